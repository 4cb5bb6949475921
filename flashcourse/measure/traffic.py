"""The bytes that attention moves and the arithmetic it does, from formulas, kernel by kernel.

The counts are what the kernels ask device memory for, with no cache between: what
:class:`flashcourse.measure.HBM` meters. A hardware counter behind a cache may read less, never
less than :attr:`AttentionTraffic.compulsory_bytes` of a cold start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["naive", "flash"]
Direction = Literal["forward", "backward"]
STATISTIC_BYTES = 4  # lse and delta are float32 whatever the inputs are


@dataclass(frozen=True)
class Pass:
    """What one kernel moves, in bytes."""

    name: str
    bytes_read: int
    bytes_written: int

    @property
    def bytes_moved(self) -> int:
        """Both directions together."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class AttentionTraffic:
    """The traffic of one attention call.

    Attributes:
        passes: one entry a kernel, in the order they run.
        flops: of the matrix products, see :func:`attention_flops`.
        compulsory_bytes: each input read once and each output written once; no algorithm that
            starts with a cold cache moves less.
    """

    passes: tuple[Pass, ...]
    flops: int
    compulsory_bytes: int

    @property
    def bytes_read(self) -> int:
        """Bytes that the kernels read."""
        return sum(p.bytes_read for p in self.passes)

    @property
    def bytes_written(self) -> int:
        """Bytes that the kernels write."""
        return sum(p.bytes_written for p in self.passes)

    @property
    def bytes_moved(self) -> int:
        """Both directions together."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.bytes_moved


@dataclass(frozen=True)
class _Shape:
    """The sizes of a call, and the tiles that its flash kernels visit."""

    batch: int
    heads: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int
    itemsize: int
    is_causal: bool
    block_q: int
    block_k: int

    @property
    def q_bytes(self) -> int:
        return self.batch * self.heads * self.seq_q * self.head_dim * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of k alone, which has the size of v."""
        return self.batch * self.heads_kv * self.seq_k * self.head_dim * self.itemsize

    @property
    def score_bytes(self) -> int:
        return self.batch * self.heads * self.seq_q * self.seq_k * self.itemsize

    @property
    def statistic_bytes(self) -> int:
        return self.batch * self.heads * self.seq_q * STATISTIC_BYTES

    def keys_loaded(self) -> int:
        """Keys that one head loads over all its blocks of queries."""
        total = 0
        for first in range(0, self.seq_q, self.block_q):
            stop = self.seq_k
            if self.is_causal:  # the block's last query stands at this key (bottom right)
                last = min(first + self.block_q, self.seq_q) - 1
                stop = max(0, last + self.seq_k - self.seq_q + 1)
            total += min(self.seq_k, -(-stop // self.block_k) * self.block_k)
        return total

    def queries_loaded(self) -> int:
        """Queries that one head loads over all its blocks of keys (the dK/dV kernel)."""
        total = 0
        for first in range(0, self.seq_k, self.block_k):
            start = 0
            if self.is_causal:  # the first query that sees the block's first key
                start = min(max(0, first - (self.seq_k - self.seq_q)), self.seq_q)
            total += self.seq_q - start // self.block_q * self.block_q if start < self.seq_q else 0
        return total


def attention_traffic(
    batch: int,
    heads: int,
    seq_q: int,
    seq_k: int,
    head_dim: int,
    itemsize: int,
    *,
    heads_kv: int | None = None,
    algorithm: Algorithm = "naive",
    direction: Direction = "forward",
    is_causal: bool = False,
    block_q: int = 128,
    block_k: int = 64,
    return_lse: bool = False,
) -> AttentionTraffic:
    """Bytes that each kernel of an attention call reads from and writes to device memory.

    ``naive`` forward is four kernels: S = QKᵀ, the scale, the softmax, PV. They pass over the
    ``seq_q × seq_k`` matrix six times (write S; read and write it; read it and write P; read P).
    Its backward keeps P and passes over the matrix nine times. A causal mask is applied by the
    kernel that scales, and saves nothing: every score is still computed and moved.

    ``flash`` forward is one kernel: each block of queries reads its q once, every k and v it may
    see, and writes its out once; Dao (2023), "FlashAttention-2", algorithm 1. Its backward is
    three: delta = rowsum(dO ∘ O), one that makes dK and dV, one that makes dQ. Under a causal
    mask, tiles that no query of a block sees are not read.

    Args:
        batch, heads, seq_q, seq_k, head_dim: of q ``(batch, heads, seq_q, head_dim)`` and k, v.
        itemsize: bytes of a number, of the score matrix too (2 for float16, 4 for float32).
        heads_kv: heads of k and v; default ``heads``. Each query head still reads its own k and v.
        algorithm, direction: as above.
        is_causal: aligned to the bottom right.
        block_q, block_k: the flash kernels' tile; block_k matters for causal and backward only.
        return_lse: the flash forward also writes lse, 4 bytes a row (as training needs).

    Raises:
        TypeError, ValueError: an argument is not what it must be; the message says which.
    """
    sizes = dict(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    sizes.update(itemsize=itemsize, block_q=block_q, block_k=block_k)
    sizes["heads_kv"] = heads if heads_kv is None else heads_kv
    for name, size in sizes.items():
        _check_size(name, size)
    if heads % sizes["heads_kv"]:
        raise ValueError(f"heads must be a multiple of heads_kv, got {heads} and {heads_kv}")
    shape = _Shape(is_causal=bool(is_causal), **sizes)
    passes = {
        ("naive", "forward"): _naive_forward,
        ("naive", "backward"): _naive_backward,
        ("flash", "forward"): lambda s: _flash_forward(s, return_lse),
        ("flash", "backward"): _flash_backward,
    }.get((algorithm, direction))
    if passes is None:
        raise ValueError(
            f"algorithm must be 'naive' or 'flash' and direction 'forward' or 'backward', "
            f"got {algorithm!r} and {direction!r}"
        )
    inputs_outputs = 2 * shape.q_bytes + 2 * shape.kv_bytes  # q, out, k, v
    if direction == "backward":
        inputs_outputs = 4 * shape.q_bytes + 4 * shape.kv_bytes  # and dO, dQ, dK, dV
    return AttentionTraffic(
        passes(shape),
        attention_flops(
            batch, heads, seq_q, seq_k, head_dim, is_causal=is_causal, direction=direction
        ),
        inputs_outputs,
    )


def attention_flops(
    batch: int,
    heads: int,
    seq_q: int,
    seq_k: int,
    head_dim: int,
    is_causal: bool = False,
    *,
    direction: Direction = "forward",
) -> int:
    """FLOPs of attention's matrix products; a multiply and an add count as two.

    Forward: ``4 · head_dim`` for every pair of query and key that may see each other (two for
    QKᵀ, two for PV). Backward: ``10 · head_dim`` (QKᵀ again, dP, dV, dK, dQ). The softmax is not
    counted. Causal pairs are counted exactly, aligned to the bottom right.
    """
    pairs = visible_pairs(seq_q, seq_k, is_causal)
    return batch * heads * pairs * head_dim * (4 if direction == "forward" else 10)


def visible_pairs(seq_q: int, seq_k: int, is_causal: bool = False) -> int:
    """Pairs (i, j) with ``j <= i + seq_k - seq_q`` if causal, else all ``seq_q · seq_k``."""
    if not is_causal:
        return seq_q * seq_k
    rows = min(seq_q, seq_k)  # earlier queries stand before the first key
    shortest = seq_k - rows + 1  # keys that the first of these rows sees
    return rows * (shortest + seq_k) // 2


def _naive_forward(s: _Shape) -> tuple[Pass, ...]:
    return (
        Pass("S = QKᵀ", s.q_bytes + s.kv_bytes, s.score_bytes),
        Pass("S · scale", s.score_bytes, s.score_bytes),
        Pass("P = softmax(S)", s.score_bytes, s.score_bytes),
        Pass("O = PV", s.score_bytes + s.kv_bytes, s.q_bytes),
    )


def _naive_backward(s: _Shape) -> tuple[Pass, ...]:
    return (
        Pass("dV = PᵀdO", s.score_bytes + s.q_bytes, s.kv_bytes),
        Pass("dP = dO Vᵀ", s.q_bytes + s.kv_bytes, s.score_bytes),
        Pass("dS = P ∘ (dP − rowsum)", 2 * s.score_bytes, s.score_bytes),
        Pass("dS · scale", s.score_bytes, s.score_bytes),
        Pass("dQ = dS K", s.score_bytes + s.kv_bytes, s.q_bytes),
        Pass("dK = dSᵀ Q", s.score_bytes + s.q_bytes, s.kv_bytes),
    )


def _flash_forward(s: _Shape, return_lse: bool) -> tuple[Pass, ...]:
    row = s.head_dim * s.itemsize
    keys_and_values = 2 * s.batch * s.heads * s.keys_loaded() * row
    lse = s.statistic_bytes if return_lse else 0
    return (Pass("flash forward", s.q_bytes + keys_and_values, s.q_bytes + lse),)


def _flash_backward(s: _Shape) -> tuple[Pass, ...]:
    row = s.head_dim * s.itemsize
    keys_and_values = 2 * s.batch * s.heads * s.keys_loaded() * row
    # q and dO, and the two statistics of each row, lse and delta
    queries = s.batch * s.heads * s.queries_loaded() * (2 * row + 2 * STATISTIC_BYTES)
    return (
        Pass("delta = rowsum(dO ∘ O)", 2 * s.q_bytes, s.statistic_bytes),
        Pass("dK and dV", 2 * s.kv_bytes + queries, 2 * s.kv_bytes),
        Pass("dQ", 2 * s.q_bytes + 2 * s.statistic_bytes + keys_and_values, s.q_bytes),
    )


def _check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name} must be an integer, got {size!r}")
    if size < 1:
        raise ValueError(f"{name} must be 1 or more, got {size}")
