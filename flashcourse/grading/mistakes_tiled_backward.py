"""The known mistakes of lab3.tiled_backward: each leaves the right path in one place."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashcourse.grading.mistakes_tiled_forward import tiled_forward
from flashcourse.grading.question import Answer, Mistake

Step = Callable[..., Any]


def _repeated(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.repeat_interleave(group, dim=1)


def _summed(dx: torch.Tensor, group: int) -> torch.Tensor:
    return dx.unflatten(1, (-1, group)).sum(dim=2)


def _visible(i: torch.Tensor, j: torch.Tensor, seq_q: int, seq_k: int) -> torch.Tensor:
    return j <= i + seq_k - seq_q


def _probabilities(s: torch.Tensor, visible: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.exp(s.masked_fill(~visible, -math.inf) - torch.where(lse == -math.inf, 0.0, lse))


def tiled_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
    *,
    spread: Step = _repeated,
    gathered: Step = _summed,
    visible: Step = _visible,
    probabilities: Step = _probabilities,
    row_sum: Step = lambda do, out: (do * out).sum(dim=-1, keepdim=True),
    gradient_of_scores: Step = lambda p, dp, delta: p * (dp - delta),
    dv_weights: Step = lambda p, ds: p,
    score_scale: Step = lambda scale: scale,
    scores: Step = lambda s: s,
    products: Step = lambda dp: dp,
    dq_scale: Step = lambda scale: scale,
    dk_scale: Step = lambda scale: scale,
    add_q: Step = torch.add,
    add_k: Step = torch.add,
    query_stop: Step = lambda seq_q, block_q: seq_q,
    key_stop: Step = lambda seq_k, block_k: seq_k,
    rounded: Step = lambda x: x,  # lab 5: what a matrix unit takes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A right answer to the question: dq, dk, dv. Each step can be replaced by a wrong one."""
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5
    k, v = spread(k, group), spread(v, group)
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    delta = row_sum(do, out)
    for first in range(0, query_stop(seq_q, block_q), block_q):
        rows = slice(first, min(first + block_q, seq_q))
        q_i, do_i = q[:, :, rows], do[:, :, rows]
        for key in range(0, key_stop(seq_k, block_k), block_k):
            columns = slice(key, min(key + block_k, seq_k))
            k_j, v_j = k[:, :, columns], v[:, :, columns]
            s = scores(q_i @ k_j.transpose(-2, -1) * score_scale(scale))
            seen = torch.ones(s.shape[-2:], dtype=torch.bool)
            if is_causal:
                i, j = torch.arange(rows.start, rows.stop), torch.arange(key, columns.stop)
                seen = visible(i[:, None], j, seq_q, seq_k)
            p = probabilities(s, seen, lse[:, :, rows, None])
            dp = products(do_i @ v_j.transpose(-2, -1))
            ds = rounded(gradient_of_scores(p, dp, delta[:, :, rows]))
            dq[:, :, rows] = add_q(dq[:, :, rows], ds @ k_j * dq_scale(scale))
            dk_j = ds.transpose(-2, -1) @ q_i * dk_scale(scale)
            dk[:, :, columns] = add_k(dk[:, :, columns], dk_j)
            dv_j = rounded(dv_weights(p, ds)).transpose(-2, -1) @ do_i
            dv[:, :, columns] = add_k(dv[:, :, columns], dv_j)
    return dq, gathered(dk, group), gathered(dv, group)


def _mistake(name: str, explanation: str, **step: Any) -> Mistake:
    return Mistake(name, explanation, partial(tiled_backward, **step))


def _softmax_of_tile(s: torch.Tensor, visible: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    s = s.masked_fill(~visible, -math.inf)
    m = s.amax(dim=-1, keepdim=True)
    p = torch.exp(s - torch.where(m == -math.inf, 0.0, m))
    l = p.sum(dim=-1, keepdim=True)
    return p / torch.where(l == 0, 1.0, l)


def _not_normalised(s: torch.Tensor, visible: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    s = s.masked_fill(~visible, -math.inf)
    m = s.amax(dim=-1, keepdim=True)
    return torch.exp(s - torch.where(m == -math.inf, 0.0, m))


def _whole_rows(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tiled_backward(*args, **(kwargs | {"block_k": args[1].shape[2]}))


def _by_autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
) -> tuple[torch.Tensor, ...]:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        forward: Answer = tiled_forward
        again, _ = forward(*inputs, is_causal, block_q, block_k)
        return torch.autograd.grad(again, inputs, do)


MISTAKES = (
    _mistake(
        "delta missing",
        "every score also moves the sum of its row: dS = P ∘ (dP − delta), with delta the row sum "
        "of dO ∘ O.",
        gradient_of_scores=lambda p, dp, delta: p * dp,
    ),
    _mistake(
        "delta added instead of subtracted",
        "dS = P ∘ (dP − delta): the minus comes from the derivative of the denominator.",
        gradient_of_scores=lambda p, dp, delta: p * (dp + delta),
    ),
    _mistake(
        "delta from one tile only",
        "the row sum of P ∘ dP runs over all keys, not over those of a tile. The row sum of "
        "dO ∘ O is the same number and needs no tile.",
        gradient_of_scores=lambda p, dp, delta: p * (dp - (p * dp).sum(dim=-1, keepdim=True)),
    ),
    _mistake(
        "delta without the product with P",
        "dS = P ∘ (dP − delta): P multiplies delta too.",
        gradient_of_scores=lambda p, dp, delta: p * dp - delta,
    ),
    _mistake(
        "scale missing in dq",
        "the scores are scale · q kᵀ, so dq = scale · dS k.",
        dq_scale=lambda scale: 1.0,
    ),
    _mistake(
        "scale missing in dk",
        "the scores are scale · q kᵀ, so dk = scale · dSᵀ q.",
        dk_scale=lambda scale: 1.0,
    ),
    _mistake(
        "scale missing in dq and dk",
        "the scores are scale · q kᵀ: both gradients carry the factor scale.",
        dq_scale=lambda scale: 1.0,
        dk_scale=lambda scale: 1.0,
    ),
    _mistake(
        "scale missing in the recomputed scores",
        "lse was made from scale · q kᵀ; P = exp(scale · q kᵀ − lse).",
        score_scale=lambda scale: 1.0,
    ),
    _mistake(
        "softmax of each tile instead of exp(s − lse)",
        "a tile does not sum to 1; lse holds the maximum and the sum of the whole row.",
        probabilities=_softmax_of_tile,
    ),
    _mistake(
        "P not normalised",
        "exp(s − m) is only the numerator; exp(s − lse) is P.",
        probabilities=_not_normalised,
    ),
    _mistake(
        "lse taken as base 2",
        "lse is a natural logarithm: exp(s − lse), not exp2.",
        probabilities=lambda s, visible, lse: torch.exp2(
            s.masked_fill(~visible, -math.inf) - torch.where(lse == -math.inf, 0.0, lse)
        ),
    ),
    _mistake(
        "dv from dS",
        "out = P v, so dv = Pᵀ dO. dS is the gradient of the scores.",
        dv_weights=lambda p, ds: ds,
    ),
    _mistake(
        "only the last query head of a group",
        "all query heads that read a KV head send it a gradient: sum over the group.",
        gathered=lambda dx, group: dx[:, group - 1 :: group],
    ),
    _mistake(
        "only the first query head of a group",
        "all query heads that read a KV head send it a gradient: sum over the group.",
        gathered=lambda dx, group: dx[:, ::group],
    ),
    _mistake(
        "mean over the group instead of sum",
        "the gradients of the query heads that read a KV head add up.",
        gathered=lambda dx, group: dx.unflatten(1, (-1, group)).mean(dim=2),
    ),
    _mistake(
        "KV heads tiled instead of repeated",
        "query head h read KV head h % heads_kv. Neighbouring query heads share: "
        "h // (heads_q // heads_kv).",
        spread=lambda x, group: x.repeat(1, group, 1, 1),
        gathered=lambda dx, group: dx.unflatten(1, (group, -1)).sum(dim=1),
    ),
    _mistake(
        "causal mask ignored",
        "is_causal=True changed nothing: the backward needs the forward's mask.",
        visible=lambda i, j, seq_q, seq_k: torch.ones_like(i + j, dtype=torch.bool),
    ),
    _mistake(
        "causal mask aligned to the top left",
        "the last query stands at the last key: j <= i + seq_k − seq_q, not j <= i.",
        visible=lambda i, j, seq_q, seq_k: j <= i,
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
    ),
    _mistake(
        "masked after exp, by multiplication",
        "a hidden score can be far above lse: exp overflows, and ∞ · 0 is NaN. Mask the scores "
        "first.",
        probabilities=lambda s, visible, lse: (
            torch.exp(s - torch.where(lse == -math.inf, math.inf, lse)) * visible
        ),
    ),
    _mistake(
        "a row that sees no key gives NaN",
        "its lse is −inf, and −inf − (−inf) is NaN. Put any finite number in its place: P is then "
        "exp(−inf) = 0.",
        probabilities=lambda s, visible, lse: torch.exp(s.masked_fill(~visible, -math.inf) - lse),
    ),
    _mistake(
        "dq overwritten by each block of keys",
        "every block of keys adds to dq: +=, not =.",
        add_q=lambda old, new: new,
    ),
    _mistake(
        "dk and dv overwritten by each block of queries",
        "every block of queries adds to dk and dv: +=, not =.",
        add_k=lambda old, new: new,
    ),
    _mistake(
        "the last keys are dropped",
        "seq_k need not be a multiple of block_k: the loop must visit the ragged last block too.",
        key_stop=lambda seq_k, block_k: seq_k // block_k * block_k,
    ),
    _mistake(
        "the last queries are dropped",
        "seq_q need not be a multiple of block_q: the loop must visit the ragged last block too.",
        query_stop=lambda seq_q, block_q: seq_q // block_q * block_q,
    ),
    Mistake(
        "automatic differentiation of the forward",
        "autograd keeps every tile of P until the backward. Write the formulas instead: they need "
        "q, k, v, out, lse and do, and one tile at a time.",
        _by_autograd,
    ),
    Mistake(
        "scores of whole rows in memory",
        "the numbers are right, but a tensor holds a query's scores for all keys at once. Hold "
        "block_q × block_k of them: exp(s − lse) needs no more.",
        _whole_rows,
    ),
)
