"""lab2.metered_attention: tiled attention through the HBM meter, within a budget of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashcourse.attention.naive import naive_attention
from flashcourse.grading.draw import integer, normal
from flashcourse.grading.judge import FLOAT32_EPS, judge_tensor, score_tolerance
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions.lab2_flash_bytes import reference as flash_bytes
from flashcourse.measure.hbm import HBM, Array
from flashcourse.measure.memory import readable_bytes
from flashcourse.measure.onchip import SramExceeded

FLOAT32_BYTES = 4
HEAD_DIMS = (5, 6, 7, 9, 10, 11)  # no powers of 2


def chip_bytes(block_q: int, block_k: int, head_dim: int) -> int:
    """What one program may hold: 8 tiles of q's size, 8 of k's, 12 of scores, and 32 numbers a row.

    A plain solution needs about half of it.
    """
    tiles = 8 * (block_q + block_k) * head_dim + 12 * block_q * block_k
    return FLOAT32_BYTES * (tiles + 32 * (block_q + block_k))


class _Noting(HBM):
    """A memory that notes the largest tile loaded from each array, by name: its numbers."""

    def __init__(self, sram_bytes: int | None) -> None:
        super().__init__(sram_bytes)
        self.largest: dict[str, int] = {}

    def load(self, array: Array, index: Any = ...) -> torch.Tensor:
        tile = super().load(array, index)
        self.largest[array.name] = max(self.largest.get(array.name, 0), tile.numel())
        return tile


def _launch(
    answer: Answer, q: Any, k: Any, v: Any, block_q: int, block_k: int, *, limited: bool = False
) -> tuple[_Noting, Any]:
    hbm = _Noting(chip_bytes(block_q, block_k, q.shape[-1]) if limited else None)
    inputs = [hbm.put(tensor, name) for tensor, name in ((q, "q"), (k, "k"), (v, "v"))]
    out = hbm.launch(answer, *inputs, block_q, block_k)
    if type(out) is not Array:
        raise TypeError(
            "metered_attention must return the handle of out, made with hbm.empty; it returned "
            f"{'None' if out is None else type(out).__name__}"
        )
    for array, tensor in zip(inputs, (q, k, v), strict=True):
        if out is array or not torch.equal(hbm.read(array), tensor):
            raise ValueError(f"{array.name} was written to; store to an array of your own")
    return hbm, out


def _values(answer: Answer, *arguments: Any) -> torch.Tensor:
    hbm, out = _launch(answer, *arguments)
    return hbm.read(out)


def _bytes(answer: Answer, *arguments: Any) -> dict[str, Any]:
    hbm, _ = _launch(answer, *arguments)
    tiles = {name: hbm.largest.get(name, 0) for name in ("q", "k", "v")}
    return {"read": hbm.bytes_read, "written": hbm.bytes_written, "largest tiles": tiles}


def _room(answer: Answer, *arguments: Any) -> str:
    """Empty, or the tile that was one too many."""
    try:
        _launch(answer, *arguments, limited=True)
    except SramExceeded as error:
        return error.tile
    return ""


def _judge_values(case: Case, observation: Observation) -> str | None:
    q, k, v, *_ = case.args
    expected = naive_attention(q.double(), k.double(), v.double())
    assert isinstance(expected, torch.Tensor)
    largest_score = (q.double() @ k.double().transpose(-2, -1)).abs().max().item()
    allowed = score_tolerance(largest_score / math.sqrt(q.shape[-1]), v.abs().max().item())
    if k.shape[2] == 1:  # the weight of a single key is 1: its score cancels
        allowed = 4 * FLOAT32_EPS * (1 + largest_score) * v.abs().max().item()
    return judge_tensor("out", observation.output, expected, allowed, q.dtype)


def _judge_bytes(case: Case, observation: Observation) -> str | None:
    q, k, _, block_q, block_k = case.args
    moved = observation.output
    written = q.numel() * FLOAT32_BYTES
    batch, heads, seq_q, head_dim = q.shape
    budget = flash_bytes(batch, heads, seq_q, k.shape[2], head_dim, FLOAT32_BYTES, block_q)
    most = budget - written
    if moved["read"] > most:
        return (
            f"the kernel read {moved['read']:,} bytes; the budget is {most:,}: q once, and k and v "
            "once for every block of queries"
        )
    if moved["read"] != most:
        return (
            f"the kernel read {moved['read']:,} bytes, fewer than the {most:,} of the budget: with "
            f"blocks of {block_q} queries every block reads all of k and v through hbm.load"
        )
    if moved["written"] != written:
        return (
            f"the kernel wrote {moved['written']:,} bytes; out has {written:,}, and each of them "
            "is to be written once, through hbm.store"
        )
    for name, largest in moved["largest tiles"].items():
        rows = block_q if name == "q" else block_k
        if largest != rows * head_dim:
            return (
                f"the largest tile of {name} that the kernel loaded has {largest:,} numbers; a "
                f"block of {rows} rows of {head_dim} has {rows * head_dim:,}"
            )
    return None


def _judge_room(case: Case, observation: Observation) -> str | None:
    if not observation.output:
        return None
    q, _, _, block_q, block_k = case.args
    room = readable_bytes(chip_bytes(block_q, block_k, q.shape[-1]))
    return (
        f"the kernel holds too much on the chip: its {observation.output} tile no longer fits. One "
        f"program has {room}, enough for one head's tiles of {block_q} queries and {block_k} keys"
    )


def _case(
    generator: torch.Generator,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    scale: float = 1,
    note: str = "",
    head_dim: int | None = None,
) -> Case:
    """Normal q, k and v; the head_dim, if not given, is one whose square root is no power of 2."""
    (batch, per_sequence), (seq_q, seq_k) = heads, lengths
    head_dim = head_dim or HEAD_DIMS[integer(generator, 0, len(HEAD_DIMS) - 1)]
    q, k, v = (normal(generator, batch, per_sequence, n, head_dim) for n in (seq_q, seq_k, seq_k))
    return Case(
        f"batch={batch}, heads={per_sequence}, seq_q={seq_q}, seq_k={seq_k}, head_dim={head_dim}, "
        f"block_q={blocks[0]}, block_k={blocks[1]}{note or f', scores × {scale}'}",
        (scale * q, k, v, *blocks),
    )


def _even(generator: torch.Generator) -> Iterator[Case]:
    for heads, scale in (((2, 2), 1), ((1, 1), 5), ((1, 2), 40)):
        blocks = integer(generator, 3, 6), integer(generator, 4, 8)
        yield _case(generator, heads, (2 * blocks[0], 3 * blocks[1]), blocks, scale)


def _ragged(generator: torch.Generator) -> Iterator[Case]:
    for _ in range(2):
        block_q, block_k = integer(generator, 4, 7), integer(generator, 5, 9)
        seq_q = block_q + integer(generator, 1, block_q - 1)
        seq_k = 2 * block_k + integer(generator, 1, block_k - 1)
        yield _case(generator, (1, 2), (seq_q, seq_k), (block_q, block_k), 5)


def _small(generator: torch.Generator) -> Iterator[Case]:
    lengths = integer(generator, 1, 4), integer(generator, 2, 6)
    yield _case(generator, (2, 1), lengths, (8, 16), 2)
    yield _case(generator, (1, 1), (3, 1), (2, 2), 0.1)


def _extremes(generator: torch.Generator) -> Iterator[Case]:
    """Scores of ±1,000 in every row, the lowest in the first block of keys and in the last.

    Then rows that lie near −1,000 throughout, rows near 1,000 and rows near 200.
    """
    block_q, block_k = integer(generator, 3, 5), integer(generator, 4, 6)
    for first in (-1, 1, 0):
        lengths = block_q + 1, 3 * block_k
        case = _case(generator, (1, 1), lengths, (block_q, block_k), note=", scores near ±1,000")
        q, k, *_ = case.args
        level = (1000 * q.shape[-1] ** 0.5) ** 0.5
        q[..., 0], k[..., 0] = level, -first * level
        k[:, :, :block_k, 0] = first * level
        if not first:
            k[..., 0], q[:, :, ::3, 0], q[:, :, 2::3, 0] = level, -level, level / 5
        yield case


def _budget(generator: torch.Generator) -> Iterator[Case]:
    block_q, block_k = integer(generator, 4, 7), integer(generator, 5, 9)
    seq_q = 2 * block_q + integer(generator, 1, block_q - 1)
    yield _case(generator, (1, 2), (seq_q, 3 * block_k + 1), (block_q, block_k))


def _long(generator: torch.Generator) -> Iterator[Case]:
    """All of one head's k, and a tile of every head at once, are more than the chip holds."""
    block_q, block_k = integer(generator, 4, 5), integer(generator, 7, 9)
    seq_k = chip_bytes(block_q, block_k, 8) // (8 * FLOAT32_BYTES) + integer(generator, 1, 20)
    yield _case(generator, (1, 2), (block_q, seq_k), (block_q, block_k), head_dim=8)
    yield _case(generator, (4, 4), (block_q, 2 * block_k), (block_q, block_k))


# Known mistakes

Tile = torch.Tensor


def _rows(start: int, block: int, length: int) -> slice:
    return slice(start, min(start + block, length))


def _wrong(
    *,
    alpha_o: Callable[[Tile], Tile] = lambda alpha: alpha,
    alpha_l: Callable[[Tile], Tile] = lambda alpha: alpha,
    scaled: bool = True,
    largest: Callable[[Tile], Tile] = lambda s: s.amax(dim=-1, keepdim=True),
    pivot: Callable[[Tile], Tile] = lambda m: m,
    start: float = -math.inf,
    all_blocks: bool = True,
    divided: bool = True,
    q_again: bool = False,
    whole_k: bool = False,
    scores_stored: bool = False,
    all_heads: bool = False,
) -> Answer:
    """Right by default; each mistake changes one step."""

    def metered_attention(
        hbm: HBM, q: Array, k: Array, v: Array, block_q: int, block_k: int
    ) -> Array:
        batch, heads, seq_q, head_dim = q.shape
        seq_k = k.shape[2]
        out = hbm.empty(q.shape, q.dtype, name="out")
        scores = hbm.empty((batch, heads, seq_q, seq_k), q.dtype, name="scores")
        factor = head_dim**-0.5 if scaled else 1.0
        last = seq_k if all_blocks else max(seq_k // block_k * block_k, min(block_k, seq_k))
        each: list[tuple[Any, ...]] = [(b, h) for b in range(batch) for h in range(heads)]
        for head in [(slice(None), slice(None))] if all_heads else each:
            for i in range(0, seq_q, block_q):
                rows = _rows(i, block_q, seq_q)
                q_i = hbm.load(q, (*head, rows))
                k_head = hbm.load(k, head) if whole_k else None
                shape = q_i.shape[:-1]
                m = torch.full((*shape, 1), start)
                l = torch.zeros((*shape, 1))
                o = torch.zeros(q_i.shape)
                for j in range(0, last, block_k):
                    columns = _rows(j, block_k, seq_k)
                    if q_again and j:
                        q_i = hbm.load(q, (*head, rows))
                    k_j = hbm.load(k, (*head, columns)) if k_head is None else k_head[columns]
                    v_j = hbm.load(v, (*head, columns))
                    s = q_i @ k_j.transpose(-2, -1) * factor
                    if scores_stored:
                        hbm.store(scores, (*head, rows, columns), s)
                        s = hbm.load(scores, (*head, rows, columns))
                    new_m = pivot(torch.maximum(m, largest(s)))
                    p = torch.exp(s - new_m)
                    alpha = torch.exp(m - new_m)
                    l = alpha_l(alpha) * l + p.sum(dim=-1, keepdim=True)
                    o = alpha_o(alpha) * o + p @ v_j
                    m = new_m
                hbm.store(out, (*head, rows), o / l if divided else o)
        return out

    return metered_attention


def _keys_outside(hbm: HBM, q: Array, k: Array, v: Array, block_q: int, block_k: int) -> Array:
    """The loop order of the first FlashAttention paper: o, m and l go through HBM every time."""
    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    out = hbm.empty(q.shape, q.dtype, name="out")
    m, l = (hbm.empty((*q.shape[:3], 1), name=name) for name in ("m", "l"))
    for head in [(b, h) for b in range(batch) for h in range(heads)]:
        for j in range(0, seq_k, block_k):
            columns = _rows(j, block_k, seq_k)
            k_j, v_j = hbm.load(k, (*head, columns)), hbm.load(v, (*head, columns))
            for i in range(0, seq_q, block_q):
                place = (*head, _rows(i, block_q, seq_q))
                s = hbm.load(q, place) @ k_j.T * head_dim**-0.5
                if j == 0:
                    m_i, l_i = torch.full((s.shape[0], 1), -math.inf), torch.zeros(s.shape[0], 1)
                    o_i = torch.zeros(s.shape[0], head_dim)
                else:
                    m_i, l_i, o_i = (hbm.load(array, place) for array in (m, l, out))
                new_m = torch.maximum(m_i, s.amax(dim=-1, keepdim=True))
                p, alpha = torch.exp(s - new_m), torch.exp(m_i - new_m)
                new_l = alpha * l_i + p.sum(dim=-1, keepdim=True)
                hbm.store(out, place, (alpha * l_i * o_i + p @ v_j) / new_l)
                hbm.store(m, place, new_m)
                hbm.store(l, place, new_l)
    return out


QUESTION = Question(
    id="lab2.metered_attention",
    points=5,
    checks=(
        Check("agrees with float64, for scores × 1, × 5 and × 40", _even, _judge_values, _values),
        Check("last blocks that are not full", _ragged, _judge_values, _values),
        Check("blocks larger than the sequences", _small, _judge_values, _values),
        Check("scores as large as ±1,000", _extremes, _judge_values, _values),
        Check("moves the bytes of the budget, block by block", _budget, _judge_bytes, _bytes),
        Check(
            "many keys and many heads fit on the chip, block by block", _long, _judge_room, _room
        ),
    ),
    mistakes=(
        Mistake(
            "the output is not rescaled",
            "when the maximum rises, what was accumulated before is too large by "
            "exp(m_new − m_old): multiply o with exp(m_old − m_new).",
            _wrong(alpha_o=torch.ones_like),
        ),
        Mistake(
            "the running sum is not rescaled",
            "l was summed with the old maximum: multiply it with exp(m_old − m_new), as o.",
            _wrong(alpha_l=torch.ones_like),
        ),
        Mistake(
            "the scale is missing",
            "scores are multiplied with head_dim ** -0.5.",
            _wrong(scaled=False),
        ),
        Mistake(
            "no maximum subtracted",
            "exp overflows for scores above 88.7, and infinity over infinity is NaN.",
            _wrong(pivot=torch.zeros_like),
        ),
        Mistake(
            "one maximum for the whole tile",
            "each row has a maximum of its own, along the keys. Where another row's is far higher, "
            "every exp(s − m) underflows to 0, and 0/0 is NaN.",
            _wrong(largest=lambda s: s.amax()),
        ),
        Mistake(
            "m starts at a finite number",
            "where all scores are far below it, every exp(s − m) underflows to 0, and 0/0 is NaN. "
            "The maximum of nothing is −inf.",
            _wrong(start=0.0),
            tuple(_wrong(start=start) for start in (-10.0, -50.0, -100.0, -200.0, -500.0)),
        ),
        Mistake(
            "the last keys are dropped",
            "seq_k is not a multiple of block_k; the last block has fewer keys, and they count.",
            _wrong(all_blocks=False),
        ),
        Mistake(
            "not divided by the sum",
            "the weights of a row do not sum to 1 until o is divided by l at the end.",
            _wrong(divided=False),
        ),
        Mistake(
            "q is loaded again for every block of keys",
            "a block of queries stays on the chip while the keys pass by: load it once, before the "
            "loop over keys.",
            _wrong(q_again=True),
        ),
        Mistake(
            "keys in the outer loop",
            "then o, m and l travel to HBM and back for every block of keys. With the queries in "
            "the outer loop they never leave the chip: Dao (2023), section 3.1.",
            _keys_outside,
        ),
        Mistake(
            "the scores pass through HBM",
            "a tile of scores is used once, right where it was made; storing it brings the N×N "
            "traffic back.",
            _wrong(scores_stored=True),
        ),
        Mistake(
            "all keys of a head loaded at once",
            "the chip holds a few tiles. Load k and v in blocks of block_k.",
            _wrong(whole_k=True),
        ),
        Mistake(
            "all heads in one program",
            "the chip belongs to one head and one block of queries at a time: loop over batch and "
            "heads.",
            _wrong(all_heads=True),
        ),
    ),
)
