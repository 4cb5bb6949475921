"""Memory against sequence length, predicted and measured, up to the budget that ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flashcourse.show.style import BLUE, GREY, ORANGE, VERMILION, new_figure

MIB = 2**20


def draw_memory_growth(
    lengths: Sequence[int],
    predicted: Sequence[float],
    measured: Mapping[int, float],
    budget: float | None = None,
    failed: Sequence[int] = (),
    linear: Sequence[float] | None = None,
) -> Figure:
    """Bytes against sequence length on log scales.

    Args:
        lengths: sequence lengths, in order.
        predicted: predicted bytes, one for each length.
        measured: measured bytes by length, for the runs that finished.
        budget: bytes that may be used; None draws no limit.
        failed: lengths whose run was stopped by the budget; drawn at its line.
        linear: bytes of the inputs and the output alone, one for each length.
    """
    figure, axis = new_figure(8.6, 3.6)
    mib = [value / MIB for value in predicted]
    axis.plot(lengths, mib, color=BLUE, label="predicted (N²)")
    if linear is not None:
        axis.plot(
            lengths,
            [value / MIB for value in linear],
            color=GREY,
            linestyle="--",
            label="q, k, v and out alone (N)",
        )
    done = sorted(measured)
    axis.plot(done, [measured[n] / MIB for n in done], "o", color=ORANGE, label="measured")
    if budget is not None:
        axis.axhline(budget / MIB, color=VERMILION, linewidth=1)
        axis.annotate(
            f"budget {budget / MIB:,.0f} MiB",
            (0.01, budget / MIB),
            xycoords=("axes fraction", "data"),
            va="bottom",
            color=VERMILION,
        )
    if failed and budget is not None:
        axis.plot(
            list(failed),
            [budget / MIB] * len(failed),
            "x",
            color=VERMILION,
            markersize=11,
            markeredgewidth=2.5,
            label="out of memory",
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(list(lengths), [f"{n:,}" for n in lengths])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_xlabel("sequence length N (seq_q = seq_k)")
    axis.set_ylabel("memory, MiB")
    axis.set_ylim(top=max((budget or 0) / MIB, max(mib)) * 2.5)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
