"""The shapes that are measured: named grids, and shapes given by hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flashcourse.measure.traffic import visible_pairs

Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Shape:
    """One attention call.

    Attributes:
        batch, heads, heads_kv, head_dim, dtype: as the tensors have them.
        seq_q, seq_k: the lengths; for a packed batch the total, in a batch of one.
        is_causal: aligned to the bottom right.
        window: keys to the left that stay visible, or None; causal.
        lengths: of the sequences of a packed batch, or None.
        directions: what is timed; decoding, one query, has no backward.
        flex: whether FlexAttention is measured, which costs a compilation a shape.
    """

    seq_q: int
    seq_k: int
    head_dim: int = 64
    is_causal: bool = False
    dtype: str = "float16"
    batch: int = 4
    heads: int = 32
    heads_kv: int = 32
    window: int | None = None
    lengths: tuple[int, ...] | None = None
    directions: tuple[Direction, ...] = DIRECTIONS
    flex: bool = True

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        length = f"N{self.seq_q}" if self.seq_q == self.seq_k else f"N{self.seq_q}×{self.seq_k}"
        if self.lengths is not None:
            length = f"{len(self.lengths)} packed, longest {max(self.lengths)}, {self.seq_q} tokens"
        mask = f"window {self.window}" if self.window is not None else ""
        mask = mask or ("causal" if self.is_causal else "full")
        return f"B{self.batch} H{heads} D{self.head_dim} {length} {mask} {DTYPES[self.dtype]}"

    @property
    def family(self) -> str:
        """What two shapes that differ only in their length have in common."""
        return re.sub(r"N\d+(×\d+)? |, \d+ tokens", "", str(self)).strip()

    def sequences(self) -> Iterator[tuple[int, int, int, int]]:
        """(first query, queries, first key, keys) of each sequence; one for a dense shape."""
        if self.lengths is None:
            yield 0, self.seq_q, 0, self.seq_k
            return
        first = 0
        for length in self.lengths:
            yield first, length, first, length
            first += length

    @property
    def pairs(self) -> int:
        """Pairs of query and key that may see each other, in one head of one batch entry."""
        total = 0
        for _, seq_q, _, seq_k in self.sequences():
            seen = visible_pairs(seq_q, seq_k, self.is_causal)
            if self.window is not None and seq_k > self.window + 1:
                # A row that reaches further than the window loses what lies beyond it.
                beyond = seq_k - self.window - 1
                rows = min(seq_q, beyond)
                seen -= rows * (2 * beyond - rows + 1) // 2
            total += seen
        return total

    def flops(self, direction: Direction) -> int:
        """FLOPs of the matrix products: 4 a pair and head_dim forward, 10 backward, 14 both."""
        factor = {"forward": 4, "backward": 10, "both": 14}[direction]
        return factor * self.batch * self.heads * self.pairs * self.head_dim

    @property
    def bytes_read(self) -> int:
        """Of q, k and v: what decoding cannot do without."""
        size = getattr(torch, self.dtype).itemsize
        rows = self.heads * self.seq_q + 2 * self.heads_kv * self.seq_k
        return self.batch * rows * self.head_dim * size

    def inputs(self, device: str = "cuda") -> tuple[torch.Tensor, ...]:
        """q, k, v and a gradient of the output, normal random, all with 4 dimensions."""
        q_shape = (self.batch, self.heads, self.seq_q, self.head_dim)
        kv_shape = (self.batch, self.heads_kv, self.seq_k, self.head_dim)
        dtype = getattr(torch, self.dtype)
        if self.lengths is not None:  # as packed tensors lie: token by token
            q_shape, kv_shape = ((s[0], s[2], s[1], s[3]) for s in (q_shape, kv_shape))
        drawn = (
            torch.randn(shape, dtype=dtype, device=device)
            for shape in (q_shape, kv_shape, kv_shape, q_shape)
        )
        if self.lengths is not None:
            return tuple(t.transpose(1, 2) for t in drawn)
        return tuple(drawn)


def _quick() -> list[Shape]:
    return [Shape(4096, 4096, d, causal) for d in (64, 128) for causal in (False, True)]


def _paper() -> list[Shape]:
    """What tells most comes first: a run with a time limit leaves out the end."""

    def square(lengths: tuple[int, ...], dtype: str) -> list[Shape]:
        return [
            Shape(n, n, d, causal, dtype, flex=(n, causal, dtype) == (4096, True, "float16"))
            for n, d, causal in itertools.product(lengths, (64, 128), (False, True))
        ]

    grouped = [Shape(n, n, 128, True, "bfloat16", heads_kv=8, flex=False) for n in (4096, 16384)]
    windows = [Shape(16384, 16384, d, True, "bfloat16", window=1024, flex=False) for d in (64, 128)]
    return [
        *square((4096, 1024, 16384, 2048, 8192), "float16"),
        *square((16384,), "bfloat16"), *grouped, *windows,
        *square((4096, 1024), "bfloat16"), *square((512,), "float16"),
    ]  # fmt: skip


MOST_CACHE_BYTES = 16 * 2**30  # of K and V in a row of the decode grid; the pages are copies


def _decode() -> list[Shape]:
    shapes = [
        Shape(1, n, 128, False, "bfloat16", batch, 32, heads_kv, directions=("forward",),
              flex=False)
        for heads_kv, batch, n in itertools.product(
            (32, 8, 4), (1, 8, 64, 256), (1024, 8192, 32768, 131072)
        )
    ]  # fmt: skip
    return [shape for shape in shapes if shape.bytes_read <= 1.01 * MOST_CACHE_BYTES]


def _varlen() -> list[Shape]:
    equal = (1024,) * 16
    uneven = (4096, 128, 2048, 512, 64, 3072, 1024, 256, 1536, 640, 96, 2304, 32, 512, 48, 16)
    return [
        Shape(sum(lengths), sum(lengths), d, True, "bfloat16", batch=1, lengths=lengths)
        for d in (64, 128)
        for lengths in (equal, uneven)
    ]


def _window() -> list[Shape]:
    return [
        Shape(16384, 16384, d, True, "bfloat16", window=window)
        for d in (64, 128)
        for window in (128, 1024, 4096)
    ]


GRIDS = {"quick": _quick, "paper": _paper, "decode": _decode, "varlen": _varlen, "window": _window}

_FIELDS = {"B": "batch", "H": "heads", "D": "head_dim", "N": "seq_q", "W": "window"}
SHAPE_HELP = (
    "such as B4,H32,D128,N4096,causal,bf16: B batch, H heads (H32/8: grouped), D head_dim, "
    "N length (N1/4096: queries/keys), W window, causal, fp16 | bf16 | fp32"
)


def parse_shape(text: str) -> Shape:
    """A :class:`Shape` from text, such as ``B4,H32/8,D128,N4096,causal,bf16``.

    Raises:
        ValueError: a part is not understood, or is out of range; the message says which.
    """
    values: dict[str, Any] = {}
    dtypes = {short: name for name, short in DTYPES.items()} | {name: name for name in DTYPES}
    for part in filter(None, text.replace(" ", ",").split(",")):
        match = re.fullmatch(r"([BHDNW])(\d+)(?:/(\d+))?", part)
        if part in ("causal", "full"):
            values["is_causal"] = part == "causal"
        elif part in dtypes:
            values["dtype"] = dtypes[part]
        elif match and int(match[2]) > 0 and (match[3] is None or match[1] in "HN"):
            values[_FIELDS[match[1]]] = int(match[2])
            if match[1] == "H":
                values["heads_kv"] = int(match[3] or match[2])
            elif match[1] == "N":
                values["seq_k"] = int(match[3] or match[2])
        else:
            raise ValueError(f"{text!r}: {part!r} is not understood; a shape is {SHAPE_HELP}")
    if "seq_q" not in values:
        raise ValueError(f"{text!r}: the length is missing (N4096); a shape is {SHAPE_HELP}")
    if values.get("window") is not None:
        values["is_causal"] = True
    if values["seq_q"] == 1:
        values["directions"] = ("forward",)  # decoding
    shape = Shape(**values)
    if shape.heads_kv < 1 or shape.heads % shape.heads_kv:
        raise ValueError(f"{text!r}: heads must be a multiple of KV heads, got {shape.heads}/"
                         f"{shape.heads_kv}")  # fmt: skip
    if shape.head_dim > 256:
        raise ValueError(f"{text!r}: head_dim must be 1 to 256, got {shape.head_dim}")
    return shape
