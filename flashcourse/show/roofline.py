"""The roofline drawn, and how traffic grows with length and SRAM."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from flashcourse.show.style import BLACK, BLUE, GREEN, GREY, MARKERS, ORANGE, VERMILION, new_figure

KERNEL_COLOURS = (VERMILION, BLUE, GREEN, ORANGE)


def draw_roofline(
    peak_flops: float,
    bandwidth: float,
    kernels: Mapping[str, float],
    title: str,
) -> Figure:
    """One chip's roof, and where kernels stand under it.

    Args:
        peak_flops: FLOP/s of the flat part.
        bandwidth: bytes/s, the slope of the other part.
        kernels: arithmetic intensity (FLOPs per byte) by name; each is drawn where the roof is,
            the most it can reach.
        title: names the chip and the shape.
    """
    figure, axes = new_figure(7.0, 3.8)
    ax: Any = axes
    ridge = peak_flops / bandwidth
    low = min([1.0, *kernels.values()]) / 2
    high = max([ridge * 4, *kernels.values()]) * 2
    xs = [low, ridge, high]
    ax.loglog(xs, [bandwidth * low / 1e12, peak_flops / 1e12, peak_flops / 1e12], color=BLACK)
    ax.axvline(ridge, color=GREY, linestyle=":", linewidth=1)
    ax.text(ridge, bandwidth * low / 1e12, f" ridge: {ridge:.0f} FLOP/byte", color=GREY)
    looks = zip(itertools.cycle(KERNEL_COLOURS), itertools.cycle(MARKERS), strict=False)
    for (name, intensity), (colour, marker) in zip(kernels.items(), looks, strict=False):
        reach = min(peak_flops, intensity * bandwidth)
        ax.plot([intensity], [reach / 1e12], marker, color=colour, markersize=8, clip_on=False)
        label = f"{name}: at most {reach / 1e12:.3g} TFLOP/s ({reach / peak_flops:.0%} of the peak)"
        ax.plot([], [], marker, color=colour, label=label)
    ax.set_xlabel("arithmetic intensity, FLOPs per byte of HBM traffic")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(title)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.2), fontsize=9)
    return figure


def draw_io_bound(
    sram_kib: Sequence[float],
    naive_bytes: Sequence[float],
    flash_bytes: Sequence[float],
    chips: Mapping[str, float],
    title: str,
) -> Figure:
    """Traffic against the size of the SRAM, both axes logarithmic.

    Args:
        sram_kib: sizes of one block's SRAM, KiB.
        naive_bytes, flash_bytes: the two bounds at these sizes.
        chips: KiB by name, drawn as marks on the axis.
        title: names the shape.
    """
    figure, axes = new_figure(7.0, 3.4)
    ax: Any = axes
    mebi = 2.0**20
    ax.loglog(
        sram_kib, [b / mebi for b in naive_bytes], color=VERMILION, label="standard: N·d + N²"
    )
    ax.loglog(
        sram_kib, [b / mebi for b in flash_bytes], color=BLUE, label="FlashAttention: N²·d²/M"
    )
    for name, kib in chips.items():
        ax.axvline(kib, color=GREY, linewidth=0.8, linestyle=":")
        ax.annotate(
            name, (kib, 0.03), xycoords=("data", "axes fraction"), rotation=90, color=GREY,
            fontsize=8, ha="right", va="bottom",
        )  # fmt: skip
    ax.set_xlabel("SRAM of one block, KiB")
    ax.set_ylabel("MiB through HBM (constants = 1)")
    ax.set_title(title)
    ax.legend()
    return figure
