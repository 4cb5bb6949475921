"""Finds the tiles of the tuning table on the GPU at hand.

For each head_dim, dtype and kernel: compile every candidate (in several processes; compiling is
what takes the time), time those that fit, and keep the fastest whose results are the same bits in
50 runs and exact on small integers. Run by ``python -m flashcourse bench --tune``; the result is
printed, and a person puts it into ``flashcourse/attention/tuning.py``.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

from flashcourse.attention import flash_attention, naive_attention
from flashcourse.attention.tuning import BUCKETS, KERNELS, Kernel, Tiles, bucket_of, force_tiles
from flashcourse.bench.race import LEAD
from flashcourse.measure.timing import time_ms

REPEATS = 50
SHOWN = 4  # of the fastest
DTYPES = ("float16", "bfloat16", "float32")
Row = tuple[Kernel, int, str]


@dataclass(frozen=True)
class Candidate:
    """Tiles of one kernel for one head_dim and dtype."""

    kernel: Kernel
    head_dim: int
    dtype: str
    tiles: Tiles


# block of the rows a program owns × block it walks over, warps
SHAPES = {
    2: ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 64, 4),
        (128, 128, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8)),
    4: ((16, 16, 4), (32, 16, 4), (32, 32, 4), (64, 16, 4), (64, 32, 4), (64, 32, 8), (64, 64, 8)),
}  # fmt: skip


def candidates(kernel: Kernel, head_dim: int, dtype: str, hopper: bool) -> Iterator[Candidate]:
    """The tiles worth trying. Register limits are tried where they let one more program share a
    multiprocessor: 65,536 registers over 128 or 256 threads."""
    half = dtype != "float32"
    for (owned, walked, warps), stages, tma in itertools.product(
        SHAPES[2 if half else 4], (2, 3) if half else (1, 2), (False, True)
    ):
        if tma and not (half and hopper):
            continue
        limits: tuple[int | None, ...] = (None,)
        if half and torch.version.hip is None:
            limits = (None, 128) if warps == 8 else (None, 128, 168)
        for registers in limits:
            blocks = (walked, owned) if kernel == "backward_kv" else (owned, walked)
            tiles = Tiles(*blocks, warps, stages, tma, registers)
            yield Candidate(kernel, head_dim, dtype, tiles)
            # Gluon's forward divides 128 queries between two groups of warps.
            enough = owned == 128 if kernel == "forward" else owned == 64
            if tma and stages == 2 and warps == 4 and enough and bucket_of(head_dim) in (64, 128):
                yield Candidate(kernel, head_dim, dtype, replace(tiles, gluon=True))


def run_once(candidate: Candidate, batch: int, heads: int, seq: int) -> dict[bool, float]:
    """Milliseconds for causal False and True; raises RuntimeError if it does not fit."""
    shape = (batch, heads, seq, candidate.head_dim)
    q, k, v, d_out = (
        torch.randn(shape, dtype=getattr(torch, candidate.dtype), device="cuda") for _ in range(4)
    )
    times: dict[bool, float] = {}
    with force_tiles(**{candidate.kernel: candidate.tiles}):
        for is_causal in (False, True):
            if candidate.kernel == "forward":
                with torch.no_grad():
                    times[is_causal] = time_ms(
                        lambda c=is_causal: flash_attention(q, k, v, is_causal=c),  # type: ignore[misc]
                        repeats=10, clear_l2=True, lead=LEAD,
                    )  # fmt: skip
                continue
            leaves = [t.requires_grad_() for t in (q, k, v)]
            out = flash_attention(*leaves, is_causal=is_causal)
            times[is_causal] = time_ms(
                lambda o=out, x=leaves: torch.autograd.grad(o, x, d_out, retain_graph=True),  # type: ignore[misc]
                repeats=10, clear_l2=True, lead=LEAD,
            )  # fmt: skip
    return times


def compile_candidate(candidate: Candidate) -> str | None:
    """Fill Triton's cache on disk; None, or why this candidate cannot run."""
    try:
        run_once(candidate, 1, 2, 256)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def repeat_test(candidate: Candidate) -> str | None:
    """None if the results are the same bits in every run and exact on small integers."""
    head_dim, dtype = candidate.head_dim, getattr(torch, candidate.dtype)
    with force_tiles(**{candidate.kernel: candidate.tiles}):
        for is_causal in (False, True):
            q, k, v, d_out = (
                torch.randn((2, 8, 1023, head_dim), dtype=dtype, device="cuda") for _ in range(4)
            )
            leaves = [t.requires_grad_() for t in (q, k, v)]
            first: list[torch.Tensor] = []
            for number in range(REPEATS):
                out = flash_attention(*leaves, is_causal=is_causal)
                assert isinstance(out, torch.Tensor)
                results = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
                if number and not all(map(torch.equal, results, first)):
                    return f"run {number} gave other bits (causal={is_causal})"
                first = results
        # q = 0: every visible key weighs the same. 256 keys, so all sums are exact.
        zeros = torch.zeros((1, 2, 256, head_dim), dtype=dtype, device="cuda")
        v = torch.randint(-2, 3, zeros.shape, device="cuda").to(dtype) * 256
        leaves = [
            zeros.clone().requires_grad_(),
            zeros.clone().requires_grad_(),
            v.requires_grad_(),
        ]
        d_out = torch.randint(-2, 3, zeros.shape, device="cuda").to(dtype)
        out, expected = flash_attention(*leaves), naive_attention(*leaves)
        assert isinstance(out, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        if not torch.equal(out, expected):
            return "out is not exact on small integers"
        ours = torch.autograd.grad(out, leaves, d_out)
        plain = torch.autograd.grad(expected, leaves, d_out)
        if not torch.equal(ours[2], plain[2]):
            return "dv is not exact on small integers"
    return None


def rows(only: Sequence[str] = ()) -> list[Row]:
    """The rows of the table, (kernel, head_dim, dtype); only those whose name holds one of these.

    A row is named as it is printed: ``forward head_dim=128 float16``.
    """
    everything: Iterator[Row] = itertools.product(KERNELS, BUCKETS, DTYPES)
    return [row for row in everything if not only or any(text in named(*row) for text in only)]


def named(kernel: Kernel, head_dim: int, dtype: str) -> str:
    return f"{kernel} head_dim={head_dim} {dtype}"


def tune(wanted: Sequence[Row], seq: int) -> None:
    """Print the fastest tiles for each of these rows of the table.

    Args:
        seq: the length they are timed at; batch 4, 16 heads, causal and not.
    """
    hopper = torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)
    everything = [candidate for row in wanted for candidate in candidates(*row, hopper)]
    processes = max(1, min(24, (os.cpu_count() or 2) - 1))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        reasons = dict(zip(everything, pool.map(compile_candidate, everything), strict=True))
    for candidate, reason in reasons.items():
        if reason is not None:
            print(f"  {candidate}: {reason}", file=sys.stderr)
    print(f"{len(everything)} candidates, {sum(r is None for r in reasons.values())} fit")
    for row in wanted:
        timed = []
        for candidate, reason in reasons.items():
            if (candidate.kernel, candidate.head_dim, candidate.dtype) == row and reason is None:
                times = run_once(candidate, 4, 16, seq)
                timed.append((statistics.geometric_mean(times.values()), times, candidate))
        timed.sort(key=lambda entry: entry[0])
        print(named(*row))
        passed = False
        for mean, times, candidate in timed[:SHOWN]:
            trouble = None if passed else repeat_test(candidate)
            passed = passed or trouble is None
            print(
                f"  {mean:7.3f} ms  full {times[False]:.3f}  causal {times[True]:.3f}  "
                f"{candidate.tiles}  {trouble or ''}",
                flush=True,
            )
        if not passed:
            print("  no candidate passed", flush=True)
