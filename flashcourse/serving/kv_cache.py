"""What both KV caches have in common: the memory, and what the engine asks of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ATTENTION = ("flashcourse", "naive")


class CacheFull(RuntimeError):
    """The cache has no room for what was asked. Nothing has changed."""


@dataclass(frozen=True)
class KVShape:
    """What a model keeps for each token.

    Attributes:
        layers, heads_kv, head_dim: of the model.
        dtype: of keys and values.
    """

    layers: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype | None = None) -> KVShape:
        """The shape of a Transformers model; keys and values have the model's dtype."""
        config = model.config
        head_dim = getattr(config, "head_dim", None)
        return cls(
            config.num_hidden_layers,
            config.num_key_value_heads,
            head_dim or config.hidden_size // config.num_attention_heads,
            dtype or model.dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.heads_kv * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Usage:
    """Slots (one token each) at one moment.

    Attributes:
        used: that hold a token of a sequence; a shared slot counts once.
        reserved: that no other sequence can have.
        kept: of pages that no sequence holds, but a new one may find.
        capacity: that there are.
    """

    used: int
    reserved: int
    kept: int
    capacity: int

    @property
    def waste(self) -> float:
        """The share of the reserved slots that holds nothing; 0 if nothing is reserved."""
        return 1 - self.used / self.reserved if self.reserved else 0.0


@dataclass(frozen=True)
class Region:
    """A stretch of the cache's memory that belongs together.

    Attributes:
        start, reserved, used: in slots; the first ``used`` of the ``reserved`` hold a token.
        sequences: who holds it; none: kept.
    """

    start: int
    reserved: int
    used: int
    sequences: tuple[int, ...]


class KVCache(ABC):
    """Keys and values of many sequences: ``k``, ``v`` ``(layers, slots, heads_kv, head_dim)``.

    Args:
        shape: what is kept for a token.
        slots: tokens there is memory for.
        longest: tokens that one sequence may have.
        device: of the memory.

    Attributes:
        grows: sequences get their slots as they need them, so they compete until they end.
    """

    grows = False

    def __init__(self, shape: KVShape, slots: int, longest: int, device: torch.device | str):
        self.shape, self.capacity, self.longest = shape, slots, longest
        size = (shape.layers, slots, shape.heads_kv, shape.head_dim)
        # Empty on purpose: what unused slots hold never reaches a result.
        self.k = torch.empty(size, dtype=shape.dtype, device=device)
        self.v = torch.empty(size, dtype=shape.dtype, device=device)

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.k.device

    @property
    def num_bytes(self) -> int:
        """The memory of keys and values."""
        return self.capacity * self.shape.bytes_per_token

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put the keys and values of tokens, ``(tokens, heads_kv, head_dim)``, into their slots.

        Args:
            slots: int64 ``(tokens,)``, from :meth:`slots`.
        """
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> int:
        """A new sequence. Its :meth:`length` says how many of the tokens are in the cache already.

        Raises:
            CacheFull: there is no room.
        """

    @abstractmethod
    def extend(self, sequence: int, count: int) -> None:
        """Give a sequence ``count`` more slots.

        Raises:
            CacheFull: there is no room.
        """

    @abstractmethod
    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """The sequence's slots have been written and hold these tokens."""

    @abstractmethod
    def fork(self, sequence: int) -> int:
        """A second sequence with the same content.

        Raises:
            CacheFull: there is no room.
        """

    @abstractmethod
    def free(self, sequence: int) -> None:
        """End a sequence."""

    @abstractmethod
    def length(self, sequence: int) -> int:
        """Tokens in a sequence."""

    @abstractmethod
    def slots(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Where a sequence's tokens ``start`` to ``stop`` lie, int64."""

    @abstractmethod
    def order(self, sequence: int) -> int:
        """Sequences of a step are put in this order, if that makes reading them cheaper."""

    @abstractmethod
    def locate(self, sequences: Sequence[int], batch: int) -> Any:
        """Where the sequences lie, on the device: made once a step, read by every layer.

        Args:
            batch: rows of q to come, at least one a sequence; those behind stand for nobody.
        """

    @abstractmethod
    def attend(
        self, layer: int, q: torch.Tensor, where: Any, *, attention: str, scale: float | None
    ) -> torch.Tensor:
        """Attention of the sequences' newest queries over their slots, which are written already.

        Args:
            q: ``(batch, heads_q, seq_q, head_dim)``.
            where: from :meth:`locate`.
            attention: ``"flashcourse"``, the kernels, or ``"naive"``, their slow twins.
            scale: of the scores.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """How much is used, reserved and kept now."""

    @abstractmethod
    def regions(self) -> list[Region]:
        """Who has which part of the memory now, in the order of the memory."""


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
