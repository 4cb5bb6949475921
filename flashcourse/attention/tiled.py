"""FlashAttention in plain PyTorch: online softmax over tiles, and a backward that recomputes.

Nothing here is fast. It is the algorithm of the kernel, one statement a step, with the names of
Dao (2023), "FlashAttention-2", algorithms 1 (forward) and 2 (backward). No tensor of size
``seq_q × seq_k`` ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashcourse.attention.arguments import Options, check_dense, resolve_options
from flashcourse.attention.first_order import first_order
from flashcourse.attention.naive import DTYPES
from flashcourse.attention.visibility import key_range, visible_keys


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    block_q: int = 64,
    block_k: int = 64,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`naive_attention`, computed tile by tile. Same arguments, same results.

    Its memory beyond inputs and outputs is a few tiles of ``block_q × block_k``; its backward
    keeps only out and lse from the forward and recomputes the rest.

    Args:
        q: ``(batch, heads_q, seq_q, head_dim)``, float16, bfloat16, float32 or float64.
        k, v: ``(batch, heads_kv, seq_k, head_dim)``, the same dtype.
        block_q, block_k: rows and columns of a tile, 1 or more.
        (the others): see :func:`flashcourse.attention.naive.naive_attention`.

    Returns:
        out with q's shape and dtype; with ``return_lse`` also lse, ``(batch, heads_q, seq_q)``,
        float32 (float64 for float64 inputs), natural logarithm. Both are differentiable.

    Raises:
        TypeError, ValueError: an argument is not what it must be; the message says which.
    """
    check_dense(q, k, v, DTYPES)
    options = resolve_options(
        q.shape[-1],
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
    )
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if not isinstance(block, int) or isinstance(block, bool):
            raise TypeError(f"{name} must be an integer, got {block!r}")
        if block < 1:
            raise ValueError(f"{name} must be 1 or more, got {block}")
    out, lse = _TiledAttention.apply(q, k, v, options, block_q, block_k)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Tile:
    """Rows and columns of one tile, and the mask it needs (None if every pair is visible)."""

    rows: slice
    columns: slice
    visible: torch.Tensor | None


def _query_blocks(seq_q: int, block_q: int) -> Iterator[slice]:
    for start in range(0, seq_q, block_q):
        yield slice(start, min(start + block_q, seq_q))


def _tiles_of(
    rows: slice, seq_q: int, seq_k: int, block_k: int, options: Options, device: torch.device
) -> Iterator[_Tile]:
    """The tiles of one block of queries, left to right, without those that no query can see."""
    first, stop = key_range(rows.start, rows.stop - 1, seq_q, seq_k, options)
    for start in range(first // block_k * block_k, stop, block_k):
        columns = slice(start, min(start + block_k, seq_k))
        visible = None
        if options.masked:
            queries = torch.arange(rows.start, rows.stop, device=device)
            keys = torch.arange(columns.start, columns.stop, device=device)
            visible = visible_keys(queries, keys, seq_q, seq_k, options)
        yield _Tile(rows, columns, visible)


def _scores(q_i: torch.Tensor, k_j: torch.Tensor, tile: _Tile, options: Options) -> torch.Tensor:
    """The scores of a tile; -inf where the query may not see the key."""
    s = q_i @ k_j.transpose(-2, -1) * options.scale  # (batch, heads_kv, group, rows, columns)
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if tile.visible is not None:
        s = s.masked_fill(~tile.visible, float("-inf"))
    return s


class _TiledAttention(torch.autograd.Function):
    """Forward and backward over tiles.

    Inside, heads are split in ``(heads_kv, group)``: the queries that share a KV head become one
    more dimension, and K and V are broadcast over it instead of being copied.
    """

    @staticmethod
    def forward(ctx, q, k, v, options, block_q, block_k):
        group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
        accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:3], dtype=accumulate, device=q.device)
        grouped_q = q.unflatten(1, (k.shape[1], group))  # (batch, heads_kv, group, seq_q, head_dim)
        grouped_out = out.unflatten(1, (k.shape[1], group))
        grouped_lse = lse.unflatten(1, (k.shape[1], group))
        k, v = k.unsqueeze(2), v.unsqueeze(2)  # (batch, heads_kv, 1, seq_k, head_dim)

        for rows in _query_blocks(seq_q, block_q):
            q_i = grouped_q[..., rows, :].to(accumulate)
            m = torch.full((*q_i.shape[:-1], 1), float("-inf"), dtype=accumulate, device=q.device)
            l = torch.zeros_like(m)
            o = torch.zeros_like(q_i)
            for tile in _tiles_of(rows, seq_q, seq_k, block_k, options, q.device):
                k_j = k[..., tile.columns, :].to(accumulate)
                v_j = v[..., tile.columns, :].to(accumulate)
                s = _scores(q_i, k_j, tile, options)
                m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
                pivot = torch.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
                p = torch.exp(s - pivot)
                rescale = torch.exp(m - pivot)  # what was summed under the old maximum
                l = rescale * l + p.sum(dim=-1, keepdim=True)
                o = rescale * o + p @ v_j
                m = m_new
            safe_l = torch.where(l == 0, 1.0, l)
            grouped_out[..., rows, :] = (o / safe_l).to(q.dtype)
            grouped_lse[..., rows] = torch.where(
                l == 0, float("-inf"), m + torch.log(safe_l)
            ).squeeze(-1)

        ctx.save_for_backward(q, k.squeeze(2), v.squeeze(2), out, lse)
        ctx.options, ctx.blocks = options, (block_q, block_k)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        grads = first_order(
            "tiled_attention", _gradients, d_out, d_lse, *ctx.saved_tensors, ctx.options, ctx.blocks
        )
        return *grads, None, None, None


def _gradients(
    d_out: torch.Tensor, d_lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, options: Options, blocks: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv (FlashAttention-2, algorithm 2), tile by tile from the saved lse."""
    block_q, block_k = blocks
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    accumulate = lse.dtype
    heads = (k.shape[1], group)
    dq = torch.zeros(q.shape, dtype=accumulate, device=q.device)
    dk = torch.zeros(k.shape, dtype=accumulate, device=q.device)
    dv = torch.zeros_like(dk)
    grouped_dq = dq.unflatten(1, heads)
    # delta: the row sum of dO ∘ O is the row sum of P ∘ dP, without P (section 2.2 and
    # algorithm 2, line 4). A gradient of lse enters through the same term: d lse / d S = P.
    delta = (d_out.to(accumulate) * out.to(accumulate)).sum(dim=-1) - d_lse
    q, d_out, lse, delta = (t.unflatten(1, heads) for t in (q, d_out, lse, delta))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    # A row that saw no key has lse -inf; any finite stand-in keeps its P at exp(-inf) = 0.
    lse = torch.where(lse == float("-inf"), 0.0, lse)

    for rows in _query_blocks(seq_q, block_q):
        q_i = q[..., rows, :].to(accumulate)
        do_i = d_out[..., rows, :].to(accumulate)
        for tile in _tiles_of(rows, seq_q, seq_k, block_k, options, q.device):
            k_j = k[..., tile.columns, :].to(accumulate)
            v_j = v[..., tile.columns, :].to(accumulate)
            s = _scores(q_i, k_j, tile, options)
            p = torch.exp(s - lse[..., rows].unsqueeze(-1))  # P again, from lse alone
            dv[..., tile.columns, :] += (p.transpose(-2, -1) @ do_i).sum(dim=2)
            dp = do_i @ v_j.transpose(-2, -1)
            ds = p * (dp - delta[..., rows].unsqueeze(-1))
            if options.softcap is not None:  # d tanh(x) = 1 - tanh²(x); P is 0 where masked
                tanh = torch.where(p == 0, 0.0, s / options.softcap)
                ds = ds * (1 - tanh * tanh)
            grouped_dq[..., rows, :] += ds @ k_j * options.scale
            dk[..., tile.columns, :] += (ds.transpose(-2, -1) @ q_i).sum(dim=2) * options.scale
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
