"""The forward scheduled by hand, also on what the table gives to other kernels.

It runs on a GPU of compute capability 9 alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_cases import LAYOUTS, Case, VarlenCase, problems, varlen_problems

from flashcourse.attention import flash_attention
from flashcourse.attention.flash_kernels import has_gluon
from flashcourse.attention.flash_sizes import descriptors_fit
from flashcourse.attention.tuning import GLUON_TABLES, force_tiles

pytestmark = [pytest.mark.needs_triton, pytest.mark.needs_gpu]
TILES = GLUON_TABLES["hopper"][2]["forward"][128]
f16, bf16 = torch.float16, torch.bfloat16

OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "scale": -0.1},
    {"window_size": (200, 0)},
    {"window_size": (30, 40), "softcap": 5.0},
    {"window_size": (-1, 10), "scale": 0.0},
    {"scale": -0.2, "softcap": 2.0},
]
# one tile and less, several, a last one of one row, more queries than keys and the other way round
LENGTHS = [(1, 1), (128, 128), (129, 257), (300, 300), (700, 129), (90, 700), (513, 1)]


@pytest.fixture(autouse=True)
def _needs_a_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9 or not has_gluon():
        pytest.skip("needs a GPU of compute capability 9 and Triton 3.6")


def ran(*inputs: torch.Tensor, **options: Any) -> set[str]:
    """The names of the kernels of one forward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        flash_attention(*inputs, **options)
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages() if event.key.startswith("flash_")}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_and_options(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    one = Case(2, 4, 2, *lengths, head_dim=128, dtype=f16, options=options)
    with force_tiles(forward=TILES):
        assert problems(one, "cuda") == []


@pytest.mark.parametrize("head_dim", [72, 104, 120, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, head_dim: int) -> None:
    for heads_kv, options in ((6, {}), (2, {"is_causal": True})):
        one = Case(3, 6, heads_kv, 200, 150, head_dim, bf16, layout, options=options)
        with force_tiles(forward=TILES):
            assert problems(one, "cuda") == []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed(options: dict[str, Any]) -> None:
    for lengths_q, lengths_k in (((300, 0, 1, 129), (300, 5, 128, 64)), ((1,) * 9, (400,) * 9)):
        one = VarlenCase(lengths_q, lengths_k, 3, 2, 4, 2, 128, f16, options=options)
        with force_tiles(forward=TILES):
            assert varlen_problems(one, "cuda") == []


def test_more_tiles_than_programs_and_the_same_bits_every_run() -> None:
    q, k, v = (torch.randn(3, 50, 700, 128, device="cuda", dtype=f16) for _ in range(3))
    for options in ({}, {"is_causal": True}, {"window_size": (100, 0)}):
        with force_tiles(forward=TILES):
            first = flash_attention(q, k, v, **options)
            for _ in range(20):
                assert torch.equal(first, flash_attention(q, k, v, **options))
        alone = torch.stack(
            [flash_attention(q[2:, 40:], k[2:, 40:], v[2:, 40:], **options) for _ in range(2)]
        )
        assert (alone[0] - first[2:, 40:]).abs().max() < 2e-3


def test_it_runs_where_one_descriptor_can_serve_all_heads() -> None:
    q, k, v = (torch.randn(2, 4, 1000, 128, device="cuda", dtype=f16) for _ in range(3))
    assert ran(q, k, v) == {"flash_forward_hopper_kernel"}
    assert ran(q.transpose(1, 2).contiguous().transpose(1, 2), k, v) == ran(q, k, v)
    repeated = k[:, :1].expand(k.shape)
    assert descriptors_fit(repeated)
    assert not descriptors_fit(repeated, all_heads=True)
    assert ran(q, repeated, v) == {"flash_forward_kernel"}
    assert ran(q[..., ::2], k[..., ::2], v[..., ::2]) == {"flash_forward_kernel"}
