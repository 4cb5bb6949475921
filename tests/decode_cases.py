"""Cases for the decode kernels: one cache, laid out both ways, and how a result is judged.

The judge is the accuracy rule of ``flashcourse.measure.accuracy``; the reference is the slow twin
in float64, which test_flash_decode.py holds against loops over rows. Every slot, page and entry
of a table that no sequence uses holds something that would be seen if it were read.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from flash_cases import _keep_layout, draw, plain_attention, visible_pairs

from flashcourse.attention import (
    flash_decode,
    naive_decode,
    naive_paged_attention,
    paged_attention,
)
from flashcourse.measure.accuracy import (
    LSE_TOLERANCE,
    allowed_error,
    explain_difference,
    score_rounding,
)

CACHE_LAYOUTS = ("dense", "transposed", "sliced", "fused", "strided_columns")
PAGE_LAYOUTS = ("separate", "interleaved", "side_by_side", "heads_first", "columns")
GARBAGE = (float("nan"), float("inf"), -float("inf"), 6e4)


@dataclass(frozen=True)
class DecodeCase:
    """One call of ``flash_decode`` and of ``paged_attention`` on the same sequences."""

    lengths: tuple[int, ...] = (70,)
    heads_q: int = 2
    heads_kv: int = 2
    seq_q: int = 1
    head_dim: int = 32
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    slack: int = 9  # slots of the contiguous cache behind the longest sequence
    layout: str = "dense"
    page_layout: str = "separate"
    input_scale: float = 1.0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        options = "-".join(f"{key}={value}" for key, value in self.options.items())
        lengths = ".".join(map(str, self.lengths))
        return (
            f"L{lengths}-H{self.heads_q}.{self.heads_kv}-Q{self.seq_q}-D{self.head_dim}-"
            f"P{self.page_size}-{dtype}-{self.layout}-{self.page_layout}-"
            f"x{self.input_scale}-{options}"
        )


@dataclass
class Inputs:
    """The tensors of a case; ``caches`` are each sequence's own (k, v), (heads_kv, length, d)."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def contiguous(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.cache_seqlens

    @property
    def paged(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_pages, self.v_pages, self.block_table, self.cache_seqlens


def spoil(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return tensor.fill_(rng.choice(GARBAGE))


def inputs_of(case: DecodeCase, device: str = "cpu") -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    rng = random.Random(case.seed)
    batch, heads, d, dtype = len(case.lengths), case.heads_kv, case.head_dim, case.dtype
    q = draw((batch, case.heads_q, case.seq_q, d), case.layout, dtype, generator)
    q.mul_(case.input_scale)
    caches = []
    for length in case.lengths:
        k, v = (torch.randn(heads, length, d, generator=generator).to(dtype) for _ in range(2))
        caches.append((k * case.input_scale, v))

    capacity = max(case.lengths, default=0) + case.slack
    k_cache, v_cache = (
        spoil(draw((batch, heads, capacity, d), case.layout, dtype, generator), rng)
        for _ in range(2)
    )
    page_size = case.page_size
    needed = [-(-length // page_size) for length in case.lengths]
    num_pages = sum(needed) + 3
    shape = (num_pages, page_size, heads, d)
    if case.page_layout == "interleaved":
        both = torch.empty(num_pages, 2, page_size, heads, d, dtype=dtype)
        k_pages, v_pages = both[:, 0], both[:, 1]
    elif case.page_layout == "side_by_side":
        both = torch.empty(num_pages, page_size, heads, 2 * d, dtype=dtype)
        k_pages, v_pages = both[..., :d], both[..., d:]
    elif case.page_layout == "heads_first":
        k_pages = torch.empty(num_pages, heads, page_size, d, dtype=dtype).transpose(1, 2)
        v_pages = torch.empty(shape, dtype=dtype)
    elif case.page_layout == "columns":
        k_pages = torch.empty(num_pages, page_size, d, heads, dtype=dtype).transpose(2, 3)
        v_pages = torch.empty(num_pages, heads, d, page_size, dtype=dtype).permute(0, 3, 1, 2)
    else:
        k_pages, v_pages = (torch.empty(shape, dtype=dtype) for _ in range(2))
    spoil(k_pages, rng)
    spoil(v_pages, rng)
    # a view of a wider table, whose unused entries are stale, -1, or no page at all
    table = torch.empty(batch, max(needed, default=0) + 3, dtype=torch.int32)
    for row in table:
        row.copy_(torch.tensor([rng.choice([-1, 0, 2**31 - 1, -(2**31)]) for _ in row]))
    block_table = table[:, : max(needed, default=0) + rng.choice([0, 0, 2])]

    free = list(range(num_pages))
    rng.shuffle(free)
    for b, (k, v) in enumerate(caches):
        length = case.lengths[b]
        k_cache[b, :, :length], v_cache[b, :, :length] = k, v
        for column in range(needed[b]):
            page = free.pop()
            block_table[b, column] = page
            slots = slice(column * page_size, min((column + 1) * page_size, length))
            count = slots.stop - slots.start
            k_pages[page, :count] = k[:, slots].transpose(0, 1)
            v_pages[page, :count] = v[:, slots].transpose(0, 1)
    moved = [
        _keep_layout(t, device)
        for t in (q, k_cache, v_cache, k_pages, v_pages, block_table,
                  torch.tensor(case.lengths, dtype=torch.int32))
    ]  # fmt: skip
    return Inputs(*moved, [(k.to(device), v.to(device)) for k, v in caches])


def yardstick(case: DecodeCase, inputs: Inputs) -> torch.Tensor:
    """Plain attention in the dtype under test, one sequence at a time."""
    options = {key: value for key, value in case.options.items() if key != "num_splits"}
    outs = [torch.empty_like(inputs.q[:0])]
    for b, (k, v) in enumerate(inputs.caches):
        visible = visible_pairs(case.seq_q, k.shape[1], {**options, "is_causal": True})
        visible = visible.to(k.device)
        outs.append(plain_attention(inputs.q[b, None], k[None], v[None], visible, options)[0])
    return torch.cat(outs)


def problems(
    case: DecodeCase,
    device: str = "cpu",
    contiguous: Callable[..., Any] | None = flash_decode,
    paged: Callable[..., Any] | None = paged_attention,
) -> list[str]:
    """What is wrong with the results of either function; empty if both pass."""
    inputs = inputs_of(case, device)
    plain = yardstick(case, inputs)
    found = []
    for function, twin, arguments in (
        (contiguous, naive_decode, inputs.contiguous),
        (paged, naive_paged_attention, inputs.paged),
    ):
        if function is None:
            continue
        out, lse = function(*arguments, return_lse=True, **case.options)
        wide = (t.double() if t.is_floating_point() else t for t in arguments)
        exact_out, exact_lse = twin(*wide, return_lse=True, **case.options)
        keys = [k.cpu().reshape(1, -1, case.head_dim) for k, _ in inputs.caches]
        held = torch.cat([torch.zeros(1, 1, case.head_dim), *keys], 1)
        largest = exact_out.abs().max().item() if exact_out.numel() else 0.0
        floor = score_rounding(inputs.q.cpu(), held, case.options.get("scale")) * largest
        allowed = allowed_error(plain, exact_out) + floor
        name = function.__name__
        found.append(explain_difference(f"{name}: out", out, exact_out, allowed))
        finite = exact_lse[torch.isfinite(exact_lse)].abs()
        lse_allowed = max(LSE_TOLERANCE, 1e-6 * finite.max().item() if finite.numel() else 0.0)
        found.append(explain_difference(f"{name}: lse", lse, exact_lse, lse_allowed))
        if out.dtype != case.dtype or lse.dtype != torch.float32:
            found.append(f"{name}: dtypes {out.dtype} and {lse.dtype}")
    return [f"{case}: {problem}" for problem in found if problem]


def random_case(seed: int, longest: int = 130, largest_head_dim: int = 96) -> DecodeCase:
    """A case drawn from a seed."""
    rng = random.Random(seed)
    heads_kv = rng.choice([1, 1, 2, 3])
    page_size = rng.choice([1, 2, 3, 7, 8, 16, 16, 32, 33, 64, 128, 256])

    def length() -> int:
        if rng.random() < 0.15:
            return rng.choice([0, 1, 2])
        if rng.random() < 0.4:  # around the end of a page
            return min(longest, max(0, page_size * rng.randint(1, 5) + rng.choice([-1, 0, 0, 1])))
        return rng.randint(1, longest)

    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["num_splits"] = rng.choice([1, 2, 3, 5, 8, 17, 40])
    if rng.random() < 0.35:
        options["window_size"] = (rng.choice([None, -1, 0, 1, 5, 31, 40, 64, 200, 10**12]),
                                  rng.choice([None, -1, 0, 3]))  # fmt: skip
    if rng.random() < 0.25:
        options["softcap"] = rng.choice([0.5, 5.0, 30.0])
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.0, -0.2, 1.0, 0.01, -1.0])
    head_dims = [d for d in (1, 7, 16, 24, 40, 64, 80, 96, 111, 128, 160, 256)
                 if d <= largest_head_dim]  # fmt: skip
    return DecodeCase(
        lengths=tuple(length() for _ in range(rng.choice([1, 1, 2, 3]))),
        heads_q=heads_kv * rng.choice([1, 1, 2, 4, 7]),
        heads_kv=heads_kv,
        seq_q=rng.choice([1, 1, 1, 2, 3, 5, 17, 40]),
        head_dim=rng.choice(head_dims),
        page_size=page_size,
        dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
        slack=rng.choice([0, 1, 40]),
        layout=rng.choice(CACHE_LAYOUTS),
        page_layout=rng.choice(PAGE_LAYOUTS),
        input_scale=rng.choice([0.5, 1.0, 1.0, 5.0]),
        seed=seed,
        options=options,
    )
