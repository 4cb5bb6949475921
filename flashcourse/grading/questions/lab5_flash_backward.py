"""lab5.flash_backward: dq, dk and dv from Triton kernels of the learner's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from flashcourse.grading.draw import normal, strided
from flashcourse.grading.judge import judge_tensors
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions import lab3_tiled_backward as lab3
from flashcourse.grading.questions import lab3_tiled_forward as lab3_forward
from flashcourse.grading.questions import lab4_flash_forward as forward
from flashcourse.grading.triton_work import (
    EPS16,
    TILES,
    as_half,
    from_first_entry,
    here,
    judge_own_kernel,
    needs_triton,
    on_cpu,
    tiled_mistake,
    where_it_ran,
)

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
EPS = torch.finfo(torch.float32).eps

# What is right ------------------------------------------------------------------------------


def allowed_errors(*args: torch.Tensor, is_causal: bool) -> tuple[float, ...]:
    """The errors that any right backward may make, in float32 or float16.

    float16 adds its rounding of P, of dS, of the given out and of the result: half an eps each,
    relative to the same sums of absolute values; and of a q that is scaled before the product.
    """
    q, k, v, out, lse, do = args
    allowed = lab3.allowed_errors(q, k, v, out, lse, do, is_causal)
    if q.dtype == torch.float32:
        return allowed
    score = lab3_forward.largest_score(q.float(), k.float())
    finite = lse[torch.isfinite(lse)]
    exponent = score + (finite.abs().max().item() if finite.numel() else 0.0)
    more = EPS16 * (2 + score / 2) / (16 * EPS * (4 + exponent))
    return tuple(error * (1 + more) for error in allowed)


def judge(case: Case, observation: Observation) -> str | None:
    """Judge dq, dk and dv by automatic differentiation in float64."""
    args = tuple(t.detach().cpu() for t in case.args)
    q, k, v, _, _, do = args
    is_causal = case.kwargs["is_causal"]
    expected = lab3.reference(q, k, v, do, is_causal)
    allowed = allowed_errors(*args, is_causal=is_causal)
    return judge_tensors(lab3.NAMES, observation.output, expected, allowed, (q.dtype,) * 3)


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_own_kernel(observation, tensors=6)


# The inputs: those of the forward, with its right result and a gradient -------------------------


def with_gradient(generator: torch.Generator, case: Case) -> Case:
    """The case of the forward with out, lse and do behind its inputs."""
    q, k, v = case.args
    out, lse = lab3_forward.reference(q.cpu(), k.cpu(), v.cpu(), case.kwargs["is_causal"])
    do = normal(generator, *q.shape, dtype=q.dtype)
    rest = (here(out.to(q.dtype)), here(lse.float()), here(do))
    return Case(case.description, (q, k, v, *rest), case.kwargs)


def _from(draw: forward.Draw) -> forward.Draw:
    def cases(generator: torch.Generator) -> Iterator[Case]:
        for case in draw(generator):
            yield with_gradient(generator, case)

    return cases


def _large_causal(generator: torch.Generator) -> Iterator[Case]:
    """Hidden scores far above the row's lse: exp of them overflows."""
    case = forward.draw_case(
        generator, 21, 21, scale=5, is_causal=True, note="hidden scores above 100"
    )
    q, k, _ = case.args
    k[:, :, -1] = 0.0
    k[:, :, -1, 0] = 40.0 * q.shape[-1] ** 0.5
    q[:, :, :-1, 0] = q[:, :, :-1, 0].abs() + 3.0
    yield case


def _grouped(generator: torch.Generator) -> Iterator[Case]:
    """Four query heads to a KV head, and three; causal too."""
    yield forward.draw_case(generator, 9, 14, heads=(8, 2))
    yield forward.draw_case(generator, 10, 10, heads=(6, 2), is_causal=True)


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    for case in _from(forward.layout_cases)(generator):
        *rest, do = case.args
        yield Case(case.description, (*rest, here(strided(do.cpu(), (3, 0, 2, 1)))), case.kwargs)


def _expanded(generator: torch.Generator) -> Iterator[Case]:
    """A do of ones, which the call then expands from one number."""
    case = with_gradient(generator, forward.draw_case(generator, 19, 23, heads=(2, 2)))
    *rest, do = case.args
    yield Case(
        f"{case.description}, do with all strides 0", (*rest, torch.ones_like(do)), case.kwargs
    )


def _call_expanded(answer: Answer, *args: torch.Tensor, **kwargs: Any) -> Any:
    *rest, do = args
    return answer(*rest, do.reshape(-1)[:1].reshape(()).expand(do.shape), **kwargs)


def _half(generator: torch.Generator) -> Iterator[Case]:
    yield as_half(forward.draw_case(generator, 33, 70, head_dim=64))
    yield as_half(
        forward.draw_case(generator, 21, 43, heads=(4, 2), head_dim=40, scale=5, is_causal=True)
    )


def _half_sums(generator: torch.Generator) -> Iterator[Case]:
    """Two keys share all weight: a row of dv sums 300 gradients and passes 65,504 on the way."""
    case = as_half(forward.draw_case(generator, 300, 2, note="do near 1,200, then −600"))
    case.args[0].zero_()
    case = with_gradient(generator, case)
    *rest, do = case.args
    level = torch.where(torch.arange(do.shape[2], device=do.device) < 128, 1200.0, -600.0)
    do = (do.float() + level[:, None]).half()
    yield Case(case.description, (*rest, do), case.kwargs)


def _ours(generator: torch.Generator) -> Iterator[Case]:
    yield from _from(forward.own_work_cases)(generator)


# The known mistakes -----------------------------------------------------------------------------


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


def _kept(name: str, explanation: str, **kept: Any) -> Mistake:
    return tiled_mistake(Mistake(name, explanation, partial(_dense, **kept)), _adapt)


def _either(*mistakes: Mistake) -> Mistake:
    """One mistake that shows in several ways."""
    first, *others = mistakes
    more = tuple(answer for other in others for answer in (other.answer, *other.variants))
    return Mistake(first.name, first.explanation, first.answer, first.variants + more)


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
    return _TILED(q, k, v, *rest, **changed, **options)


def _half_sum(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (old + new).half().float()


def _half_accumulator(everywhere: bool, block: int) -> Answer:
    """Sums in the dtype of the inputs, or in float16 ``everywhere``."""

    def answer(*args: torch.Tensor, is_causal: bool = False) -> Gradients:
        low = everywhere or args[0].dtype == torch.float16
        tiled = partial(_TILED, add_q=_half_sum, add_k=_half_sum) if low else _TILED
        return _adapt(tiled, block, block)(*args, is_causal=is_causal)

    return answer


assert lab3.QUESTION.right is not None
_TILED = lab3.QUESTION.right
RIGHT = _adapt(partial(_TILED), 64, 64)
_LEFT_OUT = (
    "automatic differentiation of the forward",
    "scores of whole rows in memory",
    "dq overwritten by each block of keys",
    "dk and dv overwritten by each block of queries",
)
_FIRST, *_OTHERS = (
    _half_accumulator(everywhere, block) for everywhere in (False, True) for block in TILES
)

MISTAKES = (
    *(tiled_mistake(m, _adapt) for m in lab3.MISTAKES if m.name not in _LEFT_OUT),
    _kept(
        "dq overwritten by each block of keys",
        "every block of keys adds to dq: give the old sum to tl.dot, or use +=.",
        kept_for_q=_last_keys,
    ),
    _either(
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
    Mistake(
        "float16 accumulator",
        "a sum over blocks was kept in float16, or in the inputs' dtype: it overflows above 65,504 "
        "and loses digits at every tile. The sums live in float32.",
        _FIRST,
        tuple(_OTHERS),
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

QUESTION = Question(
    id="lab5.flash_backward",
    points=13,
    checks=(
        Check("dq, dk and dv over many tiles", _from(forward.tile_cases), judge),
        Check("any length: 1, primes, a block and one more", _from(forward.ragged_cases), judge),
        Check("scores × 1, × 5 and × 40, rows far from 0", _from(forward.scale_cases), judge),
        Check("gradients of a group of query heads add up", _from(_grouped), judge),
        Check("causal: no gradient from a later key", _from(forward.causal_cases), judge),
        Check("causal with more keys than queries", _from(forward.longer_key_cases), judge),
        Check("a query that sees no key has gradient 0", _from(forward.empty_row_cases), judge),
        Check("hidden scores of any size stay hidden", _from(_large_causal), judge),
        Check("head_dim 16 to 128, powers of two or not", _from(forward.head_dim_cases), judge),
        Check("any strides", _layouts, judge),
        Check("do with all strides 0", _expanded, judge, _call_expanded),
        Check(
            "nothing behind the end is used",
            _from(forward.tail_cases),
            judge,
            forward.call_amid_nan,
        ),
        Check("float16", _from(_half), judge),
        Check("float16, with sums in float32", _half_sums, judge),
        Check(
            "memory does not grow with the score matrix",
            _from(forward.long_cases),
            forward.judge_memory,
            work=True,
        ),
        Check("your own kernels did the work", _ours, _judge_own_work, work=True),
    ),
    mistakes=MISTAKES,
    needs=needs_triton,
    right=RIGHT,
    remark=where_it_ran,
)
