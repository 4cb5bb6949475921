"""Reading what the answers' process says: somebody else's program may have written it."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from flashcourse.grading.launches import Launch
from flashcourse.grading.question import Observation


def observation(
    message: dict[str, Any], values: dict[str, Any], error: str, seconds: float
) -> Observation:
    """What the answer did, from a frame that reports it.

    Args:
        error, seconds: read and measured before.
    """
    return Observation(
        output=values.get("output"),
        error=error,
        changed_inputs=_texts(message.get("changed_inputs")),
        largest_shape=_numbers(message.get("largest_shape")),
        largest_numel=_number(message.get("largest_numel")),
        live_numel=_number(message.get("live_numel")),
        operators=frozenset(_texts(message.get("operators"))),
        library_calls=frozenset(_texts(message.get("library_calls"))),
        threads=message.get("threads") is True,
        launches=_launches(message.get("launches")),
        seconds=seconds,
    )


def how_it_ended(status: Any) -> str:
    """What became of a process, from its exit status."""
    if isinstance(status, int) and not isinstance(status, bool):
        if status < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-status).name
                return f"the answer's process was killed by {name}{_BECAUSE.get(name, '')}"
        return f"the answer ended its own process (exit status {status})"
    return "the answer's process ended"


_OUTSIDE = ": on a CPU mostly by a store outside a tensor; look at the masks and the strides"
_BECAUSE = {"SIGABRT": _OUTSIDE, "SIGSEGV": _OUTSIDE, "SIGBUS": _OUTSIDE}
_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "out of memory")
_DEVICE = ("CUDA error", "illegal memory access", "HIP error", "device-side assert")


def status_of(error: str) -> str:
    """What an error that an answer raised means for the question."""
    head = error.split("  (raised by the line")[0]
    if any(word in head for word in _MEMORY):
        return "out_of_memory"
    return "crashed" if any(word in head for word in _DEVICE) else "failed"


def text_of(value: Any) -> str:
    """A text of reasonable length; an empty one for anything else."""
    return value[:2000] if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    items = value[:1000] if isinstance(value, list) else []
    return tuple(item[:200] for item in items if isinstance(item, str))


def _number(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**62 else 0


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(_number(item) for item in value[:64]) if isinstance(value, list) else ()


def _launches(value: Any) -> tuple[Launch, ...]:
    items = value[:1000] if isinstance(value, list) else []
    return tuple(
        Launch(text_of(item[0]), item[1] is True, _number(item[2]))
        for item in items
        if isinstance(item, list) and len(item) == 3
    )
