"""Pictures of a KV cache's memory: who has what, what is wasted, what is shared, what it brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

from flashcourse.show.style import (
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

FREE, EMPTY, KEPT, FIRST = 0, 1, 2, 3  # codes of an image; requests' colours begin at FIRST
SHADES = (BLUE, SKY, GREEN, ORANGE)
PALE = "#DCDCDC"  # and not as light as white
COLORS = ListedColormap(["white", GREY, PALE, *SHADES])
LINES = {"contiguous": ORANGE, "paged": BLUE}


def memory_column(regions: Sequence[Any], capacity: int) -> np.ndarray:
    """One moment of a cache's memory as codes, one a slot.

    Args:
        regions: objects with ``start``, ``reserved``, ``used`` and ``sequences``, such as
            ``cache.regions()`` returns.
        capacity: slots of the cache.
    """
    column = np.full(capacity, FREE, dtype=np.int8)
    for region in regions:
        end = region.start + region.reserved
        if not region.sequences:
            column[region.start : end] = KEPT
            continue
        color = FIRST + min(region.sequences) % len(SHADES)
        column[region.start : end] = EMPTY
        column[region.start : region.start + region.used] = color
    return column


def _name_the_colours(figure: Figure) -> None:
    """A legend of what a slot can be."""
    names: dict[str, Any] = {
        "a request's tokens": tuple(Patch(color=color) for color in SHADES),
        "reserved, empty": Patch(color=GREY),
        "kept, nobody's": Patch(color=PALE),
        "free": Patch(facecolor="white", edgecolor=GREY),
    }
    figure.legend(
        list(names.values()), list(names), loc="outside lower center", ncols=4, frameon=False,
        fontsize=9, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def draw_memory_over_time(maps: Mapping[str, Sequence[np.ndarray]]) -> Figure:
    """Who had which slot, step by step, one panel a cache.

    Args:
        maps: columns from :func:`memory_column` by the cache's name.
    """
    figure, axes = new_figure(7.4, 4.2, columns=len(maps), squeeze=False, sharey=True)
    longest = max(len(columns) for columns in maps.values())
    for panel, (name, columns) in zip(axes[0], maps.items(), strict=True):
        image = np.stack(columns, axis=1)  # (slots, steps)
        panel.imshow(
            image, aspect="auto", interpolation="nearest", cmap=COLORS, vmin=0,
            vmax=FIRST + len(SHADES) - 1,
        )  # fmt: skip
        held = (image != FREE) & (image != KEPT)
        empty = (image == EMPTY).sum() / max(1, held.sum())
        panel.set(xlabel="step", xlim=(-0.5, longest - 0.5))
        panel.set_title(
            f"{name}: {image.shape[1]} steps\n{empty:.0%} of the reserved holds nothing"
        )
    axes[0][0].set_ylabel("slot of the cache")
    _name_the_colours(figure)
    return figure


def draw_memory_now(column: np.ndarray, width: int, title: str) -> Figure:
    """One moment of the memory as rows of slots.

    Args:
        column: from :func:`memory_column`.
        width: slots a row.
        title: what moment.
    """
    rows = -(-len(column) // width)
    image = np.full(rows * width, FREE)
    image[: len(column)] = column
    figure, axes = new_figure(7.0, 1.0 + 0.16 * rows)
    axes.pcolormesh(
        image.reshape(rows, width), cmap=COLORS, vmin=0, vmax=FIRST + len(SHADES) - 1,
        edgecolors="white", linewidth=0.4,
    )  # fmt: skip
    axes.invert_yaxis()
    axes.set(title=title, xlabel="slot", yticks=[])
    _name_the_colours(figure)
    return figure


def draw_lengths(lengths: Sequence[tuple[int, int]], longest: int) -> Figure:
    """How long requests were, and what was reserved for each.

    Args:
        lengths: (prompt, answer) of each.
        longest: slots that are reserved.
    """
    whole = np.array([prompt + answer for prompt, answer in lengths])
    figure, axes = new_figure(7.0, 2.8)
    axes.hist(whole, bins=np.linspace(0, longest, 41), color=BLUE)
    axes.axvline(whole.mean(), color=ORANGE, lw=2, label=f"mean {whole.mean():.0f}")
    axes.axvline(longest, color=VERMILION, lw=2, ls="--", label=f"reserved for each: {longest}")
    axes.set(xlabel="tokens of a request in the end, prompt and answer", ylabel="requests")
    axes.legend()
    return figure


def draw_block_table(table: Sequence[int], length: int, page_size: int, num_pages: int) -> Figure:
    """A sequence as it is meant, above, and where it lies, below.

    Args:
        table: the page of each stretch of ``page_size`` tokens.
        length: tokens of the sequence.
        page_size: slots a page.
        num_pages: pages of the memory.
    """
    figure, axes = new_figure(7.4, 2.6)
    scale = num_pages / len(table)  # both rows are equally wide
    for number, page in enumerate(table):
        color = SHADES[number % len(SHADES)]
        used = min(page_size, length - number * page_size) / page_size
        for left, width, y, text in (
            (number * scale, scale, 1.6, f"tokens {number * page_size}–"
             f"{min(length, (number + 1) * page_size) - 1}"),
            (page, 1, 0, f"page {page}"),
        ):  # fmt: skip
            axes.add_patch(Rectangle((left, y), width, 0.6, fc=LIGHT, ec="white"))
            axes.add_patch(Rectangle((left, y), width * used, 0.6, fc=color, ec="white"))
            axes.text(left + 0.06, y + 0.3, text, ha="left", va="center", fontsize=8,
                      color="white" if color == BLUE else "black")  # fmt: skip
        axes.plot([number * scale + scale / 2, page + 0.5], [1.6, 0.6], color=color, lw=1.5)
    for page in set(range(num_pages)) - set(table):
        axes.add_patch(Rectangle((page, 0), 1, 0.6, fc="white", ec=LIGHT))
        axes.text(page + 0.5, 0.3, f"{page}", ha="center", va="center", fontsize=8, color=GREY)
    axes.set(xlim=(-0.1, num_pages + 0.1), ylim=(-0.1, 2.3))
    axes.set_axis_off()
    axes.set_title(f"block table: {list(table)}")
    return figure


def draw_page_waste(sizes: Sequence[int], shares: Mapping[str, Sequence[float]]) -> Figure:
    """What the last page wastes, against the page size.

    Args:
        sizes: of a page, in slots.
        shares: of the reserved slots that hold nothing, 0 to 1, by name of the line.
    """
    figure, axes = new_figure(7.0, 3.0)
    for (name, values), color in zip(
        shares.items(), (BLUE, ORANGE, GREEN, VERMILION), strict=False
    ):
        axes.plot(sizes, np.asarray(values) * 100, marker="o", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.axhline(3.7, color=GREY, lw=1, ls=":")
    axes.text(
        sizes[0], 4.1, "3.7 % of the memory: Kwon et al. (2023), figure 2", color=GREY, fontsize=8
    )
    axes.set(xlabel="slots a page", ylabel="wasted, % of the reserved", ylim=(0, None))
    axes.legend()
    return figure


def draw_scene(scene: Any) -> Figure:
    """Pages, who holds them, and how often.

    Args:
        scene: a ``Scene`` of ``flashcourse.serving.story``.
    """
    figure, axes = new_figure(7.4, 3.0)
    _draw_scene(axes, scene)
    return figure


def draw_story(scenes: Sequence[Any]) -> Figure:
    """All scenes of a story, below each other."""
    figure, axes = new_figure(7.4, 1.9 * len(scenes), rows=len(scenes), squeeze=False)
    for panel, scene in zip(axes[:, 0], scenes, strict=True):
        _draw_scene(panel, scene)
    return figure


def _draw_scene(axes: Any, scene: Any) -> None:
    pages, size = len(scene.words), len(scene.words[0])
    for page, words in enumerate(scene.words):
        held, kept = scene.references[page] > 0, page in scene.kept
        face = SKY if scene.references[page] > 1 else LIGHT if held or kept else "white"
        edge = VERMILION if page in scene.changed else GREY
        axes.add_patch(Rectangle((page, 0), 0.94, 1, fc=face, ec=edge, lw=2, alpha=0.9))
        state = f"×{scene.references[page]}" if held else "kept" if kept else "free"
        axes.text(page + 0.47, -0.2, f"page {page}\n{state}", ha="center", va="top", fontsize=8)
        if held or kept:
            for slot, word in enumerate(words):
                axes.text(
                    page + 0.47, 1 - (slot + 0.5) / size, word or "·", ha="center", va="center",
                    fontsize=8, color="black" if held else GREY,
                )  # fmt: skip
    for row, (name, table) in enumerate(scene.tables.items()):
        height = 1.35 + 0.42 * row
        color = (BLUE, GREEN, VERMILION, PURPLE)[sum(map(ord, name)) % 4]  # one for all scenes
        axes.text(-0.15, height, name, ha="right", va="center", color=color, weight="bold")
        places = [page + 0.47 for page in table]
        axes.plot(places, [height] * len(places), color=color, marker="o", lw=1, ms=5, alpha=0.9)
        for number, place in enumerate(places):
            axes.text(
                place + 0.06, height + 0.06, str(number), ha="center", fontsize=7, color=color
            )
    axes.set(xlim=(-0.5, pages), ylim=(-0.85, 1.75 + 0.42 * max(1, len(scene.tables) - 1)))
    axes.set_axis_off()
    axes.set_title(scene.caption, fontsize=9)


def draw_running(over_time: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """How many requests ran and waited over time.

    Args:
        over_time: rows of (seconds, running, waiting, …) by cache.
    """
    figure, (top, bottom) = new_figure(7.2, 4.0, rows=2, sharex=True)
    for name, rows in over_time.items():
        seconds = [row[0] for row in rows]
        top.step(seconds, [row[1] for row in rows], where="post", color=LINES[name], label=name)
        bottom.step(seconds, [row[2] for row in rows], where="post", color=LINES[name], label=name)
    top.set(ylabel="running", ylim=(0, None), title="the same memory, the same requests")
    bottom.set(ylabel="waiting", ylim=(0, None), xlabel="seconds")
    top.legend()
    return figure


def draw_service(rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """Numbers of several caches beside each other, one panel a number.

    Args:
        rows: numbers by name, by cache.
    """
    names = list(next(iter(rows.values())))
    figure, axes = new_figure(7.4, 2.4, columns=len(names), squeeze=False)
    for panel, name in zip(axes[0], names, strict=True):
        for place, (cache, numbers) in enumerate(rows.items()):
            panel.bar(place, numbers[name], color=LINES[cache], width=0.7)
            panel.text(place, numbers[name], f"{numbers[name]:,.4g}", ha="center", va="bottom",
                       fontsize=8)  # fmt: skip
        panel.set_xticks(range(len(rows)), list(rows), fontsize=8)
        panel.set_yticks([])
        panel.margins(y=0.15)
        panel.set_title(name, fontsize=9)
    return figure


def draw_indirection(ms: Mapping[str, float]) -> Figure:
    """Times of the paged kernel by page size, against the contiguous one.

    Args:
        ms: milliseconds by page size, and for "contiguous".
    """
    base = ms["contiguous"]
    sizes = [name for name in ms if name != "contiguous"]
    figure, axes = new_figure(7.0, 2.8)
    ratios = [ms[size] / base for size in sizes]
    axes.bar(range(len(sizes)), ratios, color=BLUE, width=0.6)
    for place, ratio in enumerate(ratios):
        axes.text(place, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=9)
    axes.axhline(1, color=ORANGE, lw=2, label=f"contiguous, {base:.3g} ms")
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set(xlabel="slots a page", ylabel="time, contiguous = 1", ylim=(0, max(ratios) * 1.25))
    axes.legend(loc="upper right")
    return figure
