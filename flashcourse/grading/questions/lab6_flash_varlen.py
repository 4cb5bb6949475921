"""lab6.flash_varlen: causal attention over packed documents, from a kernel of the learner's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from flashcourse import runtime
from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.fresh import fresh_check
from flashcourse.grading.judge import judge_largest_tensor, judge_tensor, score_tolerance
from flashcourse.grading.mistakes_flash_varlen import MISTAKES, RIGHT, TILES
from flashcourse.grading.question import Case, Check, Observation, Question
from flashcourse.grading.questions import lab3_tiled_forward as lab3
from flashcourse.grading.triton_work import (
    FIRST_KEYS,
    LOW_VALUE,
    half_tolerance,
    here,
    judge_own_kernel,
    needs_triton,
    set_small_weights,
    small_weights_tolerance,
    where_it_ran,
)

LONGEST = 2070 if runtime.has_gpu() else 1030  # tokens of the longest document
LONG = 4096 if runtime.has_gpu() else 128  # tokens of the row with which memory is judged
MOST_LAUNCHES = 3  # a kernel, and one or two that prepare; not one a document

# What is right ----------------------------------------------------------------------------------


def _judge(case: Case, observation: Observation) -> str | None:
    q, k, v, cu_seqlens, _ = (t.cpu() if isinstance(t, torch.Tensor) else t for t in case.args)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    allowed = torch.zeros(len(q), q.shape[1], 1)
    for first, last in itertools.pairwise(cu_seqlens.tolist()):
        if last > first:
            q4, k4, v4 = (t[first:last].transpose(0, 1)[None] for t in (q, k, v))
            out, _ = lab3.reference(q4, k4, v4, True)
            expected[first:last] = out[0].transpose(0, 1)
            tolerance = torch.tensor(_tolerance(q4, k4, v4)).expand(1, q.shape[1], last - first, 1)
            if q.dtype == torch.float32:
                tolerance = lab3.allowed_of_rows(q4, k4, v4, True, tolerance)
            allowed[first:last] = tolerance[0].transpose(0, 1)
    return judge_tensor("out", observation.output, expected, allowed, q.dtype)


def _judge_others(case: Case, observation: Observation) -> str | None:
    """Judge all documents but those of NaN, whose out may be anything."""
    out, q = observation.output, case.args[0]
    if isinstance(out, torch.Tensor) and out.shape == q.shape:
        spoilt = q.isnan().any(dim=-1, keepdim=True).to(out.device)
        out = torch.where(spoilt, torch.nan, out.detach())
    return _judge(case, Observation(output=out))


def _tolerance(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The error that any right answer may make in this document."""
    largest = v.abs().max().item()
    size = lab3.largest_score(q.float(), k.float())
    if q.dtype != torch.float16:
        return score_tolerance(size, largest)
    # What q and k may lose in float16 before the product is relative to their terms; but a term
    # that all keys share changes all scores of a row alike, and cancels.
    apart = torch.where(k.amax(2, keepdim=True) == k.amin(2, keepdim=True), 0, k)
    rounding = half_tolerance(lab3.largest_score(q.float(), apart.float()), largest)
    return rounding + score_tolerance(size, largest)


def _judge_sums(case: Case, observation: Observation) -> str | None:
    q, k, *_ = (t.cpu().double() for t in case.args[:3])
    moved = lab3.moved_scores(q.transpose(0, 1)[None], k.transpose(0, 1)[None])
    expected = torch.full(q.shape, LOW_VALUE, dtype=torch.float64)
    allowed = small_weights_tolerance(moved, len(k))
    return judge_tensor("out", observation.output, expected, allowed, torch.float16)


def _judge_memory(case: Case, observation: Observation) -> str | None:
    q = case.args[0]
    return judge_largest_tensor(
        observation,
        2 * q.numel(),
        f"the score matrix of the row has {q.shape[0]}×{q.shape[0]} numbers",
    )


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    message = judge_own_kernel(observation, tensors=5)
    if message:
        return message
    count = sum(launch.own for launch in observation.launches)
    documents = len(case.args[3]) - 1
    if count > MOST_LAUNCHES:
        return (
            f"{count} launches for {documents} documents: one launch does the whole row, and each "
            "of its programs finds its document in cu_seqlens"
        )
    return None


# The inputs -------------------------------------------------------------------------------------


def _case(
    generator: torch.Generator,
    lengths: list[int],
    *,
    heads: tuple[int, int] = (1, 1),
    head_dim: int = 16,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    bound: int | None = None,
    note: str = "",
) -> Case:
    total = sum(lengths)
    q = normal(generator, total, heads[0], head_dim, scale=scale, dtype=dtype)
    k, v = (normal(generator, total, heads[1], head_dim, dtype=dtype) for _ in range(2))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    args = (*(here(t) for t in (q, k, v, offsets)), bound or max(lengths))
    described = (
        f"q {tuple(q.shape)}, k and v {tuple(k.shape)}, documents of "
        f"{', '.join(map(str, lengths))} tokens"
    )
    return Case(described + (f", {note}" if note else ""), args)


def _level(case: Case, document: int, level: float) -> None:
    """Lift all scores of a document, in place, by a term that its keys share.

    Eighths make the scores exact in any order of their sums: two wrong answers that are the same
    mistake then give the same numbers, however large the scores are.
    """
    q, k, _, cu_seqlens, _ = case.args
    rows = slice(*cu_seqlens[document : document + 2].tolist())
    size = (abs(level) * q.shape[-1] ** 0.5) ** 0.5
    q[rows, :, 0], k[rows, :, 0] = size, math.copysign(size, level)
    for tensor in (q, k):
        tensor[rows] = (8 * tensor[rows]).round() / 8


def _several(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 3, 9), integer(generator, 11, 20), 5])
    yield _case(generator, [integer(generator, 33, 60), 7])


def _whole_tiles(generator: torch.Generator) -> Iterator[Case]:
    """Whatever the tile: lengths that fill it, some that do not, and one or two tokens off."""
    whole = [TILES[i] for i in torch.randperm(len(TILES), generator=generator)]
    yield _case(generator, whole)
    yield _case(generator, [63, 1, 65, 33, 17, integer(generator, 2, 15)])


def _short(generator: torch.Generator) -> Iterator[Case]:
    lengths = [integer(generator, 1, 3) for _ in range(integer(generator, 66, 70))]
    yield _case(generator, lengths)


def _empty(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 5, 15)
    yield _case(generator, [0, n, 0, 0, 9, 0], note="empty documents")


def _bounds(generator: torch.Generator) -> Iterator[Case]:
    lengths = [integer(generator, 20, 40), integer(generator, 3, 12)]
    bound = 3 * max(lengths)
    yield _case(generator, lengths, bound=bound, note=f"max_seqlen {bound}: more than needed")


def _heads(generator: torch.Generator) -> Iterator[Case]:
    """Two query heads to each of three KV heads, and three to one with an odd head_dim."""
    yield _case(generator, [integer(generator, 5, 14), 9], heads=(6, 3))
    head_dim = 2 * integer(generator, 17, 30) + 1
    yield _case(generator, [7, integer(generator, 5, 14)], heads=(3, 1), head_dim=head_dim)


def _scales(generator: torch.Generator) -> Iterator[Case]:
    for scale, length in ((5, LONGEST), (40, integer(generator, 65, 73))):
        lengths = [length, integer(generator, 3, 9)]
        yield _case(generator, lengths, scale=scale, note=f"scores × {scale}")


def _rising(generator: torch.Generator) -> Iterator[Case]:
    """By more than exp can bear, after any first tile; and by 14, where the others still count:
    those before the last keys, and those behind the first.
    """
    lengths = [integer(generator, 140, 150) for _ in range(3)]
    note = "scores from −200 to 200 at key 128 of the first, 14 above the others in the others"
    case = _case(generator, lengths, scale=0.1, note=note)
    q, k, v, _, _ = case.args
    ends = list(itertools.accumulate([0, *lengths]))
    first, second, third = (slice(*ends[n : n + 2]) for n in range(3))
    level = (200 * q.shape[-1] ** 0.5) ** 0.5
    q[first, :, 0], k[first, :, 0] = level, -level
    k[128 : lengths[0], :, 0] = level
    q[second, :, 0], k[second, :, 0] = 1, 0
    q[third, :, 0], k[third, :, 0] = 1, 0
    v[second] = 0.1 * v[second] + 1  # what the others add does not cancel
    v[third] = 0.1 * v[third] + 1
    for keys in (slice(ends[2] - 8, ends[2]), slice(ends[2], ends[2] + 1)):
        k[keys] = 0
        k[keys, :, 0] = 14 * q.shape[-1] ** 0.5
        v[keys] *= 0.01  # nor is it hidden by these
    yield case


def _spoilt(generator: torch.Generator) -> Iterator[Case]:
    """A document of NaN between two others."""
    case = _case(generator, [integer(generator, 5, 14), 9, 12], note="NaN in the second document")
    *tensors, cu_seqlens, _ = case.args
    second = slice(*cu_seqlens[1:3].tolist())
    for tensor in tensors:
        tensor[second] = torch.nan
    yield case


def _low(generator: torch.Generator) -> Iterator[Case]:
    """Below what m may start at, and below what may stand for a hidden score."""
    lengths = [integer(generator, 5, 9) for _ in range(4)]
    note = "scores near −130, −300 and −20,000 in the first three"
    case = _case(generator, lengths, note=note)
    for document, level in enumerate((-130, -300, -20_000)):
        _level(case, document, level)
    yield case


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    """Each stored in another order of (total, heads, head_dim); then a q whose heads share rows.

    empty_like does not copy strides that overlap, and a store with those of q stays inside of out.
    """
    for orders, heads in (
        (((1, 0, 2), (2, 1, 0), (0, 2, 1)), (2, 2)),
        (((2, 1, 0), (1, 0, 2), (1, 2, 0)), (4, 2)),
    ):
        case = _case(generator, [integer(generator, 5, 14), 9], heads=heads)
        stored = zip(case.args[:3], orders, strict=True)
        args = (*(here(strided(t.cpu(), order)) for t, order in stored), *case.args[3:])
        strides = ", ".join(
            f"{name}.stride() {t.stride()}" for name, t in zip("qkv", args[:3], strict=True)
        )
        yield Case(f"{case.description}, {strides}", args)
    case = _case(generator, [integer(generator, 5, 14), 4], heads=(2, 1))
    q, *rest = case.args
    q = here(normal(generator, len(q) + 1, 16)).unfold(0, 2, 1).mT
    yield Case(f"{case.description}, heads of q that share rows", (q, *rest))


def _half(generator: torch.Generator) -> Iterator[Case]:
    """One document as ever, one whose unnormalised sums pass 65,504, one with large scores."""
    lengths = [integer(generator, 20, 40), integer(generator, 36, 40), integer(generator, 66, 72)]
    note = "v near 4,000 in the second document, scores near 1,500 in the third"
    case = _case(generator, lengths, head_dim=64, dtype=torch.float16, note=note)
    q, _, v, cu_seqlens, _ = case.args
    second = slice(*cu_seqlens[1:3].tolist())
    q[second] *= 0.1
    v[second] = 100 * v[second] + 4000
    _level(case, 2, 1500)
    yield case


def _half_sums(generator: torch.Generator) -> Iterator[Case]:
    """The sum of all small weights is 1.2 steps of what it is added to, and no tile's is a half."""
    length = integer(generator, 400, 410)
    note = "the first 16 keys 10 above the others"
    case = _case(generator, [length], dtype=torch.float16, note=note)
    q, k, v, *_ = case.args
    set_small_weights(q, k[:FIRST_KEYS], k[FIRST_KEYS:])
    v.fill_(LOW_VALUE)
    yield case


def _tiny(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 3, 9), 4])


def _long(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [LONG * 3 // 4, LONG // 4])


def _many(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 1, 6) for _ in range(8)])


QUESTION = Question(
    id="lab6.flash_varlen",
    points=5,
    checks=(
        Check("each document alone, causal", _several, _judge),
        Check("any length: 1, a block, a block and one more", _whole_tiles, _judge),
        Check("as many documents as there are", _short, _judge),
        Check("empty documents change nothing", _empty, _judge),
        Check("max_seqlen is an upper bound", _bounds, _judge),
        Check("query heads share KV heads, any head_dim", _heads, _judge),
        Check("scores × 5 and × 40", _scales, _judge),
        Check("rows far below 0", _low, _judge),
        Check("scores that rise along the keys", _rising, _judge),
        Check("a document of NaN spoils no other", _spoilt, _judge_others),
        Check("any strides", _layouts, _judge),
        Check("float16, with sums in float32", _half, _judge),
        Check("float16, and small weights add up", _half_sums, _judge_sums),
        fresh_check(_tiny),
        Check("memory does not grow with the score matrix", _long, _judge_memory, work=True),
        Check("one launch of your own kernel did the work", _many, _judge_own_work, work=True),
    ),
    mistakes=MISTAKES,
    needs=needs_triton,
    right=RIGHT,
    remark=where_it_ran,
)
