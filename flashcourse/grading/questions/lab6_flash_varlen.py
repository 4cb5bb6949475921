"""lab6.flash_varlen: causal attention over packed documents, from a kernel of the learner's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from flashcourse import runtime
from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.judge import judge_largest_tensor, judge_tensor, score_tolerance
from flashcourse.grading.mistakes_tiled_forward import MISTAKES as TILED_MISTAKES
from flashcourse.grading.mistakes_tiled_forward import tiled_forward
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions import lab3_tiled_forward as lab3
from flashcourse.grading.triton_work import (
    from_first_entry,
    half_tolerance,
    here,
    judge_own_kernel,
    needs_triton,
    on_cpu,
    tiled_mistake,
    where_it_ran,
)

LONG = 4096 if runtime.has_gpu() else 256  # tokens of the row with which memory is judged
MOST_LAUNCHES = 3  # a kernel, and one or two that prepare; not one a document

# What is right ----------------------------------------------------------------------------------


def _by_document(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    offsets: Callable[[list[int]], list[int]] = list,
) -> torch.Tensor:
    """Attention of each document alone; ``attend`` gets (1, heads, length, head_dim)."""
    bounds = offsets(cu_seqlens.tolist())
    out = torch.zeros_like(q)
    q4, k4, v4 = (on_cpu(t).transpose(0, 1)[None] for t in (q, k, v))
    for first, last in itertools.pairwise(bounds):
        if last > first:
            parts = (t[:, :, first:last] for t in (q4, k4, v4))
            out[first:last] = attend(*parts)[0].transpose(0, 1).to(out.device, out.dtype)
    return out


def _judge(case: Case, observation: Observation) -> str | None:
    q, k, v, cu_seqlens, _ = (t.cpu() if isinstance(t, torch.Tensor) else t for t in case.args)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    size = 0.0
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        if last == first:
            continue
        q4, k4, v4 = (t[first:last].transpose(0, 1)[None] for t in (q, k, v))
        out, _ = lab3.reference(q4, k4, v4, True)
        expected[first:last] = out[0].transpose(0, 1)
        size = max(size, lab3.largest_score(q4.float(), k4.float()))
    largest = v.abs().max().item()
    tolerance = half_tolerance if q.dtype == torch.float16 else score_tolerance
    return judge_tensor("out", observation.output, expected, tolerance(size, largest), q.dtype)


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


def _several(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 3, 9), integer(generator, 11, 20), 5])
    yield _case(generator, [integer(generator, 140, 160), 7, integer(generator, 33, 60)])


def _ragged(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [1, 1, integer(generator, 2, 5), 1])
    yield _case(generator, [63, 1, 65, 31])


def _empty(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 5, 15)
    yield _case(generator, [0, n, 0, 0, 9, 0], note="empty documents")


def _bounds(generator: torch.Generator) -> Iterator[Case]:
    lengths = [integer(generator, 20, 40), integer(generator, 3, 12)]
    bound = 3 * max(lengths)
    yield _case(generator, lengths, bound=bound, note=f"max_seqlen {bound}: more than needed")


def _heads(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 5, 14), 9], heads=(6, 2))
    yield _case(generator, [7, integer(generator, 5, 14)], heads=(4, 2), head_dim=40)


def _scales(generator: torch.Generator) -> Iterator[Case]:
    for scale in (5, 40):
        lengths = [integer(generator, 3, 9), integer(generator, 140, 160)]
        yield _case(generator, lengths, scale=scale, note=f"scores × {scale}")


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    """Stored head by head, as some models do, and with head_dim outermost."""
    for order, stored in (((1, 0, 2), "heads, total"), ((2, 1, 0), "head_dim, heads, total")):
        case = _case(generator, [integer(generator, 5, 14), 9, 3], heads=(4, 2))
        args = (*(here(strided(t.cpu(), order)) for t in case.args[:3]), *case.args[3:])
        yield Case(f"{case.description}, stored as ({stored}…)", args)


def _half(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 20, 40), 7], head_dim=64, dtype=torch.float16)


def _long(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [LONG // 2, LONG // 4, LONG // 4])


def _many(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 1, 6) for _ in range(8)], heads=(2, 1))


# The known mistakes -----------------------------------------------------------------------------


def _attend(answer: Answer, block_q: int, block_k: int) -> Callable[..., torch.Tensor]:
    """A tiled forward of lab 3 as causal attention without lse."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = answer(q, k, v, True, block_q, block_k)[0]
        return out

    return attend


def _adapt(answer: Answer, block_q: int, block_k: int) -> Answer:
    """A tiled forward of lab 3, on each document."""
    return partial(_by_document, _attend(answer, block_q, block_k))


_RIGHT = _adapt(tiled_forward, 32, 32)


def _whole_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    ends = torch.tensor([0, int(cu_seqlens[-1])])
    return _RIGHT(q, k, v, ends, max_seqlen)


def _shifted(bounds: list[int]) -> list[int]:
    """Every boundary but the outer two lies one token too far."""
    last = bounds[-1]
    return [bounds[0], *(min(b + 1, last) for b in bounds[1:-1]), last]


def _masked(
    visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
) -> torch.Tensor:
    """Attention over the whole row with a mask made from documents and positions."""
    offsets = cu_seqlens.cpu().long()
    lengths = offsets.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(document)) - offsets[document]
    keep = visible(document, position)
    group = q.shape[1] // k.shape[1]
    q4, k4, v4 = (on_cpu(t).transpose(0, 1) for t in (q, k, v))
    k4, v4 = (t.repeat_interleave(group, dim=0) for t in (k4, v4))
    s = (q4 @ k4.mT * q.shape[-1] ** -0.5).masked_fill(~keep, float("-inf"))
    return (torch.softmax(s, -1) @ v4).transpose(0, 1).to(q.device, q.dtype)


def _by_position(document: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return position[None, :] <= position[:, None]


def _blocks_only(document: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return document[None, :] == document[:, None]


def _cut(
    limit: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
) -> torch.Tensor:
    """Only the first ``limit`` queries of each document are computed."""
    out = _RIGHT(q, k, v, cu_seqlens, max_seqlen)
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        out[first + limit : last] = 0
    return out


def _in_order(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    parts = (from_first_entry(t) for t in (q, k, v))
    return _RIGHT(*parts, cu_seqlens, max_seqlen)


_FROM_LAB_3 = (
    "the accumulator is not rescaled",
    "the sum is not rescaled",
    "no max subtraction",
    "scale missing",
    "scaled twice",
    "the last keys are dropped",
    "causal off by one: a query does not see its own key",
    "KV heads tiled instead of repeated",
    "never divided by the sum",
)
_TILES = (16, 32, 64, 128)

QUESTION = Question(
    id="lab6.flash_varlen",
    points=5,
    checks=(
        Check("each document alone, causal", _several, _judge),
        Check("any length: 1, a block, a block and one more", _ragged, _judge),
        Check("empty documents change nothing", _empty, _judge),
        Check("max_seqlen is an upper bound", _bounds, _judge),
        Check("query heads share KV heads, any head_dim", _heads, _judge),
        Check("scores × 5 and × 40", _scales, _judge),
        Check("any strides", _layouts, _judge),
        Check("float16, with sums in float32", _half, _judge),
        Check("memory does not grow with the score matrix", _long, _judge_memory, work=True),
        Check("one launch of your own kernel did the work", _many, _judge_own_work, work=True),
    ),
    mistakes=(
        *(tiled_mistake(m, _adapt) for m in TILED_MISTAKES if m.name in _FROM_LAB_3),
        Mistake(
            "neighbours visible",
            "the whole row was one causal sequence, so every document reads those before it. A "
            "program's keys begin at its document's first token.",
            _whole_row,
        ),
        Mistake(
            "mask by position only",
            "positions were compared and documents were not: the beginnings of all documents are "
            "seen.",
            partial(_masked, _by_position),
        ),
        Mistake(
            "not causal inside a document",
            "tokens see their own future.",
            partial(_masked, _blocks_only),
        ),
        Mistake(
            "cu_seqlens shifted by one",
            "document d begins at cu_seqlens[d], which is its own first token.",
            partial(_by_document, _attend(tiled_forward, 32, 32), offsets=_shifted),
        ),
        Mistake(
            "only the first tile of each document",
            "the grid must have enough programs for the longest document: "
            "cdiv(max_seqlen, BLOCK) of them.",
            partial(_cut, _TILES[0]),
            tuple(partial(_cut, limit) for limit in _TILES[1:]),
        ),
        Mistake(
            "strides ignored",
            "the inputs were read as if they were contiguous. Pass stride() of every input to the "
            "kernel.",
            _in_order,
        ),
        Mistake(
            "the right numbers from PyTorch",
            "a loop over the documents in PyTorch gives the right numbers. The question asks for "
            "your kernel, launched once.",
            _RIGHT,
        ),
    ),
    needs=needs_triton,
    right=_RIGHT,
    remark=where_it_ran,
)
