"""The known mistakes of lab1.attention: each leaves the right path in one place."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashcourse.grading.question import Mistake

Step = Callable[..., torch.Tensor]


def _scaled(s: torch.Tensor, head_dim: int) -> torch.Tensor:
    return s * head_dim**-0.5


def _repeated(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.repeat_interleave(group, dim=1)


def _visible(i: torch.Tensor, j: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return j <= i + seq_k - seq_q


def _filled(s: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return s.masked_fill(~visible, -math.inf)


def _finite_row_max(s: torch.Tensor) -> torch.Tensor:
    m = s.detach().amax(dim=-1, keepdim=True)
    return torch.where(m == -math.inf, 0.0, m)


def _normalised(p: torch.Tensor) -> torch.Tensor:
    l = p.sum(dim=-1, keepdim=True)
    return p / torch.where(l == 0, 1.0, l)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    *,
    scaled: Step = _scaled,
    spread: Step = _repeated,
    visible: Step = _visible,
    masked: Step = _filled,
    pivot: Step = _finite_row_max,
    normalised: Step = _normalised,
    compute: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    queries, keys, values = (t.to(compute or q.dtype) for t in (q, k, v))
    s = scaled(queries @ spread(keys, group).transpose(-2, -1), q.shape[-1])
    if is_causal:
        i, j = torch.arange(seq_q)[:, None], torch.arange(seq_k)[None, :]
        s = masked(s, visible(i, j, seq_q, seq_k))
    p = normalised(torch.exp(s - pivot(s)))
    return (p @ spread(values, group)).to(q.dtype)


def _mistake(name: str, explanation: str, **step: Any) -> Mistake:
    return Mistake(name, explanation, partial(_attend, **step))


def _maximum_before_the_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    maxima: list[torch.Tensor] = []

    def masked(s: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        maxima.append(_finite_row_max(s))
        return _filled(s, visible)

    def pivot(s: torch.Tensor) -> torch.Tensor:
        return maxima.pop() if maxima else _finite_row_max(s)

    return _attend(q, k, v, is_causal, masked=masked, pivot=pivot)


def _over_queries(s: torch.Tensor) -> torch.Tensor:
    m = s.amax(dim=-2, keepdim=True)
    return torch.where(m == -math.inf, 0.0, m)


def _sum_over_queries(p: torch.Tensor) -> torch.Tensor:
    l = p.sum(dim=-2, keepdim=True)
    return p / torch.where(l == 0, 1.0, l)


def _unguarded_max(s: torch.Tensor) -> torch.Tensor:
    return s.amax(dim=-1, keepdim=True)


def _added(s: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return s + torch.zeros(visible.shape).masked_fill(~visible, -math.inf)


def _cut_off(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    return _attend(q.detach(), k.detach(), v.detach(), is_causal)


def _cut_off_in_half(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    return (_cut_off if q.dtype == torch.float16 else _attend)(q, k, v, is_causal)


def _scaled_in_half(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    return _attend(q * q.shape[-1] ** -0.5, k, v, is_causal, scaled=lambda s, head_dim: s)


MISTAKES = (
    _mistake(
        "scale missing",
        "a dot product of head_dim numbers grows with √head_dim; without the factor "
        "1/√head_dim the softmax becomes too sharp.",
        scaled=lambda s, d: s,
    ),
    _mistake(
        "scaled with 1/head_dim",
        "the factor is 1/√head_dim; with 1/head_dim the softmax becomes too flat.",
        scaled=lambda s, d: s / d,
    ),
    _mistake(
        "multiplied with √head_dim instead of divided by it",
        "the factor is head_dim ** −0.5: the minus is missing.",
        scaled=lambda s, d: s * d**0.5,
    ),
    _mistake(
        "KV heads tiled instead of repeated",
        "query head h read KV head h % heads_kv. Neighbouring query heads share: "
        "h // (heads_q // heads_kv), which is repeat_interleave, not repeat.",
        spread=lambda x, group: x.repeat(1, group, 1, 1),
    ),
    _mistake(
        "causal mask ignored",
        "is_causal=True changed nothing.",
        visible=lambda i, j, seq_q, seq_k: torch.ones(seq_q, seq_k, dtype=torch.bool),
    ),
    _mistake(
        "causal mask aligned to the top left",
        "with j <= i a query over a longer cache sees only its first keys. The last query stands "
        "at the last key: j <= i + seq_k − seq_q.",
        visible=lambda i, j, seq_q, seq_k: j <= i,
    ),
    _mistake(
        "causal off by one: a query does not see its own key",
        "the diagonal belongs to the visible keys: <=, not <.",
        visible=lambda i, j, seq_q, seq_k: j < i + seq_k - seq_q,
    ),
    _mistake(
        "causal off by one: a query sees the next key",
        "the key after the diagonal is the future, the very token to be predicted.",
        visible=lambda i, j, seq_q, seq_k: j <= i + seq_k - seq_q + 1,
    ),
    _mistake(
        "causal mask inverted",
        "the past was hidden and the future kept: masked_fill fills where its mask is True.",
        visible=lambda i, j, seq_q, seq_k: j >= i + seq_k - seq_q,
    ),
    _mistake(
        "no max subtraction",
        "exp overflows above 88.7 in float32 and underflows far below; ∞/∞ and 0/0 are NaN.",
        pivot=lambda s: torch.zeros(()),
    ),
    _mistake(
        "softmax over the queries",
        "the columns of P sum to 1 instead of the rows. Normalise over the keys, dim=-1.",
        pivot=_over_queries,
        normalised=_sum_over_queries,
    ),
    _mistake(
        "the weights are not divided by their sum",
        "exp(s − m) is only the numerator of the softmax.",
        normalised=lambda p: p,
    ),
    _mistake(
        "hidden scores filled with a finite number",
        "real scores can be lower than −10,000, and then the hidden keys win; and with any finite "
        "number a row that sees no key gets the mean of all values. Fill with −inf.",
        masked=lambda s, visible: s.masked_fill(~visible, -1e4),
    ),
    Mistake(
        "the maximum is taken before the mask",
        "a hidden score may be the largest by far; then exp(s − m) is 0 for every visible key, and "
        "the row is lost. Hide first, then take the maximum.",
        _maximum_before_the_mask,
    ),
    _mistake(
        "a row that sees no key gives NaN",
        "its maximum is −inf and −inf − (−inf) is NaN. Use a finite pivot there, and divide by 1 "
        "where the sum is 0.",
        pivot=_unguarded_max,
        normalised=lambda p: p / p.sum(dim=-1, keepdim=True),
    ),
    _mistake(
        "NaN replaced after the division",
        "the output is right, but the gradient still runs through the NaN: 0 · NaN is NaN. "
        "Prevent the NaN instead of patching it.",
        masked=_added,
        pivot=_unguarded_max,
        normalised=lambda p: torch.nan_to_num(p / p.sum(dim=-1, keepdim=True)),
    ),
    _mistake(
        "scores and sums in float16",
        "near 500 the steps of float16 are 0.25, so a score is wrong by up to 0.125 and its "
        "weight by 13 %. Convert the inputs to float32 first, the output back at the end.",
        compute=None,
    ),
    Mistake(
        "q is scaled in float16",
        "q · head_dim ** −0.5 was rounded to float16 before the product: with large scores the "
        "weights are off by some percent. Convert first: q.float() · head_dim ** −0.5.",
        _scaled_in_half,
    ),
    Mistake(
        "gradients cut off",
        "detach, no_grad, .data or a trip through NumPy hide the inputs from autograd.",
        _cut_off,
        (_cut_off_in_half,),
    ),
)
