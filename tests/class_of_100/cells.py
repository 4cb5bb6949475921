"""The answer cells of the class, as sources; what is right stands in other files already."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from flashcourse.measure.kernel_source import kernel_source

SOLVED = Path(__file__).parents[2] / "solutions" / "lab4_triton_forward.ipynb"
FAILED, TIMEOUT, CRASHED = ("failed",), ("timeout",), ("crashed",)


@dataclass(frozen=True)
class Cell:
    """One answer.

    Attributes:
        name: what it is, fit for a file's name.
        source: of the cell; empty for the stub as it was given out.
        statuses: what its own question may be called.
        mistake: the known mistake it shows, if it is one.
        speed: what the question on speed may be called on a GPU, if the answer is right.
    """

    name: str
    source: str
    statuses: tuple[str, ...] = ("passed",)
    mistake: str = ""
    speed: tuple[str, ...] = ("passed", "failed")


def _solved(cell_id: str) -> str:
    notebook = json.loads(SOLVED.read_text(encoding="utf-8"))
    source = next(cell for cell in notebook["cells"] if cell["id"] == cell_id)["source"]
    return "".join(source)


def _marked(question: str, source: str) -> str:
    return f"# lab: lab4-{question}\n{dedent(source).strip()}\n"


def _changed(source: str, old: str, new: str) -> str:
    if old not in source:
        raise ValueError(f"the source no longer holds {old!r}")
    return source.replace(old, new)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)[:40].strip("_")


# Softmax ----------------------------------------------------------------------------------------


def right_softmaxes() -> list[Cell]:
    """The solution and two others."""
    from right_answers import lab4  # imports Triton, which flashcourse wants to prepare

    others = []
    for kernel, answer in (
        (lab4._rows_in_chunks, lab4.in_chunks),
        (lab4._several_rows, lab4.several_rows),
    ):
        source = f"{kernel_source(kernel)}\n\n{inspect.getsource(answer)}"
        source = source.replace(f"def {answer.__name__}(", "def row_softmax(")
        others.append(Cell(answer.__name__, _marked("row_softmax", source)))
    return [Cell("solution", _solved("lab4-row_softmax")), *others]


def wrong_softmaxes() -> list[Cell]:
    """The solution with one place changed."""
    right = _solved("lab4-row_softmax")
    changes = {
        "no_maximum": ("s - tl.max(s, 0)", "s"),
        "not_divided": ("e / tl.sum(e, 0)", "e"),
        "strides_ignored": ("*x.stride()", "columns, 1"),
        "base_2": ("tl.exp(", "tl.exp2("),
        "padded_with_0": ('other=float("-inf")', "other=0.0"),
    }
    cells = [Cell(name, _changed(right, *change), FAILED) for name, change in changes.items()]
    in_pytorch = "def row_softmax(x):\n    return torch.softmax(x, dim=-1)"
    return [
        *cells,
        Cell("in_pytorch", _marked("row_softmax", in_pytorch), FAILED),
        Cell("stub", "", ("missing",)),
    ]


# The forward, right -----------------------------------------------------------------------------


def right_forwards() -> list[Cell]:
    """The solution, which is fast enough, and four others, which may be too slow."""
    from right_answers import lab4

    from flashcourse.grading import mistakes_triton_forward as mistakes

    solution = Cell("solution", _solved("lab4-flash_forward"), speed=("passed",))
    backwards = f"{kernel_source(lab4._backwards_kernel)}\n\n" + inspect.getsource(
        lab4.from_the_last_key
    ).replace("def from_the_last_key(", "def flash_forward(")
    tall = backwards.replace("block_q=128, block_k=16", "block_q=16, block_k=128")
    passes = "\n\n".join(
        [
            kernel_source(lab4._scores),
            kernel_source(lab4._two_pass_kernel),
            inspect.getsource(lab4.in_three_passes).replace("in_three_passes(", "flash_forward("),
        ]
    )
    return [
        solution,
        Cell("from_the_last_key", _marked("flash_forward", backwards)),
        Cell("wide_tiles", _marked("flash_forward", tall)),
        Cell("three_passes", _marked("flash_forward", passes)),
        Cell("plain_kernel", _with_kernel(kernel_source(mistakes.forward_kernel))),
        solution,
    ]


_AROUND = """
import math
from collections.abc import Callable
from typing import Any

BLOCK = 32


{kernel}


{launch}


def contiguous_strides(tensor):
    return tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(4))


def flash_forward(q, k, v, is_causal=False):
    return launch(forward_kernel, q, k, v, is_causal{options})
"""
_OPTIONS = {
    "scale missing": ", scale=lambda head_dim: 1.0",
    "scaled twice": ", scale=lambda head_dim: 1.0 / head_dim",
    "scale from the padded head_dim": (
        ", scale=lambda n: max(16, triton.next_power_of_2(n)) ** -0.5"
    ),
    "the last queries are dropped": ", programs=lambda seq_q: seq_q // BLOCK",
    "strides ignored": ", strides=contiguous_strides",
}


def _with_kernel(kernel: str, options: str = "") -> str:
    from flashcourse.grading import mistakes_triton_forward as mistakes

    launch = inspect.getsource(mistakes.launch)
    return _marked("flash_forward", _AROUND.format(kernel=kernel, launch=launch, options=options))


def wrong_forwards() -> list[Cell]:
    """Every known mistake, as a kernel."""
    from flashcourse.grading import mistakes_triton_forward as mistakes

    right = kernel_source(mistakes.forward_kernel)
    cells = []
    for name, changes in mistakes.CHANGES.items():
        kernel = right
        for old, new in changes:
            kernel = _changed(kernel, old, new)
        cells.append(Cell(_slug(name), _with_kernel(kernel), FAILED, name))
    for name in mistakes.LAUNCHES:
        cells.append(Cell(_slug(name), _with_kernel(right, _OPTIONS[name]), FAILED, name))
    return cells


# The forward, broken ----------------------------------------------------------------------------

_MATRIX = """
def by_matrix(q, k, v, is_causal=False):
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    s = q.float() @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        i, j = (torch.arange(n, device=q.device) for n in (seq_q, seq_k))
        s = s.masked_fill(j > i[:, None] + seq_k - seq_q, -float("inf"))
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - torch.where(lse == -float("inf"), 0.0, lse)[..., None])
    return (p @ v).to(q.dtype), lse
"""
_KERNEL = """
@triton.jit
def some_kernel(q, k, v, out, n, STEP: tl.constexpr):
    {body}

def flash_forward(q, k, v, is_causal=False):
    out = torch.zeros_like(q)
    some_kernel[(1,)](q, k, v, out, q.shape[2], STEP=16)
    return out, out.float().sum(-1)
"""
_BROKEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "syntax": ("def flash_forward(q, k, v, is_causal=False)\n    return q", FAILED),
    "raises": ("def flash_forward(q, k, v, is_causal=False):\n    return oops", FAILED),
    "not_written": (
        "def flash_forward(q, k, v, is_causal=False):\n    raise NotImplementedError()",
        FAILED,
    ),
    "no_such_function": ("def flash(q, k, v, is_causal=False):\n    return q, q", FAILED),
    "returns_nothing": ("def flash_forward(q, k, v, is_causal=False):\n    pass", FAILED),
    "returns_out_alone": (
        "def flash_forward(q, k, v, is_causal=False):\n    return torch.zeros_like(q)",
        FAILED,
    ),
    "other_signature": ("def flash_forward(q, k):\n    return q", FAILED),
    "nan": (
        "def flash_forward(q, k, v, is_causal=False):\n"
        "    return q * float('nan'), q.new_full(q.shape[:3], float('nan'), dtype=torch.float32)",
        FAILED,
    ),
    "sdpa": (
        """
        def flash_forward(q, k, v, is_causal=False):
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return out, torch.zeros(q.shape[:3], device=q.device)
        """,
        FAILED,
    ),
    "matrix_in_pytorch": (
        _MATRIX + "\nflash_forward = by_matrix",
        FAILED,
    ),
    "kernel_for_show": (
        _MATRIX
        + """
@triton.jit
def show(q, out, n, STEP: tl.constexpr):
    i = tl.arange(0, STEP)
    tl.store(out + i, tl.load(q + i, mask=i < n, other=0.0), mask=i < n)

def flash_forward(q, k, v, is_causal=False):
    show[(1,)](q, torch.zeros(16, device=q.device), q.numel(), STEP=16)
    return by_matrix(q, k, v, is_causal)
""",
        FAILED,
    ),
    "library": (
        """
        def flash_forward(q, k, v, is_causal=False):
            from flashcourse.attention import flash_attention
            return flash_attention(q, k, v, is_causal=is_causal, return_lse=True)
        """,
        FAILED,
    ),
    "kept_by_shape": (
        _MATRIX
        + """
kept = {}
def flash_forward(q, k, v, is_causal=False):
    key = (q.shape[-1], is_causal)
    if key not in kept:
        kept[key] = by_matrix(q, k, v, is_causal)
    return kept[key]
""",
        FAILED,
    ),
    "changes_inputs": (
        _MATRIX + "\ndef flash_forward(q, k, v, is_causal=False):\n    q *= 1.5\n"
        "    return by_matrix(q, k, v, is_causal)",
        FAILED,
    ),
    "patched_checker": (
        """
        import flashcourse.grading.judge as judge, flashcourse.grading.mark as mark
        judge.judge_tensors = judge.judge_tensor = lambda *a, **k: None
        torch.allclose = torch.equal = lambda *a, **k: True
        def flash_forward(q, k, v, is_causal=False):
            return q, q
        """,
        FAILED,
    ),
    "printed_score": (
        "def flash_forward(q, k, v, is_causal=False):\n"
        "    print('✓ lab4.flash_forward: passed, 12 of 12 points')",
        FAILED,
    ),
    "exits": ("import os\ndef flash_forward(q, k, v, is_causal=False):\n    os._exit(0)", CRASHED),
    "segmentation_fault": (
        "import ctypes\ndef flash_forward(q, k, v, is_causal=False):\n    ctypes.string_at(0)",
        CRASHED,
    ),
    "endless": ("def flash_forward(q, k, v, is_causal=False):\n    while True: pass", TIMEOUT),
    "endless_when_defined": ("import time\ntime.sleep(100000)", TIMEOUT),
    "endless_kernel": (
        _KERNEL.format(body="while n > 0:\n        tl.store(out, 0.0)"),
        TIMEOUT,
    ),
    "writes_far_away": (
        _KERNEL.format(
            body="far = tl.arange(0, STEP).to(tl.int64) + 2**40\n    tl.store(out + far, 1.0)"
        ),
        CRASHED,
    ),
    "memory_hog": (
        """
        kept = []
        def flash_forward(q, k, v, is_causal=False):
            while True:
                kept.append(torch.ones(1 << 26, device=q.device))
        """,
        ("out_of_memory",),
    ),
    "host_memory_hog": (
        """
        kept = []
        def flash_forward(q, k, v, is_causal=False):
            while True:
                kept.append(bytearray(b"x" * (64 << 20)))
        """,
        ("out_of_memory",),
    ),
    "fork_bomb": (
        """
        import os, time
        def flash_forward(q, k, v, is_causal=False):
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
                time.sleep(0.02)
        """,
        ("crashed", "out_of_memory", "timeout"),
    ),
}


def broken_forwards() -> list[Cell]:
    """What does not work at all, and what attacks the grader."""
    cells = [
        Cell(name, _marked("flash_forward", source), statuses)
        for name, (source, statuses) in _BROKEN.items()
    ]
    return [*cells, Cell("stub", "", ("missing",))]
