"""The kernels compile for GPUs that are not here, and fit them.

The default suite compiles a sample; ``python -m flashcourse.attention.ahead`` compiles the whole
table, which takes half an hour on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashcourse.attention import ahead
from flashcourse.attention.tuning import CHIPS, KERNELS, SHORT_TABLES, Tiles, table_entry

pytestmark = pytest.mark.needs_triton

# chip, kernel, dtype, head_dim, options: each kernel, and each kind of chip at its tightest
SAMPLE = [
    ("sm_75", "backward_kv", "float32", 256, {}),
    ("sm_89", "backward_q", "bfloat16", 64, {"varlen": True}),
    ("sm_90", "forward", "float16", 64, {}),
    ("sm_90", "backward_kv", "float16", 64, {"grouped": True, "has_right": False}),
    ("sm_90", "backward_q", "bfloat16", 128, {"wide": True}),
    ("sm_120", "forward", "float16", 256, {"wide": True, "strided": True}),
    ("gfx942", "backward_kv", "float16", 128, {}),
]
PROGRAM = """
import json, sys
from flashcourse.attention import ahead
from flashcourse.attention.tuning import Tiles, table_entry
rows = []
for chip, kernel, dtype, head_dim, options in json.load(sys.stdin):
    tiles = table_entry(chip, kernel, head_dim, ahead.ITEMSIZE[dtype], True)
    job = ahead.Job(chip, kernel, dtype, head_dim, tiles, **options)
    compiled = ahead.compile_job(job)
    needs = ahead.needs_of(compiled, chip)
    text = str(compiled.asm.get("ptx", ""))
    rows.append([str(job), needs.shared_bytes, needs.registers, needs.spilled_bytes,
                 "wgmma" in text, "mma.sync" in text, ahead.fits(job, needs)])
print(json.dumps(rows))
"""


def compile_elsewhere(program: str, request: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, whose interpreter is off."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parent,
    )


def test_a_sample_of_the_table_compiles_and_fits() -> None:
    done = compile_elsewhere(PROGRAM, SAMPLE)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == len(SAMPLE)
    for (name, shared, registers, _, wgmma, mma, fits), (chip, *_) in zip(
        rows, SAMPLE, strict=True
    ):
        assert fits, f"{name} takes {shared} bytes of shared memory, {chip} has less"
        assert 0 < registers <= 512, name
        assert wgmma == (chip == "sm_90"), name
        assert mma == (chip in ("sm_80", "sm_89", "sm_120")), name


def test_negative_control_tiles_that_are_too_large_do_not_fit() -> None:
    job = ahead.Job("sm_89", "forward", "float16", 256, Tiles(128, 128, 8, 2))
    assert not ahead.fits(job, ahead.Needs(100 * 1024, 255, 0))
    assert ahead.fits(job, ahead.Needs(99 * 1024, 255, 0))


def test_the_interpreter_cannot_be_taken_for_the_compiler() -> None:
    program = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from flashcourse.attention import ahead\n"
        "ahead.compile_job(next(ahead.table_jobs(['sm_80'])))\n"
    )
    done = compile_elsewhere(program, None)
    assert done.returncode != 0
    assert "start Python with TRITON_INTERPRET=0" in done.stderr


def test_jobs_cover_the_table() -> None:
    jobs = list(ahead.table_jobs())
    assert {job.chip for job in jobs} == set(CHIPS)
    assert not [job for job in jobs if job.chip == "sm_75" and job.dtype == "bfloat16"]
    for job in jobs:
        itemsize = ahead.ITEMSIZE[job.dtype]
        assert job.tiles in [
            table_entry(job.chip, job.kernel, job.head_dim, itemsize, gluon, keys)
            for gluon, keys in ((False, None), (True, None), (False, 0))
        ]
    for kernel in KERNELS:
        assert [j for j in jobs if j.kernel == kernel and j.chip == "sm_90" and j.tiles.gluon]
    for head_dim, (_, tiles) in SHORT_TABLES["hopper"][2]["forward"].items():
        assert [j for j in jobs if j.head_dim == head_dim and j.tiles == tiles]


SCHEDULE = """
import json, subprocess, sys, tempfile
from pathlib import Path
from triton import knobs
from flashcourse.attention import ahead
from flashcourse.attention.tuning import table_entry
found = {}
kernels = ("forward", False), ("backward_q", False), ("backward_kv", False), ("backward_kv", True)
for kernel, grouped in kernels:
    tiles = table_entry("sm_90", kernel, 128, 2, True)
    job = ahead.Job("sm_90", kernel, "float16", 128, tiles, has_right=False, grouped=grouped)
    compiled = ahead.compile_job(job)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        text = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", str(cubin)], check=True,
                              capture_output=True, text=True).stdout
    waits = text.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1:]
    overlapped = [part.split("WARPGROUP.DEPBAR")[0].count("MUFU.EX2") for part in waits]
    needs = ahead.needs_of(compiled, "sm_90")
    name = kernel + ", grouped" * grouped
    found[name] = [tiles.gluon, max(overlapped, default=0), needs.shared_bytes]
print(json.dumps(found))
"""


def test_for_hopper_the_exponentials_run_while_a_product_is_in_flight() -> None:
    """The assembler may move a wait ahead of them; the result stays right, and slow."""
    done = compile_elsewhere(SCHEDULE, None)
    assert done.returncode == 0, done.stderr[-2000:]
    for kernel, (gluon, overlapped, shared) in json.loads(done.stdout.splitlines()[-1]).items():
        assert gluon, kernel
        assert overlapped >= 32, f"{kernel}: {overlapped} exponentials between the two waits"
        # Two programs of a backward share a multiprocessor; one of the forward fills it.
        programs = 1 if kernel == "forward" else 2
        assert programs * shared <= 227 * 1024, kernel
