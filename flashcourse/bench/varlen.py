"""The varlen kernel against PyTorch's ``varlen_attn``, on lengths as training meets them.

:func:`race_varlen` is for other benchmarks to call; ``python -m flashcourse.bench.varlen`` prints
its rows. It needs a GPU and PyTorch 2.11.
"""

from __future__ import annotations

import inspect
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flashcourse import runtime
from flashcourse.attention import flash_attention_varlen, naive_attention
from flashcourse.files import write_whole
from flashcourse.measure.recorded import machine, record
from flashcourse.measure.timing import time_ms

RECORD = "varlen"
MADE_BY = "python -m flashcourse.bench.varlen"
KINDS = ("mean 300, cv 1.2", "mean 420, cv 0.45", "one long among many short")
ALLOWED = 2.0  # times PyTorch's own error; twice as much again for gradients
CHECKED = 4096  # tokens of the sequences whose outputs are compared with float64


@dataclass(frozen=True)
class VarlenRow:
    """One shape of a race.

    Attributes:
        kind: of the lengths, one of ``KINDS``.
        total: tokens.
        head_dim, heads, heads_kv: of the attention, which is causal.
    """

    kind: str
    total: int
    head_dim: int
    heads: int
    heads_kv: int

    def __str__(self) -> str:
        return (
            f"{self.kind}, {self.total // 1024}k tokens, D={self.head_dim}, "
            f"H={self.heads}/{self.heads_kv}"
        )


def varlen_rows() -> list[VarlenRow]:
    """The course's grid: three kinds of lengths, 32k to 256k tokens, with and without GQA."""
    return [
        VarlenRow(kind, total * 1024, head_dim, 16, heads_kv)
        for kind in KINDS
        for total in (32, 128, 256)
        for head_dim in (64, 128)
        for heads_kv in (16, 4)
    ]


def draw_lengths(kind: str, total: int, seed: int = 0) -> list[int]:
    """Sequence lengths of a kind that add up to ``total``."""
    generator = torch.Generator().manual_seed(seed)
    if kind == KINDS[2]:
        longest = total // 4
        rest = total - longest
        return [longest] + [128] * (rest // 128) + ([rest % 128] if rest % 128 else [])
    mean, cv = {KINDS[0]: (300.0, 1.2), KINDS[1]: (420.0, 0.45)}[kind]
    sigma = math.sqrt(math.log(1 + cv**2))  # a lognormal with this mean and spread
    mu = math.log(mean) - sigma**2 / 2
    lengths: list[int] = []
    left = total
    while left > 0:
        drawn = math.exp(mu + sigma * torch.randn((), generator=generator).item())
        length = min(max(1, round(drawn)), left)
        lengths.append(length)
        left -= length
    return lengths


def varlen_flops(lengths: Sequence[int], heads: int, head_dim: int) -> int:
    """Of the causal forward: two products over the visible half of each square."""
    return sum(2 * length * (length + 1) for length in lengths) * heads * head_dim


def race_varlen(
    rows: Sequence[VarlenRow] | None = None, *, repeats: int = 20, dtype: torch.dtype | None = None
) -> Iterator[dict[str, Any]]:
    """Check, then time, our kernel and PyTorch's on each row.

    Yields:
        The row's fields with ``forward`` and ``backward``: milliseconds by provider (``ours``,
        ``torch``), ``ratio`` (theirs over ours: above 1 we are ahead) and ours in TFLOP/s.

    Raises:
        RuntimeError: no GPU, or a PyTorch without ``varlen_attn``.
        AssertionError: a row's results are wrong; nothing is timed then.
    """
    if not runtime.has_gpu():
        raise RuntimeError("the race against varlen_attn needs a GPU")
    dtype = dtype or runtime.compute_dtype()
    for number, row in enumerate(varlen_rows() if rows is None else rows):
        lengths = draw_lengths(row.kind, row.total)
        inputs = _inputs(row, lengths, dtype)
        _check(inputs, lengths)
        found = _time(inputs, number, repeats)
        flops = varlen_flops(lengths, row.heads, row.head_dim)
        result: dict[str, Any] = {**asdict(row), "sequences": len(lengths)}
        for part, factor in (("forward", 1.0), ("backward", 2.5)):
            ours, theirs = found[part]["ours"], found[part]["torch"]
            result[part] = {
                "ours": ours,
                "torch": theirs,
                "ratio": theirs / ours,
                "tflops": factor * flops / ours / 1e9,
            }
        yield result


def _inputs(row: VarlenRow, lengths: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(heads: int) -> torch.Tensor:
        shape = (row.total, heads, row.head_dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    q, k, v = normal(row.heads), normal(row.heads_kv), normal(row.heads_kv)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    return {
        "qkv": [t.requires_grad_() for t in (q, k, v)],
        "do": normal(row.heads),
        "offsets": offsets,
        "longest": max(lengths),
    }


def _ours(q: Any, k: Any, v: Any, offsets: torch.Tensor, longest: int) -> torch.Tensor:
    out: Any = flash_attention_varlen(q, k, v, offsets, offsets, longest, longest, is_causal=True)
    return out


def _torch(q: Any, k: Any, v: Any, offsets: torch.Tensor, longest: int) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    # Newer releases want to be asked for grouped heads; older ones just take them.
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    out: Any = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
    return out


PROVIDERS: dict[str, Callable[..., torch.Tensor]] = {"ours": _ours, "torch": _torch}


def _check(inputs: dict[str, Any], lengths: Sequence[int]) -> None:
    """Ours and PyTorch's against float64, on the first sequences and the longest that fits."""
    offsets = inputs["offsets"].tolist()
    results = {}
    for name, provider in PROVIDERS.items():
        out = provider(*inputs["qkv"], inputs["offsets"], inputs["longest"])
        results[name] = [out, *torch.autograd.grad(out, inputs["qkv"], inputs["do"])]
    fits = [i for i, n in enumerate(lengths) if n <= CHECKED]
    for index in {*fits[:3], max(fits, key=lambda i: lengths[i])}:
        rows = slice(offsets[index], offsets[index + 1])
        parts = [
            t[rows].detach().double().transpose(0, 1)[None].requires_grad_() for t in inputs["qkv"]
        ]
        right: Any = naive_attention(*parts, is_causal=True)
        do = inputs["do"][rows].double().transpose(0, 1)[None]
        expected = [right, *torch.autograd.grad(right, parts, do)]
        for what, exact, ours, theirs in zip(
            ("out", "dq", "dk", "dv"), expected, results["ours"], results["torch"], strict=True
        ):
            exact = exact[0].transpose(0, 1)
            error = (ours[rows] - exact).abs().max().item()
            yardstick = (theirs[rows] - exact).abs().max().item()
            floor = torch.finfo(ours.dtype).eps * exact.abs().max().item()
            allowed = ALLOWED * (1 if what == "out" else 2) * max(yardstick, floor)
            if not error <= allowed:
                raise AssertionError(
                    f"{what} of sequence {index} ({lengths[index]} tokens) is off by {error:.2g}; "
                    f"PyTorch's is off by {yardstick:.2g}"
                )


def _time(inputs: dict[str, Any], number: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds; the providers take turns, and who begins changes with the row."""
    order = list(PROVIDERS)
    order = order[number % 2 :] + order[: number % 2]
    times: dict[str, dict[str, list[float]]] = {
        part: {name: [] for name in PROVIDERS} for part in ("forward", "backward")
    }
    for _ in range(3):
        for name in order:
            provider = PROVIDERS[name]
            args = (*inputs["qkv"], inputs["offsets"], inputs["longest"])
            with torch.no_grad():
                forward = time_ms(partial(provider, *args), warmup=3, repeats=repeats)
            out = provider(*args)
            backward = time_ms(
                partial(torch.autograd.grad, out, inputs["qkv"], inputs["do"], retain_graph=True),
                warmup=3,
                repeats=repeats,
            )
            times["forward"][name].append(float(forward))
            times["backward"][name].append(float(backward))
    return {
        part: {name: statistics.median(found) for name, found in by_name.items()}
        for part, by_name in times.items()
    }


def main(
    total: Annotated[
        int | None, typer.Option(help="Only rows of this many thousand tokens.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows here.")
    ] = None,
) -> None:
    """Race the varlen kernel against torch.nn.attention.varlen.varlen_attn."""
    rows = [r for r in varlen_rows() if total is None or r.total == total * 1024]
    found = []
    for row, result in zip(rows, race_varlen(rows, repeats=repeats), strict=True):
        found.append(result)
        ahead = "  ".join(
            f"{part} {result[part]['ours']:.3f} ms, {result[part]['tflops']:.0f} TFLOP/s, "
            f"{result[part]['ratio']:.2f}× PyTorch's speed"
            for part in ("forward", "backward")
        )
        print(f"{row}: {ahead}", flush=True)
        if json_out is not None:  # after every row: a run that is cut off keeps them
            text = json.dumps({"machine": machine(), "rows": found}, indent=1)
            write_whole({json_out: text})
    worst = min(min(r["forward"]["ratio"], r["backward"]["ratio"]) for r in found)
    print(f"{machine()}: the worst of {2 * len(found)} ratios is {worst:.2f}")
    if total is None and record(RECORD, found, MADE_BY):
        print(f"kept as the record {RECORD!r}")


if __name__ == "__main__":
    typer.run(main)
