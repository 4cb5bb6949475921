"""What the course's attention refuses in a Transformers model, and what it costs on a GPU."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from plugins.machine import not_verified
from transformers_models import CACHE, DEVICE, alone, draw, make, packed

from flashcourse import runtime
from flashcourse.model import NotSupported, register_with_transformers
from flashcourse.model.transformers_attention import flashcourse_attention

pytestmark = pytest.mark.needs_triton


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_with_transformers()


def test_what_it_cannot_do_raises_and_names_the_alternative():
    ids = draw((4,))[0][None]
    model = make()
    with pytest.raises(NotSupported, match="eager"):
        model(ids, output_attentions=True)
    square = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE).tril()
    with pytest.raises(NotSupported, match="sdpa"):
        model(ids, attention_mask=square)
    with pytest.raises(NotSupported, match="attention_dropout=0"):
        make(attention_dropout=0.1).train()(ids)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="cu_seq_lens_k belong together"):
        model(ids, cu_seq_lens_q=offsets)


def test_other_mask_patterns_are_refused():
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    config = make().config
    names = {"config": config, "inputs_embeds": torch.zeros(1, 6, 4), "attention_mask": None,
             CACHE: None, "position_ids": torch.arange(6)[None]}  # fmt: skip
    assert create_causal_mask(**names) is None
    with pytest.raises(NotSupported, match="masks with a function of their own"):
        create_causal_mask(**names, or_mask_function=lambda b, h, q, k: k < 2)
    with pytest.raises(NotSupported, match="the mask pattern or_masks"):
        create_causal_mask(**names, block_sequence_ids=torch.zeros(1, 6, dtype=torch.long))
    config = copy.deepcopy(config)
    config.attention_chunk_size = 8
    with pytest.raises(NotSupported, match="chunked_overlay"):
        create_chunked_causal_mask(**{**names, "config": config})


def test_a_mask_that_forgets_the_cached_tokens_is_refused():
    model = make()
    (document,) = draw((4,))
    held = getattr(model(document[None], use_cache=True), CACHE)
    mask = torch.tensor([[0, 1, 1]], device=DEVICE)
    with pytest.raises(ValueError, match="must cover the cached ones too"):
        model(document[None, :3], attention_mask=mask, **{CACHE: held})


def test_models_keep_their_other_implementations():
    assert make("llama", "sdpa")(draw()[0][None]).logits.isfinite().all()
    model = make()
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert math.isfinite(model(draw()[0][None]).logits.sum().item())


def test_documents_are_found_once_a_forward_and_again_when_positions_change(monkeypatch):
    from flashcourse.model import documents

    calls = []
    find = documents.find_documents
    monkeypatch.setattr(documents, "find_documents", lambda *a: calls.append(1) or find(*a))
    remembered = documents.Remembered()
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    first = remembered.find((1, 5, 5), None, positions)
    assert remembered.find((1, 5, 5), None, positions) is first
    assert len(calls) == 1
    positions[0] = torch.tensor([0, 1, 2, 0, 1])
    assert remembered.find((1, 5, 5), None, positions).cu_seqlens_q.tolist() == [0, 3, 5]
    assert remembered.find((1, 5, 5), None, positions.clone()).cu_seqlens_q.tolist() == [0, 3, 5]
    assert len(calls) == 3


def _heads(*heads, seq=96):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, h, seq, 64, generator=generator).to(DEVICE).requires_grad_() for h in heads
    ]


@pytest.mark.needs_gpu
@pytest.mark.parametrize("keywords", [True, False], ids=["cu_seq_lens", "position_ids seen before"])
def test_the_cpu_does_not_wait_for_the_gpu(keywords):
    """A call that would wait raises in PyTorch's debug mode."""
    positions = torch.cat([torch.arange(n) for n in (40, 1, 55)])[None].to(DEVICE)
    offsets = torch.tensor([0, 40, 41, 96], dtype=torch.int32, device=DEVICE)
    given = {"position_ids": positions}
    if keywords:
        given |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
                  "max_length_q": 55, "max_length_k": 55}  # fmt: skip
    module = torch.nn.Module()
    inputs = _heads(4, 2, 2)

    def step():
        out, _ = flashcourse_attention(module, *inputs, None, **given)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_the_accuracy_rule(dtype):
    """Packed logits in low precision: at most twice as far from float64 as eager's, alone."""
    if dtype == torch.bfloat16 and runtime.compute_dtype() != torch.bfloat16:
        not_verified("no bfloat16")
    documents = draw((37, 5, 64, 1))
    with torch.no_grad():
        exact = torch.cat(alone(make("llama", "eager").double(), documents))
        plain = torch.cat(alone(make("llama", "eager").to(dtype), documents)).double()
        ours = make().to(dtype)(**packed(documents)).logits[0].double()
    yardstick = (plain - exact).abs().max()
    assert (ours - exact).abs().max() <= 2 * yardstick
    assert (ours.roll(1, 0) - exact).abs().max() > 2 * yardstick  # the negative control


@pytest.mark.needs_gpu
def test_autocast_gives_the_kernels_one_dtype():
    model = make()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        logits = model(**packed(draw())).logits[0]
    close_enough = (logits.float() - torch.cat(alone(make("llama", "eager"), draw()))).abs().max()
    assert close_enough < 0.05 * logits.abs().max()
