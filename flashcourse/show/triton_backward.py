"""Pictures of the backward pass: who visits which tile, what is kept for it, what it costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from flashcourse.show.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    new_figure,
)

Tile = tuple[int, int]  # (block of queries, block of keys)
SERIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, GREY)
MEBIBYTE = 2**20


def draw_two_loops(
    query_blocks: int,
    key_blocks: int,
    needed: Collection[Tile],
    dkdv_order: Sequence[Tile],
    dq_order: Sequence[Tile],
) -> Figure:
    """The tiles of one program of each kernel, numbered in the order of the visit.

    Args:
        query_blocks, key_blocks: the grid of tiles.
        needed: the tiles in which some query sees some key.
        dkdv_order: the tiles of one dK/dV program, first to last: one block of keys.
        dq_order: the tiles of one dQ program, first to last: one block of queries.

    Raises:
        ValueError: a program leaves its column or row, or visits a tile that is not needed, or
            misses one that is: its gradients would be wrong, and a picture must not hide it.
    """
    _check_program("dkdv_order", dkdv_order, needed, fixed=1)
    _check_program("dq_order", dq_order, needed, fixed=0)
    figure, axes = new_figure(8.4, 4.0, columns=2)
    for axis, order, title in (
        (axes[0], dkdv_order, "dK/dV: keys stay, queries pass"),
        (axes[1], dq_order, "dQ: queries stay, keys pass"),
    ):
        _tiles(axis, query_blocks, key_blocks, set(needed), order)
        axis.set_title(title)
    patches = [
        Patch(facecolor=ORANGE, edgecolor=BLACK, label="this program, in this order"),
        Patch(facecolor=SKY, edgecolor=BLACK, label="other programs"),
        Patch(facecolor=LIGHT, edgecolor=BLACK, label="nobody"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _check_program(name: str, order: Sequence[Tile], needed: Collection[Tile], fixed: int) -> None:
    places = {tile[fixed] for tile in order}
    kind = ("block of queries", "block of keys")[fixed]
    if len(places) > 1:
        raise ValueError(f"{name} must stay in one {kind}, got {sorted(places)}")
    if len(set(order)) != len(order):
        raise ValueError(f"{name} visits a tile twice: {list(order)}")
    wanted = {tile for tile in needed if tile[fixed] in places}
    if set(order) != wanted:
        raise ValueError(
            f"{name} must visit the needed tiles of its {kind}; it misses "
            f"{sorted(wanted - set(order))} and has {sorted(set(order) - wanted)} too many"
        )


def _tiles(
    axis: Any, query_blocks: int, key_blocks: int, needed: set[Tile], order: Sequence[Tile]
) -> None:
    step = {tile: number for number, tile in enumerate(order, 1)}
    for i in range(query_blocks):
        for j in range(key_blocks):
            colour = ORANGE if (i, j) in step else SKY if (i, j) in needed else LIGHT
            axis.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor=BLACK))
            if (i, j) in step:
                axis.text(j + 0.5, i + 0.5, str(step[i, j]), ha="center", va="center")
    axis.set_xlim(0, key_blocks)
    axis.set_ylim(query_blocks, 0)
    axis.set_aspect("equal")
    axis.set_xticks(np.arange(key_blocks) + 0.5, [str(j) for j in range(key_blocks)])
    axis.set_yticks(np.arange(query_blocks) + 0.5, [str(i) for i in range(query_blocks)])
    axis.tick_params(length=0)
    axis.set_xlabel("block of keys j")
    axis.set_ylabel("block of queries i")


def draw_kept(lengths: Sequence[int], kept: Mapping[str, Sequence[float]]) -> Figure:
    """Bytes that wait between forward and backward, against the sequence length.

    Args:
        lengths: seq_q = seq_k of each point.
        kept: for each label, bytes at each length. Labels that end in "predicted" are dashed.

    Raises:
        ValueError: a series has not one value for each length.
    """
    figure, axes = new_figure(7.0, 3.4)
    ax: Any = axes
    for number, (label, values) in enumerate(kept.items()):
        if len(values) != len(lengths):
            raise ValueError(f"{label}: {len(values)} values for {len(lengths)} lengths")
        predicted = label.endswith("predicted")
        ax.plot(
            lengths,
            [value / MEBIBYTE for value in values],
            label=label,
            color=SERIES[number // 2 % len(SERIES)],
            linestyle="--" if predicted else "none",
            marker="" if predicted else "o",
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(list(lengths), [str(length) for length in lengths])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("sequence length")
    ax.set_ylabel("kept for the backward, MiB")
    ax.legend(frameon=False)
    return figure


def draw_speed(lengths: Sequence[int], ratios: Mapping[str, Sequence[float | None]]) -> Figure:
    """Speed of forward plus backward relative to one of them, as bars; 1 is a dashed line.

    Args:
        lengths: one group of bars for each sequence length.
        ratios: for each implementation, its speed relative to the yardstick at each length;
            None where it refused.

    Raises:
        ValueError: an implementation has not one value for each length.
    """
    figure, axes = new_figure(7.4, 3.2)
    ax: Any = axes
    width = 0.8 / max(len(ratios), 1)
    for number, (name, values) in enumerate(ratios.items()):
        if len(values) != len(lengths):
            raise ValueError(f"{name}: {len(values)} values for {len(lengths)} lengths")
        heights = [0.0 if value is None else value for value in values]
        places = np.arange(len(lengths)) - 0.4 + (number + 0.5) * width
        ax.bar(places, heights, width * 0.9, label=name, color=SERIES[number % len(SERIES)])
    ax.axhline(1.0, color=BLACK, linestyle="--", linewidth=1)
    ax.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    ax.set_xlabel("sequence length")
    ax.set_ylabel("relative speed")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
