"""Noting which Triton kernels run, on a GPU and in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_PACKAGE = Path(__file__).parent.parent
_BORROWED = tuple(map(str, (_PACKAGE / "attention", Path(torch.__file__).parent)))
# Where a launch passes, compiled or interpreted: (module, class, method).
_GATES = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
)


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel.

    Attributes:
        kernel: its name.
        own: False if it, or a function it calls, belongs to this course's attention library or to
            PyTorch.
        tensors: how many tensors it was given.
    """

    kernel: str
    own: bool
    tensors: int


@contextmanager
def noting_launches() -> Iterator[list[Launch]]:
    """The kernels launched meanwhile, in order; a launch that raises is not noted.

    A kernel that is called by a kernel is no launch, nor is a compilation ahead of time. Where
    Triton has not been imported there is nothing to note.
    """
    launches: list[Launch] = []
    replaced: list[tuple[type, Callable[..., Any]]] = []
    for module, name in _GATES:
        gate = getattr(sys.modules.get(module), name, None)
        if gate is not None:
            replaced.append((gate, gate.run))
            gate.run = _noted(gate.run, launches)
    try:
        yield launches
    finally:
        for gate, run in replaced:
            gate.run = run  # type: ignore[attr-defined]


def _noted(run: Callable[..., Any], launches: list[Launch]) -> Callable[..., Any]:
    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        # What the interpreter does inside is not the learner's work; and noting each of its calls
        # would make it three times slower.
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            with _disable_current_modes():
                result = run(kernel, *args, **kwargs)
        finally:
            sys.setprofile(profile)
        if not kwargs.get("warmup"):
            given = [*args, *kwargs.values()]
            launches.append(
                Launch(
                    kernel=kernel.fn.__name__,
                    own=not any(_borrowed(function) for function in _functions(kernel.fn)),
                    tensors=sum(isinstance(value, torch.Tensor) for value in given),
                )
            )
        return result

    return noted


def _functions(kernel: FunctionType) -> list[FunctionType | ModuleType]:
    """The kernel and all that it can call: functions under ``@triton.jit``, and modules of them."""
    found: list[FunctionType | ModuleType] = [kernel]
    for function in found:
        if not isinstance(function, FunctionType):
            continue
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            value = getattr(value, "fn", value)
            if isinstance(value, (FunctionType, ModuleType)) and value not in found:
                found.append(value)
    return found


def _borrowed(code: FunctionType | ModuleType) -> bool:
    if isinstance(code, FunctionType):
        return code.__code__.co_filename.startswith(_BORROWED)
    return str(getattr(code, "__file__", "")).startswith(_BORROWED[0])
