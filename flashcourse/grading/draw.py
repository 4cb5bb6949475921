"""Drawing fresh inputs from a seeded generator: sizes, tensors, and tensors in unusual layouts."""

from __future__ import annotations

import torch


def integer(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def normal(
    generator: torch.Generator,
    *shape: int,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Normal numbers with standard deviation ``scale``, rounded to ``dtype``."""
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def strided(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same values and shape, laid out in memory with the dimensions in ``order``."""
    inverse = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(inverse)
