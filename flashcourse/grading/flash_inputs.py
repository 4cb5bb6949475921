"""What lab 4 and lab 5 ask of a kernel: fresh q, k and v, each case hard in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flashcourse import runtime
from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.question import Case
from flashcourse.grading.triton_work import FEW_BITS, as_half, here

HEAD_DIMS = (24, 40, 48, 72, 80, 96, 100)  # no power of two
LONG = (4096, 4096) if runtime.has_gpu() else (64, 320)  # lengths with which memory is judged

Draw = Callable[[torch.Generator], Iterator[Case]]


def draw_case(
    generator: torch.Generator,
    seq_q: int,
    seq_k: int,
    *,
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    head_dim: int = 16,
    scale: float = 1.0,
    is_causal: bool = False,
    note: str = "",
) -> Case:
    """Normal q, k and v, float32, on the device of the kernels."""
    q = normal(generator, batch, heads[0], seq_q, head_dim, scale=scale)
    k = normal(generator, batch, heads[1], seq_k, head_dim)
    v = normal(generator, batch, heads[1], seq_k, head_dim)
    described = f"q {tuple(q.shape)}, k and v {tuple(k.shape)}, is_causal={is_causal}"
    args = tuple(here(t) for t in (q, k, v))
    return Case(described + (f", {note}" if note else ""), args, {"is_causal": is_causal})


def tile_cases(generator: torch.Generator) -> Iterator[Case]:
    """More keys, then more queries than any tile holds, then whole tiles of any size."""
    yield draw_case(generator, integer(generator, 2, 5), integer(generator, 1030, 1100))
    yield draw_case(generator, integer(generator, 1030, 1100), integer(generator, 17, 24))
    yield draw_case(generator, 128, 256)


def ragged_cases(generator: torch.Generator) -> Iterator[Case]:
    """One row, primes, a block less one, a block and one more."""
    yield draw_case(generator, 1, 1, scale=0.1)
    for lengths in ((17, 127), (63, 65), (129, integer(generator, 2, 7))):
        yield draw_case(generator, *lengths)


def scale_cases(generator: torch.Generator) -> Iterator[Case]:
    """Scores × 1, × 5 and × 40, the highest behind the first tile; rows far from 0; rows that rise
    by more than exp can bear after any first tile; one score far above the others.
    """
    for scale in (1, 5, 40):
        case = draw_case(generator, 5, integer(generator, 270, 300), scale=scale)
        q, k, _ = case.args
        if scale == 40:  # one score of 100 at the least: exp(100) does not fit into float32
            key = k[0, 0, -3]
            q[0, 0, 0] = key * 100 * q.shape[-1] ** 0.5 / (key @ key)
        yield Case(f"{case.description}, scores × {scale}", case.args, case.kwargs)
    note = "rows near 300, −300 and 60"
    case = draw_case(generator, 14, integer(generator, 35, 47), note=note)
    q, k, _ = case.args
    level = (300 * q.shape[-1] ** 0.5) ** 0.5
    q[..., 0], k[..., 0] = level, level
    q[..., 1::3, 0], q[..., 2::3, 0] = -level, level / 5
    yield case
    case = draw_case(generator, 3, integer(generator, 140, 150), note="from −200 to 200 at key 128")
    q, k, _ = case.args
    level = (200 * q.shape[-1] ** 0.5) ** 0.5
    q[..., 0], k[..., :128, 0], k[..., 128:, 0] = level, -level, level
    yield case
    for key in (0, -1):
        yield far_apart_case(generator, key)


def far_apart_case(generator: torch.Generator, key: int) -> Case:
    """The first or the last score of a row is 14 above the others.

    The others add up to parts in 10,000: more than rounding, so that no weight is too small to
    count, and what was summed before a new maximum must get its own factor, however small.
    """
    note = f"the {'last' if key else 'first'} key 14 above the others"
    case = draw_case(generator, 5, integer(generator, 275, 300), scale=0.1, note=note)
    q, k, v = case.args
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[..., key, :] = 0.0
    k[..., key, 0] = 14 * q.shape[-1] ** 0.5
    v.mul_(0.1).add_(1)  # what the others add does not cancel
    v[..., key, :] *= 0.01  # nor is it hidden by this one
    return case


def head_cases(generator: torch.Generator) -> Iterator[Case]:
    """Two query heads to each of three KV heads, and nine to one; batch 3."""
    yield draw_case(generator, integer(generator, 9, 14), 17, heads=(6, 3))
    yield draw_case(generator, integer(generator, 9, 14), 21, heads=(9, 1), batch=3)


def causal_cases(generator: torch.Generator) -> Iterator[Case]:
    yield draw_case(generator, *(integer(generator, 41, 63),) * 2, heads=(2, 2), is_causal=True)
    yield draw_case(generator, *(integer(generator, 140, 170),) * 2, is_causal=True)


def longer_key_cases(generator: torch.Generator) -> Iterator[Case]:
    """Whatever the sides of the tiles: with 126 keys more the first query misses the last key of
    a tile, and with one key more a tile of queries reaches the first key of another. One query
    sees more keys than any tile holds.
    """
    seq_q = integer(generator, 17, 23)
    yield draw_case(generator, seq_q, seq_q + 126, is_causal=True)
    yield draw_case(generator, 1, integer(generator, 1030, 1100), is_causal=True)
    yield draw_case(generator, 128, 129, is_causal=True)


def empty_row_cases(generator: torch.Generator) -> Iterator[Case]:
    """More queries than keys: the first see nothing, in whole tiles and in part of one."""
    yield draw_case(generator, 160, integer(generator, 17, 21), is_causal=True)
    yield draw_case(generator, 39, integer(generator, 27, 33), is_causal=True)


def low_score_cases(generator: torch.Generator) -> Iterator[Case]:
    n = integer(generator, 20, 31)
    case = draw_case(generator, n, n, is_causal=True, note="scores near −16,000")
    q, k, _ = case.args
    for t in (q, k):  # few bits, so that every order of summation gives the same score
        t.copy_((4 * t).round() / 4)
    q[..., 0], k[..., 0] = 256, -256
    yield case


def hidden_score_cases(generator: torch.Generator) -> Iterator[Case]:
    """Hidden scores above visible ones of −16,000, and a hidden score of 150 among small ones."""
    yield from low_score_cases(generator)
    n = integer(generator, 20, 31)
    case = draw_case(generator, n, n, is_causal=True, note="hidden scores of 150")
    q, k, _ = case.args
    first = q[..., :1, :]
    k[..., -1:, :] = first * 150 * q.shape[-1] ** 0.5 / first.square().sum(-1, keepdim=True)
    yield case


def head_dim_cases(generator: torch.Generator) -> Iterator[Case]:
    """Two that are no power of two, one of them odd, and the largest."""
    even = HEAD_DIMS[integer(generator, 0, len(HEAD_DIMS) - 1)]
    for head_dim in (even, 2 * integer(generator, 32, 63) + 1, 128):
        yield draw_case(generator, 7, 19, head_dim=head_dim)


def layout_cases(generator: torch.Generator) -> Iterator[Case]:
    """Stored as a model stores them and in another order, v never like k; then parts of others."""
    model, other = (0, 2, 1, 3), (1, 3, 0, 2)
    for heads, layouts in (((4, 2), (model, model, other)), ((2, 2), (other, other, model))):
        case = draw_case(generator, 11, 23, heads=heads, batch=2)
        args = tuple(here(strided(t.cpu(), o)) for t, o in zip(case.args, layouts, strict=True))
        note = f"q and k with the dimensions stored in order {layouts[0]}, v in {layouts[2]}"
        yield Case(f"{case.description}, {note}", args, case.kwargs)
    case = draw_case(generator, 9, 9, heads=(2, 2))
    rows = (here(normal(generator, 1, 10, 16)).unfold(1, 9, 1).mT for _ in range(3))
    yield Case(f"{case.description}, heads that share rows", tuple(rows), case.kwargs)
    whole = here(normal(generator, 1, 2, 9, 3 * 16))
    yield Case(f"{case.description}, three slices of one tensor", whole.split(16, -1), case.kwargs)


def tail_cases(generator: torch.Generator) -> Iterator[Case]:
    """All heads with the numbers of the first: see ``call_amid_nan``."""
    for lengths, head_dim, is_causal in (((19, 37), 24, False), ((35, 21), 16, True)):
        case = draw_case(
            generator,
            *lengths,
            heads=(2, 2),
            head_dim=head_dim,
            is_causal=is_causal,
            note="all heads alike, NaN in memory behind every row",
        )
        for t in case.args:
            t[:, 1:] = t[:, :1]
        yield case


def default_cases(generator: torch.Generator) -> Iterator[Case]:
    """No options at all: not causal."""
    case = draw_case(generator, 5, 7)
    shapes, _, _ = case.description.partition(", is_causal")
    yield Case(f"{shapes}, no options", case.args)


def small_cases(generator: torch.Generator) -> Iterator[Case]:
    yield draw_case(generator, 5, 7, heads=(2, 1))


def half_cases(generator: torch.Generator) -> Iterator[Case]:
    yield from plain_half_cases(generator)
    yield as_half(large_sum_case(generator))


def plain_half_cases(generator: torch.Generator) -> Iterator[Case]:
    """Three widths, grouped heads, queries that see no key: float16 takes other paths and tiles."""
    yield as_half(draw_case(generator, 33, integer(generator, 60, 80), head_dim=64))
    case = draw_case(generator, 21, 43, heads=(4, 2), head_dim=40, scale=5, is_causal=True)
    yield as_half(case)
    head_dim = integer(generator, 65, 128)
    yield as_half(draw_case(generator, 37, integer(generator, 17, 30), head_dim=head_dim))
    yield as_half(draw_case(generator, 39, integer(generator, 17, 30), is_causal=True))


def large_score_cases(generator: torch.Generator) -> Iterator[Case]:
    """Scores that differ by little, near 1,276: float16 has no digits for that there."""
    case = draw_case(generator, 9, integer(generator, 7, 11), note="scores near 1,276")
    q, k, _ = case.args
    q[..., 0], k[..., 0] = FEW_BITS, FEW_BITS
    yield as_half(case)


def large_sum_case(generator: torch.Generator) -> Case:
    """Values near 400: the sum over all keys does not fit into float16, that over 100 does.

    Every other row attends to all keys. Its scores are small, so that its lse is known to five
    places, and its sum lies between 256 and 300, where float16 has steps of a quarter.
    """
    case = draw_case(generator, 24, integer(generator, 275, 300), note="values near 400")
    q, k, v = case.args
    q.zero_()
    q[..., ::2, 0] = 200  # these rows attend to the first 100 keys
    q[..., 1::2, 0] = here(torch.arange(12) / 50)
    k[..., 0], k[..., :100, 0] = 0, 1
    v += 400
    return case


def long_cases(generator: torch.Generator) -> Iterator[Case]:
    yield draw_case(generator, *LONG)


def own_work_cases(generator: torch.Generator) -> Iterator[Case]:
    """One of each kind: an answer may not turn to PyTorch for some."""
    yield draw_case(generator, 16, 16, heads=(2, 2))
    yield draw_case(generator, 17, 31, heads=(2, 1), head_dim=40, is_causal=True)
    yield as_half(draw_case(generator, 1, 129))
