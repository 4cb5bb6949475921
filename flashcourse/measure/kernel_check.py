"""Holds an attention kernel to the accuracy rule: float64 from the same inputs, plain attention in
the inputs' dtype as the yardstick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashcourse.measure.accuracy import LSE_TOLERANCE, allowed_error, explain_difference


@dataclass(frozen=True)
class KernelError:
    """How far a result is from the exact one.

    Attributes:
        error: the largest absolute error of out, where it is finite.
        allowed: the largest that passes.
        findings: what is wrong, in sentences; empty if nothing is.
    """

    error: float
    allowed: float
    findings: tuple[str, ...]

    @property
    def right(self) -> bool:
        """True if the accuracy rule is kept."""
        return not self.findings

    def __str__(self) -> str:
        if self.right:
            return f"right: out is off by {self.error:.1e}, allowed {self.allowed:.1e}"
        return "wrong: " + "; ".join(self.findings)


def attention_error(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    is_causal: bool = False,
    scale: float | None = None,
) -> KernelError:
    """Compare out and lse with attention in float64 from the same inputs.

    Args:
        out: ``(batch, heads_q, seq_q, head_dim)``. lse: ``(batch, heads_q, seq_q)``.
        q, k, v: the inputs, in the dtype under test.
        reference: attention that takes float64 and ``return_lse``: ``naive_attention``.
        is_causal, scale: the options of the call.
    """
    exact, exact_lse = reference(
        q.double(), k.double(), v.double(), is_causal=is_causal, scale=scale, return_lse=True
    )
    allowed = allowed_error(plain_attention(q, k, v, is_causal=is_causal, scale=scale), exact)
    findings = (
        explain_difference("out", out, exact, allowed),
        explain_difference("lse", lse, exact_lse, LSE_TOLERANCE),
    )
    difference = (out.double() - exact).abs()
    finite = difference[torch.isfinite(difference)]
    error = finite.max().item() if finite.numel() else 0.0
    return KernelError(error, allowed, tuple(text for text in findings if text))


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The yardstick: the textbook formula with every operation in the inputs' dtype.

    Unlike :func:`~flashcourse.attention.naive.naive_attention` it rounds scores and probabilities
    to that dtype, as plain PyTorch code does. A row that sees no key is NaN.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)  # (..., seq_q, seq_k)
    if is_causal:
        seq_q, seq_k = s.shape[-2:]
        hidden = torch.ones(seq_q, seq_k, dtype=torch.bool, device=s.device).triu(1 + seq_k - seq_q)
        s = s.masked_fill(hidden, float("-inf"))
    return s.softmax(dim=-1) @ v


def random_qkv(
    batch: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    seq_k: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> list[torch.Tensor]:
    """Standard normal q, k and v, contiguous, ``(batch, heads, seq, head_dim)``, in a dtype.

    They live on the generator's device.
    """
    sizes = ((heads_q, seq_q), (heads_kv, seq_k), (heads_kv, seq_k))
    return [
        torch.randn(batch, heads, seq, head_dim, generator=generator, device=generator.device).to(
            dtype
        )
        for heads, seq in sizes
    ]
