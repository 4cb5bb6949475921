"""Is it right, on these very tensors? Checked before anything is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashcourse.attention import naive_attention
from flashcourse.bench.candidates import Run
from flashcourse.bench.grids import Shape
from flashcourse.measure.accuracy import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    allowed_error,
    delta_rounding,
    explain_difference,
    largest,
    score_rounding,
)

CHUNK = 1024  # queries at a time: the reference of 16k keys needs 128 MiB a matrix, not 2 GiB
NAMES = ("out", "dq", "dk", "dv")
Results = tuple[torch.Tensor, ...]  # out and, where there is a backward, dq, dk, dv


def wrong(shape: Shape, run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          d_out: torch.Tensor, expected: list[Expected]) -> str | None:  # fmt: skip
    """None if ``run`` computes the shape within the accuracy rule, else what is wrong.

    Args:
        expected: from :func:`expect`, for the same tensors.
    """
    results = _results(run, q, k, v, d_out if "backward" in shape.directions else None)
    for sample in expected:
        problem = sample.problem(results)
        if problem is not None:
            return f"batch {sample.batch}, KV head {sample.head_kv}: {problem}"
    return None


class Expected:
    """The reference of one KV head and the query heads that read it, and the allowed errors."""

    def __init__(self, shape: Shape, batch: int, head_kv: int, tensors: Results) -> None:
        self.batch, self.head_kv = batch, head_kv
        group = shape.heads // shape.heads_kv
        self.heads = slice(head_kv * group, (head_kv + 1) * group)
        q, k, v, d_out = tensors
        own = slice(head_kv, head_kv + 1)
        cut = (
            q[batch, self.heads][None].detach(), k[batch, own][None].detach(),
            v[batch, own][None].detach(), d_out[batch, self.heads][None],
        )  # fmt: skip
        backward = "backward" in shape.directions
        exact = by_chunks(shape, _naive, tuple(t.double() for t in cut), backward)
        rough = by_chunks(shape, _plain, cut, backward)
        self.exact = exact
        factors = (OUTPUT_FACTOR, *[GRADIENT_FACTOR] * 3)
        self.allowed = [
            allowed_error(yardstick, reference, factor) + floor
            for yardstick, reference, factor, floor in zip(
                rough, exact, factors, rounding_floors(cut, exact), strict=False
            )
        ]

    def problem(self, results: Results) -> str | None:
        """What is wrong with these results at this sample; None if nothing."""
        own = slice(self.head_kv, self.head_kv + 1)
        cuts = (self.heads, self.heads, own, own)
        for name, came, cut, right, allowed in zip(
            NAMES, results, cuts, self.exact, self.allowed, strict=False
        ):
            found = explain_difference(name, came[self.batch, cut][None], right, allowed)
            if found is not None:
                return found
        return None


def rounding_floors(tensors: Results, exact: Results) -> list[float]:
    """The error of each result that float32 scores and dP bring, in whatever order they are summed.

    On few rows the yardstick may be lucky, and then no other right computation would pass.

    Args:
        tensors: q, k, v, d_out.
        exact: out and, where there is a backward, dq, dk, dv.
    """
    q, k, v, d_out = tensors
    relative, of_delta = score_rounding(q, k), delta_rounding(q, k, v, d_out)
    return [
        relative * largest(reference) + (of_delta if name in ("dq", "dk") else 0.0)
        for name, reference in zip(NAMES, exact, strict=False)
    ]


def expect(shape: Shape, tensors: Results) -> list[Expected]:
    """References for the first and the last head of the batch; a wrong head map hits one."""
    samples = dict.fromkeys([(0, 0), (shape.batch - 1, shape.heads_kv - 1)])
    return [Expected(shape, batch, head_kv, tensors) for batch, head_kv in samples]


Function = Callable[..., torch.Tensor]  # (q, k, v, is_causal, window)


def by_chunks(shape: Shape, function: Function, tensors: Results, backward: bool) -> Results:
    """out, dq, dk, dv of one KV head, a block of queries at a time.

    A causal block is computed with the keys up to its last one, so the bottom-right diagonal of
    the block is that of the whole.
    """
    q, k, v, d_out = tensors
    out = torch.zeros_like(q)
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    for first_q, seq_q, first_k, seq_k in shape.sequences():
        for begin in range(0, seq_q, CHUNK):
            end = min(begin + CHUNK, seq_q)
            seen = min(seq_k, max(0, end + seq_k - seq_q)) if shape.is_causal else seq_k
            rows = slice(first_q + begin, first_q + end)
            columns = slice(first_k, first_k + seen)
            leaves = [
                t[:, :, cut].detach().requires_grad_(backward)
                for t, cut in ((q, rows), (k, columns), (v, columns))
            ]
            result = function(*leaves, shape.is_causal, shape.window)
            out[:, :, rows] = result.detach()
            if backward:
                parts = torch.autograd.grad(result, leaves, d_out[:, :, rows])
                for grad, part, cut in zip(grads, parts, (rows, columns, columns), strict=True):
                    grad[:, :, cut] += part
    return (out, *grads) if backward else (out,)


def _naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool,
           window: int | None) -> torch.Tensor:  # fmt: skip
    size = None if window is None else (window, 0)
    out = naive_attention(q, k, v, is_causal=is_causal, window_size=size)
    assert isinstance(out, torch.Tensor)
    return out


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool,
           window: int | None) -> torch.Tensor:  # fmt: skip
    """The textbook with every step in the dtype of the inputs: the yardstick."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
        columns = torch.arange(k.shape[2], device=q.device)
        visible = columns <= rows
        if window is not None:
            visible = visible & (columns >= rows - window)
        s = s.masked_fill(~visible, float("-inf"))
    return s.softmax(-1) @ v


def _results(run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
             d_out: torch.Tensor | None) -> Results:  # fmt: skip
    if d_out is None:
        with torch.no_grad():
            return (run(q, k, v),)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = run(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, d_out))
