"""The two ceilings of the machine at hand, measured: its copy rate and its product rate."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from flashcourse.measure.timing import Timing, time_ms


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached in one run.

    Attributes:
        device: the name of the processor.
        dtype: of the matrix product, such as ``"bfloat16"``.
        bandwidth: of a device copy, bytes/s, read and written bytes both counted.
        peak_flops: of a large square matrix product, FLOP/s.
        copy, matmul: the timings behind them, for one copy and one product.
    """

    device: str
    dtype: str
    bandwidth: float
    peak_flops: float
    copy: Timing
    matmul: Timing

    @property
    def ridge_point(self) -> float:
        """FLOPs per byte from which the arithmetic, not the memory, is the limit."""
        return self.peak_flops / self.bandwidth


def measured_ceilings(
    *, copy_bytes: int | None = None, matmul_size: int | None = None, repeats: int = 7
) -> Ceilings:
    """Measure copy bandwidth and matrix-product rate side by side, alternating in one run.

    Alternating makes both see the same clock rates and the same neighbours.

    Args:
        copy_bytes: size of the array that is copied; default 1 GiB on a GPU, 128 MiB on a CPU.
            It should be several times the last cache.
        matmul_size: rows and columns of the product; default 8192 on a GPU, 1024 on a CPU.
        repeats: how often each is measured.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    copy_bytes = copy_bytes or (2**30 if on_gpu else 2**27)
    matmul_size = matmul_size or (8192 if on_gpu else 1024)
    dtype = _matmul_dtype() if on_gpu else torch.float32
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(matmul_size, matmul_size, device=device).to(dtype)
    b = torch.randn(matmul_size, matmul_size, device=device).to(dtype)
    copies: list[float] = []
    products: list[float] = []
    for turn in range(repeats):
        warmup = 3 if turn == 0 else 1
        copies += time_ms(lambda: target.copy_(source), warmup=warmup, repeats=1).times
        products += time_ms(lambda: a @ b, warmup=warmup, repeats=1).times
    copy, matmul = Timing(copies), Timing(products)
    return Ceilings(
        device=torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        dtype=str(dtype).removeprefix("torch."),
        bandwidth=2 * copy_bytes / (copy * 1e-3),
        peak_flops=2 * matmul_size**3 / (matmul * 1e-3),
        copy=copy,
        matmul=matmul,
    )


def _matmul_dtype() -> torch.dtype:
    """bfloat16 where the tensor cores have it; float16 below compute capability 8.0."""
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return torch.float16
    return torch.bfloat16


def _cpu_name() -> str:
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
