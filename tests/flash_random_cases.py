"""Cases for the Triton kernels drawn from a seed: one by one, and in families for a GPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import torch
from flash_cases import GRADIENTS, LAYOUTS, Case, VarlenCase


def random_options(rng: random.Random) -> dict[str, Any]:
    """Options as a caller might combine them."""
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["is_causal"] = True
    if rng.random() < 0.4:
        options["window_size"] = (rng.choice([None, -1, 0, 1, 5, 17, 40, 64, 200]),
                                  rng.choice([None, -1, 0, 3, 16, 33, 100]))  # fmt: skip
    if rng.random() < 0.25:
        options["softcap"] = rng.choice([0.5, 5.0, 30.0])
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.0, -0.2, 1.0, 0.01, -1.0])
    return options


def random_length(rng: random.Random, longest: int) -> int:
    """Lengths that break kernels: 1, around a block, primes, and any."""
    known = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 113, 127, 128, 129, 203, 239, 257]
    length = rng.choice(known) if rng.random() < 0.6 else rng.randint(1, longest)
    return min(length, longest)


def random_case(seed: int, longest: int = 130, largest_head_dim: int = 96) -> Case:
    """A dense case drawn from a seed."""
    rng = random.Random(seed)
    heads_kv = rng.choice([1, 1, 2, 3])
    square = rng.random() < 0.3
    seq_q = random_length(rng, longest)
    head_dims = [d for d in (1, 7, 8, 16, 24, 40, 59, 64, 80, 96, 111, 128, 160, 256)
                 if d <= largest_head_dim]  # fmt: skip
    return Case(
        batch=rng.choice([1, 1, 2]),
        heads_q=heads_kv * rng.choice([1, 1, 2, 4]),
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_k=seq_q if square else random_length(rng, longest),
        head_dim=rng.choice(head_dims),
        dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
        layout=rng.choice(LAYOUTS),
        gradient=rng.choice(GRADIENTS),
        input_scale=rng.choice([0.5, 1.0, 1.0, 5.0]),
        seed=seed,
        options=random_options(rng),
    )


def random_varlen_case(seed: int, longest: int = 100, largest_head_dim: int = 64) -> VarlenCase:
    """A varlen case drawn from a seed, with empty sequences and slack rows."""
    rng = random.Random(seed)
    heads_kv = rng.choice([1, 2])
    number = rng.choice([0, 1, 2, 3, 5])

    def lengths() -> tuple[int, ...]:
        return tuple(
            0 if rng.random() < 0.2 else random_length(rng, longest) for _ in range(number)
        )

    return VarlenCase(
        lengths_q=lengths(),
        lengths_k=lengths(),
        slack_q=rng.choice([0, 0, 1, 70]),
        slack_k=rng.choice([0, 0, 3, 70]),
        heads_q=heads_kv * rng.choice([1, 2]),
        heads_kv=heads_kv,
        head_dim=rng.choice([d for d in (8, 16, 40, 64, 96, 128) if d <= largest_head_dim]),
        dtype=rng.choice([torch.float32, torch.float16, torch.bfloat16]),
        layout=rng.choice(["dense", "transposed", "fused", "strided_columns"]),
        seed=seed,
        options=random_options(rng),
    )


def other_numbers(options: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same options with other numbers: what compiles to the same kernels."""
    changed = dict(options)
    if "window_size" in options:
        changed["window_size"] = tuple(
            side if side in (None, -1) else rng.choice([0, 1, 5, 17, 40, 64, 200])
            for side in options["window_size"]
        )
    if "softcap" in options:
        changed["softcap"] = rng.choice([0.5, 5.0, 30.0])
    if options.get("scale"):  # the sign is compiled in, and 0 stays 0
        changed["scale"] = math.copysign(rng.choice([0.01, 0.2, 1.0]), options["scale"])
    return changed


def random_family(
    seed: int, size: int, longest: int = 300, largest_head_dim: int = 256
) -> list[Case]:
    """Dense cases of other lengths and numbers that need few compiled kernels: for a GPU."""
    first = random_case(seed, longest, largest_head_dim)
    family = [first]
    for member in range(1, size):
        rng = random.Random(seed * 1000 + member)
        seq_q = random_length(rng, longest)
        family.append(
            replace(
                first,
                seq_q=seq_q,
                seq_k=seq_q if rng.random() < 0.3 else random_length(rng, longest),
                batch=rng.choice([1, 1, 2]),
                input_scale=rng.choice([0.5, 1.0, 1.0, 5.0]),
                seed=seed * 1000 + member,
                options=other_numbers(first.options, rng),
            )
        )
    return family


def random_varlen_family(
    seed: int, size: int, longest: int = 300, largest_head_dim: int = 128
) -> list[VarlenCase]:
    """The same for varlen: other sequences, slack and numbers."""
    first = random_varlen_case(seed, longest, largest_head_dim)
    family = [first]
    for member in range(1, size):
        rng = random.Random(seed * 1000 + member)
        other = random_varlen_case(seed * 1000 + member, longest, largest_head_dim)
        family.append(
            replace(
                first,
                lengths_q=other.lengths_q,
                lengths_k=other.lengths_k,
                slack_q=other.slack_q,
                slack_k=other.slack_k,
                seed=other.seed,
                options=other_numbers(first.options, rng),
            )
        )
    return family
