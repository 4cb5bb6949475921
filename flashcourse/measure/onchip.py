"""What a kernel holds on the chip: the tensors that are alive while it runs, and their limit."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashcourse.measure.memory import readable_bytes


class SramExceeded(MemoryError):
    """A kernel held more on the chip than ``sram_bytes``.

    Attributes:
        tile: the tile that was one too many, such as ``"64×4096 float32"``.
    """

    def __init__(self, message: str, tile: str) -> None:
        super().__init__(message)
        self.tile = tile


class NotOnChip(RuntimeError):
    """A kernel computed with a tensor that it had not loaded."""


# Ways out of a tensor that no operator sees: a list, an array or a pointer is on no meter.
_WAYS_OUT = (
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "storage",
    "untyped_storage",
    "data_ptr",
    "share_memory_",
)
_METERS = str(Path(__file__).parent)
_ONE_NUMBER = ("item", "__float__", "__int__", "__index__", "__bool__")


class TilesStay(TorchFunctionMode):
    """While active, a tile of more than one number cannot be turned into anything but tensors.

    A single number may be read, for a decision or a row's maximum, say: up to one for every two
    numbers that were loaded.

    Attributes:
        loaded: numbers loaded so far; whoever loads counts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0
        self._read = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # The meters ask for storages themselves, to tell tensors apart.
        if (
            name in _WAYS_OUT
            and args[0].numel() > 1
            and not sys._getframe(1).f_code.co_filename.startswith(_METERS)
        ):
            what = describe(tuple(args[0].shape), args[0].dtype)
            raise NotOnChip(
                f"{name}() takes a {what} tile off the chip, past the meter. A kernel computes "
                "with tensors, and gives back what it has made through hbm.store"
            )
        if name in _ONE_NUMBER:
            self._read += 1
            if self._read > max(64, self.loaded // 2):
                raise NotOnChip(
                    f"the kernel read {self._read} single numbers out of its tiles ({name}); a "
                    "kernel computes with whole tiles"
                )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Tile:
    storage: StorageWeakRef
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype


class OnChip(TorchDispatchMode):
    """Follows every tensor that a kernel makes, from the operation that makes it until it is freed.

    Views share one storage and count once. A tensor is freed when no variable refers to it: the
    one that a loop variable held in the last round lives until the variable is set again.

    Attributes:
        peak: the most bytes held at once.
    """

    def __init__(self, sram_bytes: int | None) -> None:
        super().__init__()
        self.sram_bytes = sram_bytes
        self.peak = 0
        self._tiles: dict[int, _Tile] = {}
        self._held = 0  # bytes in _tiles, those freed since the last look included
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(...) enters through it
            self._check_inputs(func, args)
            self._check_inputs(func, kwargs.values())
        output = func(*args, **kwargs)
        for tensor in _tensors_in((output,)):
            self.hold(tensor)
        return output

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The meter's own work is not the kernel's."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def check_room(self, nbytes: int, shape: torch.Size, dtype: torch.dtype) -> None:
        """Raise SramExceeded if a tile of ``nbytes`` does not fit beside what is held."""
        if self._held + nbytes <= self.peak:
            return  # even if nothing has been freed since the last look
        self._forget_freed()
        held = self._held + nbytes
        if self.sram_bytes is not None and held > self.sram_bytes:
            what = describe(tuple(shape), dtype)
            raise SramExceeded(self._explain(nbytes, what, held), what)
        self.peak = max(self.peak, held)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once, for as long as it is alive."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._tiles.get(key)
        if known is not None and not known.storage.expired():
            return
        if known is not None:
            self._held -= known.nbytes
            del self._tiles[key]
        nbytes = storage.nbytes()
        self.check_room(nbytes, tensor.shape, tensor.dtype)
        self._tiles[key] = _Tile(StorageWeakRef(storage), nbytes, tensor.shape, tensor.dtype)
        self._held += nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if this kernel made or loaded the tensor."""
        known = self._tiles.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.storage.expired()

    def _check_inputs(self, func: Any, inputs: Iterable[Any]) -> None:
        for tensor in _tensors_in(inputs):
            # A constant of one element is no traffic to speak of.
            if tensor.numel() > 1 and not self.holds(tensor):
                what = describe(tuple(tensor.shape), tensor.dtype)
                raise NotOnChip(
                    f"{func.overloadpacket.__name__} was given a {what} tensor that this kernel "
                    "neither loaded nor made. A kernel reads device memory only through hbm.load: "
                    "put the tensor in with hbm.put before the launch and load it inside"
                )

    def _forget_freed(self) -> None:
        freed = [key for key, tile in self._tiles.items() if tile.storage.expired()]
        for key in freed:
            self._held -= self._tiles.pop(key).nbytes

    def _explain(self, nbytes: int, what: str, held: int) -> str:
        assert self.sram_bytes is not None
        limit = f"the chip has {readable_bytes(self.sram_bytes)} a block"
        if nbytes > self.sram_bytes:
            return (
                f"this kernel holds a {what} tile: {readable_bytes(nbytes)}; {limit}. "
                "Work on a block of it at a time"
            )
        tiles = sorted(self._tiles.values(), key=lambda tile: -tile.nbytes)
        listed = ", ".join(
            f"{w} ({readable_bytes(n)})"
            for n, w in [
                (nbytes, what),
                *((t.nbytes, describe(tuple(t.shape), t.dtype)) for t in tiles[:4]),
            ]
        )
        more = f" and {len(tiles) - 4} more" if len(tiles) > 4 else ""
        return (
            f"this kernel holds {len(tiles) + 1} tiles at once, {readable_bytes(held)} in all: "
            f"{listed}{more}; {limit}. Use smaller blocks, or let go of tiles you have used (del)"
        )


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors among an operator's arguments or results, which nest in lists and tuples at most."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """``"64×128 float32"``; sizes of 1 in front say nothing and are left out."""
    sizes = list(shape)
    while len(sizes) > 2 and sizes[0] == 1:
        sizes.pop(0)
    return f"{'×'.join(map(str, sizes)) or 'scalar'} {str(dtype).removeprefix('torch.')}"
