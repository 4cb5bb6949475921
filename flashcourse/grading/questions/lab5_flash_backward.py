"""lab5.flash_backward: dq, dk and dv from Triton kernels of the learner's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashcourse.grading import flash_inputs
from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.judge import judge_tensors
from flashcourse.grading.mistakes_flash_backward import MISTAKES, RIGHT
from flashcourse.grading.question import Answer, Case, Check, Observation, Question
from flashcourse.grading.questions import lab3_tiled_backward as lab3
from flashcourse.grading.questions import lab3_tiled_forward as lab3_forward
from flashcourse.grading.questions import lab4_flash_forward as forward
from flashcourse.grading.triton_work import (
    EPS16,
    as_half,
    here,
    judge_own_kernel,
    needs_triton,
    new_tensors_check,
    where_it_ran,
)

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
    is_causal = case.kwargs.get("is_causal", False)
    expected = lab3.reference(q, k, v, do, is_causal)
    allowed = allowed_errors(*args, is_causal=is_causal)
    return judge_tensors(lab3.NAMES, observation.output, expected, allowed, (q.dtype,) * 3)


def _judge_cancelling(case: Case, observation: Observation) -> str | None:
    """Judge a float16 case whose products and sums are exact in float32, before P and after.

    Beside the error of any float32 backward there is that of P, dS and the result, half an eps of
    each, that of the given out, and that of scores whose q or k was scaled in float16. All are
    relative to dS itself, not to dP and delta, which cancel.
    """
    q, k, v, out, lse, do = (t.detach().cpu().double() for t in case.args)
    expected = lab3.reference(q, k, v, do, False)
    exact, _ = lab3_forward.reference(q, k, v, False)
    scale = q.shape[-1] ** -0.5
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (do @ v.mT - (do * exact).sum(-1, keepdim=True))
    unit = 1.5 * EPS16 + lab3_forward.moved_scores(q, k)
    of_ds = unit * ds.abs() + p * (do * (out - exact)).abs().sum(-1, keepdim=True)
    half = (of_ds @ k.abs() * scale, of_ds.mT @ q.abs() * scale, unit * p.mT @ do.abs())
    sizes = lab3.gradient_sizes(q, k, v, out, do, False)
    in_float32 = lab3.error_of_p(q, k, lse)
    allowed = [a + in_float32 * size for a, size in zip(half, sizes, strict=True)]
    return judge_tensors(lab3.NAMES, observation.output, expected, allowed, (torch.float16,) * 3)


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_own_kernel(observation, tensors=6)


# The inputs: those of the forward, with its right result and a gradient -------------------------


def with_gradient(generator: torch.Generator, case: Case, scale: float = 1.0) -> Case:
    """The case of the forward with out, lse and do behind its inputs; do has this scale."""
    q, k, v = case.args
    is_causal = case.kwargs.get("is_causal", False)
    out, lse = lab3_forward.reference(q.cpu(), k.cpu(), v.cpu(), is_causal)
    do = normal(generator, *q.shape, scale=scale, dtype=q.dtype)
    rest = (here(out.to(q.dtype)), here(lse.float()), here(do))
    return Case(case.description, (q, k, v, *rest), case.kwargs)


def _from(draw: flash_inputs.Draw, scale: float = 1.0) -> flash_inputs.Draw:
    def cases(generator: torch.Generator) -> Iterator[Case]:
        for case in draw(generator):
            yield with_gradient(generator, case, scale)

    return cases


def _large_causal(generator: torch.Generator) -> Iterator[Case]:
    """Hidden scores far above the row's lse: exp of them overflows."""
    case = flash_inputs.draw_case(
        generator, 21, 21, scale=5, is_causal=True, note="hidden scores above 100"
    )
    q, k, _ = case.args
    k[:, :, -1] = 0.0
    k[:, :, -1, 0] = 40.0 * q.shape[-1] ** 0.5
    q[:, :, :-1, 0] = q[:, :, :-1, 0].abs() + 3.0
    yield case


def _far_below(generator: torch.Generator) -> Iterator[Case]:
    """Every other row has all its scores near −16,000, and its lse there as well.

    Few bits make the scores exact in any order of their sums.
    """
    note = "rows near 16,000 and −16,000"
    case = flash_inputs.draw_case(generator, 10, integer(generator, 9, 15), note=note)
    q, k, _ = case.args
    for t in (q, k):
        t.copy_((4 * t).round() / 4)
    q[..., 0], k[..., 0] = 256, -256
    q[..., ::2, 0] = -256
    yield case


def _grouped(generator: torch.Generator) -> Iterator[Case]:
    """Two query heads to each of three KV heads, and nine to one; batch 3; causal too."""
    yield flash_inputs.draw_case(generator, 9, 14, heads=(6, 3))
    yield flash_inputs.draw_case(generator, 10, 10, heads=(9, 1), batch=3, is_causal=True)


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    for case in _from(flash_inputs.layout_cases)(generator):
        *rest, do = case.args
        yield Case(case.description, (*rest, here(strided(do.cpu(), (3, 0, 2, 1)))), case.kwargs)


def _tails(generator: torch.Generator) -> Iterator[Case]:
    """All heads share the memory of the first, that of do too."""
    for case in _from(flash_inputs.tail_cases)(generator):
        do = case.args[-1]
        do[:, 1:] = do[:, :1]
        yield case


def _expanded(generator: torch.Generator) -> Iterator[Case]:
    """A do of ones, which the call then expands from one number."""
    case = with_gradient(generator, flash_inputs.draw_case(generator, 19, 23, heads=(2, 2)))
    *rest, do = case.args
    yield Case(
        f"{case.description}, do with all strides 0", (*rest, torch.ones_like(do)), case.kwargs
    )


def _call_expanded(answer: Answer, *args: torch.Tensor, **kwargs: Any) -> Any:
    *rest, do = args
    return answer(*rest, do.reshape(-1)[:1].reshape(()).expand(do.shape), **kwargs)


def _half_sums(generator: torch.Generator) -> Iterator[Case]:
    """Every sum passes 65,504 on the way and ends below: dk and dv first, then dq.

    The scores are 0. In the first case two keys share all weight. In the second three queries
    spread it over all keys, and the terms of delta, ±72,000 in turns, add up to 0; the gradients
    of the scores are exact in float16.
    """
    case = flash_inputs.draw_case(generator, 300, 2, note="do near 1,200, then −600")
    q, k, v = case.args
    for t in case.args:
        t.zero_()
    q[..., 0], v[:, :, 0], v[:, :, 1] = 0.25, 1, -1
    case = with_gradient(generator, as_half(case))
    *rest, do = case.args
    level = torch.where(torch.arange(do.shape[2], device=do.device) < 128, 1200.0, -600.0)
    do = (do.float() + level[:, None]).half()
    yield Case(case.description, (*rest, do), case.kwargs)
    case = flash_inputs.draw_case(generator, 3, 256, note="k 32, v 59 or 61, do ±1,200")
    for t in case.args:
        t.zero_()
    q, k, v = case.args
    k[..., 0] = 32
    sign = torch.ones_like(v[..., :1, :])
    sign[..., 1::2] = -1
    v[:, :, :128], v[:, :, 128:] = 60 + sign, 60 - sign
    *rest, do = with_gradient(generator, as_half(case)).args
    do = (1200 * sign).expand(do.shape).to(do.dtype).contiguous()
    yield Case(f"{case.description}, float16", (*rest, do), case.kwargs)


def _cancelling(generator: torch.Generator) -> Iterator[Case]:
    """Where float16 keeps no units: dP at 4,097 ± 1, then scores near 1,276.

    In the first case all scores are 0, and dP − delta is 1 or −1. In the second the first factor
    of a score loses nothing if it is scaled in float16: 71.4375 / 4 · log2(e) has few bits too.
    """
    case = flash_inputs.draw_case(generator, 9, 64, note="dP 4,096 or 4,098")
    q, k, v = case.args
    q[..., 1:], k[..., 0], k[..., 1] = 0, 0, 1
    q[..., 0] = q[..., 0].abs() + 1
    order = torch.randperm(k.shape[2], generator=generator)
    v.zero_()
    v[..., 0], v[..., 1] = 64, 1
    v[..., 2] = here(torch.where(order % 2 == 0, 1.0, -1.0))
    *rest, do = with_gradient(generator, as_half(case)).args
    do.zero_()
    do[..., 0], do[..., 1:3] = 64, 1
    yield Case(f"{case.description}, float16", (*rest, do), case.kwargs)
    case = flash_inputs.draw_case(generator, 6, integer(generator, 5, 8), note="scores near 1,276")
    for t in case.args:
        t.copy_((8 * t).round() / 8)
    q, k, _ = case.args
    q[..., 0], k[..., 0] = flash_inputs.FEW_BITS, flash_inputs.FEW_BITS
    case = with_gradient(generator, as_half(case))
    *rest, do = case.args
    yield Case(case.description, (*rest, (8 * do).round() / 8), case.kwargs)


def _ours(generator: torch.Generator) -> Iterator[Case]:
    yield from _from(flash_inputs.own_work_cases)(generator)


QUESTION = Question(
    id="lab5.flash_backward",
    points=13,
    checks=(
        Check("dq, dk and dv over many tiles", _from(flash_inputs.tile_cases), judge),
        Check(
            "any length: 1, primes, a block and one more", _from(flash_inputs.ragged_cases), judge
        ),
        Check(
            "scores × 1, × 5 and × 40, rows far from 0, do × 100",
            _from(flash_inputs.scale_cases, scale=100),
            judge,
        ),
        Check("lse as low as −16,000", _from(_far_below), judge),
        Check("gradients of a group of query heads add up", _from(_grouped), judge),
        Check("causal: no gradient from a later key", _from(flash_inputs.causal_cases), judge),
        Check("causal with more keys than queries", _from(flash_inputs.longer_key_cases), judge),
        Check(
            "a query that sees no key has gradient 0", _from(flash_inputs.empty_row_cases), judge
        ),
        Check("hidden scores of any size stay hidden", _from(_large_causal), judge),
        Check(
            "head_dim 16 to 128, powers of two or not", _from(flash_inputs.head_dim_cases), judge
        ),
        Check("not causal if nothing is said", _from(flash_inputs.default_cases), judge),
        Check("any strides", _layouts, judge),
        Check("do with all strides 0", _expanded, judge, _call_expanded),
        Check(
            "nothing behind the end is used",
            _tails,
            judge,
            forward.call_amid_nan,
        ),
        Check("float16", _from(flash_inputs.plain_half_cases), judge),
        Check("float16, with sums in float32", _half_sums, judge),
        Check("float16 in, scores and dP in float32", _cancelling, _judge_cancelling),
        new_tensors_check(_from(flash_inputs.small_cases)),
        Check(
            "memory does not grow with the score matrix",
            _from(flash_inputs.long_cases),
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
