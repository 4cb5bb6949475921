"""The known mistakes of lab4.flash_forward in PyTorch, with the tiles a learner may choose."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from flashcourse.grading.mistakes_tiled_forward import MISTAKES as TILED_MISTAKES
from flashcourse.grading.mistakes_tiled_forward import ONE_MAXIMUM, tile_max, tiled_forward
from flashcourse.grading.question import Answer, Mistake
from flashcourse.grading.triton_work import (
    FLOAT16_ACCUMULATOR,
    TILES,
    either,
    from_first_entry,
    on_cpu,
    read_with,
    tiled_mistake,
)


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
    return RIGHT(*(from_first_entry(t) for t in (q, k, v)), is_causal)


def _strides_of_k(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> Any:
    return RIGHT(q, k, read_with(v, k.stride()), is_causal)


def _causal_by_default(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = True
) -> Any:
    return RIGHT(q, k, v, is_causal)


def _a_key_early(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reaches one key too short, which shows where a tile of keys begins with that key."""

    def stop(rows: range, seq_q: int, seq_k: int, block_k: int, is_causal: bool) -> int:
        reach = max(rows.start + block_q - 1 + seq_k - seq_q, 0)
        return min(seq_k, reach) if is_causal else seq_k

    return tiled_forward(q, k, v, is_causal, block_q, block_k, stop=stop, **options)


def _half_scores(factor: float, scale_first: bool) -> Answer:
    """Rounds the scores of float16 inputs to float16, scaled or not, of base 2 or e."""

    def scaled(s: torch.Tensor, head_dim: int) -> torch.Tensor:
        scale = head_dim**-0.5
        first = factor * (scale if scale_first else 1.0)
        return (s * first).half().float() * (scale / first)

    def answer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounding = {"scaled": scaled} if q.dtype == torch.float16 else {}
        tiled = partial(tiled_forward, **rounding)  # type: ignore[arg-type]
        return _adapt(tiled, 64, 64)(q, k, v, is_causal)

    return answer


def _half_accumulator(everywhere: bool, block_q: int, block_k: int) -> Answer:
    """Sums in the dtype of the inputs, or in float16 ``everywhere``."""

    def answer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        low = everywhere or q.dtype == torch.float16
        tiled = partial(tiled_forward, accumulate=torch.float16 if low else torch.float32)
        return _adapt(tiled, block_q, block_k)(q, k, v, is_causal)

    return answer


def _half_step(block_k: int, **step: Any) -> Answer:
    """For float16 inputs, a step of the tiled forward that rounds to float16."""

    def answer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = step if q.dtype == torch.float16 else {}
        return _adapt(partial(tiled_forward, **steps), 64, block_k)(q, k, v, is_causal)

    return answer


def _half_sum(factor: torch.Tensor, l: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return (factor * l + p.sum(dim=-1, keepdim=True)).half().float()


def _half_log(m: torch.Tensor, l: torch.Tensor) -> torch.Tensor:
    return (m + torch.log(l)).half().float()


def _in_tf32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> Any:
    return RIGHT(*((t if t.dtype == torch.float16 else _tf32(t)) for t in (q, k, v)), is_causal)


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


RIGHT = _adapt(partial(tiled_forward), 32, 32)
_LEFT_OUT = (
    "no max subtraction",
    ONE_MAXIMUM,
    "float16 accumulator",
    "scores of whole rows in memory",
)
_OF_LAB_3 = {m.name: m for m in TILED_MISTAKES}
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
    either(
        *(
            _own(
                ONE_MAXIMUM,
                _OF_LAB_3[ONE_MAXIMUM].explanation,
                highest=partial(tile_max, padded=padded),
            )
            for padded in (True, False)
        )
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
        "v read with k's strides",
        "v was read with the strides of k, which are the same only if both are stored alike. Pass "
        "v.stride() too.",
        _strides_of_k,
    ),
    tiled_mistake(
        Mistake(
            "the causal loop stops a key early",
            "the last query of the tile, first_query + BLOCK_Q - 1, sees keys up to and including "
            "first_query + BLOCK_Q - 1 + seq_k - seq_q. range stops before its end: it must be one "
            "more.",
            _a_key_early,
        ),
        _adapt,
    ),
    Mistake(
        "causal if nothing is said",
        "the default of is_causal is False.",
        _causal_by_default,
    ),
    Mistake(
        "scores in float16",
        "the scores were rounded to float16, which leaves 11 bits: near 1,000 that is a half. "
        "tl.dot returns float32; keep it.",
        _half_scores(1.0, True),
        (
            _half_scores(1.0, False),
            _half_scores(1.4426950408889634, True),
            _half_scores(1.4426950408889634, False),
        ),
    ),
    Mistake(
        "float16 accumulator",
        FLOAT16_ACCUMULATOR,
        _FIRST,
        tuple(_OTHERS),
    ),
    Mistake(
        "the sum in float16",
        "l was kept in float16, or in the inputs' dtype: above 256 it moves in steps of a quarter. "
        "m, l and o live in float32.",
        _half_step(64, new_sum=_half_sum),
        tuple(_half_step(block_k, new_sum=_half_sum) for block_k in TILES[1:]),
    ),
    Mistake(
        "lse rounded to float16",
        "lse passed through the inputs' dtype, which keeps three digits of it; the backward takes "
        "exp(s − lse), where they are missing. It is float32 from the sum to the store.",
        _half_step(64, log_sum_exp=_half_log),
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
