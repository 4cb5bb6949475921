"""Compiles decode kernels for GPUs that are not here: reads jobs on stdin, prints what they need.

A job is ``[chip, dtype, head_dim, rows, page_size (0: contiguous), window?, long?]``. Start it with
``TRITON_INTERPRET=0``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashcourse.attention.ahead import DTYPES, ITEMSIZE, needs_of
from flashcourse.attention.decode_kernels import decode_kernel
from flashcourse.attention.decode_tuning import decode_entry, tiles_of_entry
from flashcourse.attention.flash_plan import compiler_options
from flashcourse.attention.tuning import bucket_of


def source(dtype: str, constants: dict[str, Any]) -> ASTSource:
    """What a launch with dense, aligned tensors and several splits would compile."""
    signature, constexprs, attributes = {}, {}, {}
    aligned = [["tt.divisibility", 16]]
    for index, parameter in enumerate(decode_kernel.params):
        name = parameter.name
        if parameter.is_constexpr or (name == "table" and not constants["PAGED"]):
            signature[name], constexprs[(index,)] = "constexpr", constants.get(name)
        elif name in ("stride_qd", "stride_kd", "stride_vd", "stride_od", "stride_tn"):
            signature[name], constexprs[(index,)] = "constexpr", 1
        elif name in ("q", "k", "v", "out", "lse", "cache_seqlens", "table"):
            kind = {"q": DTYPES[dtype], "k": DTYPES[dtype], "v": DTYPES[dtype],
                    "out": "fp32", "lse": "fp32"}.get(name, "i32")  # fmt: skip
            signature[name], attributes[(index,)] = "*" + kind, aligned
        elif name in ("scale_log2", "cap_in", "cap_out"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name.startswith("stride_") and name != "stride_tb":
                attributes[(index,)] = aligned
    return ASTSource(decode_kernel, signature, constexprs, attributes)


def compile_job(
    chip: str,
    dtype: str,
    head_dim: int,
    rows: int,
    page_size: int,
    window: bool,
    long: bool = False,
) -> dict[str, Any]:
    """Shared memory, registers and spills of one kernel, and whether it uses a matrix unit."""
    itemsize = ITEMSIZE[dtype]
    tiles = tiles_of_entry(decode_entry(chip, head_dim, itemsize, long), rows, page_size > 0)
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_D": bucket_of(head_dim),
        "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k,
        "PAGED": page_size > 0, "PAGE_SIZE": page_size, "HAS_LEFT": window,
        "SOFTCAP": False, "NEGATE": False, "WIDE": False,
    }  # fmt: skip
    compiled = triton.compile(
        source(dtype, constants),
        target=GPUTarget("cuda", int(chip[3:]), 32),
        options=compiler_options(tiles),
    )
    needs = needs_of(compiled, chip)
    ptx = str(compiled.asm["ptx"])
    return {
        "chip": chip, "tiles": str(tiles), "shared": needs.shared_bytes,
        "registers": needs.registers, "spilled": needs.spilled_bytes,
        "mma": "mma.sync" in ptx or "wgmma" in ptx,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps([compile_job(*job) for job in json.load(sys.stdin)]))
