"""Compiles the attention kernels for GPUs that are not here, and reads what they need.

``python -m flashcourse.attention.ahead`` compiles every entry of the tuning table for every chip
and prints shared memory, registers and spills. It runs where Triton is installed, GPU or not, in a
process whose interpreter is off: start it with ``TRITON_INTERPRET=0`` on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashcourse.attention.tuning import (
    BUCKETS,
    CHIPS,
    KERNELS,
    Kernel,
    Tiles,
    bucket_of,
    table_entry,
)

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Job:
    """One kernel to compile: for which chip, with which tiles and options."""

    chip: str
    kernel: Kernel
    dtype: str
    head_dim: int
    tiles: Tiles
    has_left: bool = False
    has_right: bool = True
    softcap: bool = False
    varlen: bool = False
    grouped: bool = False  # more query heads than KV heads
    wide: bool = False
    strided: bool = False  # head_dim not the dense dimension, strides not multiples of 16

    def __str__(self) -> str:
        tiles = self.tiles
        return (
            f"{self.chip} {self.kernel} {self.dtype} head_dim={self.head_dim} "
            f"{tiles.block_q}x{tiles.block_k} warps={tiles.warps} stages={tiles.stages}"
            f"{' tma' if tiles.tma else ''}{' gluon' if tiles.gluon else ''}"
            f"{f' registers={tiles.registers}' if tiles.registers else ''}"
        )


@dataclass(frozen=True)
class Needs:
    """What a compiled kernel takes: bytes of shared memory a program, registers and spilled bytes
    a thread."""

    shared_bytes: int
    registers: int
    spilled_bytes: int


def table_jobs(
    chips: Iterable[str] = tuple(CHIPS), dtypes: Iterable[str] = tuple(DTYPES)
) -> Iterator[Job]:
    """A job for each entry of the tables, with the mask that costs most registers."""
    for chip in chips:
        for dtype in dtypes:
            if chip == "sm_75" and dtype == "bfloat16":
                continue  # Turing has no bfloat16
            for kernel in KERNELS:
                for head_dim in BUCKETS:
                    # all, where there are others: one scheduled by hand, one for few keys
                    tiles = [
                        table_entry(chip, kernel, head_dim, ITEMSIZE[dtype], gluon, keys)
                        for gluon, keys in ((False, None), (True, None), (False, 0))
                    ]
                    for entry in dict.fromkeys(tiles):
                        yield Job(chip, kernel, dtype, head_dim, entry, has_left=True)


def compile_job(job: Job) -> Any:
    """The compiled kernel of a job.

    Raises:
        RuntimeError: Triton's interpreter is on in this process.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from flashcourse import runtime

    if runtime.interpreting():
        raise RuntimeError(
            "Triton's interpreter is on, so nothing is compiled here; "
            "start Python with TRITON_INTERPRET=0"
        )
    from flashcourse.attention.flash_kernels import kernel_for
    from flashcourse.attention.flash_plan import compiler_options

    function = kernel_for(job.kernel, job.tiles, job.tiles.tma and not _grouped_kv(job))
    target = (
        GPUTarget("cuda", int(job.chip[3:]), 32)
        if job.chip.startswith("sm_")
        else GPUTarget("hip", job.chip, 64)
    )
    return triton.compile(
        _source(function, job),
        target=target,
        options=compiler_options(job.tiles),
    )


def _source(function: Any, job: Job) -> Any:
    """What a launch would compile: the types of its arguments and what is known about them."""
    constants = {
        "HEAD_DIM": job.head_dim, "BLOCK_D": bucket_of(job.head_dim),
        "BLOCK_Q": job.tiles.block_q, "BLOCK_K": job.tiles.block_k,
        "VARLEN": job.varlen, "HAS_LEFT": job.has_left, "HAS_RIGHT": job.has_right,
        "SOFTCAP": job.softcap, "HAS_DLSE": False, "NEGATE": False, "GROUPED": job.grouped,
        "WIDE": job.wide,
        "TMA": job.tiles.tma and not _grouped_kv(job),
    }  # fmt: skip
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants[name]
        elif name == "dlse" or (name.startswith("cu_") and not job.varlen):
            signature[name] = "constexpr"
            constexprs[(index,)] = None
        elif name.startswith("cu_"):
            signature[name] = "*i32"
        elif name in ("lse", "delta"):
            signature[name] = "*fp32"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in ("q", "k", "v", "out", "do", "dq", "dk", "dv"):
            signature[name] = "*" + DTYPES[job.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif (name == "group" and not job.grouped) or (
            name.startswith("stride_") and name.endswith("d") and not job.strided
        ):
            signature[name] = "constexpr"
            constexprs[(index,)] = 1
        elif name.startswith("stride_"):
            signature[name] = "i64" if job.wide else "i32"
            if not job.strided:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in ("scale", "score_scale", "scale_log2", "cap_in", "cap_out"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
    return _source_type(function)(function, signature, constexprs, attributes)


def _grouped_kv(job: Job) -> bool:
    """As the launch decides: only Gluon's loop has a descriptor for each head of a group."""
    return job.grouped and job.kernel == "backward_kv" and not job.tiles.gluon


def _source_type(function: Any) -> Any:
    if getattr(function, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def needs_of(compiled: Any, chip: str) -> Needs:
    """Shared memory, registers and spills, read from the machine code."""
    shared = int(compiled.metadata.shared)
    if chip.startswith("gfx"):
        numbers = re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", compiled.asm["amdgcn"])
        found = {key: int(number) for key, number in numbers}
        return Needs(shared, found["vgpr_count"], 4 * found["vgpr_spill_count"])
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if usage is None:
        raise RuntimeError(f"cuobjdump's report has no register count: {report[:500]}")
    return Needs(shared, int(usage[1]), int(usage[2]))


def measure(job: Job) -> Needs:
    """Compile one job and read what it needs."""
    return needs_of(compile_job(job), job.chip)


def fits(job: Job, needs: Needs) -> bool:
    """True if the chip has the shared memory."""
    return needs.shared_bytes <= CHIPS[job.chip].shared_kib * 1024


def main(arguments: list[str] | None = None) -> int:
    """Compile the table or a part of it, print what each entry needs; 1 if one does not fit."""
    parser = argparse.ArgumentParser(prog="python -m flashcourse.attention.ahead")
    parser.add_argument("--chips", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)

    jobs = list(table_jobs(options.chips, options.dtypes))
    rows, failed = [], 0
    with ProcessPoolExecutor(options.processes) as pool:
        for job, needs in zip(jobs, pool.map(measure, jobs), strict=True):
            verdict = "" if fits(job, needs) else "  DOES NOT FIT"
            failed += bool(verdict)
            print(
                f"{job!s:70} {needs.shared_bytes / 1024:6.1f} KiB of "
                f"{CHIPS[job.chip].shared_kib}  {needs.registers:3} registers  "
                f"{needs.spilled_bytes:5} spilled{verdict}",
                flush=True,
            )
            rows.append({"job": asdict(job), "needs": asdict(needs)})
    if options.json:
        partial = options.json.with_suffix(".part")
        partial.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        os.replace(partial, options.json)
    print(f"{len(jobs)} kernels compiled, {failed} do not fit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
