"""``flash_attention`` and ``flash_attention_varlen``: the Triton kernels as PyTorch operators.

The kernels are registered as custom operators with shapes for tracing and a backward, so that
``torch.compile(fullgraph=True)`` and ``torch.export`` see one opaque call each. An ordinary call
takes a shorter way to the same two functions. This module needs no Triton until it is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flashcourse import runtime
from flashcourse.attention.arguments import (
    HALF_AND_SINGLE,
    Options,
    check_dense,
    check_varlen,
    resolve_options,
)
from flashcourse.attention.first_order import first_order


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`~flashcourse.attention.naive.naive_attention` as one fused kernel, differentiable.

    Memory beyond inputs and outputs: lse in the forward, one more float32 a query in the backward
    and the gradients. The backward is deterministic. Dao (2023), "FlashAttention-2".

    Args:
        q: ``(batch, heads_q, seq_q, head_dim)``, float16, bfloat16 or float32 (computed as
            float32, not TF32), any strides, head_dim 1 to 256. On a GPU, or on a CPU where
            Triton's interpreter runs.
        k, v: ``(batch, heads_kv, seq_k, head_dim)``; query head ``h`` reads KV head
            ``h // (heads_q // heads_kv)``.
        is_causal: query ``i`` sees key ``j`` when ``j <= i + seq_k - seq_q``.
        scale: factor of the scores; default ``head_dim ** -0.5``.
        window_size: keys to the (left, right) of the diagonal that stay visible; -1 or None is
            unlimited. Tiles of keys outside are not visited.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None is off.
        return_lse: also return the log-sum-exp of each row's scores.

    Returns:
        out with q's shape and dtype, its dimensions laid out in memory in q's order; with
        ``return_lse`` also lse, ``(batch, heads_q, seq_q)``, float32, natural logarithm. A row
        that sees no key gives out 0 and lse ``-inf``.

    Raises:
        TypeError, ValueError: an argument is not what it must be; the message says which.
        flashcourse.runtime.TritonMissing: Triton is not installed.
    """
    check_dense(q, k, v, HALF_AND_SINGLE)
    options = resolve_options(
        q.shape[-1],
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
    )
    runtime.require_triton("flash_attention")
    out, lse = _attend(q, k, v, None, None, options)
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash_attention` over sequences of any lengths, packed behind each other.

    Sequence ``b`` owns the queries ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the keys
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``, and sees no other. Empty sequences are legal.
    Rows behind the last offset come back as 0 with lse ``-inf`` and zero gradients.

    Args:
        q: ``(total_q, heads_q, head_dim)``.
        k, v: ``(total_k, heads_kv, head_dim)``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(num_sequences + 1)`` on q's device, from 0, never
            falling, at most the total. On a CPU this is checked; on a GPU it is not, because
            reading them would make the CPU wait for the GPU.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. Accepted for the sake of other
            interfaces and checked for their type; the kernels find their sequence without them.
        (the others): see :func:`flash_attention`.

    Returns:
        out ``(total_q, heads_q, head_dim)``; with ``return_lse`` also lse ``(heads_q, total_q)``.
    """
    check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, HALF_AND_SINGLE)
    options = resolve_options(
        q.shape[-1],
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
    )
    runtime.require_triton("flash_attention_varlen")
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # (1, heads, total, head_dim)
    out, lse = _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (
        q, k, v, cu_seqlens_q, cu_seqlens_k,
        options.scale, options.left, options.right, options.softcap,
    )  # fmt: skip
    if torch.compiler.is_compiling() or not _ordinary(q, k, v):
        return torch.ops.flashcourse.flash_forward(*arguments)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _FlashInTransforms.apply(*arguments)  # its tensors are wrapped, apply unwraps them
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Flash.apply(*arguments)
    return _FlashInTransforms.forward(*arguments)


def _ordinary(*tensors: torch.Tensor) -> bool:
    """True if nobody is looking: no tensor subclass or one without data, no tracing or counting.

    Then the way through the dispatcher, 40 µs when a gradient is wanted, can be saved.
    """
    return not is_in_torch_dispatch_mode() and all(
        type(t) in _PLAIN and not t.is_meta for t in tensors
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _FlashInTransforms(torch.autograd.Function):
    """The operators' forward and backward under ``torch.func``, which needs ``setup_context``."""

    @staticmethod
    def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *options):
        from flashcourse.attention.flash_launch import launch_forward
        from flashcourse.attention.flash_sizes import FlashOptions

        return launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, FlashOptions(*options))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx, d_out, d_lse):
        from flashcourse.attention.flash_launch import launch_backward
        from flashcourse.attention.flash_sizes import FlashOptions

        saved = ctx.saved_tensors  # q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k
        if d_out is None:
            d_out = torch.zeros_like(saved[3])
        options = FlashOptions(*ctx.options)
        grads = first_order("flash_attention", launch_backward, d_out, d_lse, *saved, options)
        return *grads, None, None, None, None, None, None


class _Flash(torch.autograd.Function):
    """The same for ordinary calls: without ``setup_context``, applying it takes 30 µs less."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _FlashInTransforms.forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output

    backward = _FlashInTransforms.backward


@torch.library.custom_op("flashcourse::flash_forward", mutates_args=())
def _flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flashcourse.attention.flash_launch import launch_forward
    from flashcourse.attention.flash_sizes import FlashOptions

    options = FlashOptions(scale, left, right, softcap)
    return launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, options)


@_flash_forward.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, left, right, softcap):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("flashcourse::flash_backward", mutates_args=())
def _flash_backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flashcourse.attention.flash_launch import launch_backward
    from flashcourse.attention.flash_sizes import FlashOptions

    options = FlashOptions(scale, left, right, softcap)
    return launch_backward(d_out, d_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, options)


@_flash_backward.register_fake
def _(d_out, d_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, scale, left, right, softcap):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
    ctx.options = options
    ctx.set_materialize_grads(False)  # lse mostly has no gradient: None is cheaper than zeros


def _backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> Any:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    dq, dk, dv = torch.ops.flashcourse.flash_backward(
        d_out, d_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.options
    )
    return dq, dk, dv, None, None, None, None, None, None


torch.library.register_autograd(
    "flashcourse::flash_forward", _backward, setup_context=_save_for_backward
)
