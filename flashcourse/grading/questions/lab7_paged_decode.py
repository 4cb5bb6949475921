"""lab7.paged_decode: a new token's attention through a block table, from the learner's kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flashcourse import runtime
from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.fresh import fresh_check
from flashcourse.grading.judge import judge_largest_tensor, judge_tensor, score_tolerance
from flashcourse.grading.mistakes_paged_decode import MISTAKES, RIGHT
from flashcourse.grading.page_memory import call_between_guards, call_in_a_large_pool
from flashcourse.grading.question import Case, Check, Observation, Question
from flashcourse.grading.questions import lab3_tiled_forward as lab3
from flashcourse.grading.triton_work import (
    LOW_VALUE,
    half_tolerance,
    here,
    judge_own_kernel,
    needs_triton,
    set_small_weights,
    small_weights_tolerance,
    where_it_ran,
)

LONG = 2048 if runtime.has_gpu() else 250  # about the tokens with which memory is judged
MOST_LAUNCHES = 3  # a kernel, one that merges, one that prepares; not one a sequence
HEAD_DIMS = (24, 40, 48, 72, 80, 96, 100)  # no power of two

# What is right ----------------------------------------------------------------------------------


def _judge(case: Case, observation: Observation) -> str | None:
    q, k_pages, v_pages, block_table, cache_seqlens = (t.cpu() for t in case.args)
    page_size = k_pages.shape[1]
    expected = torch.zeros(q.shape, dtype=torch.float64)
    size, apart, largest = 0.0, 0.0, 0.0
    one_key = torch.full((len(q), 1, 1, 1), torch.inf)
    for b, length in enumerate(cache_seqlens.tolist()):
        if not length:
            continue
        pages = block_table[b, : -(-length // page_size)].long()
        k, v = (
            held[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for held in (k_pages, v_pages)
        )
        expected[b, None], _ = lab3.reference(q[b, None], k, v, False)
        if length == 1 and q.dtype == torch.float32:
            one_key[b] = lab3.allowed_of_rows(q[b, None], k, v, False, one_key[b, None]).max()
        size = max(size, lab3.largest_score(q[b, None].float(), k.float()))
        from_mean = k.float() - k.float().mean(dim=2, keepdim=True)
        apart = max(apart, lab3.largest_score(q[b, None].float(), from_mean))
        largest = max(largest, v.abs().max().item())
    allowed = score_tolerance(size, largest)
    if q.dtype == torch.float16:
        # A q that was rounded moves the scores of a row, and what they have in common cancels:
        # it counts for keys relative to their mean. A score that was rounded has no such excuse.
        allowed += half_tolerance(apart, largest)
    return judge_tensor("out", observation.output, expected, one_key.clamp(max=allowed), q.dtype)


def _judge_sums(case: Case, observation: Observation) -> str | None:
    q, k_pages, _, _, lengths = (t.cpu() for t in case.args)
    k = k_pages.flatten(0, 1).transpose(0, 1)[None]
    allowed = small_weights_tolerance(lab3.moved_scores(q.double(), k.double()), int(lengths[0]))
    expected = torch.full(q.shape, LOW_VALUE, dtype=torch.float64)
    return judge_tensor("out", observation.output, expected, allowed, torch.float16)


def _judge_memory(case: Case, observation: Observation) -> str | None:
    k_pages, lengths = case.args[1], case.args[4]
    copied = int(lengths.sum()) * k_pages.shape[2] * k_pages.shape[3]
    return judge_largest_tensor(
        observation,
        copied // 4,
        f"the sequences' keys copied behind each other have {copied:,} numbers",
    )


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    message = judge_own_kernel(observation, tensors=5)
    if message:
        return message
    count = sum(launch.own for launch in observation.launches)
    if count > MOST_LAUNCHES:
        return (
            f"{count} launches for {len(case.args[4])} sequences: one launch does the whole batch, "
            "and each of its programs finds its sequence's row of the table"
        )
    return None


# The inputs -------------------------------------------------------------------------------------


def _case(
    generator: torch.Generator,
    lengths: list[int],
    *,
    page_size: int = 16,
    heads: tuple[int, int] = (1, 1),
    head_dim: int = 16,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    unused: float | None = None,
    garbage: tuple[int, ...] | None = None,
    columns: int = 1,
    note: str = "",
) -> Case:
    """Sequences in pages in random order.

    Args:
        unused: what lies in slots that no sequence uses; None is what others left there.
        garbage: entries past a sequence's last page; None is pages of others. -1 is the page
            before the first, and a number below -1 stands for the page after the last.
        columns: how many more the table has than the longest sequence needs.
    """
    needed = [-(-length // page_size) for length in lengths]
    count = sum(needed) + 3
    q = normal(generator, len(lengths), heads[0], 1, head_dim, scale=scale, dtype=dtype)
    shape = (count, page_size, heads[1], head_dim)
    k_pages, v_pages = (normal(generator, *shape, dtype=dtype) for _ in range(2))
    used = torch.zeros(count, page_size, dtype=torch.bool)
    order = torch.randperm(count, generator=generator)
    table = torch.randint(count, (len(lengths), max(needed) + columns), generator=generator)
    if garbage:
        entries = torch.tensor([count if entry < -1 else entry for entry in garbage])
        table = entries[torch.randint(len(garbage), table.shape, generator=generator)]
    for b, length in enumerate(lengths):
        pages, order = order[: needed[b]], order[needed[b] :]
        table[b, : needed[b]] = pages
        for column, page in enumerate(pages.tolist()):
            used[page, : length - column * page_size] = True
    if unused is not None:
        k_pages[~used], v_pages[~used] = unused, unused
    args = (q, k_pages, v_pages, table.int(), torch.tensor(lengths, dtype=torch.int32))
    described = (
        f"q {tuple(q.shape)}, pages {shape}, table {tuple(table.shape)}, sequences of "
        f"{', '.join(map(str, lengths))} tokens"
    )
    return Case(described + (f", {note}" if note else ""), tuple(here(t) for t in args))


def _several(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 36, 46)])
    yield _case(generator, [integer(generator, 17, 30), integer(generator, 35, 46)])
    yield _case(generator, [integer(generator, 1030, 1045)], page_size=4)  # over 256 pages


def _page_sizes(generator: torch.Generator) -> Iterator[Case]:
    for page_size in (1, integer(generator, 3, 7), 64):
        lengths = [integer(generator, 9, 20), 64 + integer(generator, 3, 9)]
        yield _case(generator, lengths, page_size=page_size)
    page_size = integer(generator, 130, 150)
    yield _case(generator, [page_size + integer(generator, 3, 9)], page_size=page_size)


def _large_pool(generator: torch.Generator) -> Iterator[Case]:
    """The sequence's first keys lie in the last page: see ``call_in_a_large_pool``."""
    note = "far apart in a pool of 40,000 pages, which spans 2³¹ numbers"
    lengths = [integer(generator, 36, 46)]
    case = _case(generator, lengths, dtype=torch.float16, note=note)
    q, k_pages, v_pages, table, lengths_ = case.args
    order = torch.arange(len(k_pages), device=table.device)
    first, last = int(table[0, 0]), len(k_pages) - 1
    order[first], order[last] = last, first
    args = (q, k_pages[order], v_pages[order], order[table.long()].int(), lengths_)
    yield Case(case.description, args)


def _last_pages(generator: torch.Generator) -> Iterator[Case]:
    """One slot, all but one, exactly full: in the table's last column, and not.

    The tiles of 16, 32, 64 and 128 keys that people choose are exactly full as well.
    """
    yield _case(generator, [33, 31, 1])
    yield _case(generator, [128, 48, 16, 64, 32], columns=0)
    yield _case(generator, [3 * 5], page_size=5, columns=0)


def _nan_slots(generator: torch.Generator) -> Iterator[Case]:
    """A sequence that fills its pages is beside the other: it tells what is read from what."""
    lengths = [integer(generator, 17, 30), 16]
    yield _case(generator, lengths, unused=torch.nan, note="NaN in every unused slot")
    yield _case(generator, [7], page_size=3, unused=torch.inf, note="inf in every unused slot")


def _garbage(generator: torch.Generator) -> Iterator[Case]:
    lengths = [integer(generator, 3, 14), integer(generator, 34, 46)]
    yield _case(generator, lengths, note="entries of others past the last page")
    yield _case(
        generator, [32, *lengths], garbage=(-1, -2), columns=2, note="no pages past the last"
    )


def _batches(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 20, 40), 1, 9, 60], page_size=8)
    yield _case(generator, [0, integer(generator, 5, 30), 0], note="two of them empty")
    yield _case(generator, [integer(generator, 1, 9) for _ in range(33)], page_size=4)


def _heads(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [integer(generator, 20, 30)], heads=(6, 2))
    yield _case(generator, [7, integer(generator, 20, 30)], heads=(10, 5))
    yield _case(generator, [integer(generator, 3, 9)], heads=(66, 1))


def _scales(generator: torch.Generator) -> Iterator[Case]:
    """The highest score stands far behind the first."""
    for scale in (5, 40):
        length = integer(generator, 70, 90) if scale == 5 else integer(generator, 140, 159)
        case = _case(generator, [length], scale=scale, note=f"scores × {scale}")
        q, k_pages, _, table, _ = case.args
        if scale == 40:  # a score of 100 at the least: exp(100) does not fit into float32
            key = k_pages[table[0, (length - 1) // 16], (length - 1) % 16, 0]
            q[0, 0, 0] = key * 100 * q.shape[-1] ** 0.5 / (key @ key)
        yield case


def _rising(generator: torch.Generator) -> Iterator[Case]:
    """By more than exp can bear, after any first tile; and by 14, where the others still count."""
    note = "scores from −200 to 200 at key 128 of the first"
    case = _case(generator, [integer(generator, 140, 150), 1], scale=0.1, note=note)
    q, k_pages, _, table, _ = case.args
    pages = table[0, :9].long()
    level = (200 * q.shape[-1] ** 0.5) ** 0.5
    q[0, ..., 0], k_pages[pages, ..., 0], k_pages[pages[8], ..., 0] = level, -level, level
    yield case
    length = integer(generator, 275, 300)
    for key in (0, length - 1):
        case = _case(generator, [length], scale=0.1, note=f"key {key} 14 above the others")
        q, k_pages, v_pages, table, _ = case.args
        q[..., 0], k_pages[..., 0] = 1, 0
        v_pages.mul_(0.1).add_(1)  # what the others add does not cancel
        page, slot = table[0, key // 16].long(), key % 16
        k_pages[page, slot] = 0
        k_pages[page, slot, :, 0] = 14 * q.shape[-1] ** 0.5
        v_pages[page, slot] *= 0.01  # nor is it hidden by this one
        yield case


def _low_scores(generator: torch.Generator) -> Iterator[Case]:
    """Below what m may start at, and what may stand for a hidden score; and heads far apart.

    Few bits make the scores of the first exact in any order of their sums. Its first value is 3
    throughout: a head whose weights are lost has an error of 3 there, whatever is allowed.
    """
    note = "scores near −20,000, 100 and −60 in the three heads"
    case = _case(generator, [integer(generator, 35, 45)], heads=(3, 1), note=note)
    q, k_pages, v_pages, *_ = case.args
    v_pages[..., 0] = 3
    for tensor in (q, k_pages):
        tensor.copy_((8 * tensor).round() / 8)
    level = torch.tensor([-20_000.0, 100.0, -60.0], device=q.device)
    k_pages[..., 0] = 64
    q[..., 0, 0] = level * q.shape[-1] ** 0.5 / 64
    yield case
    yield _lowered(_case(generator, [integer(generator, 35, 45)]))


def _lowered(case: Case) -> Case:
    """The same case with all scores near −300."""
    q, k_pages, *_ = case.args
    level = (300 * q.shape[-1] ** 0.5) ** 0.5
    q[..., 0], k_pages[..., 0] = level, -level
    return Case(f"{case.description}, scores near −300", case.args)


def _head_dims(generator: torch.Generator) -> Iterator[Case]:
    """Two that are no power of two, one of them odd, and the largest."""
    even = HEAD_DIMS[integer(generator, 0, len(HEAD_DIMS) - 1)]
    for head_dim in (even, 2 * integer(generator, 32, 63) + 1, 128):
        yield _case(generator, [integer(generator, 17, 30)], head_dim=head_dim)


def _layouts(generator: torch.Generator) -> Iterator[Case]:
    """Heads outside the slots; K and V laid out differently; K and V in one tensor.

    The q of the last overlaps: empty_like does not copy such strides, and a store with them stays
    inside of out.
    """
    for order_k, order_v, stored in (
        ((0, 2, 1, 3), (0, 2, 1, 3), "pages stored as (page, heads, slot, head_dim)"),
        ((0, 1, 2, 3), (0, 3, 2, 1), "V stored as (page, head_dim, heads, slot)"),
    ):
        note = f"{stored}, the table column by column"
        case = _case(generator, [21, integer(generator, 34, 40)], heads=(4, 2), note=note)
        q, k_pages, v_pages, table, lengths = (t.cpu() for t in case.args)
        q, table = strided(q, (1, 3, 0, 2)), strided(table, (1, 0))
        args = (q, strided(k_pages, order_k), strided(v_pages, order_v), table, lengths)
        yield Case(case.description, tuple(here(t) for t in args))
    note = "K and V as views of one tensor, rows of q that share memory"
    case = _case(generator, [5, integer(generator, 34, 40)], heads=(2, 1), note=note)
    _, k_pages, v_pages, *rest = case.args
    q = here(normal(generator, 3, 16)).unfold(0, 2, 1).mT[:, :, None]
    both = torch.stack([k_pages, v_pages], dim=1)
    yield Case(case.description, (q, both[:, 0], both[:, 1], *rest))


def _half(generator: torch.Generator) -> Iterator[Case]:
    half = torch.float16
    lengths = [integer(generator, 33, 60), 7]
    note = "scores near 900"
    case = _case(generator, lengths, heads=(6, 2), head_dim=64, dtype=half, note=note)
    q, k_pages, v_pages, *_ = case.args
    q[..., 0] = k_pages[..., 0] = (900 * q.shape[-1] ** 0.5) ** 0.5  # where float16 has steps of ½
    v_pages.sign_()
    yield case
    lengths = [integer(generator, 115, 125), 5]
    case = _case(generator, lengths, page_size=32, dtype=half, note="values near 600")
    case.args[0].zero_()
    case.args[2].add_(600)  # the sum of all values does not fit into float16
    yield case


def _half_sums(generator: torch.Generator) -> Iterator[Case]:
    length = integer(generator, 600, 700)
    note = "the first 16 keys 10 above the others"
    case = _case(generator, [length], dtype=torch.float16, note=note)
    q, k_pages, v_pages, table, _ = case.args
    page = table[0, 0].item()
    first, others = k_pages[page : page + 1], k_pages
    set_small_weights(q, first, others)
    v_pages.fill_(LOW_VALUE)
    yield case


def _small(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [5, 3], page_size=4, note="twice")


def _long(generator: torch.Generator) -> Iterator[Case]:
    yield _case(generator, [LONG + 3, LONG - 5], heads=(2, 2), scale=5, unused=torch.nan)


def _many(generator: torch.Generator) -> Iterator[Case]:
    """Hard enough that few known mistakes give the right numbers, and are asked about the rest."""
    lengths = [integer(generator, 145, 155), 0, *(integer(generator, 2, 47) for _ in range(6))]
    case = _case(generator, lengths, heads=(4, 2), head_dim=24, scale=5, unused=torch.nan)
    yield _lowered(case)
    yield _case(generator, [19] * 4, page_size=8, head_dim=40, dtype=torch.float16)


def _check(name: str, cases: Callable[[torch.Generator], Iterator[Case]]) -> Check:
    return Check(name, cases, _judge, call_between_guards)


QUESTION = Question(
    id="lab7.paged_decode",
    points=5,
    checks=(
        _check("a new token over several pages", _several),
        _check("any page size", _page_sizes),
        Check("a pool of 40,000 pages", _large_pool, _judge, call_in_a_large_pool),
        _check("the last page: one slot, all but one, exactly full", _last_pages),
        _check("unused slots may hold NaN", _nan_slots),
        _check("entries past the last page may be anything", _garbage),
        _check("every sequence has its own length, 0 included", _batches),
        _check("query heads share KV heads", _heads),
        _check("scores × 5 and × 40", _scales),
        _check("scores far below 0", _low_scores),
        _check("scores that rise along the keys", _rising),
        _check("any head_dim", _head_dims),
        _check("any strides", _layouts),
        _check("float16, with scores and sums in float32", _half),
        Check("float16, and small weights add up", _half_sums, _judge_sums, call_between_guards),
        fresh_check(_small),
        Check("the pages are not copied", _long, _judge_memory, work=True),
        Check(
            "one launch of your own kernel did the work",
            _many,
            _judge_own_work,
            call_between_guards,
            work=True,
        ),
    ),
    mistakes=MISTAKES,
    needs=needs_triton,
    right=RIGHT,
    remark=where_it_ran,
)
