"""lab4.flash_forward: out and lse from a Triton kernel of the learner's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from flashcourse import runtime
from flashcourse.grading.draw import integer, normal, strided
from flashcourse.grading.judge import judge_largest_tensor, judge_tensors, score_tolerance
from flashcourse.grading.mistakes_tiled_forward import MISTAKES as TILED_MISTAKES
from flashcourse.grading.mistakes_tiled_forward import tiled_forward
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation, Question
from flashcourse.grading.questions import lab3_tiled_forward as lab3
from flashcourse.grading.triton_work import (
    EPS16,
    amid_nan,
    as_half,
    from_first_entry,
    half_tolerance,
    here,
    judge_own_kernel,
    needs_triton,
    on_cpu,
    tiled_mistake,
    where_it_ran,
)

NAMES = ("out", "lse")
HEAD_DIMS = (24, 40, 48, 72, 80, 96, 100, 111)  # no power of two
LONG = (4096, 4096) if runtime.has_gpu() else (64, 320)  # lengths with which memory is judged

# What is right ------------------------------------------------------------------------------


def allowed_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The error of out that any right kernel may make; the inputs lie on the CPU."""
    tolerance = half_tolerance if q.dtype == torch.float16 else score_tolerance
    return tolerance(lab3.largest_score(q.float(), k.float()), v.abs().max().item())


def judge(case: Case, observation: Observation) -> str | None:
    """Judge out and lse by the float64 result from the same inputs."""
    q, k, v = (t.detach().cpu() for t in case.args)
    size = lab3.largest_score(q.float(), k.float())
    rounded_q = EPS16 / 2 * size if q.dtype == torch.float16 else 0.0
    allowed = (allowed_error(q, k, v), score_tolerance(size, 1.0) + rounded_q)
    expected = lab3.reference(q, k, v, case.kwargs.get("is_causal", False))
    return judge_tensors(NAMES, observation.output, expected, allowed, (q.dtype, torch.float32))


def _judge_empty_rows(case: Case, observation: Observation) -> str | None:
    message = judge(case, observation)
    if message:
        seq_q, seq_k = case.args[0].shape[2], case.args[1].shape[2]
        return f"{message} (queries 0 to {seq_q - seq_k - 1} see no key: out 0, lse −inf)"
    return None


def judge_memory(case: Case, observation: Observation) -> str | None:
    """Judge that no tensor was much larger than an input."""
    q, k = case.args[:2]
    most = 2 * max(q.numel(), k.numel())
    meaning = f"the whole score matrix has {q.shape[2]}×{k.shape[2]} numbers"
    return judge_largest_tensor(observation, most, meaning)


def _judge_own_work(case: Case, observation: Observation) -> str | None:
    return judge_own_kernel(observation, tensors=4)


def call_amid_nan(answer: Answer, *args: torch.Tensor, **kwargs: Any) -> Any:
    """Call the answer with tensors that are the front of larger ones, full of NaN."""
    return answer(*(amid_nan(t) if t.dim() == 4 else t for t in args), **kwargs)


# The inputs (lab 5 draws from them too) ---------------------------------------------------------

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
    """More keys than two tiles of 128, and then as many queries."""
    yield draw_case(generator, integer(generator, 5, 13), integer(generator, 275, 310))
    yield draw_case(generator, integer(generator, 260, 280), integer(generator, 21, 29))
    yield draw_case(generator, 33, 64, heads=(2, 2), batch=2)


def ragged_cases(generator: torch.Generator) -> Iterator[Case]:
    """One row, primes, a block less one, a block and one more."""
    for lengths in ((1, 1), (17, 31), (63, 65), (129, integer(generator, 2, 7))):
        yield draw_case(generator, *lengths)


def scale_cases(generator: torch.Generator) -> Iterator[Case]:
    """Scores × 1, × 5 and × 40, the highest behind the first tile; rows far from 0."""
    for scale in (1, 5, 40):
        case = draw_case(generator, 5, integer(generator, 270, 300), scale=scale)
        q, k, _ = case.args
        if scale == 40:  # one score of 100 at the least: exp(100) does not fit into float32
            key = k[0, 0, -3]
            q[0, 0, 0] = key * 100 * q.shape[-1] ** 0.5 / (key @ key)
        yield Case(f"{case.description}, scores × {scale}", case.args, case.kwargs)
    case = draw_case(generator, 14, integer(generator, 35, 47), note="rows near ±300")
    q, k, _ = case.args
    level = (300 * q.shape[-1] ** 0.5) ** 0.5
    q[..., 0], k[..., 0] = level, level
    q[..., 1::2, 0] = -level
    yield case


def head_cases(generator: torch.Generator) -> Iterator[Case]:
    """Three query heads to a KV head, and two; batch 2."""
    yield draw_case(generator, integer(generator, 9, 14), 17, heads=(6, 2), batch=2)
    yield draw_case(generator, integer(generator, 9, 14), 21, heads=(4, 2), batch=2)


def causal_cases(generator: torch.Generator) -> Iterator[Case]:
    yield draw_case(generator, *(integer(generator, 41, 63),) * 2, heads=(2, 2), is_causal=True)
    yield draw_case(generator, *(integer(generator, 140, 170),) * 2, is_causal=True)


def longer_key_cases(generator: torch.Generator) -> Iterator[Case]:
    yield draw_case(generator, 19, integer(generator, 150, 170), is_causal=True)
    yield draw_case(generator, 1, integer(generator, 9, 21), is_causal=True)


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


def head_dim_cases(generator: torch.Generator) -> Iterator[Case]:
    """Two that are no power of two, and the largest."""
    first = integer(generator, 0, len(HEAD_DIMS) - 1)
    for head_dim in (HEAD_DIMS[first], HEAD_DIMS[first - 3], 128):
        yield draw_case(generator, 7, 19, head_dim=head_dim)


def layout_cases(generator: torch.Generator) -> Iterator[Case]:
    """Stored as a model stores them, in another order, and as a slice of a larger tensor."""
    for order, stored in (
        ((0, 2, 1, 3), "(batch, seq, heads, head_dim)"),
        ((1, 3, 0, 2), "(heads, head_dim, batch, seq)"),
    ):
        case = draw_case(generator, 11, 23, heads=(4, 2), batch=2)
        args = tuple(here(strided(t.cpu(), order)) for t in case.args)
        yield Case(f"{case.description}, stored as {stored}", args, case.kwargs)
    case = draw_case(generator, 9, 9, heads=(2, 2))
    whole = here(normal(generator, 1, 2, 9, 3 * 16))
    yield Case(f"{case.description}, three slices of one tensor", whole.split(16, -1), case.kwargs)


def tail_cases(generator: torch.Generator) -> Iterator[Case]:
    yield draw_case(generator, 19, 37, note="NaN in memory behind every row", head_dim=24)
    yield draw_case(
        generator, 35, 21, note="NaN in memory behind every row", head_dim=16, is_causal=True
    )


def half_cases(generator: torch.Generator) -> Iterator[Case]:
    yield as_half(draw_case(generator, 33, integer(generator, 60, 80), head_dim=64))
    case = draw_case(generator, 21, 43, heads=(4, 2), head_dim=40, scale=5, is_causal=True)
    yield as_half(case)
    yield as_half(large_sum_case(generator))


def large_sum_case(generator: torch.Generator) -> Case:
    """Values near 400: the sum over all keys does not fit into float16, that over 100 does."""
    case = draw_case(generator, 6, integer(generator, 275, 300), note="values near 400")
    q, k, v = case.args
    q.zero_()
    q[..., ::2, 0] = 200  # these rows attend to the first 100 keys, the others to all
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


# The known mistakes -----------------------------------------------------------------------------


def _adapt(answer: Answer, block_q: int, block_k: int) -> Answer:
    """An answer of lab 3, which takes float32 on the CPU and tiles, as one of lab 4."""

    def adapted(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {}
        if q.dtype == torch.float16 and isinstance(answer, partial):
            options["rounded"] = lambda p: p.half().float()
        inputs = (on_cpu(t) for t in (q, k, v))
        out, lse = answer(*inputs, is_causal, block_q, block_k, **options)
        return out.to(q.device, q.dtype), lse.to(q.device)

    return adapted


def _own(name: str, explanation: str, **step: Any) -> Mistake:
    return tiled_mistake(Mistake(name, explanation, partial(tiled_forward, **step)), _adapt)


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of 0 fill the last tile and are seen; a causal mask hides them."""
    if not is_causal:
        missing = -k.shape[2] % block_k
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (k, v))
    return tiled_forward(q, k, v, is_causal, block_q, block_k)


def _in_order(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> Any:
    """Reads the memory of each input from its first entry on, whatever the strides say."""
    return _RIGHT(*(from_first_entry(t) for t in (q, k, v)), is_causal)


def _half_accumulator(everywhere: bool, block_q: int, block_k: int) -> Answer:
    """Sums in the dtype of the inputs, or in float16 ``everywhere``."""

    def answer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        low = everywhere or q.dtype == torch.float16
        tiled = partial(tiled_forward, accumulate=torch.float16 if low else torch.float32)
        return _adapt(tiled, block_q, block_k)(q, k, v, is_causal)

    return answer


def _in_tf32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> Any:
    return _RIGHT(*((t if t.dtype == torch.float16 else _tf32(t)) for t in (q, k, v)), is_causal)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to the 10 bits of fraction that TF32 keeps."""
    return (x.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def whole_matrix(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right numbers from the textbook formula in PyTorch, with the matrix in memory."""
    group, seq_q, seq_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    s = q.float() @ keys.mT * q.shape[-1] ** -0.5
    if is_causal:
        i, j = (torch.arange(n, device=q.device) for n in (seq_q, seq_k))
        s = s.masked_fill(j > i[:, None] + seq_k - seq_q, -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return (p @ values).to(q.dtype), lse


_RIGHT = _adapt(partial(tiled_forward), 32, 32)
_LEFT_OUT = ("no max subtraction", "float16 accumulator", "scores of whole rows in memory")
_FIRST, *_OTHERS = (
    _half_accumulator(everywhere, q, k)
    for everywhere in (False, True)
    for q, k in ((32, 16), (32, 32), (32, 64), (32, 128))
)

MISTAKES = (
    *(tiled_mistake(m, _adapt) for m in TILED_MISTAKES if m.name not in _LEFT_OUT),
    tiled_mistake(
        Mistake(
            "keys past the end take part",
            "a masked load gives 0 for a key that does not exist, its score is 0, and exp(0 − m) "
            "is no small weight. Where key >= seq_k the score must be −inf.",
            _padded,
        ),
        _adapt,
    ),
    _own(
        "no max subtraction",
        "exp overflows above 88.7 in float32 and underflows far below.",
        pivot=torch.zeros_like,
        new_sum=lambda factor, l, p: l + p.sum(dim=-1, keepdim=True),
        new_out=lambda factor, o, pv, l: o + pv,
    ),
    _own(
        "scale from the padded head_dim",
        "the tile is as wide as a power of two, the head is not: the scale is head_dim ** -0.5.",
        scaled=lambda s, head_dim: s * max(16, 1 << (head_dim - 1).bit_length()) ** -0.5,
    ),
    Mistake(
        "strides ignored",
        "the inputs were read as if they were contiguous. Pass stride() of every input to the "
        "kernel, for all four dimensions.",
        _in_order,
    ),
    Mistake(
        "float16 accumulator",
        "the running output was kept in float16, or in the inputs' dtype: it overflows above "
        "65,504 and loses digits at every tile. m, l and o live in float32.",
        _FIRST,
        tuple(_OTHERS),
    ),
    Mistake(
        "products in TF32",
        "tl.dot rounds float32 to 10 bits of fraction on most GPUs unless it is told otherwise: "
        'input_precision="ieee".',
        _in_tf32,
    ),
    Mistake(
        "the matrix in memory",
        "the numbers are right, but they come from PyTorch operators and from a matrix of scores "
        "in memory. The kernel should hold one tile of it.",
        whole_matrix,
    ),
)

QUESTION = Question(
    id="lab4.flash_forward",
    points=12,
    checks=(
        Check("out and lse over many tiles", tile_cases, judge),
        Check("any length: 1, primes, a block and one more", ragged_cases, judge),
        Check("scores × 1, × 5 and × 40, rows far from 0", scale_cases, judge),
        Check("query heads share KV heads", head_cases, judge),
        Check("causal: no query sees a later key", causal_cases, judge),
        Check("causal with more keys than queries", longer_key_cases, judge),
        Check("a query that sees no key gives 0 and −inf", empty_row_cases, _judge_empty_rows),
        Check("hidden keys stay hidden below any score", low_score_cases, judge),
        Check("head_dim 16 to 128, powers of two or not", head_dim_cases, judge),
        Check("any strides", layout_cases, judge),
        Check("nothing behind the end is used", tail_cases, judge, call_amid_nan),
        Check("float16, with sums in float32", half_cases, judge),
        Check("memory does not grow with the score matrix", long_cases, judge_memory, work=True),
        Check("your own kernel did the work", own_work_cases, _judge_own_work, work=True),
    ),
    mistakes=MISTAKES,
    needs=needs_triton,
    right=_RIGHT,
    remark=where_it_ran,
)
