"""What a compile produces: machine code, registers, shared memory. For any GPU, on any machine.

Triton compiles for a GPU that is not there. What it makes of a kernel can be read on a laptop:
only the time needs the chip.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashcourse.measure.kernel_source import kernel_module, kernel_name
from flashcourse.runtime import require_triton

CHILD = Path(__file__).with_name("compiled_child.py")

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
# What multiplies tiles: warp-wide mma from sm_75 on, warpgroup-wide wgmma on sm_90, tcgen05 on
# sm_100, mfma on AMD. ``fma`` is the plain multiply-add of one thread.
_INSTRUCTIONS = {
    "wgmma": r"^\s*wgmma\.mma_async\S*",
    "mma": r"^\s*mma\.sync\S*",
    "tcgen05": r"^\s*(?:@\S+\s+)?tcgen05\.mma\S*",
    "mfma": r"^\s*v_mfma_\S*",
    "fma": r"^\s*fma\.rn\S*",
    "ex2": r"^\s*ex2\.approx\S*",
    "cp.async": r"^\s*(?:@\S+\s+)?cp\.async\.c[ag]\S*",
}

_MATRIX = ("wgmma", "tcgen05", "mma", "mfma")


class CompileFailed(RuntimeError):
    """Triton could not compile a kernel for a target."""


@dataclass(frozen=True)
class Launch:
    """One configuration to compile for.

    Attributes:
        target: ``"sm_90"`` (NVIDIA compute capability 9.0), ``"gfx942"`` (AMD), ...
        constants: the kernel's ``tl.constexpr`` parameters by name.
        num_warps: warps of 32 threads (AMD: 64) that work on one program.
        num_stages: tiles in flight in a loop that loads and multiplies.
    """

    target: str
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel.

    Attributes:
        kernel: its name.
        launch: what it was compiled for.
        shared_bytes: shared memory of one program.
        threads: threads of one program.
        registers: 32-bit registers of one thread.
        spilled_bytes: bytes of one thread's stack. Registers that do not fit are kept there, in
            device memory.
        ttgir: Triton's own intermediate code with the layouts of the tiles; "" unless asked for.
        assembly: PTX, or AMD's assembly; "" unless asked for.
    """

    kernel: str
    launch: Launch
    shared_bytes: int
    threads: int
    registers: int
    spilled_bytes: int
    ttgir: str = ""
    assembly: str = ""

    @property
    def matrix_instruction(self) -> str | None:
        """The kind of instruction that multiplies tiles; None if plain multiply-adds do."""
        return next((kind for kind in _MATRIX if self.lines(kind)), None)

    def count(self, instruction: str) -> int:
        """How often an instruction is written in the assembly (a loop's body counts once).

        Args:
            instruction: ``"wgmma"``, ``"mma"``, ``"tcgen05"``, ``"mfma"``, ``"fma"``, ``"ex2"`` or
                ``"cp.async"``.
        """
        return len(self.lines(instruction))

    def lines(self, instruction: str) -> list[str]:
        """The instructions of a kind as they stand in the assembly, without their operands."""
        if instruction not in _INSTRUCTIONS:
            raise ValueError(
                f"instruction must be one of {', '.join(_INSTRUCTIONS)}, got {instruction!r}"
            )
        if not self.assembly:
            raise ValueError("the assembly was not kept: compile with keep_text=True")
        found = re.findall(_INSTRUCTIONS[instruction], self.assembly, re.MULTILINE)
        return [line.strip() for line in found]


def compile_kernel(
    kernel: Any,
    arguments: Sequence[Any],
    launches: Sequence[Launch],
    *,
    keep_text: bool = True,
    timeout_s: float = 600.0,
) -> list[Compiled]:
    """Compile a kernel as a launch with these arguments would, for GPUs that need not be there.

    The work is done in a process of its own, because in this one Triton may be interpreting.
    Triton's cache keeps the results: the second time takes a fraction of the first.

    Args:
        kernel: a function under ``@triton.jit``, from a file or from a notebook cell.
        arguments: what a launch would pass before the constants, in order: tensors (any device;
            only dtype and alignment matter), integers, floats, None.
        launches: the configurations.
        keep_text: keep the intermediate code and the assembly.
        timeout_s: seconds for all of them.

    Raises:
        TritonMissing: Triton is not installed.
        CompileFailed: a configuration does not compile; the message says which and why.
    """
    require_triton("compile_kernel")
    described = [_describe(argument) for argument in arguments]
    jobs = [
        {
            "target": launch.target,
            "constants": dict(launch.constants),
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "arguments": described,
            "keep_text": keep_text,
        }
        for launch in launches
    ]
    answers = _compile_in_child(kernel, jobs, timeout_s)
    results = []
    for launch, answer in zip(launches, answers, strict=True):
        if "error" in answer:
            raise CompileFailed(
                f"{kernel_name(kernel)} does not compile for {launch}: {answer['error']}\n"
                f"{answer['where']}"
            )
        results.append(Compiled(kernel_name(kernel), launch, **answer))
    return results


def compiled_table(results: Sequence[Compiled]) -> str:
    """One line a result: the instruction that multiplies, and what the kernel takes.

    "how often" counts instructions in the text: the body of a loop counts once.
    """
    lines = [
        f"{'kernel':16} {'target':6} {'multiplies with':38} {'how often':>9} {'2^x':>4} "
        f"{'shared':>8} {'registers':>9} {'spilled':>7}"
    ]
    for result in results:
        kind = result.matrix_instruction or "fma"
        # "wgmma.mma_async.sync.aligned.m64n64k16": the dtypes behind the shape are left out
        name = result.lines(kind)[0] if result.count(kind) else "-"
        name = re.sub(r"(m\d+n\d+k\d+).*", r"\1", name)
        lines.append(
            f"{result.kernel:16} {result.launch.target:6} {name:38} {result.count(kind):9} "
            f"{result.count('ex2'):4} {result.shared_bytes / 1024:4.0f} KiB {result.registers:9} "
            f"{result.spilled_bytes:7}"
        )
    return "\n".join(lines)


def _compile_in_child(kernel: Any, jobs: list[dict], timeout_s: float) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory(prefix="flashcourse-compile-") as folder:
        module, answer = Path(folder, "kernel.py"), Path(folder, "answer.json")
        module.write_text(kernel_module(kernel), encoding="utf-8")
        request = {"module": str(module), "kernel": kernel_name(kernel), "jobs": jobs}
        child = subprocess.run(
            [sys.executable, "-P", str(CHILD), str(answer)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s,
        )
        if child.returncode != 0 or not answer.is_file():
            raise CompileFailed(
                f"the process that compiles ended with status {child.returncode} and this "
                f"message:\n{child.stderr[-2000:]}"
            )
        return json.loads(answer.read_text(encoding="utf-8"))


def _describe(argument: Any) -> dict[str, Any]:
    """What the just-in-time compiler would know of an argument: type, 16-divisibility, is it 1."""
    if argument is None:
        return {"kind": "none"}
    if isinstance(argument, torch.Tensor):
        if argument.dtype not in _POINTERS:
            raise TypeError(f"a kernel argument has dtype {argument.dtype}, which is not supported")
        return {"kind": _POINTERS[argument.dtype], "divisible": argument.data_ptr() % 16 == 0}
    if isinstance(argument, bool):
        return {"kind": "i1"}
    if isinstance(argument, int):
        if not -(2**63) <= argument < 2**63:
            raise ValueError(f"an integer argument must fit in 64 bits, got {argument}")
        kind = "i32" if -(2**31) <= argument < 2**31 else "i64"
        return {"kind": kind, "divisible": argument % 16 == 0, "one": argument == 1}
    if isinstance(argument, float):
        return {"kind": "fp32"}
    raise TypeError(
        f"a kernel argument is a {type(argument).__name__}; allowed are tensors, integers, "
        "floats, booleans and None"
    )
