"""Benchmark of the attention kernels against PyTorch's, correctness first.

Every row is checked before it is timed. The providers of a row are timed in turns, in an order
that rotates, because a GPU's clock drifts: only ratios from one run mean something.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashcourse.attention import flash_attention, naive_attention
from flashcourse.measure.timing import time_ms

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OURS = "ours"


@dataclass(frozen=True)
class Row:
    """One shape: self-attention of ``seq`` tokens."""

    head_dim: int
    seq: int
    is_causal: bool
    dtype: str = "float16"
    batch: int = 4
    heads: int = 32
    heads_kv: int = 32
    window: int | None = None  # keys to the left, causal

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else "full"
        if self.window is not None:
            mask = f"window {self.window}"
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        return f"D={self.head_dim} N={self.seq} {mask} H={heads} {self.dtype}"

    @property
    def flops(self) -> float:
        """Of the forward: 4 · B · H · N² · D, and half of that when causal; ×2.5 backward."""
        pairs = self.seq**2 / (2 if self.is_causal else 1)
        if self.window is not None:
            pairs = self.seq * min(self.window + 1, self.seq)
        return 4.0 * self.batch * self.heads * pairs * self.head_dim


def standard_rows(quick: bool = False) -> list[Row]:
    """The rows of the committed comparison; ``quick`` keeps one length and one dtype."""
    lengths = (4096,) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    rows = [
        Row(head_dim, seq, is_causal, dtype)
        for dtype in (("float16",) if quick else ("float16", "bfloat16"))
        for head_dim in (64, 128)
        for is_causal in (False, True)
        for seq in lengths
        if dtype == "float16" or seq in (2048, 8192)
    ]
    if not quick:
        rows += [Row(128, 4096, True, heads_kv=8), Row(128, 16384, True, window=1024)]
    return rows


def options_of(row: Row) -> dict[str, Any]:
    """The keyword arguments of :func:`flash_attention` for a row."""
    window = None if row.window is None else (row.window, 0)
    return {"is_causal": row.is_causal, "window_size": window}


def make_inputs(row: Row) -> tuple[torch.Tensor, ...]:
    """q, k, v and a gradient of the output, normal random, on the GPU."""
    dtype = getattr(torch, row.dtype)
    shapes = [row.heads, row.heads_kv, row.heads_kv, row.heads]
    return tuple(
        torch.randn(row.batch, heads, row.seq, row.head_dim, dtype=dtype, device="cuda")
        for heads in shapes
    )


def providers_of(row: Row) -> dict[str, Callable[..., torch.Tensor]]:
    """What can compute the row: ours, and PyTorch's backends that accept it."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attention(q, k, v, **options_of(row))
        assert isinstance(out, torch.Tensor)
        return out

    def sdpa(backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=row.is_causal, enable_gqa=row.heads != row.heads_kv
                )

        return run

    providers: dict[str, Callable[..., torch.Tensor]] = {OURS: ours}
    if row.window is None:
        providers |= {name: sdpa(backend) for name, backend in SDPA.items()}
        if row.seq >= 8192:  # 3 to 4 times slower: known by then, and long to wait for
            del providers["efficient"]
    return providers


def check_row(row: Row) -> None:
    """Compare out and gradients with plain attention in float64, on two heads and a short length.

    Raises:
        AssertionError: a result is wrong; nothing is timed then.
    """
    small = dataclasses.replace(
        row, batch=1, heads=2 * row.heads // row.heads_kv, heads_kv=2, seq=min(row.seq, 777)
    )
    if row.window is not None:
        small = dataclasses.replace(small, window=min(row.window, 100))
    q, k, v, d_out = make_inputs(small)
    results = []
    for function, dtype in (
        (naive_attention, torch.float64),
        (naive_attention, q.dtype),
        (flash_attention, q.dtype),
    ):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = function(*leaves, **options_of(small))
        assert isinstance(out, torch.Tensor)
        grads = torch.autograd.grad(out, leaves, d_out.to(dtype))
        results.append((out.detach(), *grads))
    for name, exact, plain, ours in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        error = (ours.double() - exact).abs().max().item()
        allowed = 3 * (plain.double() - exact).abs().max().item() + 1e-4
        if not error <= allowed:
            raise AssertionError(f"{small}: {name} is off by {error:.2g}, allowed {allowed:.2g}")


def time_row(row: Row, rounds: int = 3) -> dict[str, dict[str, float]]:
    """``{provider: {"forward": ms, "backward": ms}}``; a provider that refuses is left out."""
    q, k, v, d_out = make_inputs(row)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    warmup, repeats = (1, 3) if row.seq >= 8192 else (2, 7)
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    for name, provider in providers_of(row).items():
        try:
            with torch.no_grad():
                provider(*leaves)
            out = provider(*leaves)
        except RuntimeError as error:
            print(f"{row}: {name} refuses: {str(error).splitlines()[0][:80]}", file=sys.stderr)
            continue

        def forward(provider: Callable[..., torch.Tensor] = provider) -> object:
            with torch.no_grad():
                return provider(*leaves)

        def backward(out: torch.Tensor = out) -> object:
            return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

        calls[name] = {"forward": forward, "backward": backward}
    times: dict[str, dict[str, list[float]]] = {n: {"forward": [], "backward": []} for n in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for direction, call in calls[name].items():
                times[name][direction] += time_ms(call, warmup=warmup, repeats=repeats).times
    return {
        name: {direction: statistics.median(ms) for direction, ms in directions.items()}
        for name, directions in times.items()
    }


def geometric_mean(values: list[float]) -> float:
    """The mean of ratios that treats 2 and 1/2 alike; NaN of nothing."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def run(rows: list[Row], out: Path | None = None) -> list[dict[str, Any]]:
    """Check and time the rows, print a line each and the ratios, write them to ``out``."""
    results: list[dict[str, Any]] = []
    for row in rows:
        check_row(row)
    print(f"{len(rows)} rows are right; TFLOP/s (ratio of ours to the others)")
    for row in rows:
        times = time_row(row)
        results.append({"row": dataclasses.asdict(row), "ms": times})
        print(f"{row!s:45}", _line(row, times), flush=True)
    for other in SDPA:
        for direction in ("forward", "backward"):
            long = [
                r["ms"][other][direction] / r["ms"][OURS][direction]
                for r in results
                if other in r["ms"] and r["row"]["seq"] >= 2048
            ]
            if long:
                print(
                    f"ours / {other} {direction}, N >= 2048: geometric mean "
                    f"{geometric_mean(long):.3f}, lowest {min(long):.3f} of {len(long)} rows"
                )
    if out is not None:
        partial = out.with_suffix(".part")
        partial.write_text(json.dumps({"machine": machine(), "rows": results}, indent=1))
        os.replace(partial, out)
    return results


def _line(row: Row, times: dict[str, dict[str, float]]) -> str:
    parts = []
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        mine = times[OURS][direction]
        parts.append(f"{direction} {factor * row.flops / mine / 1e9:4.0f}")
        parts += [
            f"{name} {factor * row.flops / ms[direction] / 1e9:4.0f} ({ms[direction] / mine:.2f})"
            for name, ms in times.items()
            if name != OURS
        ]
    return "  ".join(parts)


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
    }
