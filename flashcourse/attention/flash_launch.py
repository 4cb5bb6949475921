"""One call of the kernels: outputs, a launch that is planned once for a layout, gradients.

Every tensor here is ``(batch, heads, seq, head_dim)``; a varlen batch is a batch of one whose
sequences lie behind each other, told apart by ``cu_seqlens``. Needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from flashcourse import runtime
from flashcourse.attention.flash_plan import plan_backward, plan_forward
from flashcourse.attention.flash_sizes import FlashOptions
from flashcourse.attention.tuning import forced_tiles

Plan = TypeVar("Plan")

FEW_QUERIES = 8
MOST_COPIED = 2**27  # entries of k and v each: 1 GiB as float32, together

# Plans by everything that decides them; forgotten all at once when there are this many.
_plans: dict[Hashable, Any] = {}
MOST_PLANS = 2048


def planned_once(key: Hashable, plan: Callable[[], Plan]) -> Plan:
    """The launches that ``plan`` plans, or those it planned when the key was the same.

    Args:
        key: the name of the function and all that its plan depends on.
    """
    planned = _plans.get(key)
    if planned is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        planned = _plans[key] = plan()
    return planned


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    options: FlashOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, and lse ``(batch, heads_q, seq_q)`` float32."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if is_widened(q):
        wide, lse = launch_forward(
            q.float(), k.float(), v.float(), cu_seqlens_q, cu_seqlens_k, options
        )
        return out.copy_(wide), lse
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    key = (
        "forward", options, layout_of(q), layout_of(k), layout_of(v),
        _sequences(cu_seqlens_q), _sequences(cu_seqlens_k), forced_tiles(),
    )  # fmt: skip
    launch = planned_once(key, lambda: plan_forward(q, k, v, out, cu_seqlens_q, options))
    launch(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
    return out, lse


def launch_backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    options: FlashOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, each with the shape, dtype and layout of its input."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    out = _unrounded(q, k, v, out, cu_seqlens_q, options)
    if is_widened(q):
        widened = launch_backward(
            d_out.float(), d_lse, q.float(), k.float(), v.float(), out.float(), lse,
            cu_seqlens_q, cu_seqlens_k, options,
        )  # fmt: skip
        return dq.copy_(widened[0]), dk.copy_(widened[1]), dv.copy_(widened[2])
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    if d_lse is not None:
        d_lse = d_lse.contiguous()
    delta = torch.empty_like(lse)
    key = (
        "backward", options, layout_of(q), layout_of(k), layout_of(v), layout_of(out),
        layout_of(d_out), d_lse is None, _sequences(cu_seqlens_q), _sequences(cu_seqlens_k),
        forced_tiles(),
    )  # fmt: skip
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    tensors = (q, k, v, out, d_out, dq, dk, dv)
    for_q, for_kv = planned_once(key, lambda: plan_backward(*tensors, d_lse, *cu_seqlens, options))
    if dq.numel():  # the kernel for dQ also writes delta, which the next one reads
        for_q(q, k, v, out, d_out, dq, lse, d_lse, delta, *cu_seqlens)
    if dk.numel():
        for_kv(q, k, v, d_out, dk, dv, lse, delta, *cu_seqlens)
    return dq, dk, dv


def _unrounded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    options: FlashOptions,
) -> torch.Tensor:
    """``out``, or where there are few queries, what it was before it was rounded to 16 bits.

    Where one key has nearly all the weight, dS = P (dP - delta) is a small difference, and delta
    comes from the rounded out. Among many rows others have larger errors; a single one is alone
    with it, and computing its out again in float32 is cheap, unless k and v are very large.
    """
    if q.dtype == torch.float32 or q.shape[2] > FEW_QUERIES or cu_seqlens is not None:
        return out
    if k.numel() > MOST_COPIED:
        return out
    return launch_forward(q.float(), k.float(), v.float(), None, None, options)[0]


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the choice and the compilation of a kernel depend on."""
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0,
    )  # fmt: skip


def _sequences(cu_seqlens: torch.Tensor | None) -> tuple[int, bool] | None:
    if cu_seqlens is None:
        return None
    return cu_seqlens.shape[0], cu_seqlens.data_ptr() % 16 == 0


def is_widened(q: torch.Tensor) -> bool:
    """True if the interpreter must compute this in float32.

    Triton's interpreter multiplies bfloat16 numbers as if their bits were integers, and rounds to
    bfloat16 without carrying. There bfloat16 inputs are computed in float32 and only the results
    are rounded: more exact than a GPU, which rounds P and dS to bfloat16 as well.
    """
    return q.dtype == torch.bfloat16 and runtime.interpreting()
