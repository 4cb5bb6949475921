"""Padded against packed training on a GPU: real tokens a second, memory, and the same loss.

``python -m flashcourse.bench.packing`` measures and prints; with ``FLASHCOURSE_RECORD=1`` it keeps
the record that lesson 07 shows to those without a GPU.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flashcourse import runtime
from flashcourse.files import write_whole
from flashcourse.measure.memory import readable_bytes
from flashcourse.measure.recorded import machine, record
from flashcourse.model import (
    LAYOUTS,
    Corpus,
    Layout,
    count_parameters,
    draw_batches,
    encode,
    held_out_loss,
    padding_share,
    small_llama,
    standard_library,
    train,
    train_tokenizer,
)
from flashcourse.model.batches import IGNORED, on_device
from flashcourse.model.small_llama import size_named

RECORD = "packing_training"
MADE_BY = "python -m flashcourse.bench.packing"
TARGETS_AGREE = 0.05  # of the spread of the targets' losses: what bfloat16 rounds away
SKIP = 5  # steps that compile and allocate


@dataclass(frozen=True)
class Case:
    """Documents of one kind in batches of one size.

    Attributes:
        name: what is special about it.
        batch: documents a step.
        shortest, longest: tokens; shorter documents are left out, longer ones are cut.
        dense_mask: whether the packed row with a dense mask takes part. Its mask grows with the
            square of the row: 60,000 tokens make 3.6 billion entries.
    """

    name: str
    batch: int
    shortest: int
    longest: int
    dense_mask: bool = True


CASES = (
    Case("padding wastes about half", 128, 256, 1024, dense_mask=False),
    Case("the same, half the batch", 64, 256, 1024, dense_mask=False),
    Case("the same, a small batch", 16, 256, 1024),
    Case("all documents, short ones too", 128, 2, 1024, dense_mask=False),
    Case("equal lengths", 64, 512, 512, dense_mask=False),
    Case("one document a batch", 1, 256, 1024),
)


def choose(documents: Sequence[Sequence[int]], case: Case) -> list[Sequence[int]]:
    """The documents of a case, each cut to its longest."""
    chosen = [d[: case.longest] for d in documents if len(d) >= case.shortest]
    if len(chosen) < case.batch:
        raise ValueError(
            f"only {len(chosen)} documents have {case.shortest} tokens or more; the case "
            f"{case.name!r} needs {case.batch} a batch"
        )
    return chosen


def check_layouts(
    model: Any, documents: Sequence[Sequence[int]], layouts: Sequence[Layout], dtype: torch.dtype
) -> None:
    """Compare the loss of every single target in every layout, before anything is timed.

    An untrained model gives every mean the same value, so the means would say nothing: targets
    are compared with each other, and against their own spread.

    Raises:
        AssertionError: two layouts differ by more than rounding.
    """
    losses = {}
    for layout in layouts:
        model.set_attn_implementation(layout.attention)
        batch = on_device(layout.make(documents), model.device)
        labels = batch.pop("labels")[:, 1:]
        on = dtype not in (None, torch.float32)
        with torch.no_grad(), torch.autocast(model.device.type, dtype=dtype, enabled=on):
            logits = model(**batch, use_cache=False).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
        losses[layout.name] = each[labels != IGNORED]
    first_name, first = next(iter(losses.items()))
    for name, each in losses.items():
        if each.shape != first.shape:
            raise AssertionError(f"{name} has {len(each)} targets, {first_name} {len(first)}")
        apart = (each - first).square().mean().sqrt().item()
        if not apart <= TARGETS_AGREE * first.std().item():
            raise AssertionError(
                f"{name} and {first_name} do not compute the same losses: their targets differ by "
                f"{apart:.2g}, and spread by {first.std().item():.2g}"
            )


def measure_case(
    model: Any,
    documents: Sequence[Sequence[int]],
    case: Case,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    steps: int = 20,
    turns: int = 2,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Speed and memory of every layout on the same batches.

    The layouts take turns in an order that rotates, because a GPU's clock drifts. Memory is all
    that PyTorch held at the peak, weights and optimiser included.

    Returns:
        A row of the record; a layout that ran out of memory has ``"out_of_memory": True``.
    """
    layouts = [layout for layout in layouts if case.dense_mask or layout.attention != "sdpa"
               or layout is layouts[0]]  # fmt: skip
    chosen = choose(documents, case)
    batches = list(draw_batches(chosen, case.batch, steps))
    lengths = [len(d) for group in batches for d in group]
    runs: dict[str, list[Any]] = {layout.name: [] for layout in layouts}
    out_of_memory: set[str] = set()
    check_layouts(model, batches[0][:4], layouts, dtype)
    for turn in range(turns):
        for offset in range(len(layouts)):
            layout = layouts[(turn + offset) % len(layouts)]
            if layout.name in out_of_memory:
                continue
            model.set_attn_implementation(layout.attention)
            gc.collect()  # what a step that did not fit left behind is not the next one's memory
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            try:
                run = train(
                    model, batches, layout, steps=steps, learning_rate=1e-5,
                    device=model.device, dtype=dtype,
                )  # fmt: skip
            except torch.cuda.OutOfMemoryError:
                out_of_memory.add(layout.name)
                model.zero_grad(set_to_none=True)
                continue
            model.zero_grad(set_to_none=True)
            runs[layout.name].append(run)
    return {
        "case": case.name,
        "batch": case.batch,
        "documents": len(chosen),
        "mean_length": statistics.fmean(lengths),
        "cv_length": statistics.pstdev(lengths) / statistics.fmean(lengths),
        "padding": statistics.fmean(padding_share([len(d) for d in group]) for group in batches),
        "steps": steps,
        "layouts": {
            name: _summary(found) if found else {"out_of_memory": True}
            for name, found in runs.items()
        },
    }


def _summary(runs: Sequence[Any]) -> dict[str, Any]:
    speeds = [run.tokens_per_second(SKIP) for run in runs]
    return {
        "tokens_per_second": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "step_ms": statistics.median(run.step_ms(SKIP) for run in runs),
        "peak_bytes": runs[0].peak_bytes,
    }


def loss_curves(
    documents: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    case: Case,
    size: str,
    *,
    layouts: Sequence[Layout],
    seeds: Sequence[int],
    steps: int,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Whole training runs: every layout with every seed, on the same batches for a seed."""
    chosen = choose(documents, case)
    cut = [d[: case.longest] for d in held_out]
    found = []
    for seed in seeds:
        for layout in layouts:
            model = small_llama(size, attention=layout.attention, seed=seed)
            run = train(
                model, draw_batches(chosen, case.batch, steps, seed=seed), layout, steps=steps,
                learning_rate=size_named(size).learning_rate, device=runtime.device(), dtype=dtype,
            )  # fmt: skip
            model.set_attn_implementation("flashcourse")
            found.append(
                {
                    "layout": layout.name,
                    "seed": seed,
                    "losses": [round(loss, 4) for loss in run.losses],
                    "final_loss": run.final_loss(),
                    "held_out_loss": held_out_loss(model, cut, dtype=dtype),
                    "seconds": sum(run.seconds),
                }
            )
    return found


def compare_row(row: dict[str, Any]) -> str:
    """One case in words: each layout against the padded one."""
    base = row["layouts"][LAYOUTS[0].name]
    lines = [
        f"{row['case']}: batch {row['batch']}, mean length {row['mean_length']:.0f}, "
        f"{row['padding']:.0%} padding (at best {1 / (1 - row['padding']):.2f}×)"
    ]
    for name, run in row["layouts"].items():
        if run.get("out_of_memory"):
            lines.append(f"  {name:<18} out of memory")
            continue
        speed = f"{run['tokens_per_second']:>9,.0f} tokens/s, step {run['step_ms']:.1f} ms"
        if run["peak_bytes"] is not None:
            speed += f", peak {readable_bytes(run['peak_bytes'])}"
        if not base.get("out_of_memory"):
            speed += f"   {run['tokens_per_second'] / base['tokens_per_second']:.2f}× the tokens"
            if base["peak_bytes"] and run["peak_bytes"]:
                speed += f", {run['peak_bytes'] / base['peak_bytes'] - 1:+.0%} memory"
        lines.append(f"  {name:<18} {speed}")
    return "\n".join(lines)


def compare_curves(curves: Sequence[dict[str, Any]]) -> str:
    """Final losses by layout, and whether they agree within the spread of the seeds."""
    by_layout: dict[str, list[float]] = {}
    for curve in curves:
        by_layout.setdefault(curve["layout"], []).append(curve["held_out_loss"])
    lines = [
        f"  {name:<18} held-out loss " + ", ".join(f"{loss:.4f}" for loss in losses)
        for name, losses in by_layout.items()
    ]
    spread = max(max(losses) - min(losses) for losses in by_layout.values())
    means = [statistics.fmean(losses) for losses in by_layout.values()]
    lines.append(
        f"  the layouts' means differ by {max(means) - min(means):.4f}; "
        f"two seeds of one layout by up to {spread:.4f}"
    )
    return "\n".join(lines)


def main(
    size: Annotated[str, typer.Option(help="Model: tiny, small or base.")] = "base",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each speed run.")] = 20,
    curve_steps: Annotated[
        int, typer.Option(min=0, help="Steps of each loss curve; 0: none.")
    ] = 300,
    limit: Annotated[int | None, typer.Option(help="Training documents; none: all.")] = None,
    case: Annotated[int | None, typer.Option(help="Only this case, counted from 0.")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows here.")
    ] = None,
) -> None:
    """Train the course's model padded and packed, and compare."""
    if not runtime.has_gpu():
        raise typer.BadParameter("this benchmark needs a GPU; lesson 07 shows its record")
    # Packed rows have another length in every step. By default PyTorch's allocator then asks the
    # driver for memory again and again; segments that grow spare it that, in every layout alike.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    shape = size_named(size)
    corpus: Corpus = standard_library(limit)
    tokenizer = train_tokenizer(corpus.train, shape.vocab)
    documents = encode(tokenizer, corpus.train, 4096)
    held_out = encode(tokenizer, corpus.held_out, 4096)
    dtype = runtime.compute_dtype()
    model = small_llama(size, seed=0).to(runtime.device())
    parameters = count_parameters(model)
    print(f"{size}: {parameters:,} parameters, {len(documents)} documents, {machine()}", flush=True)
    rows = []
    for chosen in CASES if case is None else (CASES[case],):
        rows.append(measure_case(model, documents, chosen, steps=steps, dtype=dtype))
        print(compare_row(rows[-1]), flush=True)
        _keep(size, parameters, dtype, corpus, rows, [], json_out, case is None)
    del model
    if curve_steps:
        curves = loss_curves(
            documents, held_out, CASES[2], size, layouts=(LAYOUTS[0], LAYOUTS[2]), seeds=(0, 1),
            steps=curve_steps, dtype=dtype,
        )  # fmt: skip
        print(compare_curves(curves), flush=True)
        _keep(size, parameters, dtype, corpus, rows, curves, json_out, case is None)


def _keep(
    size: str,
    parameters: int,
    dtype: torch.dtype,
    corpus: Corpus,
    rows: list[dict[str, Any]],
    curves: list[dict[str, Any]],
    json_out: Path | None,
    whole: bool,
) -> None:
    """Write what there is so far: a run that is cut off keeps its finished cases."""
    results = {
        "size": size,
        "parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "corpus": corpus.source,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "rows": rows,
        "curves": curves,
    }
    if json_out is not None:
        text = json.dumps({"machine": machine(), **results}, indent=1)
        write_whole({json_out: text})
    if whole:
        record(RECORD, results, MADE_BY)


if __name__ == "__main__":
    typer.run(main)
