"""Joining attention over two sets of keys, from their outputs and log-sum-exps."""

from __future__ import annotations

import torch

from flashcourse.attention.arguments import check_same, check_tensor
from flashcourse.attention.naive import DTYPES


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of ``a`` and ``b`` together, if no key is in both.

    Each output is weighted with its share of the joint softmax sum, ``exp(lse_x - lse)``. This is
    the step that joins the blocks of FlashAttention and the splits of a decode kernel: Dao (2023),
    "FlashAttention-2", section 3.1.1; Milakov and Gimelshein (2018), section 3.1.

    Args:
        out_a, out_b: ``(batch, heads, seq, head_dim)``, or ``(seq, head_dim)`` for a single head;
            for varlen ``(total, heads, head_dim)``.
        lse_a, lse_b: natural logarithm, ``(batch, heads, seq)`` or ``(seq,)``;
            for varlen ``(heads, total)``.

    Returns:
        (out, lse) of the union, out in out_a's dtype and lse float32 (float64 if an input is).
        Where both sides saw no key (lse ``-inf``), out is 0 and lse ``-inf``.

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit; the message says which.
    """
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        check_tensor(name, out, DTYPES)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, (torch.float32, torch.float64))
    check_same("shape", out_a=tuple(out_a.shape), out_b=tuple(out_b.shape))
    check_same("dtype", out_a=out_a.dtype, out_b=out_b.dtype)
    varlen = out_a.dim() == 3
    if out_a.dim() not in (2, 3, 4):
        raise ValueError(f"out_a must have 2, 3 or 4 dimensions, got shape {tuple(out_a.shape)}")
    rows = tuple(out_a.shape[:-1])
    expected = rows[::-1] if varlen else rows
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(lse.shape) != expected:
            raise ValueError(
                f"{name} must have shape {expected} for an output of shape "
                f"{tuple(out_a.shape)}, got {tuple(lse.shape)}"
            )

    pivot = torch.maximum(lse_a, lse_b).detach()
    pivot = torch.where(pivot == float("-inf"), 0.0, pivot)
    weight_a, weight_b = torch.exp(lse_a - pivot), torch.exp(lse_b - pivot)
    total = weight_a + weight_b
    safe_total = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, float("-inf"), pivot + torch.log(safe_total))
    out = _share(weight_a / safe_total, out_a, varlen) + _share(
        weight_b / safe_total, out_b, varlen
    )
    return out.to(out_a.dtype), lse


def _share(weight: torch.Tensor, out: torch.Tensor, varlen: bool) -> torch.Tensor:
    """weight · out in the weight's precision; a side without keys adds 0, whatever it holds."""
    weight = (weight.transpose(0, 1) if varlen else weight).unsqueeze(-1)
    return torch.where(weight == 0, 0.0, weight * out.to(weight.dtype))
