"""The course's attention inside Transformers models, in every situation they create."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers_models import (
    CACHE,
    DEVICE,
    MODELS,
    alone,
    close,
    draw,
    make,
    packed,
    padded,
)

from flashcourse.model import register_with_transformers

pytestmark = pytest.mark.needs_triton


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_with_transformers()
    register_with_transformers()  # twice is once


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
