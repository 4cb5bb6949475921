"""The known mistakes of lab5.flash_backward in PyTorch, with the tiles a learner may choose."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashcourse.grading.mistakes_tiled_backward import MISTAKES as TILED_MISTAKES
from flashcourse.grading.mistakes_tiled_backward import tiled_backward
from flashcourse.grading.question import Answer, Mistake
from flashcourse.grading.triton_work import (
    TILES,
    either,
    from_first_entry,
    on_cpu,
    read_with,
    tiled_mistake,
)

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _adapt(answer: Answer, block_q: int, block_k: int) -> Answer:
    """An answer of lab 3, which takes float32 on the CPU and tiles, as one of lab 5."""

    def adapted(*args: torch.Tensor, is_causal: bool = False) -> Gradients:
        q = args[0]
        options: dict[str, Any] = {}
        if q.dtype == torch.float16:
            options["rounded"] = lambda x: x.half().float()
        gradients = answer(*map(on_cpu, args), is_causal, block_q, block_k, **options)
        dq, dk, dv = (t.to(q.device, q.dtype) for t in gradients)
        return dq, dk, dv

    return adapted


def _with(change: Callable[[torch.Tensor], torch.Tensor], which: str) -> Answer:
    """The right answer from changed inputs."""

    def answer(*args: torch.Tensor, is_causal: bool = False) -> Gradients:
        names = ("q", "k", "v", "out", "lse", "do")
        changed = (
            change(t) if name in which.split() else t for name, t in zip(names, args, strict=True)
        )
        return RIGHT(*changed, is_causal=is_causal)

    return answer


Keep = Callable[..., torch.Tensor]
Step = Callable[..., torch.Tensor]


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool,
    block_q: int,
    block_k: int,
    *,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    kept_for_q: Keep | None = None,
    kept_for_kv: Keep | None = None,
    last_of_group: bool = False,
) -> Gradients:
    """The gradients with only the tiles that are kept; 0 for the others."""
    (heads, seq_q), (heads_kv, seq_k) = q.shape[1:3], k.shape[1:3]
    group, scale = heads // heads_kv, q.shape[-1] ** -0.5
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    i, j = torch.arange(seq_q)[:, None], torch.arange(seq_k)
    s = q @ keys.mT * scale
    if is_causal:
        s = s.masked_fill(j > i + seq_k - seq_q, -math.inf)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    ds = rounded(p * (do @ values.mT - (do * out).sum(-1, keepdim=True)))
    at = (i, j, seq_q, seq_k, block_q, block_k, is_causal)
    for_q = kept_for_q(*at) if kept_for_q else torch.ones_like(i + j)
    for_kv = kept_for_kv(*at) if kept_for_kv else torch.ones_like(i + j)
    dq = (ds * for_q) @ keys * scale
    shares = ((ds * for_kv).mT @ q * scale, rounded(p * for_kv).mT @ do)
    if last_of_group:
        dk, dv = (t[:, group - 1 :: group] for t in shares)
    else:
        dk, dv = (t.unflatten(1, (heads_kv, group)).sum(dim=2) for t in shares)
    return dq, dk, dv


def _last_keys(i, j, seq_q, seq_k, block_q, block_k, is_causal):
    """The last tile of keys that a tile of queries visits."""
    stop = i // block_q * block_q + block_q + seq_k - seq_q if is_causal else seq_k + 0 * i
    stop = stop.clamp(0, seq_k)
    return j // block_k == (stop - 1) // block_k


def _last_queries(i, j, seq_q, seq_k, block_q, block_k, is_causal):
    return (i // block_q == (seq_q - 1) // block_q) & (j >= 0)


def _stops_early(i, j, seq_q, seq_k, block_q, block_k, is_causal):
    if not is_causal:
        return (i >= 0) & (j >= 0)
    stop = (i // block_q * block_q + seq_k - seq_q).clamp(0, seq_k) // block_k * block_k
    return j < stop


def _begins_late(i, j, seq_q, seq_k, block_q, block_k, is_causal):
    if not is_causal:
        return (i >= 0) & (j >= 0)
    first = (j // block_k * block_k - (seq_k - seq_q)).clamp(min=0)
    return i >= (first + block_q - 1) // block_q * block_q


def _stops_a_key_early(i, j, seq_q, seq_k, block_q, block_k, is_causal):
    if not is_causal:
        return (i >= 0) & (j >= 0)
    stop = (i // block_q * block_q + block_q - 1 + seq_k - seq_q).clamp(0, seq_k)
    return j < (stop + block_k - 1) // block_k * block_k


def _begins_a_query_late(i, j, seq_q, seq_k, block_q, block_k, is_causal):
    if not is_causal:
        return (i >= 0) & (j >= 0)
    first = (j // block_k * block_k - (seq_k - seq_q) + 1).clamp(min=0)
    return i >= first // block_q * block_q


def _kept(name: str, explanation: str, **kept: Any) -> Mistake:
    return tiled_mistake(Mistake(name, explanation, partial(_dense, **kept)), _adapt)


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    """The textbook formula, which autograd can follow: the whole matrix stays in memory."""
    dtype = q.dtype
    q, k, v = (t.float() for t in (q, k, v))
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    i, j = (torch.arange(t.shape[2], device=t.device) for t in (q, k))
    visible = (j <= i[:, None] + len(j) - len(i)) | (not is_causal)
    s = (q @ keys.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -1e30)
    return (s.softmax(-1) * visible @ values).to(dtype)


def _by_autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool = False,
) -> tuple[torch.Tensor, ...]:
    q, k, v = leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        return torch.autograd.grad(softmax_attention(q, k, v, is_causal), leaves, do)


def _zeros(*args: torch.Tensor, is_causal: bool = False) -> Gradients:
    q, k, v = args[:3]
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _padded_scale(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any
) -> Gradients:
    padded = max(16, 1 << (q.shape[-1] - 1).bit_length())
    changed = {
        name: (lambda scale: padded**-0.5) for name in ("score_scale", "dq_scale", "dk_scale")
    }
    answer: Answer = tiled_backward
    dq, dk, dv = answer(q, k, v, *rest, **changed, **options)
    return dq, dk, dv


def _half_sum(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (old + new).half().float()


NAMES = ("dq", "dk", "dv")


def _half_accumulator(which: str, everywhere: bool, block: int) -> Answer:
    """Some sums in the dtype of the inputs, or in float16 ``everywhere``."""

    def answer(*args: torch.Tensor, is_causal: bool = False) -> Gradients:
        right = RIGHT(*args, is_causal=is_causal)
        if not everywhere and args[0].dtype != torch.float16:
            return right
        tiled = partial(tiled_backward, add_q=_half_sum, add_k=_half_sum)
        half = _adapt(tiled, block, block)(*args, is_causal=is_causal)
        chosen = (h if n in which else r for n, h, r in zip(NAMES, half, right, strict=True))
        dq, dk, dv = chosen
        return dq, dk, dv

    return answer


def _half_step(which: str, **step: Any) -> Answer:
    """For float16 inputs, a step rounds to float16 in the kernel that makes these gradients."""

    def answer(*args: torch.Tensor, is_causal: bool = False) -> Gradients:
        right = RIGHT(*args, is_causal=is_causal)
        if args[0].dtype != torch.float16:
            return right
        half = _adapt(partial(tiled_backward, **step), 64, 64)(*args, is_causal=is_causal)
        dq, dk, dv = (h if n in which else r for n, h, r in zip(NAMES, half, right, strict=True))
        return dq, dk, dv

    return answer


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def _with_half_lse(s: torch.Tensor, visible: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    lse = torch.where(lse == -math.inf, 0.0, lse).half().float()
    return torch.exp(s.masked_fill(~visible, -math.inf) - lse)


def _half_in_base_2(s: torch.Tensor) -> torch.Tensor:
    return (s * math.log2(math.e)).half().float() * math.log(2)


def _in_some_kernel(name: str, explanation: str, **steps: tuple[Step, ...]) -> Mistake:
    """A step that rounds, in all kernels or in one of them."""
    first, *others = (
        _half_step(which, **{key: step})
        for key, choices in steps.items()
        for step in choices
        for which in ("dq dk dv", "dq", "dk dv")
    )
    return Mistake(name, explanation, first, tuple(others))


def _half_delta(*args: torch.Tensor, is_causal: bool = False) -> Gradients:
    """For float16 inputs, products and sum of delta in float16."""
    tiled: Answer = tiled_backward
    if args[0].dtype == torch.float16:
        tiled = partial(
            tiled_backward,
            row_sum=lambda do, out: (do.half() * out.half()).sum(dim=-1, keepdim=True).float(),
        )
    return _adapt(tiled, 64, 64)(*args, is_causal=is_causal)


def _strides_of_k(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor, is_causal: bool = False
) -> Gradients:
    dq, dk, dv = RIGHT(q, k, read_with(v, k.stride()), *rest, is_causal=is_causal)
    return dq, dk, dv


def _causal_by_default(*args: torch.Tensor, is_causal: bool = True) -> Gradients:
    dq, dk, dv = RIGHT(*args, is_causal=is_causal)
    return dq, dk, dv


RIGHT = _adapt(partial(tiled_backward), 64, 64)
_LEFT_OUT = (
    "automatic differentiation of the forward",
    "scores of whole rows in memory",
    "dq overwritten by each block of keys",
    "dk and dv overwritten by each block of queries",
)
_FIRST, *_OTHERS = (
    _half_accumulator(which, everywhere, block)
    for which in ("dq dk dv", "dk dv", *NAMES)
    for everywhere in (False, True)
    for block in TILES
)

MISTAKES = (
    *(tiled_mistake(m, _adapt) for m in TILED_MISTAKES if m.name not in _LEFT_OUT),
    _kept(
        "dq overwritten by each block of keys",
        "every block of keys adds to dq: give the old sum to tl.dot, or use +=.",
        kept_for_q=_last_keys,
    ),
    either(
        *(
            _kept(
                "dk and dv overwritten by each block of queries",
                "every block of queries, of every head of the group, adds to dk and dv: give the "
                "old sum to tl.dot, or use +=.",
                kept_for_kv=_last_queries,
                last_of_group=last,
            )
            for last in (True, False)
        )
    ),
    _kept(
        "the causal loop over keys stops a tile early",
        "the last tile to visit for dq is the one that the block's last query reaches, and it is "
        "only partly visible.",
        kept_for_q=_stops_early,
    ),
    _kept(
        "the causal loop over queries begins a tile late",
        "the first query that sees a key of the block may lie inside a tile: round down, not up.",
        kept_for_kv=_begins_late,
    ),
    _kept(
        "the causal loop over keys stops a key early",
        "the last query of the tile, first_query + BLOCK_Q - 1, sees keys up to and including "
        "first_query + BLOCK_Q - 1 + seq_k - seq_q. range stops before its end: it must be one "
        "more.",
        kept_for_q=_stops_a_key_early,
    ),
    _kept(
        "the causal loop over queries begins a query late",
        "the first key of the tile is seen by query first_key - (seq_k - seq_q) already.",
        kept_for_kv=_begins_a_query_late,
    ),
    Mistake(
        "delta in float16",
        "the products and the sum that make delta overflow above 65,504. Cast both factors to "
        "float32 before they are multiplied.",
        _half_delta,
    ),
    _in_some_kernel(
        "dP in float16",
        "dP was rounded to float16, which has no odd numbers above 2,048, before delta was "
        "subtracted from it: what is left may be smaller than a step. tl.dot returns float32; "
        "keep it, and cast dS.",
        products=(_half,),
    ),
    _in_some_kernel(
        "scores in float16",
        "the scores were rounded to float16, whose steps are 1 above 1,024: exp(s − lse) is then "
        "wrong by up to e^0.5. tl.dot returns float32; keep it.",
        scores=(_half, _half_in_base_2),
    ),
    _in_some_kernel(
        "lse in float16",
        "lse was rounded to float16, whose steps are 1 above 1,024: exp(s − lse) is then wrong by "
        "up to e^0.5. lse is float32; keep it so.",
        probabilities=(_with_half_lse,),
    ),
    Mistake(
        "v read with k's strides",
        "v was read with the strides of k, which are the same only if both are stored alike. Pass "
        "v.stride() too.",
        _strides_of_k,
    ),
    Mistake(
        "causal if nothing is said",
        "the default of is_causal is False.",
        _causal_by_default,
    ),
    Mistake(
        "float16 accumulator",
        "a sum over blocks was kept in float16, or in the inputs' dtype: it overflows above 65,504 "
        "and loses digits at every tile. The sums live in float32.",
        _FIRST,
        tuple(_OTHERS),
    ),
    Mistake(
        "lse is not taken below a number",
        "a row whose scores all lie far below 0 has its lse there too. If lse stops at -1000, "
        "exp(s − lse) is 0 throughout. Only -inf, a row that saw no key, stands for something "
        "else.",
        _with(lambda lse: lse.clamp(min=-1000.0), "lse"),
        (_with(lambda lse: torch.where(lse < -1000.0, 0.0, lse), "lse"),),
    ),
    Mistake("gradients of 0", "all three results were zeros.", _zeros),
    Mistake(
        "strides of do ignored",
        "do was read as if it were contiguous; autograd hands it over with any strides.",
        _with(from_first_entry, "do"),
    ),
    Mistake(
        "strides of q, k and v ignored",
        "the inputs were read as if they were contiguous: pass stride() of each to the kernels.",
        _with(from_first_entry, "q k v"),
    ),
    Mistake(
        "scale from the padded head_dim",
        "the tile is as wide as a power of two, the head is not: the scale is head_dim ** -0.5.",
        _adapt(_padded_scale, 64, 64),
    ),
    Mistake(
        "gradients by autograd, with the matrix in memory",
        "the numbers are right, but PyTorch made them from the whole matrix of probabilities. The "
        "kernels should make P again, tile by tile.",
        _by_autograd,
    ),
)
