"""The kernels as PyTorch operators: arguments, autograd, torch.compile, memory, messages."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime.errors import OutOfResources

from flashcourse.attention import (
    flash_attention,
    flash_attention_varlen,
    flash_kernels,
    naive_attention,
)
from flashcourse.attention.tuning import (
    BUCKETS,
    CHIPS,
    KERNELS,
    Tiles,
    bucket_of,
    chip_of_capability,
    force_tiles,
    table_entry,
    tiles_for,
)

pytestmark = pytest.mark.needs_triton
HERE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(*shape: int, dtype: torch.dtype = torch.float32, number: int = 3) -> list[torch.Tensor]:
    return [torch.randn(shape, device=HERE).to(dtype) for _ in range(number)]


def test_opcheck_of_both_operators() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(1, 2, 9, 8))
    options = (0.3, 4, None, None)
    torch.library.opcheck(
        torch.ops.flashcourse.flash_forward.default, (q, k, v, None, None, *options)
    )
    with torch.no_grad():
        out, lse = torch.ops.flashcourse.flash_forward(q, k, v, None, None, *options)
    plain = [t.detach() for t in (q, k, v)]
    torch.library.opcheck(
        torch.ops.flashcourse.flash_backward.default,
        (torch.randn_like(out), None, *plain, out, lse, None, None, *options),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 2.0}])
def test_gradcheck(options: dict[str, Any]) -> None:
    """In float32, so the step is large and the tolerance that of float32 differences."""
    leaves = [t.requires_grad_() for t in tensors(1, 1, 3, 4)]

    def function(*args: torch.Tensor) -> Any:
        return flash_attention(*args, return_lse=True, **options)

    assert torch.autograd.gradcheck(function, leaves, eps=1e-2, atol=2e-3, rtol=2e-2)


def test_gradcheck_varlen() -> None:
    leaves = [t.requires_grad_() for t in tensors(5, 1, 4)]
    cu = torch.tensor([0, 2, 4], dtype=torch.int32, device=HERE)

    def function(*args: torch.Tensor) -> Any:
        return flash_attention_varlen(*args, cu, cu)

    assert torch.autograd.gradcheck(function, leaves, eps=1e-2, atol=2e-3, rtol=2e-2)


def test_compiles_as_one_graph_and_not_again_for_a_new_length() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    def block(x: torch.Tensor) -> torch.Tensor:
        out = flash_attention(x, x * 2, x + 1, is_causal=True)
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2).flatten(2)

    compiled = torch.compile(block, backend=count, fullgraph=True, dynamic=True)
    for length in (17, 24, 33):
        (x,) = tensors(2, 2, length, 8, number=1)
        torch.testing.assert_close(compiled(x), block(x))
    assert len(graphs) == 1


def test_compiles_with_aot_autograd() -> None:
    """Forward and backward are traced with fake tensors, whose strides must be the real ones."""

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attention(q.transpose(1, 2), k, v, window_size=(4, 1))
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)

    (q,) = tensors(2, 9, 2, 8, number=1)
    k, v = tensors(2, 2, 9, 8, number=2)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(block(*leaves).sum(), leaves)
    actual = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_varlen_compiles_as_one_graph() -> None:
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=HERE)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attention_varlen(q, k, v, cu, cu, is_causal=True, return_lse=True)

    leaves = tensors(9, 2, 8)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(*leaves), block(*leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_only_lse_may_have_a_gradient() -> None:
    leaves = [t.requires_grad_() for t in tensors(1, 1, 9, 8)]
    _, lse = flash_attention(*leaves, return_lse=True)
    _, plain = naive_attention(*leaves, return_lse=True)
    ours = torch.autograd.grad(lse.sum(), leaves, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(plain.sum(), leaves, allow_unused=True, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_inputs_are_not_changed() -> None:
    leaves = [t.requires_grad_() for t in tensors(1, 2, 9, 8)]
    copies = [t.detach().clone() for t in leaves]
    flash_attention(*leaves, scale=-1.0).sum().backward()
    assert all(map(torch.equal, leaves, copies))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q must be a torch.Tensor"),
        ({"q": torch.zeros(1, 2, 4, 8, dtype=torch.float64)}, TypeError, "float64; allowed are"),
        ({"q": torch.zeros(2, 4, 8)}, ValueError, "q must have 4 dimensions"),
        ({"k": torch.zeros(1, 3, 4, 8)}, ValueError, "number of heads"),
        ({"k": torch.zeros(1, 3, 4, 8), "v": torch.zeros(1, 3, 4, 8)}, ValueError, "multiple"),
        ({"k": torch.zeros(1, 2, 4, 9), "v": torch.zeros(1, 2, 4, 9)}, ValueError, "head_dim"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
        ({"window_size": 3}, TypeError, "window_size must be a pair"),
        ({"window_size": (-2, 0)}, ValueError, "window_size left"),
        ({"is_causal": 1}, TypeError, "is_causal"),
        ({"q": torch.zeros(1, 2, 4, 8).to_sparse()}, TypeError, "q has layout sparse_coo"),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {name: torch.zeros(1, 2, 4, 8) for name in "qkv"} | change
    with pytest.raises(error, match=message):
        flash_attention(**arguments)


def test_tensors_without_data_give_shapes() -> None:
    q, k = (torch.zeros(1, 2, n, 8, device="meta").requires_grad_() for n in (4, 5))
    out, lse = flash_attention(q, k, k, window_size=(10**30, 0), return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    out.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 6, 2, 8)}, ValueError, "q must have 3 dimensions"),
        ({"cu_seqlens_q": torch.tensor([0, 6])}, TypeError, "cu_seqlens_q has dtype int64"),
        ({"cu_seqlens_q": [0, 6]}, TypeError, "cu_seqlens_q must be a torch.Tensor"),
        ({"cu_seqlens_q": torch.tensor([0, 7], dtype=torch.int32)}, ValueError, "total of 6"),
        ({"cu_seqlens_k": torch.tensor([1, 6], dtype=torch.int32)}, ValueError, "start at 0"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 3], dtype=torch.int32)}, ValueError, "never fall"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 6], dtype=torch.int32)}, ValueError, "num_sequences"),
        ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q must be an integer"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k"),
        ({"max_seqlen_k": 5}, ValueError, "max_seqlen_k is 5, but a sequence has length 6"),
    ],
)
def test_wrong_varlen_arguments(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    cu = torch.tensor([0, 6], dtype=torch.int32)
    arguments: dict[str, Any] = {name: torch.zeros(6, 2, 8) for name in "qkv"}
    arguments |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu} | change
    with pytest.raises(error, match=message):
        flash_attention_varlen(**arguments)


def test_a_kernel_that_does_not_fit_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class TooLarge:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*args: Any, **options: Any) -> None:
                raise OutOfResources(250000, 101376, "shared memory")

            return run

    monkeypatch.setattr(flash_kernels, "flash_forward_kernel", TooLarge())
    with pytest.raises(RuntimeError, match=r"forward kernel does not fit.*force_tiles.*--tune"):
        flash_attention(*tensors(1, 1, 4, 8))


def test_without_triton_the_package_imports_and_the_call_explains() -> None:
    program = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from flashcourse.attention import flash_attention, naive_attention\n"
        "from flashcourse.runtime import TritonMissing\n"
        "x = torch.ones(1, 1, 2, 4)\n"
        "naive_attention(x, x, x)\n"
        "try:\n"
        "    flash_attention(x, x, x)\n"
        "except TritonMissing as error:\n"
        "    print('explained:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "explained: flash_attention needs Triton" in done.stdout


def test_the_table_has_an_entry_for_every_chip_and_bucket() -> None:
    for chip in CHIPS:
        for kernel in KERNELS:
            for head_dim in BUCKETS:
                for itemsize in (2, 4):
                    tiles = table_entry(chip, kernel, head_dim, itemsize)
                    assert min(tiles.block_q, tiles.block_k) >= 16
                    assert not tiles.tma or chip in ("sm_90", "sm_100", "sm_120")


def test_a_gpu_reads_the_row_of_its_own_kind() -> None:
    known = {(7, 5): "sm_75", (8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_86", (8, 9): "sm_89",
             (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100", (11, 0): "sm_100",
             (12, 0): "sm_120", (12, 1): "sm_120", (7, 0): "sm_75"}  # fmt: skip
    for capability, chip in known.items():
        assert chip_of_capability(*capability) == chip
    with pytest.raises(RuntimeError, match=r"capability 6\.1"):
        chip_of_capability(6, 1)


def test_head_dim_is_padded_to_a_power_of_two() -> None:
    assert [bucket_of(d) for d in (1, 16, 17, 40, 64, 65, 96, 128, 129, 256)] == [
        16, 16, 32, 64, 64, 128, 128, 128, 256, 256,
    ]  # fmt: skip


def test_forced_tiles_are_forgotten_afterwards() -> None:
    device = torch.device(HERE)
    before = tiles_for("forward", 64, 2, device)
    with force_tiles(forward=Tiles(16, 16, 4, 1)):
        assert tiles_for("forward", 64, 2, device).block_q == 16
    with force_tiles(forward=Tiles(16, 16, 4, 1, True, None, True)):  # no float32 kernel is Gluon's
        assert tiles_for("forward", 64, 2, device).block_q == 16
        assert not tiles_for("forward", 64, 4, device).gluon
    assert tiles_for("forward", 64, 2, device) == before
    with pytest.raises(ValueError, match="unknown kernels"), force_tiles(backwards=before):
        pass


@pytest.mark.needs_gpu
def test_extra_memory_of_the_backward_is_linear_in_the_length() -> None:
    peaks = []
    for seq in (2048, 4096):
        leaves = [
            torch.randn(1, 4, seq, 64, device="cuda", dtype=torch.float16, requires_grad=True)
            for _ in range(3)
        ]
        flash_attention(*leaves).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_attention(*leaves, is_causal=True).sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.2 * peaks[0]


def test_torch_func_and_tracing_see_the_operator() -> None:
    q, k, v = tensors(1, 1, 9, 8)
    ours = torch.func.grad(lambda x: flash_attention(x, k, v).sum())(q)
    plain = torch.func.grad(lambda x: naive_attention(x, k, v).sum())(q)
    torch.testing.assert_close(ours, plain)
    traced = make_fx(lambda x: flash_attention(x, k, v, is_causal=True))(q)
    assert "flashcourse.flash_forward" in traced.code
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (q, k, v)]
        out = flash_attention(*fake)
    assert out.shape == q.shape
