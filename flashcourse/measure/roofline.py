"""The roofline: how fast a kernel can be, from its FLOPs, its bytes and two numbers of the chip.

Williams, Waterman and Patterson (2009), "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52(4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """What a roofline needs to know of a processor.

    Attributes:
        name: as its maker calls it.
        peak_flops: FLOP/s of dense matrix products, in half precision with float32 sums on a GPU
            (float32 on the CPU).
        bandwidth: of the device memory, bytes/s.
        sram_bytes: shared memory that one block can use (CPU: one core's L2 cache).
        source: where the numbers come from.
    """

    name: str
    peak_flops: float
    bandwidth: float
    sram_bytes: int
    source: str

    @property
    def ridge_point(self) -> float:
        """FLOPs per byte from which the arithmetic, not the memory, is the limit."""
        return self.peak_flops / self.bandwidth


KIB = 1024
_CUDA = "shared memory: CUDA C++ Programming Guide, compute capabilities"
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "T4", 65e12, 320e9, 64 * KIB, f"NVIDIA Turing architecture whitepaper (2018); {_CUDA}"
        ),
        Chip("L4", 121e12, 300e9, 99 * KIB, f"NVIDIA L4 datasheet (2023), dense; {_CUDA}"),
        Chip(
            "RTX 4090",
            165.2e12,
            1008e9,
            99 * KIB,
            f"NVIDIA Ada architecture whitepaper (2022), FP16 with FP32 sums, dense; {_CUDA}",
        ),
        Chip("A100 80GB SXM", 312e12, 2039e9, 163 * KIB, f"NVIDIA A100 datasheet (2021); {_CUDA}"),
        Chip(
            "H100 SXM", 989.4e12, 3350e9, 227 * KIB, f"NVIDIA H100 datasheet (2022), dense; {_CUDA}"
        ),
        Chip(
            "H200 SXM", 989.4e12, 4800e9, 227 * KIB, f"NVIDIA H200 datasheet (2023), dense; {_CUDA}"
        ),
        Chip(
            "laptop CPU, 8 cores",
            768e9,
            89.6e9,
            1024 * KIB,
            "worked out: 8 cores · 3 GHz · 2 units · 8 float32 lanes · 2 FLOPs (AVX2 FMA); "
            "2 channels of DDR5-5600",
        ),
    )
}


def arithmetic_intensity(flops: float, bytes_moved: float) -> float:
    """FLOPs per byte moved to or from device memory."""
    _check_positive(bytes_moved=bytes_moved)
    return flops / bytes_moved


def ridge_point(peak_flops: float, bandwidth: float) -> float:
    """The arithmetic intensity at which both limits meet, FLOPs per byte."""
    _check_positive(peak_flops=peak_flops, bandwidth=bandwidth)
    return peak_flops / bandwidth


def attainable_flops(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """The height of the roof: FLOP/s that a kernel of this intensity can reach at most."""
    _check_positive(peak_flops=peak_flops, bandwidth=bandwidth)
    return min(peak_flops, intensity * bandwidth)


def roofline_seconds(
    flops: float, bytes_moved: float, peak_flops: float, bandwidth: float
) -> float:
    """The least time a kernel can take, in seconds.

    Arithmetic and transfers can overlap, so the time is the longer of the two, not their sum.
    """
    _check_positive(peak_flops=peak_flops, bandwidth=bandwidth)
    return max(flops / peak_flops, bytes_moved / bandwidth)


@dataclass(frozen=True)
class IoBound:
    """The two orders of growth of Dao et al. (2022), theorem 2, with every constant set to 1.

    Attributes:
        naive_bytes: N·d + N² numbers.
        flash_bytes: N²·d²/M numbers, and never less than the N·d that must be read at all.
    """

    naive_bytes: float
    flash_bytes: float


def io_bound(seq: int, head_dim: int, sram_bytes: float, itemsize: int) -> IoBound:
    """How the traffic of one head grows with its length and with the size of the SRAM.

    Dao, Fu, Ermon, Rudra and Ré (2022), "FlashAttention", theorem 2: standard attention needs
    Θ(N·d + N²) accesses to HBM, FlashAttention Θ(N²·d²/M), for an SRAM of M numbers with
    d ≤ M ≤ N·d. A Θ hides constants: compare how the curves bend, not their heights.

    Args:
        seq: N. head_dim: d. sram_bytes: of one block. itemsize: bytes of a number.

    Raises:
        ValueError: the SRAM does not hold one row of d numbers, or a size is not positive.
    """
    _check_positive(seq=seq, head_dim=head_dim, sram_bytes=sram_bytes, itemsize=itemsize)
    held = sram_bytes / itemsize
    if held < head_dim:
        raise ValueError(
            f"sram_bytes must hold at least one row of {head_dim} numbers, "
            f"{head_dim * itemsize} bytes, got {sram_bytes:g}"
        )
    naive = seq * head_dim + seq**2
    flash = max(seq**2 * head_dim**2 / held, seq * head_dim)
    return IoBound(float(naive * itemsize), float(flash * itemsize))


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
