"""Random cases of ``flash_attention`` and ``flash_attention_varlen``, forward and backward.

In the interpreter every case is drawn on its own. On a GPU compiling is what takes time, so cases
come in families that share their kernels.
"""

from __future__ import annotations

import pytest
import torch
from flash_cases import problems, varlen_problems
from flash_random_cases import (
    random_case,
    random_family,
    random_varlen_case,
    random_varlen_family,
)

pytestmark = pytest.mark.needs_triton
HERE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("seed", range(8))
def test_random(seed: int) -> None:
    assert problems(random_case(seed, longest=70, largest_head_dim=80), HERE) == []


@pytest.mark.parametrize("seed", range(4))
def test_varlen_random(seed: int) -> None:
    assert varlen_problems(random_varlen_case(seed, longest=50, largest_head_dim=40), HERE) == []


if HERE == "cpu":  # a GPU has its own 2,000

    @pytest.mark.thorough
    @pytest.mark.parametrize("block", range(30))
    def test_three_thousand_in_the_interpreter(block: int) -> None:
        found = []
        for seed in range(1000 + 75 * block, 1075 + 75 * block):
            found += problems(random_case(seed, longest=90, largest_head_dim=96))
        for seed in range(1000 + 25 * block, 1025 + 25 * block):
            found += varlen_problems(random_varlen_case(seed, longest=60))
        assert found == []


# 80 · 15 + 40 · 20 cases: a family a test, so that what runs side by side ends together
FAMILIES = [*(("dense", 5000 + i) for i in range(80)), *(("varlen", 5000 + i) for i in range(40))]


@pytest.mark.needs_gpu
@pytest.mark.parametrize(("kind", "seed"), FAMILIES)
def test_two_thousand_on_a_gpu(kind: str, seed: int) -> None:
    found = []
    if kind == "dense":
        for case in random_family(seed, size=15):
            found += problems(case, "cuda")
    else:
        for case in random_varlen_family(seed, size=20):
            found += varlen_problems(case, "cuda")
    assert found == []


def test_families_share_what_is_compiled_and_differ_in_the_rest() -> None:
    for seed in range(20):
        family = random_family(seed, size=15)
        assert len({(c.head_dim, c.dtype, c.layout, c.heads_q, c.heads_kv) for c in family}) == 1
        assert len({frozenset(c.options) for c in family}) == 1
        assert len({(c.seq_q, c.seq_k) for c in family}) > 5
        varlen = random_varlen_family(seed, size=15)
        assert len({(c.head_dim, c.dtype, c.layout) for c in varlen}) == 1
        assert len({c.lengths_q for c in varlen}) > 5
