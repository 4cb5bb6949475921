"""Bytes that a Triton kernel asks for, counted while Triton's interpreter runs it.

Every ``tl.load`` and ``tl.store`` is counted with its mask: what is masked out is not moved. On a
GPU the caches answer some of these requests; device memory sees fewer, never more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flashcourse.measure.kernel_source import kernel_module, kernel_name, load_kernel
from flashcourse.runtime import interpreting, require_triton


@dataclass(frozen=True)
class KernelTraffic:
    """Bytes requested by all programs of one launch."""

    loaded: int
    stored: int

    @property
    def total(self) -> int:
        """Loaded and stored bytes together."""
        return self.loaded + self.stored


def meter_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    timeout_s: float = 120.0,
) -> KernelTraffic:
    """Launch a kernel in the interpreter and count the bytes of its loads and stores.

    Where kernels are compiled (on a GPU machine) the interpreter runs in a process of its own, on
    copies of the arguments. Keep the sizes small: the interpreter is slow.

    Args:
        kernel: a function under ``@triton.jit``, from a file or from a notebook cell.
        grid: the number of programs along each axis.
        arguments: what is passed before the constants. Tensors that the kernel writes are written
            only where this process interprets.
        constants: the kernel's ``tl.constexpr`` parameters by name.

    Raises:
        TritonMissing: Triton is not installed.
        RuntimeError: the process that interprets failed; the message has its last words.
    """
    require_triton("meter_kernel")
    if interpreting():
        return _meter_here(kernel, grid, arguments, constants)
    with tempfile.TemporaryDirectory(prefix="flashcourse-meter-") as folder:
        request, answer = Path(folder, "request.pt"), Path(folder, "answer.pt")
        copies = [a.detach().cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
        torch.save(
            {
                "source": kernel_module(kernel),
                "name": kernel_name(kernel),
                "grid": tuple(grid),
                "arguments": copies,
                "constants": dict(constants),
            },
            request,
        )
        child = subprocess.run(
            [sys.executable, "-m", "flashcourse.measure.interpreted", str(request), str(answer)],
            capture_output=True,
            text=True,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            timeout=timeout_s,
        )
        if child.returncode != 0:
            raise RuntimeError(
                f"the process that interprets {kernel_name(kernel)} ended with status "
                f"{child.returncode}:\n{child.stderr[-2000:]}"
            )
        return KernelTraffic(**torch.load(answer))


def _meter_here(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]
) -> KernelTraffic:
    """Count between the interpreter and its memory: every load and store passes these two."""
    from triton.runtime.interpreter import interpreter_builder as builder

    _accept_new_numpy()
    moved = {"loaded": 0, "stored": 0}
    load, store = builder.create_masked_load, builder.create_masked_store

    def count(key: str, pointers: Any, mask: Any) -> None:
        itemsize = pointers.get_element_ty().primitive_bitwidth // 8
        moved[key] += int(mask.data.sum()) * itemsize

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        count("loaded", pointers, mask)
        return load(pointers, mask, *rest)

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count("stored", pointers, mask)
        return store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        kernel[grid](*arguments, **constants)
    finally:
        del builder.create_masked_load, builder.create_masked_store  # the class's own again
    return KernelTraffic(**moved)


def _accept_new_numpy() -> None:
    """Let loops run in the interpreters of Triton 3.4 to 3.6 under NumPy 2.4 and later.

    A scalar is an array of one element there, and its conversion to the integer that ``range``
    wants is an error in NumPy since 2.4. A GPU machine may well have both.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_before_flashcourse"):
        return
    patch = interpreter._patch_before_flashcourse = interpreter._patch_lang_tensor

    def as_index(tensor: Any) -> int:
        return int(tensor.handle.data.item())

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        if scope:  # from 3.5 on, what is patched for a launch is taken back after it
            scope[0].set_attr(tensor, "__index__", as_index)
        else:
            tensor.__index__ = as_index

    interpreter._patch_lang_tensor = patch_tensor


def _main(request_path: str, answer_path: str) -> None:
    request = torch.load(request_path, weights_only=True)
    kernel = load_kernel(request["source"], request["name"])
    traffic = _meter_here(kernel, request["grid"], request["arguments"], request["constants"])
    torch.save(asdict(traffic), answer_path)


if __name__ == "__main__":
    _main(*sys.argv[1:])
