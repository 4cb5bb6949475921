"""A pretend device memory that counts every byte a kernel reads and writes.

A GPU computes on what lies on the chip (registers and shared memory, "SRAM") and must fetch
everything else from device memory ("HBM"). :class:`HBM` makes that visible on any machine: arrays
live in it behind handles, and the only ways in and out are ``load`` and ``store``, which count.

The meter counts what a program asks for. A real chip also has a cache (L2) between the two, which
serves repeated reads of the same bytes, and moves whole sectors of 32 bytes; a hardware counter
at the memory therefore reads less where tiles are loaded again soon, and a little more at edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from flashcourse.measure.index import Index, resolve
from flashcourse.measure.memory import readable_bytes
from flashcourse.measure.onchip import OnChip, TilesStay, describe


def _needs_load(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Array, *_others: object) -> NoReturn:
        raise TypeError(
            f"{self.name} lies in device memory, so it has no {what}: "
            f"load what you need with hbm.load({self.name}, index) and use the tile that comes back"
        )

    return refuse


class Array:
    """A handle to an array in :class:`HBM`: shape and dtype are known, values are not.

    Attributes:
        name, shape, dtype, device: as it was put there.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.itemsize = tensor.element_size()

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return prod(self.shape) * self.itemsize

    def __repr__(self) -> str:
        return f"<{self.name}: {describe(self.shape, self.dtype)} in HBM>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} has no dimensions")
        return self.shape[0]

    __getitem__ = __setitem__ = _needs_load("elements")
    __iter__ = _needs_load("elements")
    __array__ = _needs_load("values")
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _needs_load("arithmetic")
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _needs_load("arithmetic")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        arrays = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Array)]
        name = getattr(func, "__name__", str(func))
        raise TypeError(
            f"torch's {name} was given {arrays[0].name}, which lies in device memory. Load a tile "
            f"of it first: tile = hbm.load({arrays[0].name}, index)"
        )


@dataclass
class Traffic:
    """Bytes moved between device memory and the chip, under one name."""

    name: str
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def bytes_moved(self) -> int:
        """Both directions together."""
        return self.bytes_read + self.bytes_written


class HBM:
    """Pretend device memory with a meter.

    Args:
        sram_bytes: what one kernel may hold on the chip at a time, in bytes; None for no limit.
            With a limit, ``load`` works only inside :meth:`launch`, where the chip is watched.

    Attributes:
        sram_bytes: the limit.
        sram_peak: the most bytes that any launch so far held on the chip at once.

    Example:
        >>> hbm = HBM(sram_bytes=100 * 1024)
        >>> x = hbm.put(torch.ones(1000), name="x")
        >>> y = hbm.empty((1000,), torch.float32, name="y")
        >>> def double(hbm, x, y):
        ...     for start in range(0, 1000, 128):
        ...         block = slice(start, start + 128)
        ...         hbm.store(y, block, 2 * hbm.load(x, block))
        >>> hbm.launch(double, x, y)
        >>> hbm.bytes_read, hbm.bytes_written
        (4000, 4000)
    """

    def __init__(self, sram_bytes: int | None = None) -> None:
        if sram_bytes is not None and (
            not isinstance(sram_bytes, int) or isinstance(sram_bytes, bool) or sram_bytes < 1
        ):
            raise ValueError(
                f"sram_bytes must be a positive number of bytes or None for no limit, "
                f"got {sram_bytes!r}"
            )
        self.sram_bytes = sram_bytes
        self.sram_peak = 0
        self._memory: dict[Array, torch.Tensor] = {}
        self._chip: OnChip | None = None
        self._tiles = TilesStay()
        self._sections: dict[str, Traffic] = {}
        self._section = "outside any section"

    # What lies in the memory

    def put(self, tensor: torch.Tensor, name: str | None = None) -> Array:
        """Place a copy of a tensor in the memory, as if it had always been there: not counted."""
        if self._chip is not None:
            raise RuntimeError("a kernel cannot put arrays: hbm.put belongs before the launch")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"hbm.put takes a torch.Tensor, got {type(tensor).__name__}")
        return self._keep(tensor.detach().clone(), name)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
        device: torch.device | str = "cpu",
    ) -> Array:
        """Room for an array: not counted. It holds NaN (integers: their largest value) until it
        is stored to, so that a place that was forgotten shows."""
        fill = float("nan") if dtype.is_floating_point else 1
        if not dtype.is_floating_point and dtype != torch.bool:
            fill = torch.iinfo(dtype).max
        with self._outside_the_chip():
            tensor = torch.full(tuple(shape), fill, dtype=dtype, device=device)
        return self._keep(tensor, name)

    def read(self, array: Array) -> torch.Tensor:
        """A copy of the whole array for the world outside: not counted, not for kernels."""
        if self._chip is not None:
            raise RuntimeError("a kernel reads through hbm.load; hbm.read is for the world outside")
        return self._tensor(array).clone()

    # What a kernel may do

    def load(self, array: Array, index: Index = ...) -> torch.Tensor:
        """Bring a tile onto the chip and count its bytes as read.

        Args:
            index: integers, slices and ``...`` as for a tensor. A slice that reaches over the
                edge is cut there, as a kernel's mask cuts it; the rest is not read.

        Returns:
            a tensor of the array's dtype; an integer removes its dimension.

        Raises:
            IndexError: the index lies outside the array.
            SramExceeded: the tile does not fit beside what the kernel already holds.
        """
        if self._chip is None and self.sram_bytes is not None:
            raise RuntimeError(
                "this memory has a limit for the chip, so loads must happen in a kernel: "
                "hbm.launch(kernel, ...)"
            )
        memory, place = self._tensor(array), resolve(array.name, array.shape, index)
        with self._outside_the_chip():
            source = memory[place]
            nbytes = source.numel() * source.element_size()
            if self._chip is not None:
                self._chip.check_room(nbytes, source.shape, source.dtype)
            tile = source.clone(memory_format=torch.contiguous_format)
        if self._chip is not None:
            self._chip.hold(tile)
            self._tiles.loaded += tile.numel()
        self._traffic().bytes_read += nbytes
        return tile

    def store(self, array: Array, index: Index, tile: torch.Tensor) -> None:
        """Write a tile to the array and count its bytes, in the array's dtype, as written.

        Raises:
            IndexError: the index lies outside the array.
            ValueError: the tile has another shape than the place (nothing is broadcast).
        """
        memory, place = self._tensor(array), resolve(array.name, array.shape, index)
        if not isinstance(tile, torch.Tensor):
            raise TypeError(
                f"hbm.store({array.name}, index, tile) writes a tensor, got {type(tile).__name__}"
            )
        with self._outside_the_chip():
            target = memory[place]
        if tile.shape != target.shape:
            raise ValueError(
                f"the place in {array.name} has shape {tuple(target.shape)}, the tile has "
                f"{tuple(tile.shape)}; they must be equal"
            )
        if self._chip is not None and tile.numel() > 1 and not self._chip.holds(tile):
            raise RuntimeError(
                f"the tile stored to {array.name} was not made in this kernel; a kernel works on "
                "what it loads"
            )
        with self._outside_the_chip():
            target.copy_(tile.detach())
        self._traffic().bytes_written += target.numel() * target.element_size()

    def launch(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``kernel(hbm, *args, **kwargs)`` as one kernel launch and return what it returns.

        While it runs, every tensor that is alive counts as held on the chip (``sram_peak``). A
        kernel takes handles and plain values, and returns handles, or nothing: tensors pass
        between kernels through the memory alone. The ``hbm`` that it is given has the methods of
        this one, and no way to what lies behind them.

        Raises:
            SramExceeded: it held more than ``sram_bytes``.
            NotOnChip: it computed with a tensor that it had not loaded, or turned a tile into a
                list or an array.
            TypeError: a tensor is passed to it or returned by it.
        """
        if self._chip is not None:
            raise RuntimeError("a kernel cannot launch another one")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"a kernel was given a tensor of shape {tuple(leaf.shape)}; put it in device "
                    "memory first and pass the handle: hbm.put(tensor)"
                )
        chip = OnChip(self.sram_bytes)
        self._chip, self._tiles = chip, TilesStay()
        try:
            with torch.no_grad(), chip, self._tiles:
                result = kernel(_for_kernels(self), *args, **kwargs)
        finally:
            self._chip = None
            self.sram_peak = max(self.sram_peak, chip.peak)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"the kernel returned a tensor of shape {tuple(leaf.shape)}; what it computed "
                    "on the chip is gone when it ends. Store it with hbm.store and return the "
                    "handle of the array"
                )
        return result

    # What the meter shows

    @contextmanager
    def section(self, name: str) -> Iterator[Traffic]:
        """Count what is moved inside under ``name`` (inside another section: under this one)."""
        outer, self._section = self._section, name
        try:
            yield self._traffic()
        finally:
            self._section = outer

    @property
    def sections(self) -> tuple[Traffic, ...]:
        """What was moved, by section, in the order in which they began."""
        return tuple(self._sections.values())

    @property
    def bytes_read(self) -> int:
        """Bytes that loads have brought onto the chip."""
        return sum(section.bytes_read for section in self._sections.values())

    @property
    def bytes_written(self) -> int:
        """Bytes that stores have written."""
        return sum(section.bytes_written for section in self._sections.values())

    @property
    def bytes_moved(self) -> int:
        """Both directions together."""
        return self.bytes_read + self.bytes_written

    def reset(self) -> None:
        """Set the meter to zero; the arrays stay."""
        self._sections.clear()
        self.sram_peak = 0

    def report(self) -> str:
        """A table of what was moved, one line a section."""
        rows = [*self.sections, Traffic("together", self.bytes_read, self.bytes_written)]
        width = max(len(row.name) for row in rows)
        lines = [f"{'':{width}}  {'read':>12}  {'written':>12}  {'moved':>12}"]
        for row in rows:
            cells = (row.bytes_read, row.bytes_written, row.bytes_moved)
            shown = "  ".join(f"{readable_bytes(cell):>12}" for cell in cells)
            lines.append(f"{row.name:{width}}  {shown}")
        return "\n".join(lines)

    def _keep(self, tensor: torch.Tensor, name: str | None) -> Array:
        array = Array(name or f"array_{len(self._memory)}", tensor)
        self._memory[array] = tensor
        return array

    def _tensor(self, array: Array) -> torch.Tensor:
        if not isinstance(array, Array):
            raise TypeError(
                f"expected a handle from hbm.put or hbm.empty, got {type(array).__name__}"
            )
        if array not in self._memory:
            raise ValueError(f"{array.name} lies in another HBM; put it into this one")
        return self._memory[array]

    def _traffic(self) -> Traffic:
        return self._sections.setdefault(self._section, Traffic(self._section))

    @contextmanager
    def _outside_the_chip(self) -> Iterator[None]:
        if self._chip is None:
            yield
        else:
            with self._chip.pause():
                yield


def _for_kernels(hbm: HBM) -> Any:
    """The memory as a kernel sees it: what is public, read only."""

    class KernelMemory:
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"a kernel's hbm has no attribute {name!r}")
            return getattr(hbm, name)

        def __setattr__(self, name: str, _value: object) -> NoReturn:
            raise AttributeError(f"a kernel cannot set hbm.{name}")

    return KernelMemory()
