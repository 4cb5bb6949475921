"""which_backend says what ran and why_not why something else did not; both can say no."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashcourse  # noqa: F401  (before Triton)
from flashcourse import runtime
from flashcourse.attention import (
    flash_attention,
    flash_attention_varlen,
    flash_decode,
    naive_attention,
    paged_attention,
)
from flashcourse.measure import Backend, which_backend, why_not
from flashcourse.measure.backend import classify
from flashcourse.measure.why_not import BACKENDS, _hearing, explain

Call = Callable[[], Any]


def leaves(device: str = "cpu", dtype: torch.dtype = torch.float32, **shape: int) -> Any:
    sizes = (2, shape.get("heads", 2), shape.get("seq", 32), shape.get("head_dim", 16))
    kv = (2, shape.get("heads_kv", sizes[1]), shape.get("seq_k", sizes[2]), sizes[3])
    return tuple(
        torch.randn(size, dtype=dtype, device=device).requires_grad_() for size in (sizes, kv, kv)
    )


def sdpa(backend: SDPBackend | None, qkv: Any, backward: bool = True, **options: Any) -> Call:
    def run() -> None:
        allowed = list(BACKENDS.values()) if backend is None else [backend]
        with sdpa_kernel(allowed):
            out = F.scaled_dot_product_attention(*qkv, **options)
        if backward:
            out.sum().backward()

    return run


@pytest.mark.parametrize("name", ["MATH", "FLASH"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_two_paths_on_the_cpu(name: str, backward: bool) -> None:
    ran = which_backend(sdpa(BACKENDS[name], leaves(), backward))
    assert ran == ran.forward == name
    assert ran.backward == (name if backward else None)
    assert ran.operators
    assert not ran.kernels
    assert not ran.split_kv


def test_a_backward_alone() -> None:
    q, k, v = leaves()
    out = F.scaled_dot_product_attention(q, k, v)
    ran = which_backend(lambda: out.sum().backward())
    assert (ran, ran.forward, ran.backward) == ("FLASH", None, "FLASH")


@pytest.mark.needs_triton
def test_the_kernels_of_the_course() -> None:
    q, k, v = leaves(runtime.device().type)  # compiled kernels take no tensors of the CPU
    ran = which_backend(lambda: flash_attention(q, k, v).sum().backward())
    assert (ran.forward, ran.backward) == ("flashcourse", "flashcourse")


def test_plain_attention_is_no_backend() -> None:
    q, k, v = leaves()
    softmax = which_backend(lambda: ((q @ k.mT).softmax(-1) @ v).sum().backward())
    assert (softmax.forward, softmax.backward) == ("PLAIN", "PLAIN")
    assert which_backend(lambda: naive_attention(q, k, v)) == "PLAIN"
    nothing = which_backend(lambda: q + k)
    assert (nothing, nothing.forward, nothing.backward) == ("none", None, None)
    assert "no operator" in nothing.evidence


def test_two_backends_in_one_call_are_both_named() -> None:
    qkv = leaves()

    def both() -> None:
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            sdpa(backend, qkv)()

    assert which_backend(both).forward == "FLASH + MATH"


@pytest.mark.needs_triton
def test_the_kernels_of_the_course_are_seen_without_gradients_and_in_the_interpreter() -> None:
    q, k, v = (t.detach() for t in leaves(runtime.device().type))
    batch, heads, seq, head_dim = k.shape
    lengths = torch.full((batch,), seq, dtype=torch.int32, device=q.device)
    offsets = torch.tensor([0, seq], dtype=torch.int32, device=q.device)
    pages = k.reshape(batch, seq, heads, head_dim)
    table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    calls: dict[str, Callable[[], object]] = {
        "flash": lambda: flash_attention(q, k, v),
        "varlen": lambda: flash_attention_varlen(
            *(t[0].transpose(0, 1) for t in (q, k, v)), offsets, offsets),
        "decode": lambda: flash_decode(q[:, :, :1], k, v, lengths, num_splits=1),
        "split": lambda: flash_decode(q[:, :, :1], k, v, lengths, num_splits=2),
        "paged": lambda: paged_attention(q[:, :, :1], pages, pages, table, lengths),
    }  # fmt: skip
    for name, call in calls.items():
        found = which_backend(call)
        assert (found.forward, found.backward) == ("flashcourse", None), name
        assert found.split_kv == (name == "split"), name


def test_dropout_moves_the_cpu_to_math_in_silence() -> None:
    q, k, v = leaves()
    run = lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)  # noqa: E731
    assert which_backend(run) == "MATH"
    assert why_not(q, k, v, dropout_p=0.1).chosen == "MATH"


# What the profiler calls them on a GPU (H100 and H200, torch 2.8 to 2.11).
KERNEL_NAMES = {
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>": "FLASH",
    "void pytorch_flash::flash_fwd_splitkv_kernel<pytorch_flash::Flash_fwd_kernel>": "FLASH",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>": "FLASH",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<>)":
        "EFFICIENT",
    "fmha_cutlassB_f16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::Attention)": "EFFICIENT",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "CUDNN",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128": "CUDNN",
    "triton_tem_fused_flex_attention_0": "FLEX",
    "triton_tem_fused_flex_attention_backward_zeros_1": "FLEX",
    "flash_forward_kernel": "flashcourse",
    "flash_backward_kv_kernel": "flashcourse",
    "merge_splits_kernel": "flashcourse",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>": "flash-attn",
    "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nn": "none",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::Half>": "none",
    "triton_poi_fused_add_mul_0": "none",
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_names_of_kernels_are_enough(kernel: str) -> None:
    """A replayed CUDA graph has no operators."""
    ran = classify([], [kernel])
    assert ran == KERNEL_NAMES[kernel]
    backward = any(word in kernel for word in ("bwd", "backward", "bprop", "cutlassB"))
    assert (ran.backward is not None) == backward
    assert ran.split_kv == ("split" in kernel)


def test_a_result_keeps_its_evidence_when_it_is_pickled() -> None:
    ran = classify(["aten::_scaled_dot_product_flash_attention"], ["pytorch_flash::flash_fwd_x"])
    again = pickle.loads(pickle.dumps(ran))
    assert isinstance(again, Backend)
    assert (again, again.operators, again.kernels) == (ran, ran.operators, ran.kernels)


def test_a_result_is_not_a_call() -> None:
    with pytest.raises(TypeError, match="lambda"):
        which_backend(torch.ones(3))  # type: ignore[arg-type]


BOOL = torch.ones(32, 32, dtype=torch.bool)
REFUSALS: dict[str, tuple[dict[str, int], dict[str, Any], str, str]] = {
    "dropout": ({}, {"dropout_p": 0.1}, "no dropout", "dropout_p=0.0"),
    "heads": ({"heads": 4, "heads_kv": 2}, {}, "numbers of heads", "enable_gqa=True"),
    "empty": ({"seq_k": 0}, {}, "no tokens", "skip the call"),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[..., :8], v), "Expected size"),
        (lambda q, k, v: (q, k, v.half()), "same dtype"),
        (lambda q, k, v: (q, k, v[:, :, :5]), "Expected size"),
        (lambda q, k, v: (q, k.repeat(3, 1, 1, 1), v), "must match"),
    ],
)
def test_what_no_backend_takes_raises(change: Callable, message: str) -> None:
    arguments = change(*(t.detach() for t in leaves()))
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*arguments)
    with pytest.raises(ValueError, match=message):
        why_not(*arguments)
    right = leaves()
    assert why_not(*right)["MATH"].allowed
    with pytest.raises(ValueError, match="one device"):
        why_not(right[0].to("meta"), *right[1:])


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_on_the_cpu_has_a_reason_and_a_fix(name: str) -> None:
    shape, options, reason, fix = REFUSALS[name]
    verdict = why_not(*leaves(**shape), **options)["FLASH"]
    assert not verdict.allowed
    assert reason in verdict.reason
    assert fix in verdict.fix
    assert verdict.messages


@pytest.mark.filterwarnings("ignore::UserWarning")  # SDPA warns before it raises
@settings(max_examples=30, deadline=None)
@given(
    heads_kv=st.sampled_from([1, 2, 4]),
    seq_k=st.integers(1, 9),
    head_dim=st.sampled_from([1, 7, 16]),
    mask=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.2]),
    enable_gqa=st.booleans(),
    only=st.sampled_from([None, "MATH", "FLASH", "EFFICIENT"]),
)
def test_what_it_says_is_what_happens_on_the_cpu(
    heads_kv: int,
    seq_k: int,
    head_dim: int,
    mask: bool,
    dropout_p: float,
    enable_gqa: bool,
    only: str | None,
) -> None:
    qkv = [t.detach() for t in leaves(heads=4, heads_kv=heads_kv, seq_k=seq_k, head_dim=head_dim)]
    options = {
        "attn_mask": torch.ones(32, seq_k, dtype=torch.bool) if mask else None,
        "dropout_p": dropout_p,
        "enable_gqa": enable_gqa,
    }
    with sdpa_kernel(list(BACKENDS.values()) if only is None else [BACKENDS[only]]):
        answer = why_not(*qkv, **options)
        try:
            ran: str | None = which_backend(
                lambda: F.scaled_dot_product_attention(*qkv, **options)  # type: ignore[arg-type]
            )
        except RuntimeError:
            ran = None
    assert answer.chosen == ran
    assert answer.chosen is None or answer[answer.chosen].allowed
    for verdict in answer.values():
        assert verdict.allowed != bool(verdict.reason and verdict.fix)


def test_contradictions_and_wrong_types_raise() -> None:
    q, k, v = leaves()
    with pytest.raises(ValueError, match="together with is_causal"):
        why_not(q, k, v, BOOL, is_causal=True)
    with pytest.raises(TypeError, match="k must be a tensor, got list"):
        why_not(q, [1], v)  # type: ignore[arg-type]


def test_it_prints_a_line_for_each_backend_and_the_choice() -> None:
    answer = why_not(*leaves())
    lines = str(answer).splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == list(BACKENDS)
    assert lines[-1] == "SDPA would take FLASH."


def test_pytorchs_advice_is_not_taken_for_a_number() -> None:
    reason, _ = explain((
        "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got "
        "seqlen_q: 16 seqlen_k: 64. If you would like to use causal attention with non-square "
        "masks, please see CausalAttnMask.",
    ))  # fmt: skip
    assert reason == "is_causal needs as many queries as keys (seqlen_q: 16 seqlen_k: 64)"


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ((264, 264, 264), "stops at head_dim 256"),
        ((64, 64, 32), "pad the narrower ones"),
        ((64, 32, 32), "pad the narrower ones"),
        ((26, 264, 264), "pad the narrower ones"),
    ],
)
def test_one_head_dim_that_is_too_large_is_not_told_to_pad(
    sizes: tuple[int, int, int], word: str
) -> None:
    q, k, v = sizes
    _, fix = explain((
        "FlashAttention requires q,k,v to have the same last dimension and to be less than or "
        f"equal to 256. Got Query.size(-1): {q}, Key.size(-1): {k}, Value.size(-1): {v} instead.",
    ))  # fmt: skip
    assert word in fix
    assert ("pad" in fix) == (len(set(sizes)) > 1)


def test_an_unknown_message_is_passed_on() -> None:
    reason, fix = explain(("The moon is in the wrong phase.",))
    assert "moon" in reason
    assert fix


@pytest.mark.needs_gpu
class TestOnTheGpu:
    HALF = torch.float16

    @pytest.mark.parametrize("name", BACKENDS)
    @pytest.mark.parametrize("backward", [False, True])
    def test_each_backend(self, name: str, backward: bool) -> None:
        qkv = leaves("cuda", self.HALF, seq=256, head_dim=64)
        verdict = why_not(*qkv)[name]
        if not verdict.allowed:  # an older GPU: SDPA must refuse as well
            with pytest.raises(RuntimeError):
                sdpa(BACKENDS[name], qkv, backward)()
            return
        ran = which_backend(sdpa(BACKENDS[name], qkv, backward))
        assert ran.forward == name, ran.evidence
        assert ran.backward == (name if backward else None), ran.evidence
        assert ran.kernels or name == "MATH", ran.evidence

    def test_the_default_is_the_one_why_not_names(self) -> None:
        qkv = leaves("cuda", self.HALF, seq=256, head_dim=64)
        F.scaled_dot_product_attention(*qkv)  # the first call may change the order
        ran = which_backend(lambda: F.scaled_dot_product_attention(*qkv).sum().backward())
        assert ran.forward == ran.backward == why_not(*qkv).chosen

    def test_the_kernels_of_the_course(self) -> None:
        qkv = leaves("cuda", self.HALF, seq=256, head_dim=64)
        ran = which_backend(lambda: flash_attention(*qkv).sum().backward())  # type: ignore[union-attr]
        assert (ran.forward, ran.backward) == ("flashcourse", "flashcourse")
        assert ran.kernels, ran.evidence

    def test_compiled_flex_attention(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        qkv = leaves("cuda", self.HALF, seq=256, head_dim=64)
        compiled = torch.compile(flex_attention)
        ran = which_backend(lambda: compiled(*qkv).sum().backward())
        assert (ran.forward, ran.backward) == ("FLEX", "FLEX"), ran.evidence

    def test_decoding_splits_the_keys(self) -> None:
        q = torch.randn(1, 4, 1, 64, device="cuda", dtype=self.HALF)
        k, v = torch.randn(2, 1, 4, 8192, 64, device="cuda", dtype=self.HALF)
        if not why_not(q, k, v)["FLASH"].allowed:
            return
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            ran = which_backend(lambda: F.scaled_dot_product_attention(q, k, v))
        assert ran == "FLASH"
        assert ran.split_kv, ran.evidence

    def test_a_replayed_graph_is_known_by_its_kernels(self) -> None:
        q, k, v = (t.detach() for t in leaves("cuda", self.HALF, seq=256, head_dim=64))
        flash_attention(q, k, v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flash_attention(q, k, v)
        ran = which_backend(graph.replay)
        assert ran.forward == "flashcourse", ran.evidence

    @pytest.mark.parametrize(
        ("options", "shape", "dtype", "reason"),
        [
            ({"attn_mask": True}, {}, torch.float16, "no attn_mask"),
            ({"is_causal": True}, {"seq_k": 40}, torch.float16, "as many queries as keys"),
            ({}, {}, torch.float32, "dtype"),
            ({}, {"head_dim": 264}, torch.float16, "head_dim"),
            ({}, {"heads": 4, "heads_kv": 2}, torch.float16, "numbers of heads"),
        ],
    )
    def test_refusals_of_flash(
        self, options: dict[str, Any], shape: dict[str, int], dtype: torch.dtype, reason: str
    ) -> None:
        qkv = leaves("cuda", dtype, **shape)
        if "attn_mask" in options:
            options = {"attn_mask": BOOL.cuda()}
        verdict = why_not(*qkv, **options)["FLASH"]
        assert not verdict.allowed
        assert reason in verdict.reason, verdict.messages
        with pytest.raises(RuntimeError):
            sdpa(SDPBackend.FLASH_ATTENTION, qkv, False, **options)()


def test_reasons_below_python_are_heard(capfd: pytest.CaptureFixture[str]) -> None:
    """On CUDA PyTorch writes its reasons to the process's standard error."""
    with _hearing() as messages:
        os.write(
            2,
            b"[W1130 17:42:31.0 sdp_utils_cpp.h:262] Warning: Flash Attention does not support "
            b"non-null attn_mask. (function check_for_attn_mask)\nsomething else\n",
        )
        warnings.warn("Flash attention has been runtime disabled.", stacklevel=1)
    assert messages == [
        "Flash attention has been runtime disabled.",
        "Flash Attention does not support non-null attn_mask.",
    ]
    assert explain(tuple(messages[1:]))[0] == "it takes no attn_mask"
    assert capfd.readouterr().err == "something else\n"
