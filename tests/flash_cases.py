"""Cases for the Triton kernels: what a case is, how it is drawn, and how a result is judged.

The judge is the accuracy rule of ``flashcourse.measure.accuracy``. The reference is
``naive_attention`` in float64, which test_attention.py holds against loops over rows; for varlen it
is applied to one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flashcourse.attention import flash_attention, flash_attention_varlen, naive_attention
from flashcourse.measure.accuracy import (
    FLOAT32_EPS,
    GRADIENT_FACTOR,
    LSE_TOLERANCE,
    OUTPUT_FACTOR,
    allowed_error,
    delta_rounding,
    explain_difference,
    largest,
    score_bound,
    score_rounding,
)

LAYOUTS = ("dense", "transposed", "sliced", "fused", "strided_columns", "broadcast")
GRADIENTS = ("dense", "expanded", "transposed")


@dataclass(frozen=True)
class Case:
    """One call of ``flash_attention`` and its backward."""

    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    seq_q: int = 70
    seq_k: int = 70
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    layout: str = "dense"
    gradient: str = "dense"
    input_scale: float = 1.0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        options = "-".join(f"{key}={value}" for key, value in self.options.items())
        return (
            f"B{self.batch}-H{self.heads_q}.{self.heads_kv}-N{self.seq_q}x{self.seq_k}-"
            f"D{self.head_dim}-{dtype}-{self.layout}-{self.gradient}-x{self.input_scale}-{options}"
        )


@dataclass(frozen=True)
class VarlenCase:
    """One call of ``flash_attention_varlen`` and its backward; slack rows follow the sequences."""

    lengths_q: tuple[int, ...] = (3, 0, 65)
    lengths_k: tuple[int, ...] = (5, 7, 65)
    slack_q: int = 0
    slack_k: int = 0
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    layout: str = "dense"
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def draw(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A random tensor ``(batch, heads, seq, head_dim)`` whose memory is laid out as asked."""
    batch, heads, seq, head_dim = shape

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    if layout == "dense":
        return normal(*shape)
    if layout == "transposed":  # (batch, seq, heads, head_dim) in memory, as a linear layer gives
        return normal(batch, seq, heads, head_dim).transpose(1, 2)
    if layout == "sliced":  # a window into a larger tensor, its start not aligned to 16 bytes
        return normal(batch, heads, seq + 3, head_dim + 3)[:, :, 2 : seq + 2, 1 : head_dim + 1]
    if layout == "fused":  # one of three in a fused QKV projection
        return normal(batch, seq, heads, 3, head_dim)[:, :, :, 1].transpose(1, 2)
    if layout == "strided_columns":  # head_dim is not the dense dimension
        return normal(batch, heads, head_dim, seq).transpose(2, 3)
    if layout == "broadcast":  # stride 0 over the heads
        return normal(batch, 1, seq, head_dim).expand(shape)
    raise ValueError(layout)


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in the inputs' own dtype, operation by operation: the yardstick."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = options.get("scale")
    s = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    softcap = options.get("softcap")
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if not k.shape[2]:
        return s @ v, s.sum(-1)
    some = visible.any(-1, keepdim=True)
    s = s.masked_fill(~visible & some, float("-inf"))
    p = torch.where(some, torch.softmax(s, -1), 0.0)
    return p @ v, torch.where(some[:, 0], torch.logsumexp(s, -1), 0.0)


def visible_pairs(seq_q: int, seq_k: int, options: dict[str, Any]) -> torch.Tensor:
    """bool (seq_q, seq_k), straight from the interface's sentences."""
    offset = torch.arange(seq_k)[None] - torch.arange(seq_q)[:, None] - (seq_k - seq_q)
    visible = torch.ones_like(offset, dtype=torch.bool)
    if options.get("is_causal"):
        visible &= offset <= 0
    left, right = options.get("window_size") or (None, None)
    if left not in (None, -1):
        visible &= offset >= -left
    if right not in (None, -1):
        visible &= offset <= right
    return visible


def inputs_of(case: Case) -> tuple[torch.Tensor, ...]:
    """q, k, v, the gradient of out and that of lse, on the CPU."""
    generator = torch.Generator().manual_seed(case.seed)
    shape_q = (case.batch, case.heads_q, case.seq_q, case.head_dim)
    shape_k = (case.batch, case.heads_kv, case.seq_k, case.head_dim)
    shapes = (shape_q, shape_k, shape_k)
    q, k, v = (draw(shape, case.layout, case.dtype, generator) for shape in shapes)
    if case.layout == "broadcast":  # scaled after expanding would be a dense copy
        q, k = q[:, :1] * case.input_scale, k[:, :1] * case.input_scale
        q, k = q.expand(shape_q), k.expand(shape_k)
    elif case.input_scale != 1.0:
        q.mul_(case.input_scale)
        k.mul_(case.input_scale)
    if case.gradient == "expanded":  # what out.sum().backward() gives: every stride is 0
        d_out = torch.randn((), generator=generator).to(case.dtype).expand(shape_q)
    else:
        layout = "strided_columns" if case.gradient == "transposed" else "dense"
        d_out = draw(shape_q, layout, case.dtype, generator)
    d_lse = torch.randn(shape_q[:3], generator=generator)
    return q, k, v, d_out, d_lse


Function = Callable[..., Any]


def run(
    function: Function, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk and dv; lse's gradient is that of its finite entries."""
    q, k, v, d_out, d_lse = tensors
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = function(*leaves, return_lse=True, **options)
    finite = torch.where(torch.isfinite(lse), lse, 0.0)
    grads = torch.autograd.grad((out, finite), leaves, (d_out, d_lse.to(lse.dtype)))
    return dict(
        zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True)
    )


def problems(case: Case, device: str = "cpu", function: Function | None = None) -> list[str]:
    """What is wrong with a function's results; empty if they pass."""
    tensors = tuple(_keep_layout(t, device) for t in inputs_of(case))
    q, k, v, d_out, d_lse = tensors
    actual = run(function or flash_attention, tensors, case.options)
    exact = run(naive_attention, tuple(t.double() for t in tensors), case.options)

    visible = visible_pairs(case.seq_q, case.seq_k, case.options).to(device)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    plain_out, plain_lse = plain_attention(*leaves, visible, case.options)
    plain_grads = torch.autograd.grad((plain_out, plain_lse), leaves, (d_out, d_lse.to(case.dtype)))
    found = []
    for name, plain, factor in (
        ("out", plain_out.detach(), OUTPUT_FACTOR),
        ("dq", plain_grads[0], GRADIENT_FACTOR),
        ("dk", plain_grads[1], GRADIENT_FACTOR),
        ("dv", plain_grads[2], GRADIENT_FACTOR),
    ):
        allowed = allowed_error(plain, exact[name], factor)
        floor = score_rounding(q, k, case.options.get("scale")) * largest(exact[name])
        if name in ("dq", "dk"):
            floor += delta_rounding(q, k, v, d_out, case.options.get("scale"))
        found.append(explain_difference(name, actual[name], exact[name], allowed + floor))
        if actual[name].dtype != case.dtype:
            found.append(f"{name} has dtype {actual[name].dtype}")
    lse_allowed = max(LSE_TOLERANCE, 1e-6 * largest(exact["lse"]))
    found.append(explain_difference("lse", actual["lse"], exact["lse"], lse_allowed))
    return [f"{case}: {problem}" for problem in found if problem]


def slope_floor(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> float:
    """The relative error of dQ and dK under softcap, beside that of P.

    They carry 1 - tanh², which moves by up to 2 / softcap times the rounding of the score: also
    where the terms of a score cancel, and it is small itself.
    """
    softcap = options.get("softcap")
    if not softcap:
        return 0.0
    return 2 * FLOAT32_EPS * score_bound(q, k, options.get("scale")) / softcap


def _keep_layout(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """On the device, with the same strides: ``.to()`` would make a slice dense."""
    if device == "cpu":
        return tensor
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def varlen_problems(case: VarlenCase, device: str = "cpu") -> list[str]:
    """What is wrong with ``flash_attention_varlen`` on this case; empty if it passes."""
    generator = torch.Generator().manual_seed(case.seed)
    total_q, total_k = sum(case.lengths_q) + case.slack_q, sum(case.lengths_k) + case.slack_k
    shapes = [(1, case.heads_q, total_q, case.head_dim)] + 2 * [
        (1, case.heads_kv, total_k, case.head_dim)
    ]
    q, k, v = (
        _keep_layout(draw(shape, case.layout, case.dtype, generator), device)[0].transpose(0, 1)
        for shape in shapes
    )
    d_out = torch.randn(q.shape, generator=generator).to(device, case.dtype)
    d_lse = torch.randn((case.heads_q, total_q), generator=generator).to(device)
    offsets_q, offsets_k = _offsets(case.lengths_q), _offsets(case.lengths_k)

    def ours(q, k, v, **options):
        cu_q, cu_k = (
            torch.tensor(o, dtype=torch.int32, device=device) for o in (offsets_q, offsets_k)
        )
        return flash_attention_varlen(q, k, v, cu_q, cu_k, **options)

    def one_by_one(q, k, v, **options):
        nothing = 0.0 * (q.sum() + k.sum() + v.sum())  # so that every input has a gradient
        outs, lses = [nothing + q[:0]], [nothing + q.new_zeros(q.shape[1], 0)]
        for b in range(len(case.lengths_q)):
            queries, keys = (slice(o[b], o[b + 1]) for o in (offsets_q, offsets_k))
            parts = (t.transpose(0, 1)[None] for t in (q[queries], k[keys], v[keys]))
            out, lse = naive_attention(*parts, **options)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        outs.append(torch.zeros_like(q[offsets_q[-1] :]))
        lses.append(q.new_full((q.shape[1], case.slack_q), float("-inf"), dtype=lses[0].dtype))
        return torch.cat(outs), torch.cat(lses, dim=1)

    tensors = (q, k, v, d_out, d_lse)
    actual = run(ours, tensors, case.options)
    exact = run(one_by_one, tuple(t.double() for t in tensors), case.options)
    found = []
    for name in ("out", "dq", "dk", "dv"):
        # The plain computation's error grows with the dtype's step, like this bound; the dense
        # cases hold the kernels, which are the same, against the plain computation itself.
        floor = 6 * torch.finfo(case.dtype).eps + score_rounding(q, k, case.options.get("scale"))
        if name in ("dq", "dk"):
            floor += slope_floor(q, k, case.options)
        allowed = floor * max(1.0, largest(exact[name]))
        if name in ("dq", "dk"):
            allowed += delta_rounding(q, k, v, d_out, case.options.get("scale"))
        found.append(explain_difference(name, actual[name], exact[name], allowed))
    found.append(explain_difference("lse", actual["lse"], exact["lse"], LSE_TOLERANCE))
    if actual["out"][offsets_q[-1] :].abs().sum() or actual["dq"][offsets_q[-1] :].abs().sum():
        found.append("slack queries are not exactly 0")
    if actual["dk"][offsets_k[-1] :].abs().sum() or actual["dv"][offsets_k[-1] :].abs().sum():
        found.append("slack keys have a gradient")
    return [f"{case}: {problem}" for problem in found if problem]


def _offsets(lengths: tuple[int, ...]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets
