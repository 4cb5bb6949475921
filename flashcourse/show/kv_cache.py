"""Pictures of the KV cache: what it saves, how large it is, and how decoding fills a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flashcourse.show.style import (
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    new_figure,
    plain_log_ticks,
)

LINES = (VERMILION, BLUE, GREEN, ORANGE, PURPLE)
GIB = 2.0**30


def draw_recomputed(prompt: int, new: int) -> Figure:
    """Which tokens go through the model at each step of a generation, without a cache and with.

    Args:
        prompt: tokens of the prompt.
        new: tokens that are generated.
    """
    total = prompt + new - 1  # the last token is made, not read
    again = np.zeros((new, total), dtype=int)
    for step in range(new):
        again[step, : prompt + step] = 1  # read before
    once = np.zeros_like(again)
    for step in range(new):
        once[step, : prompt + step] = 3  # kept
    for picture in (again, once):
        picture[0, :prompt] = 2
        for step in range(1, new):
            picture[step, prompt + step - 1] = 2
    figure, axes = new_figure(7.4, 0.16 * new + 1.5, columns=2, sharey=True)
    colours = ListedColormap(["white", ORANGE, VERMILION, LIGHT])
    for ax, picture, name in zip(axes, (again, once), ("no cache", "with a cache"), strict=True):
        ax.imshow(picture, cmap=colours, vmin=0, vmax=3, aspect="auto", interpolation="none")
        computed = int(np.isin(picture, (1, 2)).sum())
        ax.set(title=f"{name}: {computed} tokens computed", xlabel="token")
    axes[0].set_ylabel("step")
    figure.legend(
        handles=[
            Patch(color=VERMILION, label="computed for the first time"),
            Patch(color=ORANGE, label="computed again"),
            Patch(color=LIGHT, label="key and value read from the cache"),
        ],
        loc="outside lower center", ncols=3, frameon=False, fontsize=9,
    )  # fmt: skip
    return figure


def draw_lines(
    xs: Sequence[float], series: Mapping[str, Sequence[float | None]], *, title: str,
    xlabel: str, ylabel: str, dashed: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Values against a quantity that doubles, such as a length or a batch.

    Args:
        xs: where was measured; both axes are logarithmic.
        series: values by name, one for each of ``xs``; None where nothing was measured.
        dashed: names of series that are predictions: drawn dashed and without marks.

    Raises:
        ValueError: a series has not one value for each of ``xs``.
    """
    figure, axes = new_figure(7.0, 3.3)
    ax: Any = axes
    for number, (name, values) in enumerate(series.items()):
        if len(values) != len(xs):
            raise ValueError(f"{name}: {len(values)} values for {len(xs)} places")
        points = [(x, y) for x, y in zip(xs, values, strict=True) if y is not None]
        marker = MARKERS[number % len(MARKERS)]
        style: dict[str, Any] = {"linestyle": "--"} if name in dashed else {"marker": marker}
        ax.plot(
            [x for x, _ in points], [y for _, y in points], label=name,
            color=LINES[number % len(LINES)], **style,
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(xs), [f"{x:,}" for x in xs])
    ax.minorticks_off()
    ax.set_yscale("log")
    plain_log_ticks(ax)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2)
    return figure


def draw_memory(
    name: str, weight_bytes: float, kv_bytes_per_token: float, context: int, batch: int,
    capacities: Mapping[str, float],
) -> Figure:  # fmt: skip
    """Weights and KV cache against the context, with the memory of some GPUs.

    Args:
        name: of the model.
        weight_bytes: of its weights.
        kv_bytes_per_token: of the cache.
        context: tokens of each sequence; marked.
        batch: sequences at once.
        capacities: bytes of memory by the name of a GPU.
    """
    figure, axes = new_figure(7.4, 3.6)
    ax: Any = axes
    contexts = [2**power for power in range(8, 18)]
    cache = [batch * n * kv_bytes_per_token / GIB for n in contexts]
    weights = weight_bytes / GIB
    ax.fill_between(contexts, 0, weights, color=GREY, alpha=0.5, label="weights")
    ax.fill_between(
        contexts, weights, [weights + c for c in cache], color=BLUE, alpha=0.7, label="KV cache"
    )
    here = batch * context * kv_bytes_per_token / GIB
    ax.axvline(context, color=VERMILION, lw=1)
    top = max(1.15 * max(capacities.values()) / GIB, 1.1 * (weights + here))
    for gpu, size in capacities.items():
        ax.axhline(size / GIB, color="black", lw=0.8, ls=":")
        ax.text(
            contexts[0], size / GIB, f" {gpu}, {size / GIB:.0f} GiB", va="bottom", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(contexts, [f"{n // 1024}k" if n >= 1024 else str(n) for n in contexts])
    ax.minorticks_off()
    ax.set(
        xlim=(contexts[0], contexts[-1]), ylim=(0, top), ylabel="GiB",
        xlabel="tokens of each sequence",
        title=f"{name}, {batch} × {context:,} tokens: cache {here:,.2f} GiB, "
        f"weights {weights:,.2f} GiB",
    )  # fmt: skip
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.18), ncols=2)
    return figure


def schedule(programs: int, splits: int, places: int) -> tuple[np.ndarray, float]:
    """Where programs of equal length run, one wave after the other.

    Args:
        programs: before the split; each takes one unit of time.
        splits: parts of each, which take ``1 / splits``.
        places: programs that run at once.

    Returns:
        For each wave (row) and place (column), the number of the program, or -1; and the time of
        all, in units of one unsplit program.
    """
    parts = programs * splits
    waves = -(-parts // places)
    table = np.full((waves, places), -1)
    table.flat[:parts] = np.arange(parts) // splits
    return table, waves / splits


def draw_occupancy(programs: int, splits: int, multiprocessors: int) -> Figure:
    """Which multiprocessors work, and until when, without splits and with.

    Args:
        programs: batch · heads_kv: what runs side by side without a split.
        splits: parts of the keys.
        multiprocessors: of the GPU; one program each.
    """
    figure, axes = new_figure(7.4, 3.6, rows=2, sharex=True, sharey=True)
    for ax, parts in zip(axes, (1, splits), strict=True):
        table, time = schedule(programs, parts, multiprocessors)
        ends = (table >= 0).sum(0) / parts
        ax.bar(
            np.arange(multiprocessors), ends, width=1.0,
            color=[BLUE if end else LIGHT for end in ends],
        )  # fmt: skip
        busy = programs / (time * multiprocessors)
        ax.axhline(time, color=VERMILION, lw=1)
        ax.set_title(
            f"{parts} split{'s' * (parts > 1)}: {min(programs * parts, multiprocessors)} of "
            f"{multiprocessors} multiprocessors have work, time {time:.3g}, busy {busy:.0%}",
            fontsize=9,
        )
        ax.set_ylabel("work ends at")
    axes[-1].set_xlabel("multiprocessor")
    return figure


def draw_bars(values: Mapping[str, float], title: str, xlabel: str, limit: float | None = None,
              limit_label: str = "") -> Figure:  # fmt: skip
    """One bar a name, from top to bottom, each with its value.

    Args:
        values: by name, not negative.
        limit, limit_label: a line across, such as a ceiling.
    """
    figure, axes = new_figure(7.0, 0.9 + 0.42 * len(values))
    ax: Any = axes
    names = list(values)
    for row, name in enumerate(names):
        ax.barh(row, values[name], color=SKY if row else BLUE, height=0.7)
        ax.text(values[name], row, f" {values[name]:.3g}", va="center", fontsize=9)
    if limit is not None:
        ax.axvline(limit, color=VERMILION, ls="--", lw=1, label=limit_label)
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.25))
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12 * max([*values.values(), limit or 0.0]))
    ax.set(title=title, xlabel=xlabel)
    return figure
