"""Which kernel a launch starts: Triton's, or the one in Gluon that is scheduled by hand."""

from __future__ import annotations

import functools
from typing import Any

from flashcourse import runtime
from flashcourse.attention.flash_backward import (
    flash_backward_kv_kernel,
    flash_backward_q_kernel,
)
from flashcourse.attention.flash_forward import flash_forward_kernel
from flashcourse.attention.tuning import Kernel, Tiles


def kernel_for(name: Kernel, tiles: Tiles, tma: bool) -> Any:
    """The kernel in Gluon where :func:`runs_gluon`, else the one in Triton."""
    if runs_gluon(tiles, tma):
        from flashcourse.attention.flash_backward_kv_hopper import flash_backward_kv_hopper_kernel
        from flashcourse.attention.flash_backward_q_hopper import flash_backward_q_hopper_kernel
        from flashcourse.attention.flash_forward_hopper import flash_forward_hopper_kernel

        return {
            "forward": flash_forward_hopper_kernel,
            "backward_q": flash_backward_q_hopper_kernel,
            "backward_kv": flash_backward_kv_hopper_kernel,
        }[name]
    return {
        "forward": flash_forward_kernel,
        "backward_q": flash_backward_q_kernel,
        "backward_kv": flash_backward_kv_kernel,
    }[name]


def runs_gluon(tiles: Tiles, tma: bool) -> bool:
    """True if the table asks for the kernel in Gluon, and it can run.

    Args:
        tma: the copy engine can read the tensors that the kernel walks over.
    """
    return tiles.gluon and tma and has_gluon()


@functools.cache
def has_gluon() -> bool:
    """True if this Triton's Gluon has what the kernels for Hopper need (3.6 and newer)."""
    if runtime.interpreting():
        return False
    try:
        from triton.experimental.gluon.language.nvidia.hopper import tma
    except ImportError:
        return False
    return hasattr(tma, "make_tensor_descriptor")
