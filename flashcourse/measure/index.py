"""An index of an array, as a kernel writes it: integers, slices and ``...``, checked."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any

IndexPart = int | slice | EllipsisType
Index = IndexPart | tuple[IndexPart, ...]


def resolve(name: str, shape: tuple[int, ...], index: Index) -> tuple[int | slice, ...]:
    """The index with one int or slice per dimension, checked against the array's shape.

    Args:
        name: the array's, for messages.

    Raises:
        IndexError: it lies outside the array, names too many dimensions or steps backwards.
        TypeError: a part of it is no integer, no slice and not ``...``.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"an index of {name} may hold `...` once, got {index!r}")
    missing = len(shape) - (len(parts) - len(dots))
    if missing < 0:
        raise IndexError(
            f"{name} has {len(shape)} dimensions {shape}, the index names "
            f"{len(parts) - len(dots)}: {index!r}"
        )
    place = dots[0] if dots else len(parts)
    parts[place : place + len(dots)] = [slice(None)] * missing
    return tuple(
        _resolve_part(name, axis, part, size)
        for axis, (part, size) in enumerate(zip(parts, shape, strict=True))
    )


def _resolve_part(name: str, axis: int, part: Any, size: int) -> int | slice:
    if isinstance(part, slice):
        if part.step is not None and part.step < 1:
            raise IndexError(f"a slice of {name} must step forwards, got {part}")
        if part.start is not None and part.start > size:
            raise IndexError(
                f"the slice {part.start}:{part.stop} of dimension {axis} of {name} begins "
                f"after its {size} entries"
            )
        return part
    try:
        number = operator.index(part)
    except TypeError:
        raise TypeError(
            f"an index of {name} is made of integers, slices and `...`, got "
            f"{type(part).__name__} for dimension {axis}"
        ) from None
    if not -size <= number < size:
        raise IndexError(
            f"index {number} is outside dimension {axis} of {name}, which has {size} entries"
        )
    return number
