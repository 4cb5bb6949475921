"""The score matrix cut in tiles: which are computed whole, which masked, which never touched."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from flashcourse.show.style import BLACK, BLUE, GREY, LIGHT, ORANGE, VERMILION, new_figure

WHOLE, MASKED, SKIPPED = "whole", "masked", "skipped"
_FILL = {WHOLE: BLUE, MASKED: ORANGE, SKIPPED: LIGHT}
MEBIBYTE = 2**20


def tile_kinds(
    visible: Any, block_q: int, block_k: int, visited: Collection[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    """What happens to each tile of a score matrix.

    Args:
        visible: bool ``(seq_q, seq_k)``, True where the query may see the key.
        block_q, block_k: rows and columns of a tile; the last ones may be smaller.
        visited: the tiles that the loop computed, as (block of queries, block of keys).

    Returns:
        For every tile ``"whole"`` (visited, every pair visible), ``"masked"`` (visited, some pair
        hidden) or ``"skipped"``.

    Raises:
        ValueError: a visited tile does not exist, or a skipped tile has a visible pair: such a
            loop gives wrong results, and a picture must not hide it.
    """
    matrix = np.asarray(visible, dtype=bool)
    if matrix.ndim != 2:
        raise ValueError(f"visible must have 2 dimensions (seq_q, seq_k), got shape {matrix.shape}")
    if block_q < 1 or block_k < 1:
        raise ValueError(f"blocks must be 1 or more, got block_q={block_q}, block_k={block_k}")
    seq_q, seq_k = matrix.shape
    kinds = {}
    for i in range(-(-seq_q // block_q)):
        for j in range(-(-seq_k // block_k)):
            tile = matrix[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
            if (i, j) in visited:
                kinds[i, j] = WHOLE if tile.all() else MASKED
            elif tile.any():
                raise ValueError(
                    f"tile {(i, j)} was not visited, but a query in it may see a key in it"
                )
            else:
                kinds[i, j] = SKIPPED
    unknown = set(visited) - set(kinds)
    if unknown:
        raise ValueError(f"visited has tiles that do not exist: {sorted(unknown)}")
    return kinds


def draw_tiles(
    visible: Any, block_q: int, block_k: int, visited: Collection[tuple[int, int]]
) -> Figure:
    """The tiles of a score matrix by what happens to them, with hidden pairs marked by a dot.

    Args and errors: see :func:`tile_kinds`.
    """
    matrix = np.asarray(visible, dtype=bool)
    kinds = tile_kinds(matrix, block_q, block_k, visited)
    seq_q, seq_k = matrix.shape
    figure, axes = new_figure(6.4, 4.2)
    ax: Any = axes
    for (i, j), kind in kinds.items():
        height, width = min(block_q, seq_q - i * block_q), min(block_k, seq_k - j * block_k)
        ax.add_patch(
            Rectangle(
                (j * block_k, i * block_q), width, height, facecolor=_FILL[kind], edgecolor=BLACK
            )
        )
    queries, keys = np.nonzero(~matrix)
    ax.scatter(keys + 0.5, queries + 0.5, s=6, color=BLACK, linewidths=0)
    ax.set_xticks(range(0, seq_k, block_k))
    ax.set_yticks(range(0, seq_q, block_q))
    ax.set_xlim(0, seq_k)
    ax.set_ylim(seq_q, 0)
    ax.set_aspect("equal")
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    counts = {kind: list(kinds.values()).count(kind) for kind in _FILL}
    patches = [
        Patch(facecolor=color, edgecolor=BLACK, label=f"{kind}: {counts[kind]}")
        for kind, color in _FILL.items()
    ]
    dot = ax.scatter([], [], s=6, color=BLACK, label="hidden pair")
    ax.legend(handles=[*patches, dot], loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def draw_peaks(
    lengths: Sequence[int],
    naive: Sequence[float],
    tiled: Sequence[float],
    predicted: Sequence[float],
) -> Figure:
    """Peak memory against sequence length, measured and predicted, on logarithmic axes.

    Args:
        lengths: seq_q = seq_k of each measurement.
        naive, tiled: measured peaks in bytes.
        predicted: bytes of the score matrices that naive attention holds at once.
    """
    figure, axes = new_figure(7.0, 3.4)
    ax: Any = axes
    for values, label, style in (
        (naive, "naive, measured", {"color": VERMILION, "marker": "o"}),
        (tiled, "tiled, measured", {"color": BLUE, "marker": "s"}),
        (predicted, "naive, predicted", {"color": GREY, "linestyle": "--"}),
    ):
        ax.plot(lengths, [value / MEBIBYTE for value in values], label=label, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(list(lengths), [str(length) for length in lengths])
    ax.set_xlabel("sequence length")
    ax.set_ylabel("peak memory, MiB")
    ax.legend(frameon=False)
    return figure
