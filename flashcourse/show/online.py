"""Online softmax, drawn: one row of scores read block by block.

Milakov and Gimelshein (2018), "Online normalizer calculation for softmax", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashcourse.show.style import BLUE, GREEN, GREY, LIGHT, ORANGE, VERMILION, new_figure

NEVER_SEEN = float("-inf")


@dataclass(frozen=True)
class OnlineStep:
    """What is known of a row after one more block of its keys.

    Attributes:
        start, stop: the keys of the block, ``[start, stop)``.
        m: largest score so far; ``-inf`` before the first.
        l: sum of ``exp(score - m)`` so far.
        rescale: ``exp(m_before - m)``, the factor on everything summed before this block.
        out: the output if the row ended here, ``(head_dim,)``.
    """

    start: int
    stop: int
    m: float
    l: float
    rescale: float
    out: Sequence[float]


def draw_online_step(scores: Sequence[float], steps: Sequence[OnlineStep], step: int) -> Figure:
    """Scores, weights and output of a row after ``step`` of its blocks.

    Args:
        scores: the whole row, ``(seq_k,)``; blocks not read yet are drawn pale.
        steps: one for each block, in the order they were read.
        step: how many blocks have been read, 0 to ``len(steps)``.

    Raises:
        ValueError: ``step`` is outside that range, or there is no step at all.
    """
    _check(steps, step)
    figure, axes = new_figure(9.0, 3.4, columns=3, width_ratios=[4, 4, 2])
    _draw_scores(axes[0], scores, steps, step)
    _draw_weights(axes[1], scores, steps, step)
    _draw_output(axes[2], steps, step)
    figure.suptitle(describe_step(steps, step), x=0.01, ha="left")
    return figure


def draw_online_strip(scores: Sequence[float], steps: Sequence[OnlineStep]) -> Figure:
    """All steps of a row side by side: one column a block, the same three panels as rows.

    Args:
        scores, steps: as for :func:`draw_online_step`.

    Raises:
        ValueError: there is no step.
    """
    _check(steps, len(steps))
    count = len(steps)
    figure, axes = new_figure(2.6 * count, 6.4, columns=count, rows=3, squeeze=False, sharey="row")
    for column in range(count):
        _draw_scores(axes[0][column], scores, steps, column + 1, labels=column == 0)
        _draw_weights(axes[1][column], scores, steps, column + 1, labels=column == 0)
        _draw_output(axes[2][column], steps, column + 1, labels=column == 0)
        now = steps[column]
        axes[0][column].set_title(f"block {column + 1}: m = {now.m:.2f}")
        axes[1][column].set_title(f"× {now.rescale:.3f}, then l = {now.l:.2f}")
        axes[2][column].set_title("out so far")
    return figure


def describe_step(steps: Sequence[OnlineStep], step: int) -> str:
    """The state after ``step`` blocks, in one line."""
    _check(steps, step)
    if step == 0:
        return "step 0: nothing read yet, m = −∞, l = 0, out = 0"
    now = steps[step - 1]
    return (
        f"step {step}: keys {now.start} to {now.stop - 1} · m = {now.m:.2f} · "
        f"old sums × {now.rescale:.3f} · l = {now.l:.3f}"
    )


def _check(steps: Sequence[OnlineStep], step: int) -> None:
    if not steps:
        raise ValueError("steps is empty: give one OnlineStep for each block of the row")
    if not 0 <= step <= len(steps):
        raise ValueError(f"step must be between 0 and {len(steps)} (the blocks), got {step}")


def _colors(length: int, steps: Sequence[OnlineStep], step: int) -> list[str]:
    """Blue: read before. Orange: this block. Pale: not read yet."""
    colors = [LIGHT] * length
    for index, each in enumerate(steps[:step]):
        for key in range(each.start, each.stop):
            colors[key] = ORANGE if index == step - 1 else BLUE
    return colors


def _number_keys(axes: Axes, length: int, steps: Sequence[OnlineStep]) -> None:
    """One number at the first key of each block, so that the blocks can be told apart."""
    axes.set_xticks([each.start for each in steps])
    axes.set_xlim(-0.7, length - 0.3)
    axes.set_xlabel("key")


def _draw_scores(
    axes: Axes,
    scores: Sequence[float],
    steps: Sequence[OnlineStep],
    step: int,
    labels: bool = True,
) -> None:
    axes.bar(range(len(scores)), list(scores), color=_colors(len(scores), steps, step))
    axes.axhline(0, color=GREY, linewidth=0.8)
    before = steps[step - 2].m if step > 1 else NEVER_SEEN
    now = steps[step - 1].m if step > 0 else NEVER_SEEN
    if math.isfinite(before):
        axes.axhline(before, color=GREY, linestyle=":", label="m before")
    if math.isfinite(now):
        axes.axhline(now, color=VERMILION, linestyle="--", label="m")
    low, high = min(0.0, *scores), max(0.0, *scores)
    axes.set_ylim(low - 0.2, high + 0.35 * (high - low + 1))
    _number_keys(axes, len(scores), steps)
    if labels:
        axes.set_ylabel("score")
        if math.isfinite(now):
            axes.legend(loc="upper left", ncols=2, fontsize="small", frameon=False)


def _draw_weights(
    axes: Axes,
    scores: Sequence[float],
    steps: Sequence[OnlineStep],
    step: int,
    labels: bool = True,
) -> None:
    m = steps[step - 1].m if step > 0 else NEVER_SEEN
    seen = {key for each in steps[:step] for key in range(each.start, each.stop)}
    weights = [
        math.exp(score - m) if key in seen and math.isfinite(m) else 0.0
        for key, score in enumerate(scores)
    ]
    axes.bar(range(len(scores)), weights, color=_colors(len(scores), steps, step))
    axes.set_ylim(0, 1.1)
    _number_keys(axes, len(scores), steps)
    if labels:
        axes.set_ylabel("exp(score − m)")


def _draw_output(axes: Axes, steps: Sequence[OnlineStep], step: int, labels: bool = True) -> None:
    final = list(steps[-1].out)
    so_far = list(steps[step - 1].out) if step > 0 else [0.0] * len(final)
    where: Any = range(len(final))
    axes.bar(where, so_far, color=GREEN, width=0.6, label="so far")
    axes.plot(
        where,
        final,
        linestyle="none",
        marker="_",
        markersize=22,
        color=VERMILION,
        label="whole row",
    )
    axes.axhline(0, color=GREY, linewidth=0.8)
    values = [0.0, *final, *(value for each in steps for value in each.out)]
    margin = 0.1 * (max(values) - min(values) + 0.1)
    axes.set_ylim(min(values) - margin, max(values) + 6 * margin)
    axes.set_xticks(list(where))
    axes.set_xlabel("head_dim")
    if labels:
        axes.set_ylabel("out")
        axes.legend(loc="upper left", fontsize="small", handlelength=1, frameon=False)
