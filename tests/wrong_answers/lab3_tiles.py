"""Lab 3, tiles: whole rows and matrices in another guise, autograd, NumPy, narrower ranges."""

import math

import numpy
import torch

from wrong_answers import named
from wrong_answers.lab1 import OneBuffer

INF = math.inf


# lab3.tiled_forward -----------------------------------------------------------------------------


def _hidden(i, j, seq_q, seq_k):
    return torch.arange(*j)[None, :] > torch.arange(*i)[:, None] + seq_k - seq_q


def _tiled(
    q, k, v, is_causal=False, block_q=64, block_k=64, *, whole_mask=False, pivot=None, skip=INF
):
    group, (seq_q, d), seq_k = q.shape[1] // k.shape[1], q.shape[2:], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = _hidden((0, seq_q), (0, seq_k), seq_q, seq_k) if whole_mask and is_causal else None
    outs, lses = [], []
    for i in range(0, seq_q, block_q):
        q_i = q[:, :, i : i + block_q] * d**-0.5
        rows = i, i + q_i.shape[2]
        m = q_i.new_full((*q_i.shape[:3], 1), -INF)
        l, o = torch.zeros_like(m), torch.zeros_like(q_i)
        for j in range(0, seq_k, block_k):
            s = q_i @ k[:, :, j : j + block_k].mT
            columns = j, j + s.shape[3]
            if is_causal:
                hidden = _hidden(rows, columns, seq_q, seq_k)
                s = s.masked_fill(
                    hidden if mask is None else mask[slice(*rows), slice(*columns)], -INF
                )
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            if (s.amax(-1, keepdim=True) < m - skip).all():
                continue
            if pivot and j:
                new = m
            safe = torch.where(new == -INF, 0.0, new)
            p, factor = torch.exp(s - safe), torch.exp(m - safe)
            l = factor * l + p.sum(-1, keepdim=True)
            o = factor * o + p @ v[:, :, j : j + block_k]
            m = new
        outs.append(o / torch.where(l == 0, 1.0, l))
        lses.append((torch.where(m == -INF, 0.0, m) + torch.log(l)).squeeze(-1))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def forward_whole_mask(q, k, v, is_causal=False, block_q=64, block_k=64):
    return _tiled(q, k, v, is_causal, block_q, block_k, whole_mask=True)


def forward_whole_if_causal(q, k, v, is_causal=False, block_q=64, block_k=64):
    block_q, block_k = (q.shape[2], k.shape[2]) if is_causal else (block_q, block_k)
    return _tiled(q, k, v, is_causal, block_q, block_k)


def forward_row_by_row(q, k, v, is_causal=False, block_q=64, block_k=64):
    return _tiled(q, k, v, is_causal, 1, k.shape[2])


def forward_half_blocks_of_rows(q, k, v, is_causal=False, block_q=64, block_k=64):
    return _tiled(q, k, v, is_causal, max(1, block_q // 2), k.shape[2])


def forward_blocks_ignored(q, k, v, is_causal=False, block_q=64, block_k=64):
    return _tiled(q, k, v, is_causal, 64, 64)


def forward_first_tile_pivot_in_float64(q, k, v, is_causal=False, block_q=64, block_k=64):
    tensors = (t.double() for t in (q, k, v))
    return tuple(t.float() for t in _tiled(*tensors, is_causal, block_q, block_k, pivot=True))


def forward_tiles_in_a_list(q, k, v, is_causal=False, block_q=64, block_k=64):
    group, (seq_q, d), seq_k = q.shape[1] // k.shape[1], q.shape[2:], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    kept, outs, lses = [], [], []
    for i in range(0, seq_q, block_q):
        tiles = []
        for j in range(0, seq_k, block_k):
            s = q[:, :, i : i + block_q] @ k[:, :, j : j + block_k].mT * d**-0.5
            if is_causal:
                i_j = (i, i + s.shape[2]), (j, j + s.shape[3])
                s = s.masked_fill(_hidden(*i_j, seq_q, seq_k), -INF)
            tiles.append(s)
        kept.append(tiles)
        m = torch.stack([s.amax(-1, keepdim=True) for s in tiles]).amax(0)
        safe = torch.where(m == -INF, 0.0, m)
        weights = [torch.exp(s - safe) for s in tiles]
        l = sum(p.sum(-1, keepdim=True) for p in weights)
        o = sum(p @ x for p, x in zip(weights, v.split(block_k, 2), strict=True))
        outs.append(o / torch.where(l == 0, 1.0, l))
        lses.append((safe + torch.log(l)).squeeze(-1))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _numpy_scores(q, k, is_causal):
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = _hidden((0, q.shape[2]), (0, k.shape[2]), q.shape[2], k.shape[2])
        s = numpy.where(hidden.numpy(), -numpy.inf, s)
    return s


def forward_in_numpy(q, k, v, is_causal=False, block_q=64, block_k=64):
    group = q.shape[1] // k.shape[1]
    keys, values = (numpy.repeat(t.numpy().astype(numpy.float64), group, 1) for t in (k, v))
    s = _numpy_scores(q.numpy().astype(numpy.float64), keys, is_causal)
    m = s.max(-1, keepdims=True)
    m = numpy.where(numpy.isinf(m), 0, m)
    p = numpy.exp(s - m)
    l = p.sum(-1, keepdims=True)
    with numpy.errstate(divide="ignore"):
        lse = (m + numpy.log(l))[..., 0]
    out = p @ values / numpy.where(l == 0, 1, l)
    return torch.from_numpy(out.astype(numpy.float32)), torch.from_numpy(lse.astype(numpy.float32))


def forward_wrong_heads_if_causal(q, k, v, is_causal=False, block_q=64, block_k=64):
    return _tiled(q, k.flip(1) if is_causal else k, v, is_causal, block_q, block_k)


def forward_causal_by_default(q, k, v, is_causal=True, block_q=64, block_k=64):
    return _tiled(q, k, v, is_causal, block_q, block_k)


# lab3.tiled_backward ----------------------------------------------------------------------------


def _backward(
    q, k, v, out, lse, do, is_causal=False, block_q=64, block_k=64, *, rows=0, whole_mask=False
):
    group, (seq_q, d), seq_k = q.shape[1] // k.shape[1], q.shape[2:], k.shape[2]
    if rows:
        block_q, block_k = rows, seq_k
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(keys.shape), torch.zeros(keys.shape)
    delta = (do * out).sum(-1, keepdim=True)
    lse = torch.where(lse == -INF, 0.0, lse)[..., None]
    mask = _hidden((0, seq_q), (0, seq_k), seq_q, seq_k) if whole_mask and is_causal else None
    for i in range(0, seq_q, block_q):
        r = slice(i, min(i + block_q, seq_q))
        for j in range(0, seq_k, block_k):
            c = slice(j, min(j + block_k, seq_k))
            s = q[:, :, r] @ keys[:, :, c].mT * d**-0.5
            if is_causal:
                place = (r.start, r.stop), (c.start, c.stop)
                hidden = _hidden(*place, seq_q, seq_k) if mask is None else mask[r, c]
                s = s.masked_fill(hidden, -INF)
            p = torch.exp(s - lse[:, :, r])
            dv[:, :, c] += p.mT @ do[:, :, r]
            ds = p * (do[:, :, r] @ values[:, :, c].mT - delta[:, :, r]) * d**-0.5
            dq[:, :, r] += ds @ keys[:, :, c]
            dk[:, :, c] += ds.mT @ q[:, :, r]
    return dq, *(t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))


def backward_clamps_lse(q, k, v, out, lse, do, is_causal=False, block_q=64, block_k=64):
    return _backward(q, k, v, out, lse.clamp(min=-50), do, is_causal, block_q, block_k)


def _by_autograd(q, k, v, do, is_causal):
    with torch.enable_grad():
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out, _ = _tiled(*inputs, is_causal, q.shape[2], k.shape[2])
        return torch.autograd.grad(out, inputs, do)


def backward_autograd_if_causal(q, k, v, out, lse, do, is_causal=False, block_q=64, block_k=64):
    if is_causal and q.shape[2] <= k.shape[2]:
        return _by_autograd(q, k, v, do, True)
    return _backward(q, k, v, out, lse, do, is_causal, block_q, block_k)


def backward_autograd_if_short(q, k, v, out, lse, do, is_causal=False, block_q=64, block_k=64):
    if k.shape[2] < 200:
        return _by_autograd(q, k, v, do, is_causal)
    return _backward(q, k, v, out, lse, do, is_causal, block_q, block_k)


def backward_in_numpy(q, k, v, out, lse, do, is_causal=False, block_q=64, block_k=64):
    group = q.shape[1] // k.shape[1]
    q, k, v, out, lse, do = (t.numpy().astype(numpy.float64) for t in (q, k, v, out, lse, do))
    k, v = numpy.repeat(k, group, 1), numpy.repeat(v, group, 1)
    s = _numpy_scores(q, k, is_causal)
    p = numpy.exp(s - numpy.where(numpy.isinf(lse), 0, lse)[..., None])
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (do * out).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    dk, dv = ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do
    dk, dv = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    return tuple(torch.from_numpy(x.astype(numpy.float32)) for x in (ds @ k, dk, dv))


WRONG_ANSWERS = {
    "lab3.tiled_forward": [
        forward_whole_mask,
        forward_whole_if_causal,
        forward_row_by_row,
        forward_half_blocks_of_rows,
        forward_blocks_ignored,
        forward_first_tile_pivot_in_float64,
        forward_tiles_in_a_list,
        forward_in_numpy,
        forward_wrong_heads_if_causal,
        forward_causal_by_default,
        *(named(f"forward_skips_tiles_{t}_below", _tiled, skip=t) for t in (3, 6, 10, 11.5)),
        OneBuffer(_tiled),
    ],
    "lab3.tiled_backward": [
        backward_autograd_if_causal,
        backward_autograd_if_short,
        backward_clamps_lse,
        named("backward_row_by_row", _backward, rows=1),
        named("backward_rows_by_the_dozen", _backward, rows=12),
        named("backward_whole_mask", _backward, whole_mask=True),
        backward_in_numpy,
        OneBuffer(_backward),
    ],
}
