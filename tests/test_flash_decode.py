"""``flash_decode`` and ``paged_attention`` against their slow twins, interpreted and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_cases import (
    CACHE_LAYOUTS,
    PAGE_LAYOUTS,
    DecodeCase,
    inputs_of,
    problems,
    random_case,
)
from reference import reference_attention

from flashcourse.attention import (
    flash_decode,
    merge_attention,
    naive_decode,
    naive_paged_attention,
    paged_attention,
)
from flashcourse.attention.decode_tuning import force_decode
from flashcourse.attention.tuning import CHIPS

HERE = "cuda" if torch.cuda.is_available() else "cpu"
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
triton_only = pytest.mark.needs_triton


def case(*lengths: int, **fields: Any) -> DecodeCase:
    names = set(DecodeCase.__dataclass_fields__)
    options = {key: fields.pop(key) for key in list(fields) if key not in names}
    return DecodeCase(lengths=lengths, options=options, **fields)


# Each line is a kind of fault that some public kernel had.
TABLE = [
    # lengths: none, one, around a tile of 32 keys and around a page
    case(0),
    case(0, 5, 0),
    case(),
    case(1, 31, 32, 33),
    case(64, 128, slack=0),  # exactly full: caches, pages and tables end with the sequence
    case(48, page_size=16, num_splits=3, slack=0),
    # splits: more than tiles, many of them empty; every one empty
    case(70, num_splits=2),
    case(70, 3, num_splits=8),
    case(33, 0, num_splits=17),
    # groups: 4 query heads to each of 2 KV heads, all to one, more rows than a tile
    case(70, 40, heads_q=8, heads_kv=2),
    case(70, heads_q=7, heads_kv=1, num_splits=2),
    case(70, heads_q=20, heads_kv=1, seq_q=5),
    # several queries, more than there are slots, a chunk of a prefill
    case(70, 9, seq_q=3, heads_q=4),
    case(70, 2, 0, seq_q=5, num_splits=3),
    case(100, 33, seq_q=33, heads_q=4, heads_kv=2),
    # windows: own slot only, inside a tile, wider than all, with splits and several queries
    case(70, window_size=(0, 0)),
    case(100, 20, window_size=(40, 7), seq_q=4, num_splits=2),
    case(100, window_size=(37, -1), seq_q=40, num_splits=3),
    case(70, window_size=(10**12, None)),
    case(100, 64, window_size=(5, 0), num_splits=4),
    # scale and softcap
    case(40, scale=0.0),
    case(40, scale=-0.3, num_splits=2),
    case(40, scale=-1.0, softcap=2.0, window_size=(9, 0)),
    case(40, softcap=0.5, input_scale=40.0),  # e^x would overflow here
    case(70, input_scale=40.0, dtype=bf16, num_splits=3),  # beats any stand-in for -inf
    # dtypes and head_dim
    case(70, 33, dtype=f16, heads_q=4, num_splits=2),
    case(70, 33, dtype=bf16, heads_q=4, num_splits=2),
    case(40, head_dim=1),
    case(40, head_dim=59, num_splits=2),
    case(40, head_dim=96, dtype=bf16),
    case(40, head_dim=111, dtype=f16),
    case(40, head_dim=256),
    # pages: one slot, a prime, as large as a tile, larger
    case(35, 70, page_size=1),
    case(35, 70, page_size=7, num_splits=2),
    case(64, 70, page_size=32, seq_q=2),
    case(64, 130, page_size=64, num_splits=2),
    case(130, 256, page_size=128, window_size=(100, 0)),
    case(256, 257, page_size=256),
]  # fmt: skip


@triton_only
@pytest.mark.parametrize("one", TABLE, ids=str)
def test_table(one: DecodeCase) -> None:
    assert problems(one, HERE) == []


@triton_only
@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_any_strides_of_the_cache(layout: str) -> None:
    for dtype in (f32, f16):
        one = case(33, 40, layout=layout, dtype=dtype, head_dim=24, seq_q=2, heads_q=4)
        assert problems(one, HERE, paged=None) == []


@triton_only
@pytest.mark.parametrize("layout", PAGE_LAYOUTS)
def test_any_strides_of_the_pages(layout: str) -> None:
    for dtype, page_size in ((f32, 5), (f16, 16), (f32, 32)):
        one = case(33, 40, page_layout=layout, dtype=dtype, head_dim=24, page_size=page_size)
        assert problems(one, HERE, contiguous=None) == []


@triton_only
@pytest.mark.parametrize("seed", range(12))
def test_random(seed: int) -> None:
    assert problems(random_case(seed, longest=100, largest_head_dim=80), HERE) == []


@pytest.mark.needs_gpu
@pytest.mark.parametrize("block", range(20))
def test_random_on_a_gpu(block: int) -> None:
    found = []
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        found += problems(random_case(seed, 1500, 256), "cuda")
    assert found == []


@pytest.mark.parametrize("seq_q", [1, 2, 7])
def test_the_slow_twins_follow_the_definition(seq_q: int) -> None:
    """Against loops over rows, in float64: the only judge that shares no code with them."""
    options = {"window_size": (4, 2), "softcap": 3.0, "scale": -0.4}
    for chosen in ({}, options):
        one = case(11, 5, 1, seq_q=seq_q, heads_q=4, heads_kv=2, head_dim=8, page_size=4)
        inputs = inputs_of(one)
        out, lse = naive_decode(*inputs.contiguous, return_lse=True, **chosen)
        paged, paged_lse = naive_paged_attention(*inputs.paged, return_lse=True, **chosen)
        assert torch.equal(out, paged)
        assert torch.equal(lse, paged_lse)
        for b, (k, v) in enumerate(inputs.caches):
            exact, exact_lse = reference_attention(
                inputs.q[b, None], k[None], v[None], is_causal=True, **chosen
            )
            assert torch.allclose(out[b, None].double(), exact, atol=1e-5)
            assert torch.allclose(lse[b, None].double(), exact_lse, atol=1e-5)


def test_negative_control_the_judge_rejects_wrong_results() -> None:
    one = case(70, 33, heads_q=4, heads_kv=2, seq_q=2, page_size=16)

    def zeros(*arguments, **options):
        out, lse = naive_decode(*arguments, **options)
        return 0.0 * out, lse

    def base_2(*arguments, **options):
        out, lse = naive_decode(*arguments, **options)
        return out, lse * 1.4427

    def heads_tiled(q, k, v, lengths, **options):
        order = torch.tensor([0, 2, 1, 3])
        out, lse = naive_decode(q[:, order], k, v, lengths, **options)
        return out[:, order], lse[:, order]

    def one_slot_less(q, k, v, lengths, **options):
        return naive_decode(q, k, v, lengths - 1, **options)

    def garbage_scored(q, k, v, lengths, **options):
        return naive_decode(q, k, v, torch.full_like(lengths, k.shape[2]), **options)

    def not_causal(q, k, v, lengths, **options):
        results = [naive_decode(q[:, :, i : i + 1], k, v, lengths, **options) for i in range(2)]
        return torch.cat([r[0] for r in results], 2), torch.cat([r[1] for r in results], 2)

    for wrong in (zeros, base_2, heads_tiled, one_slot_less, garbage_scored, not_causal):
        assert problems(one, "cpu", wrong, None), f"{wrong.__name__} passes"

    def next_page(q, k, v, table, lengths, **options):
        return naive_paged_attention(q, k, v, table.flip(0), lengths.flip(0), **options)

    assert problems(one, "cpu", None, next_page)
    assert problems(one, "cpu", naive_decode, naive_paged_attention) == []


@triton_only
def test_every_tile_gives_the_same_answer() -> None:
    one = case(100, 33, window_size=(50, 0), heads_q=4, seq_q=3, head_dim=16, num_splits=2)
    for keys in (16, 64, 128):
        with force_decode(32, keys, 4, 1):
            assert problems(one, HERE) == [], keys


@triton_only
def test_slots_outside_a_window_are_never_read() -> None:
    """NaN in whole tiles that no query sees: visiting and masking would still multiply it."""
    one = case(100, page_size=4, window_size=(3, 0), num_splits=2)
    inputs = inputs_of(one, HERE)
    inputs.k_cache[:, :, :64], inputs.v_cache[:, :, :64] = float("nan"), float("nan")
    inputs.k_pages[inputs.block_table[0, :16].long()] = float("nan")
    inputs.v_pages[inputs.block_table[0, :16].long()] = float("nan")
    assert torch.isfinite(flash_decode(*inputs.contiguous, **one.options)).all()
    assert torch.isfinite(paged_attention(*inputs.paged, **one.options)).all()


@triton_only
def test_the_splits_are_what_merge_attention_joins() -> None:
    inputs = inputs_of(case(64, slack=0), HERE)
    q, k, v, _ = inputs.contiguous
    half = torch.tensor([32], dtype=torch.int32, device=HERE)
    parts = []
    for slots in (slice(0, 32), slice(32, 64)):
        parts += flash_decode(q, k[:, :, slots], v[:, :, slots], half, return_lse=True)
    out, lse = merge_attention(*parts)
    ours, our_lse = flash_decode(*inputs.contiguous, num_splits=2, return_lse=True)
    assert torch.allclose(out, ours, atol=1e-6)
    assert torch.allclose(lse, our_lse, atol=1e-6)


@triton_only
def test_infinite_and_nan_values_in_use_spread_as_in_the_twin() -> None:
    for place in ("k_cache", "v_cache"):
        for value in (float("inf"), float("nan")):
            inputs = inputs_of(case(70, heads_q=1, heads_kv=1), HERE)
            getattr(inputs, place)[0, 0, 40, 3] = value
            for splits in (1, 3):
                ours = flash_decode(*inputs.contiguous, num_splits=splits)
                assert torch.equal(ours.isnan(), naive_decode(*inputs.contiguous).isnan())


def spread(store: torch.Tensor, tensor: torch.Tensor, dimension: int, start: int) -> torch.Tensor:
    """The same values, whose last index along a dimension lies 2^31 elements from the first."""
    strides, step = [1, 1, 1, 1], 1
    for i in (i for i in reversed(range(4)) if i != dimension):
        strides[i] = step
        step *= tensor.shape[i]
    strides[dimension] = (2**31 + 2**20) // (tensor.shape[dimension] - 1)
    view = store.as_strided(tensor.shape, strides, start)
    return view.copy_(tensor)


@triton_only
@pytest.mark.parametrize("page_size", [5, 32])  # a page for each key, and one for a whole tile
def test_addresses_past_two_to_the_31(page_size: int) -> None:
    """A page's number times its stride, a sequence's, a slot's and a column's."""
    store = torch.empty(2**31 + 2**30, dtype=f16, device=HERE)  # untouched pages cost nothing
    for seed in range(100):
        one = case(10, 6, dtype=f16, head_dim=8, page_size=page_size, slack=0, seed=seed)
        inputs = inputs_of(one, HERE)
        last_page = inputs.k_pages.shape[0] - 1
        if (inputs.block_table[:, : -(-6 // page_size)] == last_page).any():
            break
    else:
        pytest.fail("no case uses the last page")
    expected = flash_decode(*inputs.contiguous)
    for function, (q, k, v, *places) in (
        (flash_decode, inputs.contiguous),
        (paged_attention, inputs.paged),
    ):
        for dimension in range(4):
            wide = (spread(store, t, dimension, 2**16 * n) for n, t in enumerate((k, v)))
            out = function(q, *wide, *places)
            assert torch.equal(out, expected), (function.__name__, dimension)


@triton_only
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_no_table_entry_past_the_last_page_is_read(page_size: int) -> None:
    """The next entry would lie 2^45 elements on, where there is no memory: reading it crashes."""
    one = case(page_size, page_size=page_size, slack=0)
    inputs = inputs_of(one, HERE)
    q, k, v, table, lengths = inputs.paged
    lonely = table[:, :1].clone().as_strided((1, 1), (1, 2**45))
    for splits in (1, 2):
        out = paged_attention(q, k, v, lonely, lengths, num_splits=splits)
        assert torch.equal(out, paged_attention(q, k, v, table, lengths, num_splits=splits))


@triton_only
def test_pages_may_be_shared_and_a_table_row_expanded() -> None:
    inputs = inputs_of(case(40, heads_q=4), HERE)
    q, k, v, table, lengths = inputs.paged
    alone = paged_attention(q, k, v, table, lengths)
    both = paged_attention(q.expand(3, -1, -1, -1), k, v, table.expand(3, -1), lengths.expand(3))
    assert torch.equal(both, alone.expand(3, -1, -1, -1))


@triton_only
def test_an_impossible_length_on_a_gpu_gives_nan_and_spares_its_neighbours() -> None:
    """The kernel's own guard; on a CPU the arguments are checked before it."""
    from flashcourse.attention.decode_launch import launch_decode
    from flashcourse.attention.flash_sizes import FlashOptions

    inputs = inputs_of(case(40, 33, 20, slack=0), HERE)
    q, k, v, lengths = inputs.contiguous
    wrong = torch.tensor([41, 33, -1], dtype=torch.int32, device=HERE)
    expected = flash_decode(q, k, v, lengths)
    for splits in (1, 2):
        options = FlashOptions(q.shape[3] ** -0.5, None, 0, None)
        out, lse = launch_decode(q, k, v, None, wrong, options, splits)
        assert out[[0, 2]].isnan().all()
        assert lse[[0, 2]].isnan().all()
        assert torch.allclose(out[1], expected[1], atol=1e-6)


@triton_only
def test_under_torch_compile_each_call_is_one_operator() -> None:
    inputs = inputs_of(case(40, 20, heads_q=4, dtype=f16), HERE)

    def both(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_decode(*arguments), paged_attention(*inputs.paged)

    backend = "inductor" if HERE == "cuda" else "eager"
    out, paged = torch.compile(both, fullgraph=True, backend=backend)(*inputs.contiguous)
    assert torch.equal(out, flash_decode(*inputs.contiguous))
    assert torch.equal(paged, paged_attention(*inputs.paged))
    q, k, v, table, lengths = inputs.paged
    torch.library.opcheck(
        torch.ops.flashcourse.decode.default,
        (q, k.transpose(1, 2), v.transpose(1, 2), table, lengths, 0.1, None, None, 2),
        test_utils=("test_schema", "test_faketensor"),
    )


@triton_only
def test_a_sample_compiles_ahead_of_time_and_fits() -> None:
    sample = [
        ["sm_90", "float16", 128, 4, 16, False],
        ["sm_80", "bfloat16", 64, 4, 0, True],
        ["sm_75", "float32", 256, 4, 64, False],
        ["sm_90", "bfloat16", 128, 4, 0, False, True],  # caches of 32,768 slots and more
        ["sm_90", "bfloat16", 128, 16, 0, True, True],
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "decode_compiled.py"],
        input=json.dumps(sample), capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"}, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == len(sample)
    for (chip, *_), row in zip(sample, rows, strict=True):
        assert row["shared"] <= CHIPS[chip].shared_kib * 1024, row
        assert row["spilled"] == 0 or chip == "sm_75", row
        assert row["mma"] == (chip != "sm_75"), row


@pytest.mark.needs_gpu
def test_the_host_never_waits_and_every_run_gives_the_same_bits() -> None:
    one = case(3000, 17, 1024, heads_q=8, heads_kv=2, head_dim=128, dtype=f16, page_size=16)
    inputs = inputs_of(one, "cuda")
    first = flash_decode(*inputs.contiguous), paged_attention(*inputs.paged)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [(flash_decode(*inputs.contiguous), paged_attention(*inputs.paged))
                for _ in range(50)]  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for run in runs:
        assert torch.equal(run[0], first[0])
        assert torch.equal(run[1], first[1])


@pytest.mark.needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seq_q", [1, 8, 64])
def test_small_integers_are_exact_on_a_gpu(head_dim: int, seq_q: int) -> None:
    """Scale 0 makes the result a mean: with 2^n ones and twos it has no rounding at all."""
    for page_size in (16, 64):
        one = case(256 + seq_q, heads_q=4, heads_kv=1, seq_q=seq_q, head_dim=head_dim,
                   dtype=f16, page_size=page_size)  # fmt: skip
        inputs = inputs_of(one, "cuda")
        values = torch.arange(256 + seq_q, device="cuda") % 2 + 1.0
        inputs.v_cache[0, :, : 256 + seq_q] = values[None, :, None]
        slots = torch.arange(256 + seq_q, device="cuda")
        pages = inputs.block_table[0].long()[slots // page_size]
        inputs.v_pages[pages, slots % page_size] = values.half()[:, None, None]
        for splits in (1, 2, 4):
            options = {"scale": 0.0, "window_size": (255, 0), "num_splits": splits}
            for _ in range(20):
                assert (flash_decode(*inputs.contiguous, **options) == 1.5).all()
                assert (paged_attention(*inputs.paged, **options) == 1.5).all()
