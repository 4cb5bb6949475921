"""Can the kernels run on these tensors here? Asked once for each new layout, before a launch."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from flashcourse import runtime


def check_machine(like: torch.Tensor, what: str = "flash_attention") -> None:
    """Raise ValueError or RuntimeError if Triton cannot compute on a tensor like this one here.

    Args:
        like: the tensor.
        what: the function that was called, for the message.
    """
    if runtime.interpreting():
        _check_interpreter()
        return
    if like.device.type != "cuda":
        raise ValueError(
            f"{what} got tensors on {like.device}, and Triton's kernels are compiled for "
            "the GPU of this machine. Move the tensors there with .to('cuda'), or start Python "
            "with TRITON_INTERPRET=1 to run the kernels on the CPU."
        )
    if like.dtype == torch.bfloat16:
        _check_bfloat16(like.device)


@functools.cache
def _check_bfloat16(device: torch.device) -> None:
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(
            "q has dtype bfloat16, which this GPU has no arithmetic for (compute capability 8.0 "
            "or newer has); use float16 or float32"
        )


@triton.jit
def _double(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, 2.0 * tl.load(x + offsets))


@functools.cache
def _check_interpreter() -> None:
    """Some pairs of Triton and NumPy make an interpreter that writes nothing, in silence."""
    x = torch.arange(16, dtype=torch.float32)
    y = torch.full_like(x, -1.0)
    _double[(1,)](x, y, BLOCK=16)
    if not torch.equal(y, 2.0 * x):
        raise RuntimeError(
            f"Triton {triton.__version__}'s interpreter computes wrong results on this machine "
            "(a known fault with some NumPy releases); update triton or numpy"
        )
