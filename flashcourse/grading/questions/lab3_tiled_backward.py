"""lab3.tiled_backward: dq, dk and dv over tiles, with P made again from lse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from flashcourse.attention import naive_attention
from flashcourse.grading.draw import normal, strided
from flashcourse.grading.fresh import fresh_check
from flashcourse.grading.judge import FORBIDDEN_ATTENTION, judge_operators, judge_tensors
from flashcourse.grading.mistakes_tiled_backward import MISTAKES, tiled_backward
from flashcourse.grading.question import Case, Check, Observation, Question
from flashcourse.grading.questions import lab3_tiled_forward as forward
from flashcourse.grading.tile_work import call_watching, judge_tiles, judge_work

NAMES = ("dq", "dk", "dv")
FLOAT32 = (torch.float32,) * 3
EPS = torch.finfo(torch.float32).eps

# What is right ------------------------------------------------------------------------------


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, ...]:
    """The gradients in float64, by automatic differentiation of naive attention."""
    with torch.enable_grad():
        inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
        out = naive_attention(*inputs, is_causal=is_causal)
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out, inputs, do.double())


def allowed_errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool,
) -> tuple[float, ...]:
    """The errors that any right float32 backward may make, however it is written.

    What is made of P inherits its :func:`error_of_p`, relative to its :func:`gradient_sizes`.
    """
    unit = error_of_p(q, k, lse)
    sizes = gradient_sizes(q, k, v, out, do, is_causal)
    return tuple(unit * max(size.max().item(), 1e-3) for size in sizes)


def error_of_p(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> float:
    """The error that P = exp(s − lse) may have relative to itself: that of its exponent.

    It is a few ``eps · (|s| + |lse|)``.
    """
    seen = lse != -math.inf
    exponent = forward.largest_score(q, k) + (lse[seen].abs().max().item() if seen.any() else 0.0)
    return 16 * EPS * (4 + exponent)


def gradient_sizes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    do: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv as sums of absolute values: what the error of each is relative to.

    dS = P ∘ (dP − delta) is relative to ``P ∘ (|dP| + |delta|)`` where both terms are sums of
    absolute values, because either may cancel. The products with k, q and do then average these.
    """
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    q, k, v, out, do = (t.detach().double() for t in (q, k, v, out, do))
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = q @ keys.transpose(-2, -1) * scale
    if is_causal:
        i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        s = s.masked_fill(j > i + s.shape[-1] - s.shape[-2], -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)  # 0 for a query that sees no key
    size = do.abs() @ values.abs().transpose(-2, -1) + (do * out).abs().sum(-1, keepdim=True)
    ds = p * size
    dk = (ds.transpose(-2, -1) @ q.abs()).unflatten(1, (-1, group)).sum(dim=2) * scale
    dv = (p.transpose(-2, -1) @ do.abs()).unflatten(1, (-1, group)).sum(dim=2)
    return ds @ keys.abs() * scale, dk, dv


def _judge(case: Case, observation: Observation) -> str | None:
    q, k, v, out, lse, do = case.args
    is_causal = case.kwargs.get("is_causal", False)
    expected = reference(q, k, v, do, is_causal)
    dq, dk, dv = allowed_errors(q, k, v, out, lse, do, is_causal)
    allowed = (torch.where(lse[..., None] == -math.inf, 0.0, dq), dk, dv)
    message = judge_tensors(NAMES, observation.output, expected, allowed, FLOAT32)
    return message or judge_operators(observation, FORBIDDEN_ATTENTION)


# The inputs: those of the forward, with its right result and a gradient -------------------------

Draw = Callable[[torch.Generator], Iterator[Case]]


def _with_gradient(generator: torch.Generator, case: Case, scale: float = 1.0) -> Case:
    q, k, v = case.args
    out, lse = forward.reference(q, k, v, case.kwargs["is_causal"])
    do = normal(generator, *q.shape, scale=scale)
    return Case(case.description, (q, k, v, out.float(), lse.float(), do), case.kwargs)


def _from(draw: Draw, scale: float = 1.0) -> Draw:
    """The cases of the forward, with a do of this scale."""

    def cases(generator: torch.Generator) -> Iterator[Case]:
        for case in draw(generator):
            yield _with_gradient(generator, case, scale)

    return cases


def _large_causal(generator: torch.Generator) -> Iterator[Case]:
    """Hidden scores far above the row's lse: exp of them overflows."""
    case = forward.draw_case(
        generator, 13, 13, (4, 8), scale=5, is_causal=True, note="hidden scores above 100"
    )
    q, k, _ = case.args
    k[:, :, -1] = 0.0
    k[:, :, -1, 0] = 40.0 * q.shape[-1] ** 0.5
    q[:, :, :-1, 0] = q[:, :, :-1, 0].abs() + 3.0
    yield case


def _grouped(generator: torch.Generator) -> Iterator[Case]:
    """Four query heads to a KV head, and three; causal too."""
    yield forward.draw_case(generator, 9, 14, (8, 8), heads=(8, 2))
    yield forward.draw_case(generator, 10, 10, (4, 8), heads=(6, 2), is_causal=True)


def _defaults(generator: torch.Generator) -> Iterator[Case]:
    """No options at all: not causal."""
    case = _with_gradient(generator, forward.draw_case(generator, 5, 7, (64, 64), batch=1))
    shapes, _, _ = case.description.partition(", is_causal")
    yield Case(f"{shapes}, no options", case.args)


def _small(generator: torch.Generator) -> Iterator[Case]:
    yield _with_gradient(
        generator, forward.draw_case(generator, 3, 5, (2, 2), batch=1, note="twice")
    )


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    for case in _from(forward.layout_cases)(generator):
        *rest, do = case.args
        yield Case(case.description, (*rest, strided(do, (3, 0, 2, 1))), case.kwargs)
    case = next(_from(forward.layout_cases)(generator))
    *rest, do = case.args
    ones = torch.ones(()).expand(do.shape)
    yield Case(f"{case.description}, do with all strides 0", (*rest, ones), case.kwargs)


QUESTION = Question(
    id="lab3.tiled_backward",
    points=4,
    checks=(
        Check(
            "dq, dk and dv over tiles, ragged ends included", _from(forward.ragged_cases), _judge
        ),
        Check("scores × 1, × 5 and × 40, do × 100", _from(forward.scale_cases, scale=100), _judge),
        Check("rows far above and below 0", _from(forward.level_cases), _judge),
        Check("gradients of a group of query heads add up", _from(_grouped), _judge),
        Check("causal: no gradient from a later key", _from(forward.causal_cases), _judge),
        Check("causal with more keys than queries", _from(forward.longer_key_cases), _judge),
        Check("a query that sees no key has gradient 0", _from(forward.empty_row_cases), _judge),
        Check("hidden scores of any size stay hidden", _from(_large_causal), _judge),
        Check("any strides", _layouts, _judge),
        Check("not causal if nothing is said", _defaults, _judge),
        fresh_check(_small),
        Check(
            "a tile of scores at a time, and P made again",
            _from(forward.long_cases),
            judge_tiles,
            call_watching,
            work=True,
        ),
        Check(
            "the gradients are your own",
            _from(forward.own_work_cases),
            judge_work,
            call_watching,
            work=True,
        ),
    ),
    mistakes=MISTAKES,
    right=tiled_backward,
)
