"""Grouped heads against the same attention with every KV head repeated for its group.

Both run the course's kernels on the same numbers, in turns. ``python -m flashcourse.bench.grouped``
prints the rows. It needs a GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flashcourse import runtime
from flashcourse.attention import flash_attention
from flashcourse.files import write_whole
from flashcourse.measure.recorded import machine
from flashcourse.measure.timing import time_ms

BATCH, HEADS, HEADS_KV, HEAD_DIM = 4, 32, 8, 128
LENGTHS = (4096, 16384)
ROUNDS, REPEATS = 6, 5
LEAD = 24  # overwrites of the L2 cache before a run: time for Python to queue a backward
ROUNDINGS = 4.0  # that each entry of two results may differ by, of the largest entry's


def grouped_inputs(seq: int, device: str, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """q, k, v with ``HEADS_KV`` heads of keys, and with each repeated; do is the last of both."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        shape = (BATCH, heads, seq, HEAD_DIM)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v, do = normal(HEADS), normal(HEADS_KV), normal(HEADS_KV), normal(HEADS)
    repeated = [t.repeat_interleave(HEADS // HEADS_KV, 1) for t in (k, v)]
    return {"grouped": [q, k, v, do], "repeated": [q, *repeated, do]}


def check_grouped(
    inputs: dict[str, list[torch.Tensor]], attend: Callable[..., Any] = flash_attention
) -> None:
    """Compare outputs and gradients; those of a repeated head are summed over its group.

    Raises:
        AssertionError: they differ by more than ``ROUNDINGS`` of their dtype's.
    """
    results = {}
    for name, (q, k, v, do) in inputs.items():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attend(*leaves, is_causal=True)
        results[name] = [out, *torch.autograd.grad(out, leaves, do)]
    for what, grouped, repeated in zip(
        ("out", "dq", "dk", "dv"), results["grouped"], results["repeated"], strict=True
    ):
        if grouped.shape != repeated.shape:
            repeated = repeated.float().unflatten(1, (grouped.shape[1], -1)).sum(2)
        apart = (grouped.float() - repeated.float()).abs().max().item()
        allowed = ROUNDINGS * torch.finfo(grouped.dtype).eps * repeated.float().abs().max().item()
        if not apart <= allowed:
            raise AssertionError(
                f"{what} with grouped heads is {apart:.2g} away from that with repeated heads; "
                f"rounding explains {allowed:.2g}"
            )


def race_grouped(lengths: Sequence[int] = LENGTHS) -> Iterator[dict[str, Any]]:
    """Check, then time, each length.

    Yields:
        ``seq``, and for ``forward`` and ``backward`` the median milliseconds of ``grouped`` and
        ``repeated``, and ``ratio``: grouped over repeated, below 1 where grouping is faster.

    Raises:
        RuntimeError: no GPU.
        AssertionError: the results differ; nothing is timed then.
    """
    if not runtime.has_gpu():
        raise RuntimeError("timing grouped heads needs a GPU")
    for seq in lengths:
        inputs = grouped_inputs(seq, "cuda", torch.bfloat16)
        check_grouped(inputs)
        yield {"seq": seq, **_time(inputs)}


def _time(inputs: dict[str, list[torch.Tensor]]) -> dict[str, dict[str, float]]:
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    for name, (q, k, v, do) in inputs.items():
        calls["forward"][name] = partial(flash_attention, q, k, v, is_causal=True)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out: Any = flash_attention(*leaves, is_causal=True)
        calls["backward"][name] = partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
    found = {}
    for part, both in calls.items():
        times: dict[str, list[float]] = {name: [] for name in both}
        for turn in range(ROUNDS):
            for name in list(both)[:: 1 if turn % 2 else -1]:
                taken = time_ms(both[name], warmup=1, repeats=REPEATS, clear_l2=True, lead=LEAD)
                times[name] += taken.times
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        found[part] = {**medians, "ratio": medians["grouped"] / medians["repeated"]}
    return found


def main(
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows here.")
    ] = None,
) -> None:
    """Race grouped heads against the same heads repeated."""
    print(f"{machine()}, {BATCH} sequences, {HEADS}/{HEADS_KV} heads, head_dim {HEAD_DIM}, causal")
    rows = []
    for row in race_grouped():
        rows.append(row)
        parts = ", ".join(
            f"{part} {row[part]['grouped']:.3f} ms, {row[part]['ratio']:.3f} of repeated heads"
            for part in ("forward", "backward")
        )
        print(f"N {row['seq']}: {parts}", flush=True)
    if json_out is not None:
        write_whole({json_out: json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n"})


if __name__ == "__main__":
    typer.run(main)
