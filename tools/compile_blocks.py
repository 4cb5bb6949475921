"""Make the table behind the block-size explorer of lesson 04: python tools/compile_blocks.py

Compiles the lesson's last kernel for every choice of blocks, warps, stages and GPU. Needs Triton
and some minutes, no GPU. Run it again when the kernel in the lesson changes; a test notices.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import torch

from flashcourse.measure.block_table import TABLE
from flashcourse.measure.compiled import Launch, compile_kernel
from flashcourse.measure.kernel_source import HEADER, kernel_fingerprint, load_kernel

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "04_triton_forward.ipynb"
CELL, KERNEL = "step-5-kernel", "with_early_exit"
HEAD_DIM, SEQ = 128, 4096
GRID: dict[str, tuple[Any, ...]] = {
    "target": ("sm_80", "sm_89", "sm_90"),
    "block_q": (64, 128, 256),
    "block_k": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3),
}


def lesson_kernel() -> Any:
    """The kernel as it stands in the lesson."""
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
    constants = "import math\n\nLN2 = tl.constexpr(math.log(2))\n\n"
    return load_kernel(HEADER + constants + cells[CELL], KERNEL)


def compile_choices(kernel: Any, choices: list[tuple]) -> list[list]:
    """One row for each (target, block_q, block_k, num_warps, num_stages)."""
    q, k, v, out = (torch.empty(1, 1, 16, HEAD_DIM, dtype=torch.float16) for _ in range(4))
    arguments = (q, k, v, out, torch.empty(16), SEQ, SEQ, HEAD_DIM**-0.5 * math.log2(math.e))
    launches = [
        Launch(
            target,
            {
                "GROUP": 1,
                "IS_CAUSAL": True,
                "BLOCK_D": HEAD_DIM,
                "HEAD_DIM": HEAD_DIM,
                "BLOCK_Q": block_q,
                "BLOCK_K": block_k,
            },
            num_warps,
            num_stages,
        )
        for target, block_q, block_k, num_warps, num_stages in choices
    ]
    results = compile_kernel(kernel, arguments, launches, keep_text=False, timeout_s=3600)
    return [
        [*choice, r.shared_bytes, r.threads, r.registers, r.spilled_bytes]
        for choice, r in zip(choices, results, strict=True)
    ]


def main() -> None:
    """Compile all choices, several at a time, and write the table whole."""
    import triton

    kernel = lesson_kernel()
    choices = list(itertools.product(*GRID.values()))
    workers = os.cpu_count() or 1
    parts = [choices[start::workers] for start in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        rows = [
            row for part in pool.map(lambda p: compile_choices(kernel, p), parts) for row in part
        ]
    content = {
        "made_by": "tools/compile_blocks.py",
        "triton": triton.__version__,
        "kernel": f"the kernel of step 5, causal, float16, head_dim {HEAD_DIM}",
        "fingerprint": kernel_fingerprint(kernel),
        "rows": sorted(rows),
    }
    text = json.dumps(content, indent=1).replace("\n   ", " ").replace("\n  ]", " ]")
    partial = TABLE.with_suffix(".json.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, TABLE)
    print(f"{len(rows)} configurations written to {TABLE.name}")


if __name__ == "__main__":
    main()
