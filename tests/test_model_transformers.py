"""The course's attention inside Transformers models, in every situation they create."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from plugins.machine import not_verified
from transformers import (
    DataCollatorWithFlattening,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from flashcourse import runtime
from flashcourse.model import NotSupported, register_with_transformers
from flashcourse.model.transformers_attention import flashcourse_attention

pytestmark = pytest.mark.needs_triton

DEVICE = runtime.device()
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
LENGTHS = (5, 1, 9, 3)
# The name of the argument; it changed in 5.24.
CACHE = (
    "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_with_transformers()
    register_with_transformers()  # twice is once


def make(kind="llama", implementation="flashcourse", **changes):
    """The same random weights for each implementation."""
    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    }
    config_class, model_class = classes[kind]
    torch.manual_seed(7)
    config = config_class(**{**SIZES, **changes}, attn_implementation=implementation)
    model = model_class(config).to(DEVICE).eval()
    for parameter in model.parameters():  # large enough that attention is not flat
        if parameter.dim() == 2:
            parameter.data.mul_(6)
    assert model.config._attn_implementation == implementation
    return model


def draw(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (n,), generator=generator).to(DEVICE) for n in lengths]


def alone(model, documents):
    """Logits of each document in a run of its own."""
    return [model(input_ids=d[None], use_cache=False).logits[0] for d in documents]


def packed(documents, **options):
    collator = DataCollatorWithFlattening(**options)
    batch = collator([{"input_ids": d.tolist()} for d in documents])
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def padded(documents, side):
    longest = max(map(len, documents))
    ids = torch.zeros(len(documents), longest, dtype=torch.long, device=DEVICE)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents):
        where = slice(longest - len(document), longest) if side == "left" else slice(len(document))
        ids[row, where], mask[row, where] = document, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return ids, mask, positions


# Both sides are float32; on a GPU their matrix products differ in the order of the sums as well.
TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 1e-4


def close(actual, expected):
    assert actual.shape == expected.shape
    size = max(1.0, expected.abs().max().item())
    assert (actual - expected).abs().max().item() <= TOLERANCE * size


MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0},
}


# Each run costs seconds in Triton's interpreter: every situation once, and every kind of model.
@pytest.mark.parametrize(
    ("kind", "keywords", "use_cache"),
    [
        ("llama", False, None),
        ("llama", False, False),
        ("llama", True, None),
        ("llama", True, False),
        ("mistral", False, None),
        ("mistral", True, None),
        ("gemma2", False, None),
        ("gemma2", True, False),
    ],
)
@torch.no_grad()
def test_packed_logits_equal_those_of_each_document_alone(kind, keywords, use_cache):
    expected = torch.cat(alone(make(kind, "eager", **MODELS[kind]), draw()))
    batch = packed(draw(), return_flash_attn_kwargs=keywords)
    options = {} if use_cache is None else {"use_cache": use_cache}
    close(make(kind, **MODELS[kind])(**batch, **options).logits[0], expected)


@torch.no_grad()
def test_the_same_batch_is_contaminated_in_eager_with_a_cache():
    """The negative control: the comparison above sees contamination."""
    model = make("llama", "eager")
    expected = torch.cat(alone(model, draw()))
    assert (model(**packed(draw())).logits[0] - expected).abs().max() > 0.1


@torch.no_grad()
def test_a_mask_of_ones_hides_no_boundary():
    expected = torch.cat(alone(make("llama", "eager"), draw()))
    batch = packed(draw())
    ones = torch.ones_like(batch["input_ids"])
    close(make()(**batch, attention_mask=ones).logits[0], expected)


@pytest.mark.parametrize("padding", [False, True])
@torch.no_grad()
def test_batches_of_packed_rows(padding):
    rows = [draw((5, 2, 4), 1), draw((3, 7, 1) if not padding else (3, 5), 2)]
    eager = make("llama", "eager")
    expected = [torch.cat(alone(eager, row)) for row in rows]
    ids, mask, _ = padded([torch.cat(row) for row in rows], "right")
    positions = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        flat = torch.cat([torch.arange(len(d)) for d in row])
        positions[i, : len(flat)] = flat
    given = {"attention_mask": mask} if padding else {}
    logits = make()(input_ids=ids, position_ids=positions, **given).logits
    for i, right in enumerate(expected):
        close(logits[i, : len(right)], right)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding(kind, side):
    documents = draw()
    expected = alone(make(kind, "eager", **MODELS[kind]), documents)
    ids, mask, positions = padded(documents, side)
    logits = make(kind, **MODELS[kind])(
        input_ids=ids, attention_mask=mask, position_ids=positions
    ).logits
    assert torch.isfinite(logits).all()
    for row, right in enumerate(expected):
        close(logits[row, mask[row].bool()], right)


@torch.no_grad()
def test_left_padding_without_position_ids():
    """RoPE is relative: positions from the first slot on give the same logits."""
    documents = draw()
    expected = alone(make("llama", "eager"), documents)
    ids, mask, _ = padded(documents, "left")
    logits = make()(input_ids=ids, attention_mask=mask).logits
    for row, right in enumerate(expected):
        close(logits[row, mask[row].bool()], right)


@torch.no_grad()
def test_a_hole_in_the_mask_does_not_end_a_document():
    (document,) = draw((8,))
    mask = torch.ones(1, 8, dtype=torch.long, device=DEVICE)
    mask[0, 3:5] = 0
    given = {"input_ids": document[None], "attention_mask": mask}
    expected = make("llama", "eager")(**given).logits
    close(make()(**given).logits[mask.bool()], expected[mask.bool()])


def _static(model, slots=16):
    return StaticCache(config=model.config, max_cache_len=slots)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("chunks", [(9,), (3, 4, 1, 1)], ids=str)
@torch.no_grad()
def test_prefill_and_continuation(kind, cache, chunks):
    (document,) = draw((9,))
    expected = make(kind, "eager", **MODELS[kind])(document[None], use_cache=False).logits
    model = make(kind, **MODELS[kind])
    held = _static(model) if cache == "static" else DynamicCache(config=model.config)
    logits = [
        model(input_ids=part[None], use_cache=True, **{CACHE: held}).logits
        for part in document.split(chunks)
    ]
    close(torch.cat(logits, 1), expected)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_from_a_left_padded_batch(kind, cache):
    ids, mask, _ = padded(draw((3, 6)), "left")
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    if cache == "static":
        given |= {"cache_implementation": "static", "disable_compile": True}
    texts = []
    for implementation in ("eager", "flashcourse"):
        model = make(kind, implementation, **MODELS[kind])
        out = model.generate(**given, output_logits=True, return_dict_in_generate=True)
        texts.append((out.sequences, torch.stack(out.logits)))
    assert torch.equal(texts[0][0], texts[1][0])
    close(texts[1][1], texts[0][1])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_packed_prefill_into_a_cache(cache):
    expected = torch.cat(alone(make("llama", "eager"), draw()))
    model = make()
    held = _static(model, 32) if cache == "static" else DynamicCache(config=model.config)
    close(model(**packed(draw()), **{CACHE: held}).logits[0], expected)


@torch.no_grad()
def test_packed_tokens_after_a_filled_cache_are_refused():
    model = make()
    (document,) = draw((4,))
    held = model(document[None], use_cache=True)
    held = getattr(held, CACHE)
    with pytest.raises(ValueError, match="the cache already holds keys"):
        model(**packed(draw()), **{CACHE: held})


@pytest.mark.parametrize(
    ("kind", "keywords", "reentrant"),
    [
        ("llama", False, None),
        ("llama", True, None),
        ("llama", False, True),
        ("llama", False, False),
        ("mistral", False, None),
        ("gemma2", False, None),
    ],
)
def test_packed_gradients_equal_those_of_each_document_alone(kind, keywords, reentrant):
    """``reentrant``: with gradient checkpointing of that kind; None: without."""
    documents = draw()
    eager = make(kind, "eager", **MODELS[kind]).train()
    targets = sum(len(d) - 1 for d in documents)
    for d in documents:
        if len(d) > 1:
            loss = eager(input_ids=d[None], labels=d[None], use_cache=False).loss
            (loss * (len(d) - 1) / targets).backward()
    model = make(kind, **MODELS[kind]).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(**packed(documents, return_flash_attn_kwargs=keywords)).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None, name
        close(ours.grad, theirs.grad)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_gradients(side):
    ids, mask, positions = padded(draw(), side)
    labels = ids.masked_fill((mask == 0) | (positions == 0), -100)  # padding predicts nothing
    gradients = []
    for implementation in ("eager", "flashcourse"):
        model = make("llama", implementation).train()
        model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels,
              use_cache=False).loss.backward()  # fmt: skip
        gradients.append([p.grad for p in model.parameters()])
    for theirs, ours in zip(*gradients, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("given", ["packed", "cu_seq_lens", "plain", "left", "right", "decode"])
@torch.no_grad()
def test_compiled_without_a_break(given):
    """Dynamo's whole graph, run as it is: on a CPU the kernels' operators are what is tested."""
    model = make(num_hidden_layers=1)
    ids, mask, positions = padded(draw(), "left" if given == "left" else "right")
    batch = {
        "packed": lambda: packed(draw()),
        "cu_seq_lens": lambda: packed(draw(), return_flash_attn_kwargs=True),
        "plain": lambda: {"input_ids": ids, "use_cache": False},
        "left": lambda: {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
        "right": lambda: {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
        "decode": lambda: {"input_ids": ids[:, :1], "attention_mask": mask[:, :1]},
    }[given]()
    batch.pop("labels", None)
    expected = model(**batch).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    actual = compiled(**batch).logits
    keep = mask[:, : actual.shape[1]].bool() if given in ("left", "right") else slice(None)
    close(actual[keep], expected[keep])


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
