"""Pictures of padded and packed batches, of what they cost, and of losses on top of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flashcourse.show.style import BLUE, GREEN, GREY, LIGHT, ORANGE, SKY, VERMILION, new_figure

SHADES = (BLUE, SKY, GREEN, ORANGE)  # neighbouring documents differ
LINES = (GREY, ORANGE, BLUE, VERMILION)


def draw_batches(lengths: Sequence[int], batch: int) -> Figure:
    """Padded batches above, the same documents packed below; padding is grey.

    Args:
        lengths: tokens of each document, in the order of the batches.
        batch: documents a batch.
    """
    groups = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    widest = max(max(sum(g) for g in groups), max(lengths))  # one scale, so areas compare
    figure, (top, bottom) = new_figure(7.4, 0.5 + 0.16 * len(lengths) + 0.9, rows=2, height_ratios=[
        len(lengths), max(3, len(groups))
    ])  # fmt: skip
    row = 0
    for number, group in enumerate(groups):
        for length in group:
            top.barh(row, max(group), color=LIGHT, height=0.8)
            top.barh(row, length, color=SHADES[number % len(SHADES)], height=0.8)
            row += 1
    slots = sum(len(g) * max(g) for g in groups)
    top.set(
        title=f"padded: {slots:,} slots, {1 - sum(lengths) / slots:.0%} of them padding (grey)",
        xlim=(0, widest),
        yticks=[],
        ylim=(row - 0.5, -0.5),
    )
    for number, group in enumerate(groups):
        start = 0
        for length in group:
            color = SHADES[number % len(SHADES)]
            bottom.barh(number, length, left=start, color=color, edgecolor="white", height=0.8)
            start += length
    bottom.set(
        title=f"packed: {sum(lengths):,} slots, one row a batch, no padding",
        xlabel="tokens",
        xlim=(0, widest),
        yticks=[],
        ylim=(len(groups) - 0.5, -0.5),
    )
    return figure


def draw_lengths(lengths: Sequence[int], batch: int) -> Figure:
    """How many documents have which length, and where the longest of a batch usually lies.

    Args:
        lengths: tokens of each document.
        batch: documents a batch; its longest is drawn from the same lengths.
    """
    values = np.asarray(lengths)
    generator = np.random.default_rng(0)
    longest = generator.choice(values, size=(400, batch)).max(axis=1)
    figure, axes = new_figure(7.0, 2.8)
    axes.hist(values, bins=40, color=BLUE)
    axes.axvline(values.mean(), color=ORANGE, lw=2, label=f"mean {values.mean():.0f}")
    axes.axvline(
        longest.mean(), color=VERMILION, lw=2, ls="--",
        label=f"longest of {batch}, on average {longest.mean():.0f}",
    )  # fmt: skip
    axes.set(
        xlabel="tokens of a document",
        ylabel="documents",
        title=f"each batch of {batch} is as wide as its longest",
    )
    axes.legend()
    return figure


def draw_waste(batches: Sequence[int], shares: Mapping[str, Sequence[float]]) -> Figure:
    """The share of padding against the batch size, one line an order of the documents.

    Args:
        batches: documents a batch.
        shares: padding over all slots, 0 to 1, by the name of the order.
    """
    figure, axes = new_figure(7.0, 3.0)
    for (name, values), color in zip(
        shares.items(), (VERMILION, BLUE, GREEN, ORANGE), strict=False
    ):
        axes.plot(batches, np.asarray(values) * 100, marker="o", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(batches), [str(b) for b in batches])
    axes.set(xlabel="documents a batch", ylabel="padding, % of all slots", ylim=(0, 100))
    axes.set_title("padding grows with the batch, unless neighbours have one length")
    axes.legend()
    return figure


def draw_packed_mask(lengths: Sequence[int], tile: int) -> Figure:
    """Who sees whom in a packed row, and which tiles a varlen kernel visits.

    Args:
        lengths: tokens of each document.
        tile: side of a square tile.
    """
    total = sum(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    i = np.arange(total)
    visible = (document[:, None] == document[None, :]) & (i[None, :] <= i[:, None])
    visited = np.zeros((total, total), dtype=int)
    count = 0
    begin = 0
    for length in lengths:  # tiles are cut from the document's own first token
        for row in range(0, length, tile):
            for column in range(0, min(row + tile, length), tile):
                rows = slice(begin + row, begin + min(row + tile, length))
                columns = slice(begin + column, begin + min(column + tile, length))
                visited[rows, columns] = 1
                count += 1
        begin += length
    figure, axes = new_figure(6.4, 4.2)
    axes.imshow(visited + visible, cmap=ListedColormap(["white", SKY, BLUE]), vmin=0, vmax=2)
    for edge in np.cumsum(lengths)[:-1]:
        axes.axhline(edge - 0.5, color=GREY, lw=0.8)
        axes.axvline(edge - 0.5, color=GREY, lw=0.8)
    dense = (-(-total // tile)) ** 2
    axes.set(
        title=f"{count} tiles visited of {dense}",
        xlabel="key",
        ylabel="query",
    )
    axes.legend(
        handles=[
            Patch(color=BLUE, label="visible"),
            Patch(color=SKY, label="visited, hidden"),
            Patch(facecolor="white", edgecolor=GREY, label="not visited"),
        ],
        loc="upper left", bbox_to_anchor=(1.02, 1),
    )  # fmt: skip
    return figure


def draw_losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Losses of the same training in several layouts, on top of each other.

    Args:
        curves: the loss of every step, by name. Earlier ones are drawn wider, so that they stay
            visible under the later ones.
    """
    figure, axes = new_figure(7.0, 3.0)
    widths = np.linspace(6, 1.5, len(curves))
    for (name, losses), width, color in zip(curves.items(), widths, LINES, strict=False):
        axes.plot(np.arange(1, len(losses) + 1), losses, lw=width, color=color, label=name)
    axes.set(xlabel="step", ylabel="loss, nats a token", title="one training, several layouts")
    axes.legend()
    return figure


def draw_speeds(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, base: str) -> Figure:
    """Bars of several cases, each layout against ``base``.

    Args:
        rows: (case, value by layout); a layout that did not run is left out of its mapping.
        unit: what the values are, such as "real tokens a second".
        base: the layout that is 1.
    """
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    figure, axes = new_figure(7.4, 0.6 + 0.62 * len(rows) + 0.5)
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        label: str | None = name
        for row, (_, values) in enumerate(rows):
            place = row + (number - (len(names) - 1) / 2) * height
            if name not in values or base not in values:
                axes.text(0, place, " not measured", va="center", fontsize=8, color=GREY)
                continue
            ratio = values[name] / values[base]
            axes.barh(place, ratio, height=height * 0.9, color=LINES[number % len(LINES)],
                      label=label)  # fmt: skip
            label = None
            axes.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1, color=GREY, lw=1)
    axes.set_yticks(range(len(rows)), [case for case, _ in rows])
    axes.margins(x=0.1)
    axes.set(xlabel=f"{unit}, {base} = 1", ylim=(len(rows) - 0.5, -0.5))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names), fontsize=8)
    return figure


def draw_scripts(tokens: Mapping[str, int], characters: Mapping[str, int]) -> Figure:
    """Tokens of one message in several languages, and its characters.

    Args:
        tokens: by language.
        characters: by language.
    """
    names = list(tokens)
    figure, axes = new_figure(7.0, 2.8)
    place = np.arange(len(names))
    axes.bar(place - 0.2, [tokens[n] for n in names], width=0.4, color=BLUE, label="tokens")
    axes.bar(place + 0.2, [characters[n] for n in names], width=0.4, color=GREY, label="characters")
    axes.set_xticks(place, names)
    axes.set(title="one message; the tokenizer learnt on Python code", ylabel="how many")
    axes.legend()
    return figure
