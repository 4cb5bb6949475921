"""Pictures of lesson 04: programs and their elements, the steps' speed, a choice of blocks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Protocol

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flashcourse.show.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    SKY,
    VERMILION,
    new_figure,
)

KIB = 1024
MAX_REGISTERS = 255
TITLE_LETTERS = 90  # in a line, so that a record's origin fits above the bars
WIDEST_BLOCK = 256  # queries; a common scale for the intensity of all choices
_PROGRAM_COLORS = (BLUE, ORANGE, GREEN, SKY)


class Resources(Protocol):
    """What one program takes, as the compiler says."""

    @property
    def shared_bytes(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def spilled_bytes(self) -> int: ...


class Resident(Protocol):
    """How many programs share a processor."""

    @property
    def programs(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def max_warps(self) -> int: ...
    @property
    def limit(self) -> str: ...


def draw_programs(elements: int, block: int) -> Figure:
    """A row of elements, coloured by the program that takes them; masked lanes are empty.

    Args:
        elements: how many exist, 1 or more.
        block: elements a program asks for, 1 or more.
    """
    if elements < 1 or block < 1:
        raise ValueError(f"elements and block must be 1 or more, got {elements} and {block}")
    figure, axes = new_figure(8.0, 1.7)
    ax: Any = axes
    programs = -(-elements // block)
    for lane in range(programs * block):
        exists = lane < elements
        color = _PROGRAM_COLORS[lane // block % len(_PROGRAM_COLORS)]
        ax.add_patch(
            Rectangle(
                (lane, 0),
                1,
                1,
                facecolor=color if exists else "white",
                edgecolor=BLACK if exists else GREY,
                linestyle="-" if exists else ":",
                alpha=0.8 if exists else 1.0,
            )
        )
        ax.text(lane + 0.5, 0.5, str(lane) if exists else "mask", ha="center", va="center", size=7)
    for program in range(programs):
        ax.text((program + 0.5) * block, 1.2, f"program {program}", ha="center", va="bottom")
    ax.set_xlim(-0.2, programs * block + 0.2)
    ax.set_ylim(-0.1, 1.7)
    ax.axis("off")
    return figure


def draw_steps(rows: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """Speed of each step as a bar.

    Args:
        rows: by name of the step, in order: ``tflops`` and ``ms``.
        title: where the numbers come from.
    """
    if not rows:
        raise ValueError("rows is empty: there is no step to draw")
    figure, axes = new_figure(8.0, 0.6 + 0.42 * len(rows))
    ax: Any = axes
    names = list(rows)
    speeds = [float(rows[name]["tflops"]) for name in names]
    ours = [BLUE if name[0].isdigit() else GREEN if "library" in name else GREY for name in names]
    ax.barh(names, speeds, color=ours)
    for place, name in enumerate(names):
        ax.text(
            speeds[place], place, f" {speeds[place]:.0f}  ({rows[name]['ms']:.2f} ms)", va="center"
        )
    ax.invert_yaxis()
    ax.set_xlim(0, max(speeds) * 1.25)
    ax.set_xlabel("TFLOP/s, counting visible pairs only")
    ax.set_title(textwrap.fill(title, TITLE_LETTERS), fontsize="small")
    return figure


def draw_blocks(
    resources: Resources,
    resident: Resident,
    *,
    shared_limit: int,
    intensity: float,
    title: str,
) -> Figure:
    """One choice of blocks: four resources side by side, each against its limit.

    Args:
        resources: what a program takes.
        resident: how many programs share a processor; ``programs`` 0 means it does not launch.
        shared_limit: bytes of shared memory that one program may have on the chip.
        intensity: FLOPs per byte of K and V that is loaded.
        title: the choice, in words.
    """
    figure, axes = new_figure(9.0, 2.9, columns=4)
    fits = resources.shared_bytes <= shared_limit
    _bar(
        axes[0],
        resources.shared_bytes / KIB,
        shared_limit / KIB,
        "shared memory, KiB",
        f"{resources.shared_bytes / KIB:.0f} of {shared_limit / KIB:.0f}",
        good=fits,
    )
    spilled = resources.spilled_bytes
    _bar(
        axes[1],
        resources.registers,
        MAX_REGISTERS,
        "registers a thread",
        f"{resources.registers}" + (f"\nand {spilled} bytes spilled" if spilled else ""),
        good=not spilled,
    )
    _bar(
        axes[2],
        resident.warps,
        resident.max_warps,
        "resident warps",
        f"{resident.warps} of {resident.max_warps}\n{_count(resident.programs, 'program')}"
        if resident.programs
        else "none: it does\nnot launch",
        good=resident.programs > 0,
    )
    axes[2].set_xlabel(f"limit: {resident.limit}", fontsize="small")
    _bar(axes[3], intensity, None, "FLOPs a byte of K, V", f"{intensity:.0f}", good=True)
    axes[3].set_ylim(0, WIDEST_BLOCK * 1.2)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _bar(
    axes: Any, value: float, limit: float | None, name: str, label: str, *, good: bool
) -> None:
    """One bar; the limit, if there is one, as a dashed line with what is left of it in grey."""
    top = value
    if limit is not None:
        top = max(value, limit)
        axes.bar([0], [limit], color=LIGHT, width=0.8)
        axes.axhline(limit, color=BLACK, linestyle="--", linewidth=0.9)
    axes.bar([0], [value], color=BLUE if good else VERMILION, width=0.8)
    axes.text(0, top * 1.05, label, ha="center", va="bottom", fontsize="small")
    axes.set_ylim(0, top * 1.45)
    axes.set_xlim(-0.7, 0.7)
    axes.set_xticks([])
    axes.set_title(name, fontsize="small")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
