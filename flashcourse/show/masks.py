"""Pictures of which query sees which key, of the numbers in small matrices, and of shared heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from flashcourse.show.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    SEQUENTIAL,
    SKY,
    VERMILION,
    new_figure,
)

CELL_INCHES = 0.28
HEAD_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY)


def draw_masks(masks: Sequence[ArrayLike], titles: Sequence[str]) -> Figure:
    """Masks side by side: a filled cell is a pair that may attend.

    Args:
        masks: each bool ``(seq_q, seq_k)``, True = may attend.
        titles: one for each mask.

    Raises:
        ValueError: a mask is not a bool matrix, or there is not one title for each mask.
    """
    grids = [np.asarray(mask) for mask in masks]
    if len(grids) != len(titles) or not grids:
        raise ValueError(f"one title for each mask: got {len(grids)} masks, {len(titles)} titles")
    for grid in grids:
        if grid.ndim != 2 or grid.dtype != np.bool_:
            raise ValueError(
                f"a mask must be a bool matrix (seq_q, seq_k), got {grid.dtype} of shape "
                f"{grid.shape}"
            )
    height = max(grid.shape[0] for grid in grids) * CELL_INCHES + 1.0
    width = sum(max(grid.shape[1] * CELL_INCHES, 1.6) + 0.6 for grid in grids)
    figure, axes = new_figure(min(width, 10.0), min(height, 6.0), columns=len(grids), squeeze=False)
    for axis, grid, title in zip(axes[0], grids, titles, strict=True):
        _mask(axis, grid, title)
    return figure


def draw_matrices(
    matrices: Sequence[ArrayLike], titles: Sequence[str], decimals: int = 2
) -> Figure:
    """Small matrices side by side with their numbers written in the cells.

    Args:
        matrices: each ``(rows, columns)`` of numbers; NaN and infinities are written as such.
        titles: one for each matrix.
    """
    grids = [np.asarray(matrix, dtype=float) for matrix in matrices]
    width = sum(grid.shape[1] * 0.5 + 0.7 for grid in grids)
    height = max(grid.shape[0] for grid in grids) * 0.42 + 0.8
    figure, axes = new_figure(min(width, 10.0), height, columns=len(grids), squeeze=False)
    for axis, grid, title in zip(axes[0], grids, titles, strict=True):
        finite = grid[np.isfinite(grid)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        shown = np.where(np.isfinite(grid), grid, low)
        axis.imshow(shown, cmap=SEQUENTIAL, vmin=low, vmax=high if high > low else low + 1)
        for (row, column), value in np.ndenumerate(grid):
            dark = not np.isfinite(value) or value < (low + high) / 2
            text = f"{value:.{decimals}f}".replace("inf", "∞").replace("-", "−")
            axis.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else BLACK,
            )
        axis.set_title(title)
        axis.set_xticks(range(grid.shape[1]))
        axis.set_yticks(range(grid.shape[0]))
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    return figure


def draw_head_maps(maps: Sequence[Sequence[int]], titles: Sequence[str]) -> Figure:
    """Which KV head each query head reads, one picture a map.

    Args:
        maps: for each picture, the KV head of query head 0, 1, 2, ….
        titles: one for each picture.
    """
    widest = max(len(heads) for heads in maps)
    figure, axes = new_figure(
        min(len(maps) * (widest * 0.45 + 0.8), 10.0), 2.0, columns=len(maps), squeeze=False
    )
    for axis, heads, title in zip(axes[0], maps, titles, strict=True):
        heads_kv = max(heads) + 1
        spread = len(heads) / heads_kv
        for head, source in enumerate(heads):
            colour = HEAD_COLOURS[source % len(HEAD_COLOURS)]
            below = (source + 0.5) * spread - 0.5
            axis.plot([head, below], [1, 0], color=colour, linewidth=1.5, zorder=1)
            _head(axis, head, 1, head, colour)
        for source in range(heads_kv):
            below = (source + 0.5) * spread - 0.5
            _head(axis, below, 0, source, HEAD_COLOURS[source % len(HEAD_COLOURS)])
        axis.set_title(title)
        axis.set_xlim(-0.7, len(heads) - 0.3)
        axis.set_ylim(-0.35, 1.35)
        axis.set_xticks([])
        axis.set_yticks([0, 1], ["KV head", "query head"])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    return figure


def _mask(axis: Axes, grid: np.ndarray, title: str) -> None:
    seq_q, seq_k = grid.shape
    axis.imshow(grid, cmap=ListedColormap([LIGHT, BLUE]), vmin=0, vmax=1, aspect="equal")
    axis.set_xticks(np.arange(seq_k + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(seq_q + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="both", length=0)
    axis.set_xticks(range(0, seq_k, max(1, seq_k // 8)))
    axis.set_yticks(range(0, seq_q, max(1, seq_q // 8)))
    for row in np.flatnonzero(~grid.any(axis=1)).tolist():
        axis.text((seq_k - 1) / 2, row, "sees no key", ha="center", va="center", color=VERMILION)
    axis.set_title(title)
    axis.set_xlabel("key j")
    axis.set_ylabel("query i")
    axis.spines[:].set_visible(False)


def _head(axis: Axes, x: float, y: float, number: int, colour: str) -> None:
    axis.plot([x], [y], "o", markersize=17, color=colour, markeredgecolor=GREY, zorder=2)
    axis.text(x, y, str(number), ha="center", va="center", color="white", fontsize=9, zorder=3)
