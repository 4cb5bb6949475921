"""Kernels taken out of their cells, compiled for GPUs that are not here, metered and changed."""

from __future__ import annotations

import importlib.util
import linecache
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashcourse import runtime
from flashcourse.measure.block_table import TABLE, BlockTable, load_block_table
from flashcourse.measure.occupancy import PROCESSORS, occupancy

ROOT = Path(__file__).parents[1]
TINY = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(2.0)


@triton.jit
def grow(x):
    return x * FACTOR


@triton.jit
def scaled_copy(x, y, n, BLOCK: tl.constexpr):
    \"\"\"y = FACTOR · x.\"\"\"
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, grow(tl.load(x + offsets, mask=offsets < n)), mask=offsets < n)


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        sums += tl.load(x + offsets, mask=offsets < n, other=0.0)
    tl.store(out, tl.sum(sums, 0))


@triton.jit
def product(a, b, out, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tile = i[:, None] * SIZE + i[None, :]
    c = tl.dot(tl.load(a + tile), tl.load(b + tile), input_precision=PRECISION)
    tl.store(out + tile, c)
"""

needs_triton = pytest.mark.skipif(not runtime.triton_installed(), reason="Triton is not installed")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "tiny_kernels.py"
    path.write_text(TINY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("tiny_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_triton
class TestSource:
    def test_the_module_has_all_that_the_kernel_uses(self, kernels):
        from flashcourse.measure.kernel_source import kernel_module

        text = kernel_module(kernels.scaled_copy)
        assert "FACTOR = tl.constexpr(2.0)" in text
        assert text.index("def grow") < text.index("def scaled_copy")
        assert "def product" not in text

    def test_the_fingerprint_is_of_the_meaning(self, kernels, tmp_path):
        from flashcourse.measure.kernel_source import kernel_fingerprint, load_kernel

        def fingerprint(text):
            return kernel_fingerprint(load_kernel(text, "scaled_copy"))

        own = kernel_fingerprint(kernels.scaled_copy)
        assert fingerprint(TINY.replace("y = FACTOR · x.", "Another text.")) == own
        assert (
            fingerprint(TINY.replace("    offsets =", "    # a comment\n    offsets =", 1)) == own
        )
        assert fingerprint(TINY.replace("x * FACTOR", "x + FACTOR")) != own
        assert fingerprint(TINY.replace("constexpr(2.0)", "constexpr(3.0)")) != own

    def test_a_change_changes_what_it_says(self, kernels):
        from flashcourse.measure.kernel_source import with_change

        x = torch.arange(10.0, device=runtime.device())
        for kernel, expected in (
            (kernels.scaled_copy, 2 * x),
            (with_change(kernels.scaled_copy, ("grow(tl.load", "-grow(tl.load")), -2 * x),
        ):
            y = torch.empty_like(x)
            kernel[(2,)](x, y, 10, BLOCK=8)
            assert torch.equal(y, expected)
        with pytest.raises(ValueError, match="occurs 0 times in scaled_copy"):
            with_change(kernels.scaled_copy, ("not there", ""))
        with pytest.raises(ValueError, match="occurs 3 times"):
            with_change(kernels.scaled_copy, ("BLOCK", "SIZE"))

    def test_a_changed_kernel_leaves_no_file_and_outlives_a_check_of_the_files(
        self, kernels, tmp_path, monkeypatch
    ):
        from flashcourse.measure.kernel_source import with_change

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        changed = with_change(kernels.scaled_copy, ("grow(tl.load", "-grow(tl.load"))
        linecache.checkcache()  # forgets the text of files that are gone
        x = torch.arange(10.0, device=runtime.device())
        y = torch.empty_like(x)
        changed[(2,)](x, y, 10, BLOCK=8)
        assert torch.equal(y, -2 * x)
        assert list(tmp_path.glob("*kernel*")) == []

    def test_errors_say_what_came(self, kernels):
        from flashcourse.measure.kernel_source import kernel_module, load_kernel

        with pytest.raises(TypeError, match=r"under @triton\.jit, got float"):
            kernel_module(1.0)
        stranger = load_kernel(
            TINY.replace("FACTOR = tl.constexpr(2.0)", "FACTOR = object()"), "scaled_copy"
        )
        with pytest.raises(NameError, match="grow uses FACTOR, a object"):
            kernel_module(stranger)


@needs_triton
class TestMeter:
    @pytest.mark.parametrize("n", [1, 7, 8, 9, 20])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_masked_lanes_move_nothing(self, kernels, n, dtype):
        from flashcourse.measure.interpreted import KernelTraffic, meter_kernel

        x = torch.ones(n, dtype=dtype, device=runtime.device())
        grid = (-(-n // 8),)
        traffic = meter_kernel(kernels.scaled_copy, grid, (x, x.clone(), n), {"BLOCK": 8})
        assert traffic == KernelTraffic(n * x.element_size(), n * x.element_size())

    def test_a_process_of_its_own_counts_the_same(self, kernels, monkeypatch):
        from flashcourse.measure import interpreted

        monkeypatch.setattr(interpreted, "interpreting", lambda: False)
        x = torch.ones(20, device=runtime.device())
        arguments = (x, x.clone(), 20)
        traffic = interpreted.meter_kernel(kernels.scaled_copy, (3,), arguments, {"BLOCK": 8})
        assert traffic == interpreted.KernelTraffic(80, 80)
        loop = interpreted.meter_kernel(kernels.total, (1,), arguments, {"BLOCK": 8})
        assert loop == interpreted.KernelTraffic(80, 4)
        with pytest.raises(RuntimeError, match="ended with status 1"):
            interpreted.meter_kernel(kernels.scaled_copy, (3,), arguments, {"BLOCK": 7})

    def test_the_meter_is_taken_off_again(self, kernels):
        if not runtime.interpreting():
            pytest.skip("kernels are compiled in this process")
        from triton.runtime.interpreter import interpreter_builder as builder

        from flashcourse.measure.interpreted import meter_kernel

        x = torch.ones(8)
        meter_kernel(kernels.scaled_copy, (1,), (x, x, 8), {"BLOCK": 8})
        with pytest.raises(Exception):  # noqa: B017 - whatever the interpreter raises
            meter_kernel(kernels.scaled_copy, (1,), (x, x, 8), {"BLOCK": 7})
        assert "create_masked_load" not in vars(builder)


@needs_triton
class TestCompile:
    def compile(self, kernel, dtype, precision, *targets):
        from flashcourse.measure.compiled import Launch, compile_kernel

        a = torch.empty(64, 64, dtype=dtype)
        launches = [Launch(t, {"PRECISION": precision, "SIZE": 64}) for t in targets]
        return compile_kernel(kernel, (a, a, torch.empty(64, 64)), launches)

    def test_each_chip_multiplies_with_its_own_instruction(self, kernels):
        from flashcourse.measure.compiled import compiled_table

        ampere, hopper = self.compile(kernels.product, torch.float16, "ieee", "sm_80", "sm_90")
        assert ampere.count("mma") > 0
        assert ampere.count("wgmma") == 0
        assert hopper.count("wgmma") > 0
        assert hopper.count("mma") == 0
        assert (ampere.matrix_instruction, hopper.matrix_instruction) == ("mma", "wgmma")
        table = compiled_table([ampere, hopper]).splitlines()
        assert "product" in table[1]
        assert "mma.sync" in table[1]
        assert "wgmma.mma_async" in table[2]
        for result in (ampere, hopper):
            assert result.threads == 128
            assert 16 <= result.registers <= 255
            assert result.shared_bytes >= 64 * 64 * 2
            assert "ttg.num-warps" in result.ttgir

    def test_float32_is_float32_only_with_ieee(self, kernels):
        (ieee,) = self.compile(kernels.product, torch.float32, "ieee", "sm_80")
        (tf32,) = self.compile(kernels.product, torch.float32, "tf32", "sm_80")
        assert ieee.count("mma") == 0
        assert ieee.matrix_instruction is None
        assert ieee.count("fma") > 0
        assert tf32.count("mma") > 0
        assert all(".tf32" in line for line in tf32.lines("mma"))

    def test_what_does_not_compile_says_so(self, kernels):
        from flashcourse.measure.compiled import CompileFailed, Launch, compile_kernel

        a = torch.empty(8, 8, dtype=torch.float16)
        launch = Launch("sm_80", {"PRECISION": "ieee", "SIZE": 7})
        with pytest.raises(CompileFailed, match=r"product does not compile for Launch.*sm_80"):
            compile_kernel(kernels.product, (a, a, a), [launch])
        with pytest.raises(TypeError, match="is a str; allowed are tensors"):
            compile_kernel(kernels.product, ("a", a, a), [launch])

    def test_text_that_was_not_kept_cannot_be_counted(self, kernels):
        from flashcourse.measure.compiled import Launch, compile_kernel

        x = torch.empty(64)
        (result,) = compile_kernel(
            kernels.scaled_copy, (x, x, 64), [Launch("sm_80", {"BLOCK": 64})], keep_text=False
        )
        assert result.shared_bytes == 0
        with pytest.raises(ValueError, match="keep_text=True"):
            result.count("mma")
        with pytest.raises(ValueError, match="must be one of wgmma"):
            result.count("add")


class TestOccupancy:
    # By hand from the limits of one SM: 65,536 registers in units of 256 a warp, shared memory
    # with 1 KiB taken by the system, warps and programs at once.
    TABLE = [
        ("sm_90", 0, 24, 128, 16, "warps"),  # 64 warps / 4
        ("sm_90", 0, 24, 32, 32, "programs"),
        ("sm_90", 0, 255, 128, 2, "registers"),  # 8 warps of 8192 registers
        ("sm_90", 64 * 1024, 64, 128, 3, "shared memory"),  # 228 // 65
        ("sm_90", 227 * 1024, 64, 128, 1, "shared memory"),
        ("sm_90", 227 * 1024 + 1, 64, 128, 0, "shared memory"),
        ("sm_80", 81 * 1024, 64, 128, 2, "shared memory"),  # 164 // 82
        ("sm_89", 0, 32, 256, 6, "warps"),  # 48 // 8
        ("sm_75", 64 * 1024, 64, 128, 1, "shared memory"),
        ("sm_80", 0, 168, 128, 3, "registers"),  # 65536 // 5376 = 12 warps
    ]

    @pytest.mark.parametrize(
        ("target", "shared", "registers", "threads", "programs", "limit"), TABLE
    )
    def test_by_hand(self, target, shared, registers, threads, programs, limit):
        result = occupancy(target, shared_bytes=shared, registers=registers, threads=threads)
        assert (result.programs, result.limit) == (programs, limit)
        assert result.warps == programs * threads // 32

    @settings(deadline=None, max_examples=200)
    @given(
        target=st.sampled_from(sorted(PROCESSORS)),
        shared=st.integers(0, 300 * 1024),
        registers=st.integers(1, 255),
        warps=st.sampled_from([1, 2, 4, 8, 16]),
    )
    def test_never_over_a_limit_and_no_room_for_one_more(self, target, shared, registers, warps):
        chip = PROCESSORS[target]
        result = occupancy(target, shared_bytes=shared, registers=registers, threads=32 * warps)

        def fits(programs):
            # The register file is split over four schedulers; a warp lives in one of them.
            return (
                shared <= chip.shared_bytes_per_program
                and programs * (shared + chip.reserved_bytes) <= chip.shared_bytes
                and math.ceil(programs * warps / 4) * 4 * math.ceil(registers * 32 / 256) * 256
                <= chip.registers
                and programs * warps <= chip.max_warps
                and programs <= chip.max_programs
            )

        assert result.programs == 0 or fits(result.programs)
        assert not fits(result.programs + 1)
        assert 0 <= result.share <= 1

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"target": "sm_70"}, "target must be one of"),
            ({"threads": 100}, "multiple of 32, got 100"),
            ({"registers": 256}, "between 1 and 255"),
            ({"shared_bytes": -1}, "must not be negative"),
        ],
    )
    def test_errors(self, change, message):
        arguments = {"target": "sm_90", "shared_bytes": 0, "registers": 32, "threads": 128} | change
        with pytest.raises(ValueError, match=message):
            occupancy(arguments.pop("target"), **arguments)


class TestBlockTable:
    CONTENT = {
        "made_by": "a test", "triton": "0", "kernel": "none", "fingerprint": "abc",
        "rows": [["sm_90", 128, 64, 4, 3, 65536, 128, 200, 0],
                 ["sm_80", 64, 64, 4, 3, 32768, 128, 100, 8]],
    }  # fmt: skip

    def test_rows_and_options(self):
        table = BlockTable(self.CONTENT, "abc")
        assert table.options("block_q") == [64, 128]
        assert table.options("target") == ["sm_80", "sm_90"]
        assert table.row("sm_80", 64, 64, 4, 3).spilled_bytes == 8
        with pytest.raises(KeyError, match=r"has no .*'block_q': 96"):
            table.row("sm_80", 96, 64, 4, 3)

    def test_another_kernel_is_said(self):
        assert "not the one of the table" not in BlockTable(self.CONTENT, "abc").description
        assert "not the one of the table" in BlockTable(self.CONTENT, "abd").description

    @needs_triton
    def test_the_committed_table_is_of_the_kernel_in_the_lesson(self):
        from flashcourse.measure.kernel_source import kernel_fingerprint

        spec = importlib.util.spec_from_file_location(
            "compile_blocks", ROOT / "tools" / "compile_blocks.py"
        )
        tool = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tool)
        table = load_block_table(kernel_fingerprint(tool.lesson_kernel()))
        assert table.matches, "the kernel of step 5 has changed: run python tools/compile_blocks.py"
        for choice, values in tool.GRID.items():
            assert table.options(choice) == sorted(values)
        assert TABLE.stat().st_size < 100_000


class TestRule:
    """The accuracy rule for kernels, and that it rejects what is wrong."""

    @pytest.mark.parametrize("seed", [0, 1, 2])
    @pytest.mark.parametrize("size", [0.5, 1.0, 5.0])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_right_passes_and_wrong_does_not(self, seed, size, is_causal):
        from flashcourse.attention import naive_attention, tiled_attention
        from flashcourse.measure.kernel_check import attention_error

        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            (torch.randn(1, h, n, 24, generator=generator) * size).half()
            for h, n in ((4, 37), (2, 29), (2, 29))
        )
        out, lse = tiled_attention(
            q, k, v, is_causal=is_causal, return_lse=True, block_q=16, block_k=8
        )

        def findings(out, lse):
            return attention_error(
                out, lse, q, k, v, reference=naive_attention, is_causal=is_causal
            ).findings

        assert findings(out, lse) == ()
        assert "out" in findings(torch.zeros_like(out), lse)[0]
        assert "out" in findings(out.flip(2), lse)[0]
        assert "out" in findings(torch.where(out > 0, float("nan"), out), lse)[0]
        assert "lse" in findings(out, lse * math.log2(math.e))[0]
