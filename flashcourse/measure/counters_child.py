"""The program that :func:`flashcourse.measure.hardware_bytes` runs under ncu.

Started as ``python -m flashcourse.measure.counters_child PROGRAM BATCH HEADS SEQ HEAD_DIM``. Only
what lies between ``cudaProfilerStart`` and ``cudaProfilerStop`` is counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Four kernels, each of which leaves its result in device memory."""
    s = q @ k.transpose(-2, -1)
    s = s * q.shape[-1] ** -0.5
    p = torch.softmax(s, dim=-1)
    return p @ v


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One kernel: PyTorch's FlashAttention backend, and no other if that one refuses."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v)


def main(program: str, *sizes: str) -> None:
    """Run the program twice: once to warm up, once between profiler start and stop."""
    attention: Attention = {"naive": naive, "flash": flash}[program]
    shape = tuple(int(size) for size in sizes)
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16)
        for _ in range(3)
    )
    attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
