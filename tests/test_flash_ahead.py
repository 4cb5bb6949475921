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
from flashcourse.attention.tuning import CHIPS, Tiles, table_entry

pytestmark = pytest.mark.needs_triton

# chip, kernel, dtype, head_dim, options: each kernel, and each kind of chip at its tightest
SAMPLE = [
    ("sm_75", "backward_kv", "float32", 256, {}),
    ("sm_89", "backward_q", "bfloat16", 64, {"varlen": True}),
    ("sm_90", "forward", "float16", 128, {}),
    ("sm_90", "backward_kv", "float16", 64, {"grouped": True, "has_right": False}),
    ("sm_120", "forward", "float16", 256, {"wide": True, "strided": True}),
    ("gfx942", "backward_kv", "float16", 128, {}),
]
PROGRAM = """
import json, sys
from flashcourse.attention import ahead
from flashcourse.attention.tuning import Tiles, table_entry
rows = []
for chip, kernel, dtype, head_dim, options in json.load(sys.stdin):
    tiles = table_entry(chip, kernel, head_dim, ahead.ITEMSIZE[dtype])
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
        assert job.tiles == table_entry(job.chip, job.kernel, job.head_dim, itemsize)
