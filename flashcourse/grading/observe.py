"""Running an answer once and writing down what it did."""

from __future__ import annotations

import _thread
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map

from flashcourse.grading.launches import noting_launches
from flashcourse.grading.question import Answer, Case, Check, Observation
from flashcourse.measure.allocations import AllocationWatch

_PACKAGE = Path(__file__).parent.parent
# The questions and their known mistakes: references and right answers are in there.
_QUESTIONS = tuple(str(_PACKAGE / "grading" / name) for name in ("questions", "mistakes_"))
# What an answer may not call: attention itself, the formulas that lab 2 asks for, the allocator.
LIBRARY = (
    str(_PACKAGE / "attention"),
    str(_PACKAGE / "serving"),
    str(_PACKAGE / "measure" / "metered.py"),
    str(_PACKAGE / "measure" / "traffic.py"),
    str(_PACKAGE / "measure" / "roofline.py"),
)

SHARE = "FLASHCOURSE_GPU_SHARE"  # a variable: the part of a GPU's memory for each process
_THREAD_STARTERS = tuple(
    getattr(_thread, name)
    for name in ("start_new_thread", "start_new", "start_joinable_thread")
    if hasattr(_thread, name)
)

CELL_FOLDER = "answer_cells"  # where the grader keeps a learner's cells, each in a file


def observe(check: Check, answer: Answer, case: Case) -> Observation:
    """Run ``answer`` on a copy of the case's inputs.

    Whatever it raises is caught and noted, ``SystemExit`` included; only an interrupt by the user
    passes through. Random numbers drawn by the answer do not disturb the caller's.
    """
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves(case.args)):
        _keep_to_share()
    args, kwargs = _copy(case.args), _copy(case.kwargs)
    before = _copy((args, kwargs))
    library_calls: set[str] = set()
    threads: list[str] = []
    with (
        torch.random.fork_rng(devices=[]),
        # Else a GPU's backward runs in a thread of its own, where calls are not seen.
        torch.autograd.set_multithreading_enabled(False),
        _noting_calls(library_calls, threads),
        noting_launches() as launches,
        AllocationWatch(args, kwargs) as watch,
    ):
        started = time.perf_counter()
        try:
            output, error = check.call(answer, *args, **kwargs), ""
            if torch.cuda.is_initialized():  # what a kernel did wrong is this answer's error
                torch.cuda.synchronize()
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            output, error = None, describe_error(raised)
        seconds = time.perf_counter() - started
    try:
        changed = _changed(before, (args, kwargs))
    except RuntimeError:
        if not error:
            raise
        changed = ()  # after an illegal access nothing on the GPU can be read any more
    return Observation(
        output=tree_map(_plain, output),
        error=error,
        changed_inputs=changed,
        largest_shape=watch.largest_shape,
        largest_numel=watch.largest_numel,
        live_numel=watch.live_numel,
        operators=frozenset(watch.operators),
        library_calls=frozenset(library_calls),
        threads=bool(threads),
        launches=tuple(launches),
        seconds=seconds,
    )


@cache
def _keep_to_share() -> None:
    """Take no more of the GPU's memory than `grade` allots to a process: others are at work."""
    share = os.environ.get(SHARE)
    if share:
        torch.cuda.set_per_process_memory_fraction(float(share))


def output_of(check: Check, answer: Answer, case: Case) -> Any:
    """What ``answer`` returns on a copy of the case's inputs, unwatched: twenty times as fast.

    Raises:
        Exception: whatever the answer raised.
    """
    with torch.random.fork_rng(devices=[]):
        output = check.call(answer, *_copy(case.args), **_copy(case.kwargs))
    return tree_map(_plain, output)


@contextmanager
def _noting_calls(names: set[str], threads: list[str]) -> Iterator[None]:
    """Note which functions of the course's own library are called meanwhile, and threads started.

    Only the function that was called is named, not what it calls in turn. In a thread of its own
    an answer would be out of sight, and out of the sight of the operators' watch as well.
    """

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            if argument in _THREAD_STARTERS:
                threads.append(frame.f_code.co_name)
            return
        if event != "call":
            return
        code, caller = frame.f_code, frame.f_back
        if code.co_filename.startswith(LIBRARY):
            if caller is None or not caller.f_code.co_filename.startswith(LIBRARY):
                names.add(code.co_name)
        elif code.co_filename.startswith(_QUESTIONS) and _is_borrowed(frame):
            names.add(code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def _is_borrowed(frame: FrameType) -> bool:
    """True if a function of a question's file, such as its reference, is called by the answer.

    The generators and hooks that a check hands to the answer are nested functions; they may be.
    """
    caller = frame.f_back
    function = frame.f_globals.get(frame.f_code.co_name)
    return (
        caller is not None
        and _is_learners(caller.f_code.co_filename)
        and getattr(function, "__code__", None) is frame.f_code
    )


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
    """The arguments that are not what they were: tensors, lists, and numbers in lists."""
    (args, kwargs), (args_now, kwargs_now) = before, after
    pairs = [(f"number {i + 1}", old, args_now[i]) for i, old in enumerate(args)]
    pairs += [(name, old, kwargs_now[name]) for name, old in kwargs.items()]
    found = ((name, _changed_items(old, now)) for name, old, now in pairs)
    return tuple(f"argument {name}{items}" for name, items in found if items is not None)


def _changed_items(old: Any, now: Any) -> str | None:
    """None if nothing changed, else which items of a container did, in words."""
    leaves, structure = tree_flatten_with_path(old)
    leaves_now, structure_now = tree_flatten(now)
    if structure != structure_now:
        return ""
    paths = [
        path
        for (path, leaf), leaf_now in zip(leaves, leaves_now, strict=True)
        if not _unchanged(leaf, leaf_now)
    ]
    if not paths:
        return None
    if not paths[0]:
        return ""
    first = (path[0] for path in paths)
    names = list(dict.fromkeys(str(getattr(p, "idx", getattr(p, "key", p))) for p in first))
    told = " and ".join(names[:2]) if len(names) < 3 else f"{names[0]}, {names[1]} and more"
    return f" (item {told})" if len(names) == 1 else f" (items {told})"


def _unchanged(old: Any, now: Any) -> bool:
    if isinstance(old, torch.Tensor):
        return isinstance(now, torch.Tensor) and _identical(old.detach(), now.detach())
    if isinstance(old, (bool, int, float, str)):
        return type(now) is type(old) and (now == old or (now != now and old != old))
    return True


def _identical(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Equal in every number; NaN equals NaN."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    return bool(((old == new) | (old.isnan() & new.isnan())).all())


def describe_error(error: BaseException) -> str:
    """The error and the learner's line that raised it (the last frame in one of their cells)."""
    try:
        said = str(error)
    except BaseException:  # an exception of the learner's own, whose __str__ fails
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if _is_learners(f.filename)]
    if own and own[-1].line:
        text += f"  (raised by the line: {own[-1].line.strip()})"
    return text


def _is_learners(filename: str) -> bool:
    notebook = filename.startswith("<") or "ipykernel" in filename
    return notebook or Path(filename).parent.name == CELL_FOLDER
