"""Running an answer once and writing down what it did."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from flashcourse.grading.question import Answer, Case, Check, Observation
from flashcourse.measure.allocations import AllocationWatch

_PACKAGE = Path(__file__).parent.parent
# What an answer may not call: attention itself, and the formulas that lab 2 asks for.
LIBRARY = (
    str(_PACKAGE / "attention"),
    str(_PACKAGE / "measure" / "metered.py"),
    str(_PACKAGE / "measure" / "traffic.py"),
    str(_PACKAGE / "measure" / "roofline.py"),
)


def observe(check: Check, answer: Answer, case: Case) -> Observation:
    """Run ``answer`` on a copy of the case's inputs.

    Whatever it raises is caught and noted, ``SystemExit`` included; only an interrupt by the user
    passes through. Random numbers drawn by the answer do not disturb the caller's.
    """
    args, kwargs = _copy(case.args), _copy(case.kwargs)
    before = _copy((args, kwargs))
    library_calls: set[str] = set()
    with (
        torch.random.fork_rng(devices=[]),
        _noting_library_calls(library_calls),
        AllocationWatch(args, kwargs) as watch,
    ):
        try:
            output, error = check.call(answer, *args, **kwargs), ""
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            output, error = None, _describe(raised)
    return Observation(
        output=tree_map(_plain, output),
        error=error,
        changed_inputs=_changed(before, (args, kwargs)),
        largest_shape=watch.largest_shape,
        largest_numel=watch.largest_numel,
        operators=frozenset(watch.operators),
        library_calls=frozenset(library_calls),
    )


@contextmanager
def _noting_library_calls(names: set[str]) -> Iterator[None]:
    """Note which functions of the course's own attention library are called meanwhile."""

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            names.add(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def _copy(tree: Any) -> Any:
    """Copy every tensor in a structure, keeping its strides and whether it wants a gradient."""
    return tree_map(_copy_leaf, tree)


def _copy_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    if any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True)):
        copy = leaf.detach().clone()  # an expanded tensor cannot be written element by element
    else:
        copy.copy_(leaf.detach())
    return copy.requires_grad_(leaf.requires_grad)


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _changed(before: Any, after: Any) -> tuple[str, ...]:
    names = []
    leaves, _ = tree_flatten_with_path(before)
    for (path, old), new in zip(leaves, tree_leaves(after), strict=True):
        if isinstance(old, torch.Tensor) and not torch.equal(
            torch.nan_to_num(old), torch.nan_to_num(new.detach())
        ):
            _, *place = path
            where = getattr(place[0], "key", None) or f"number {getattr(place[0], 'idx', 0) + 1}"
            names.append(f"argument {where}")
    return tuple(names)


def _describe(error: BaseException) -> str:
    """The error and the learner's line that raised it (the last frame outside this library)."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith("<") or "ipykernel" in f.filename]
    if own and own[-1].line:
        text += f"  (raised by the line: {own[-1].line.strip()})"
    return text
