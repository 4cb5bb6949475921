"""The known mistakes of lab3.tiled_forward: each leaves the right path in one place."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashcourse.grading.question import Mistake

Step = Callable[..., Any]


def _visible(i: torch.Tensor, j: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return j <= i + seq_k - seq_q


def _stop(rows: range, seq_q: int, seq_k: int, block_k: int, is_causal: bool) -> int:
    """One past the last key to read for a block of queries."""
    return min(seq_k, rows.stop + seq_k - seq_q) if is_causal else seq_k


def _finite(m: torch.Tensor) -> torch.Tensor:
    return torch.where(m == -math.inf, 0.0, m)


def _divided(o: torch.Tensor, l: torch.Tensor) -> torch.Tensor:
    return o / torch.where(l == 0, 1.0, l)


def _repeated(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.repeat_interleave(group, dim=1)


def _row_max(s: torch.Tensor, missing: int) -> torch.Tensor:
    return s.amax(dim=-1, keepdim=True)


def tile_max(s: torch.Tensor, missing: int, *, padded: bool = False) -> torch.Tensor:
    """One maximum for all rows; with ``padded`` rows that do not exist count, with scores of 0."""
    top = s.amax(dim=(-2, -1), keepdim=True)
    return top.clamp(min=0.0) if padded and missing else top


def tiled_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
    *,
    spread: Step = _repeated,
    scaled: Step = lambda s, head_dim: s * head_dim**-0.5,
    query_stop: Step = lambda seq_q, block_q: seq_q,
    stop: Step = _stop,
    visible: Step = _visible,
    hidden: float = -math.inf,
    start: float = -math.inf,
    highest: Step = _row_max,  # of the scores and of how many rows the tile has too few
    pivot: Step = _finite,
    new_sum: Step = lambda factor, l, p: factor * l + p.sum(dim=-1, keepdim=True),
    new_out: Step = lambda factor, o, pv, l: factor * o + pv,
    finish: Step = _divided,
    log_sum_exp: Step = lambda m, l: m + torch.log(l),
    accumulate: torch.dtype = torch.float32,
    rounded: Step = lambda p: p,  # lab 4: what a matrix unit takes
) -> tuple[torch.Tensor, torch.Tensor]:
    """A right answer to the question: out and lse. Each step can be replaced by a wrong one."""
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = spread(k, group), spread(v, group)
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:3], -math.inf)
    for first in range(0, query_stop(seq_q, block_q), block_q):
        rows = range(first, min(first + block_q, seq_q))
        q_i = q[:, :, rows.start : rows.stop]
        m = torch.full((*q_i.shape[:3], 1), start)
        l = torch.zeros_like(m)
        o = torch.zeros(q_i.shape, dtype=accumulate)
        for key in range(0, stop(rows, seq_q, seq_k, block_k, is_causal), block_k):
            k_j, v_j = k[:, :, key : key + block_k], v[:, :, key : key + block_k]
            s = scaled(q_i @ k_j.transpose(-2, -1), q.shape[-1])
            if is_causal:
                i, j = torch.arange(rows.start, rows.stop), key + torch.arange(s.shape[-1])
                s = s.masked_fill(~visible(i[:, None], j, seq_q, seq_k), hidden)
            m_new = torch.maximum(m, highest(s, block_q - len(rows)))
            safe = pivot(m_new)
            p, factor = torch.exp(s - safe), torch.exp(m - safe)
            l = new_sum(factor, l, p)
            o = new_out(factor, o, rounded(p) @ v_j, l).to(accumulate)
            m = m_new
        out[:, :, rows.start : rows.stop] = finish(o, l)
        lse[:, :, rows.start : rows.stop] = log_sum_exp(pivot(m), l).squeeze(-1)
    return out, lse


def _mistake(name: str, explanation: str, **step: Any) -> Mistake:
    return Mistake(name, explanation, partial(tiled_forward, **step))


def _stop_at_first_query(rows: range, seq_q: int, seq_k: int, block_k: int, is_causal: bool) -> int:
    if not is_causal:
        return seq_k
    return min(seq_k, rows.start + seq_k - seq_q) // block_k * block_k


def _stop_at_whole_blocks(
    rows: range, seq_q: int, seq_k: int, block_k: int, is_causal: bool
) -> int:
    return min(_stop(rows, seq_q, seq_k, block_k, is_causal), seq_k // block_k * block_k)


def _whole_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    return tiled_forward(q, k, v, is_causal, block_q, k.shape[2])


def _mean_of_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    total, count = torch.zeros(q.shape), 0
    for key in range(0, seq_k, block_k):
        s = q @ _repeated(k[:, :, key : key + block_k], group).transpose(-2, -1)
        s = s * q.shape[-1] ** -0.5
        if is_causal:
            i, j = torch.arange(seq_q)[:, None], key + torch.arange(s.shape[-1])
            s = s.masked_fill(~_visible(i, j, seq_q, seq_k), -math.inf)
        p = torch.exp(s - _finite(s.amax(dim=-1, keepdim=True)))
        p = _divided(p, p.sum(dim=-1, keepdim=True))
        total, count = total + p @ _repeated(v[:, :, key : key + block_k], group), count + 1
    _, lse = tiled_forward(q, k, v, is_causal, block_q, block_k)
    return total / max(count, 1), lse


ONE_MAXIMUM = "one maximum for the whole tile"

MISTAKES = (
    _mistake(
        "the accumulator is not rescaled",
        "when the maximum rises, what was added to the output under the old maximum must be "
        "multiplied with exp(m_old − m_new), as the sum is.",
        new_out=lambda factor, o, pv, l: o + pv,
    ),
    _mistake(
        "the sum is not rescaled",
        "when the maximum rises, l must be multiplied with exp(m_old − m_new), as the output is.",
        new_sum=lambda factor, l, p: l + p.sum(dim=-1, keepdim=True),
    ),
    _mistake(
        "no max subtraction",
        "exp overflows above 88.7 in float32 and underflows far below.",
        pivot=torch.zeros_like,
    ),
    _mistake(
        "m starts at 0",
        "where all scores are far below 0, every exp(s − 0) underflows. The maximum of nothing is "
        "−inf.",
        start=0.0,
    ),
    Mistake(
        ONE_MAXIMUM,
        "each row has a maximum of its own, along the keys. Where another row's is far higher, "
        "every exp(s − m) underflows; rows past the end, whose scores are 0, count as others.",
        partial(tiled_forward, highest=tile_max),
        (partial(tiled_forward, highest=lambda s, missing: s.amax()),),
    ),
    _mistake(
        "scale missing",
        "the scores are q·k / √head_dim.",
        scaled=lambda s, head_dim: s,
    ),
    _mistake(
        "scaled twice",
        "1/√head_dim was applied to q and to the scores, say: apply it once.",
        scaled=lambda s, head_dim: s / head_dim,
    ),
    _mistake(
        "the last keys are dropped",
        "seq_k need not be a multiple of block_k: the loop must visit the ragged last block too.",
        stop=_stop_at_whole_blocks,
    ),
    _mistake(
        "the last queries are dropped",
        "seq_q need not be a multiple of block_q: the loop must visit the ragged last block too.",
        query_stop=lambda seq_q, block_q: seq_q // block_q * block_q,
    ),
    _mistake(
        "causal mask ignored",
        "is_causal=True changed nothing.",
        visible=lambda i, j, seq_q, seq_k: torch.ones_like(i + j, dtype=torch.bool),
        stop=lambda rows, seq_q, seq_k, block_k, is_causal: seq_k,
    ),
    _mistake(
        "causal mask aligned to the top left",
        "the last query stands at the last key: j <= i + seq_k − seq_q, not j <= i.",
        visible=lambda i, j, seq_q, seq_k: j <= i,
        stop=lambda rows, seq_q, seq_k, block_k, is_causal: (
            min(rows.stop, seq_k) if is_causal else seq_k
        ),
    ),
    _mistake(
        "causal off by one: a query does not see its own key",
        "the diagonal belongs to the visible keys: <=, not <.",
        visible=lambda i, j, seq_q, seq_k: j < i + seq_k - seq_q,
    ),
    _mistake(
        "causal off by one: a query sees the next key",
        "the key after the diagonal is the future.",
        visible=lambda i, j, seq_q, seq_k: j <= i + seq_k - seq_q + 1,
        stop=lambda rows, seq_q, seq_k, block_k, is_causal: (
            min(seq_k, rows.stop + seq_k - seq_q + 1) if is_causal else seq_k
        ),
    ),
    _mistake(
        "the causal loop stops a tile early",
        "the last tile to visit is the one that the block's last query reaches, and it is only "
        "partly visible.",
        stop=_stop_at_first_query,
    ),
    _mistake(
        "hidden scores filled with a finite number",
        "real scores can be lower than −10,000, and then the hidden keys win; and a row that sees "
        "no key gets a mean of values. Fill with −inf.",
        hidden=-1e4,
    ),
    _mistake(
        "a row that sees no key gives NaN",
        "−inf − (−inf) is NaN, and so is 0/0. Subtract a finite pivot, and divide by 1 where the "
        "sum is 0.",
        pivot=lambda m: m,
        finish=lambda o, l: o / l,
    ),
    _mistake(
        "KV heads tiled instead of repeated",
        "query head h read KV head h % heads_kv. Neighbouring query heads share: "
        "h // (heads_q // heads_kv).",
        spread=lambda x, group: x.repeat(1, group, 1, 1),
    ),
    _mistake(
        "divided by the sum in every tile",
        "the accumulator holds unnormalised sums; divide once, after the last tile.",
        new_out=lambda factor, o, pv, l: _divided(factor * o + pv, l),
        finish=lambda o, l: o,
    ),
    _mistake(
        "never divided by the sum",
        "exp(s − m) is only the numerator of the softmax.",
        finish=lambda o, l: o,
    ),
    Mistake(
        "the mean of each tile's own softmax",
        "a tile counts with its share of the row's sum, not with one part in the number of tiles.",
        _mean_of_tiles,
    ),
    _mistake(
        "an epsilon in the denominator",
        "l is at least 1 for a row that sees a key. An epsilon makes every weight too small; "
        "divide by 1 where l is 0 instead.",
        finish=lambda o, l: o / (l + 1e-2),
    ),
    _mistake(
        "lse in base 2",
        "lse is the natural logarithm: m + log(l).",
        log_sum_exp=lambda m, l: (m + torch.log(l)) / math.log(2),
    ),
    _mistake(
        "lse without the maximum",
        "log(l) is relative to the maximum that was subtracted: lse = m + log(l).",
        log_sum_exp=lambda m, l: torch.log(l),
    ),
    _mistake(
        "float16 accumulator",
        "the running output was kept in float16: an error of 1 in 2,000 at every tile. Sums live "
        "in float32.",
        accumulate=torch.float16,
    ),
    Mistake(
        "scores of whole rows in memory",
        "the numbers are right, but a tensor holds a query's scores for all keys at once. Hold "
        "block_q × block_k of them, and let the online softmax carry m, l and o on.",
        _whole_rows,
    ),
)
