"""lab5.attention: an autograd function that keeps q, k, v, out and lse, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from flashcourse.grading import flash_inputs
from flashcourse.grading.draw import strided
from flashcourse.grading.judge import FORBIDDEN_ATTENTION, judge_operators, judge_tensors
from flashcourse.grading.mistakes_flash_backward import RIGHT, softmax_attention
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions import lab3_tiled_backward as lab3
from flashcourse.grading.questions import lab4_flash_forward as forward
from flashcourse.grading.questions import lab5_flash_backward as backward
from flashcourse.grading.triton_work import as_half, here, needs_triton, where_it_ran
from flashcourse.measure.allocations import AllocationWatch

NAMES = ("out", *lab3.NAMES)
MORE = 4  # numbers a query that may be kept beside these: m and l apart, for instance
LENGTHS = (64, 320)  # with these what is kept for the backward is counted


# How an answer is called ------------------------------------------------------------------------


def call_differentiated(
    answer: Answer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """out and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = answer(*leaves, **kwargs)
    return out, *torch.autograd.grad(out, leaves, do)


def _call_summed(answer: Answer, *args: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """As a training step: ``out.sum().backward()`` sends one number with all strides 0."""
    leaves = [t.detach().requires_grad_() for t in args[:3]]
    out = answer(*leaves, **kwargs)
    out.sum().backward()
    return (out, *(t.grad for t in leaves))


def _call_twice(answer: Answer, *args: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """A second call with other options between forward and backward."""
    leaves = [t.detach().requires_grad_() for t in args[:3]]
    out = answer(*leaves, **kwargs)
    answer(*(t.flip(-1) for t in leaves), is_causal=not kwargs["is_causal"])
    return out, *torch.autograd.grad(out, leaves, args[3])


class _Held(AllocationWatch):
    """Knows which storages are still held, of all that were allocated meanwhile."""

    def held(self, expected: int) -> dict[int, int]:
        """Their sizes; where more numbers than expected are held, cycles are freed first.

        Triton's interpreter leaves some. They are young: to free all cycles takes much longer.
        """
        for generation in (0, 1, 2, None):
            found = {key: n for key, (storage, n) in self._held.items() if not storage.expired()}
            if generation is None or sum(found.values()) <= expected:
                break
            gc.collect(generation)
        return found


def _call_counting_kept(answer: Answer, *args: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
    """How many numbers are kept for the backward beside q, k and v, and how many for longer.

    Kept is what autograd saves, and all else that was made in the forward and still exists, save
    for out itself: attributes of ctx and global variables too. Each storage counts once, that of
    an input not at all: the caller holds it. A copy of an input is memory of its own.
    """
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes() // tensor.element_size()
        return tensor.detach()  # itself, it would hold itself where it is an output

    leaves = [t.detach().requires_grad_() for t in args[:3]]
    with (
        _Held(leaves) as watch,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = answer(*leaves, **kwargs)
    linked, result = False, out
    others = watch.held(0)
    if isinstance(out, torch.Tensor):
        linked, result = out.grad_fn is not None, out.detach().clone()
        others.pop(out.untyped_storage()._cdata, None)
    del out
    for tensor in leaves:
        kept.pop(tensor.untyped_storage()._cdata, None)
    count = sum((others | kept).values())
    return {"kept": count, "left": sum(watch.held(0).values()), "linked": linked, "out": result}


# What is right ------------------------------------------------------------------------------


def _expected(case: Case) -> tuple[tuple[torch.Tensor, ...], tuple[float, ...]]:
    """out, dq, dk and dv, and the errors allowed."""
    q, k, v, do = (t.detach().cpu() for t in case.args)
    is_causal = case.kwargs.get("is_causal", False)
    out, lse = forward.lab3.reference(q, k, v, is_causal)
    rest = (out.to(q.dtype), lse.float(), do)
    errors = backward.allowed_errors(q, k, v, *rest, is_causal=is_causal)
    expected = (out, *lab3.reference(q, k, v, do, is_causal))
    return expected, (forward.allowed_error(q, k, v), *errors)


def _judge(case: Case, observation: Observation) -> str | None:
    expected, allowed = _expected(case)
    dtypes = (case.args[0].dtype,) * 4
    return judge_tensors(NAMES, observation.output, expected, allowed, dtypes)


def _judge_kept(case: Case, observation: Observation) -> str | None:
    seen = observation.output
    if not seen["linked"]:
        return "out has no grad_fn: autograd does not know how it was made"
    q, k, v, _ = case.args
    rows = q.shape[:3].numel()
    if seen["kept"] > q.numel() + (1 + MORE) * rows:
        return (
            f"{seen['kept']:,} numbers are kept for the backward beside q, k and v; out and lse "
            f"are {q.numel() + rows:,}. A copy of q, k and v has "
            f"{q.numel() + k.numel() + v.numel():,}, the whole score matrix {q.shape[2]}×"
            f"{k.shape[2]} = {q.shape[2] * k.shape[2]:,}"
        )
    if seen["left"] > q.shape[2]:
        return (
            f"{seen['left']:,} numbers are still held when out and its graph are gone: something "
            "outside of ctx, such as a global list, keeps them"
        )
    return None


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    message = judge_operators(observation, FORBIDDEN_ATTENTION)
    if message:
        return message
    if not any(launch.own for launch in observation.launches):
        return "no Triton kernel of this notebook was launched in the forward"
    return forward.judge_memory(case, observation)


# The inputs -------------------------------------------------------------------------------------


def _with_do(draw: flash_inputs.Draw, sums: bool = False, scale: float = 1.0) -> flash_inputs.Draw:
    """The case of the forward with a gradient of out, of this scale, behind its inputs."""

    def cases(generator: torch.Generator) -> Iterator[Case]:
        for case in draw(generator):
            *args, _, _, do = backward.with_gradient(generator, case, scale).args
            gradient = torch.ones_like(do) if sums else do
            yield Case(case.description, (*args, gradient), case.kwargs)

    return cases


def _plain(generator: torch.Generator) -> Iterator[Case]:
    yield flash_inputs.draw_case(generator, 33, 49, heads=(2, 2))
    yield flash_inputs.draw_case(generator, 37, 37, heads=(4, 2), head_dim=24, is_causal=True)
    yield flash_inputs.draw_case(generator, 21, 64, is_causal=True, scale=5)


def _one(generator: torch.Generator) -> Iterator[Case]:
    yield flash_inputs.draw_case(generator, 19, 23, heads=(4, 2), is_causal=True)


def _empty(generator: torch.Generator) -> Iterator[Case]:
    yield flash_inputs.draw_case(generator, 39, 27, is_causal=True)


def _defaults(generator: torch.Generator) -> Iterator[Case]:
    *args, _, _, do = backward.with_gradient(
        generator, next(flash_inputs.default_cases(generator))
    ).args
    yield Case("q, k, v and no options", (*args, do))


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    """Every tensor in a layout of its own."""
    plain = flash_inputs.draw_case(generator, 9, 14, heads=(2, 2), batch=3, is_causal=True)
    for case in _with_do(lambda _: iter([plain]))(generator):
        orders = ((0, 2, 1, 3), (1, 3, 0, 2), (0, 1, 3, 2), (3, 0, 2, 1))
        args = tuple(here(strided(t.cpu(), o)) for t, o in zip(case.args, orders, strict=True))
        yield Case(f"{case.description}, q, k, v and do each stored otherwise", args, case.kwargs)


def _half(generator: torch.Generator) -> Iterator[Case]:
    yield as_half(flash_inputs.draw_case(generator, 33, 41, heads=(2, 1), is_causal=True))


def _long(generator: torch.Generator) -> Iterator[Case]:
    yield flash_inputs.draw_case(generator, *LENGTHS)


# The known mistakes: an autograd function with one place changed ---------------------------------

Step = Callable[..., Any]


def _through_function(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    *,
    mask_of_backward: Step = lambda is_causal: is_causal,
    sent: Step = lambda do: do,
    gradients: Step = lambda dq, dk, dv: (dq, dk, dv),
    log: Step = lambda lse: lse,
    kept: dict[str, Any] | None = None,
) -> torch.Tensor:
    """The right numbers by lab 3's functions; no Triton, so the last check fails always."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            assert forward.QUESTION.right is not None
            out, lse = forward.QUESTION.right(*inputs, is_causal)
            ctx.save_for_backward(*inputs, out, lse)
            if kept is not None:
                kept["call"] = (*inputs, out, lse), is_causal
            return out

        @staticmethod
        def backward(ctx: Any, do: torch.Tensor) -> Any:
            saved, causal = kept["call"] if kept is not None else (ctx.saved_tensors, is_causal)
            *inputs, out, lse = saved
            return gradients(
                *RIGHT(*inputs, out, log(lse), sent(do), is_causal=mask_of_backward(causal))
            )

    return Function.apply(q, k, v)


def _mistake(name: str, explanation: str, **steps: Any) -> Mistake:
    return Mistake(name, explanation, partial(_through_function, **steps))


QUESTION = Question(
    id="lab5.attention",
    points=4,
    checks=(
        Check(
            "out and the gradients of q, k and v",
            _with_do(_plain, scale=100),
            _judge,
            call_differentiated,
        ),
        Check(
            "a query that sees no key: 0 and gradient 0",
            _with_do(_empty),
            _judge,
            call_differentiated,
        ),
        Check(
            "out.sum().backward(), as in training", _with_do(_one, sums=True), _judge, _call_summed
        ),
        Check("q, k, v and do in any strides", _layouts, _judge, call_differentiated),
        Check("not causal if nothing is said", _defaults, _judge, call_differentiated),
        Check("two calls do not disturb each other", _with_do(_one), _judge, _call_twice),
        Check("float16", _with_do(_half), _judge, call_differentiated),
        Check(
            "only q, k, v, out and lse are kept",
            _with_do(_long),
            _judge_kept,
            _call_counting_kept,
            work=True,
        ),
        Check(
            "a kernel made out, and no matrix was needed",
            _with_do(_long),
            _judge_own_work,
            call_differentiated,
            work=True,
        ),
    ),
    mistakes=(
        _mistake(
            "causal ignored in the backward",
            "the backward needs the forward's mask: keep is_causal in ctx.",
            mask_of_backward=lambda is_causal: False,
        ),
        Mistake(
            "causal if nothing is said",
            "the default of is_causal is False.",
            lambda q, k, v, is_causal=True: _through_function(q, k, v, is_causal),
        ),
        _mistake(
            "the incoming gradient ignored",
            "backward receives the gradient of out; it is 1 only after a sum.",
            sent=torch.ones_like,
        ),
        _mistake(
            "gradients in another order",
            "backward returns one gradient for each argument of forward, in the same order.",
            gradients=lambda dq, dk, dv: (dq, dv, dk),
        ),
        _mistake(
            "no gradient for v",
            "backward returned zeros for the last tensor.",
            gradients=lambda dq, dk, dv: (dq, dk, torch.zeros_like(dv)),
        ),
        _mistake(
            "lse of another base",
            "the backward expects the natural logarithm that the forward returned.",
            log=lambda lse: lse * 1.4426950408889634,
        ),
        _mistake(
            "kept outside of ctx",
            "what is kept in a global variable is overwritten by the next call; ctx belongs to "
            "this one. Use ctx.save_for_backward.",
            kept={},
        ),
        Mistake(
            "autograd of the textbook formula",
            "the numbers are right, but autograd keeps the whole matrix of probabilities. Write "
            "a torch.autograd.Function over the kernels.",
            softmax_attention,
        ),
    ),
    needs=needs_triton,
    right=_through_function,
    remark=where_it_ran,
)
