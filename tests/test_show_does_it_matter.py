"""Lesson 10: attention is exchanged and put back, and figures say what they were given."""

from __future__ import annotations

import math

import pytest
import torch
from matplotlib.figure import Figure

from flashcourse.measure.amdahl import amdahl_speedup, share_of_part
from flashcourse.model import Size, small_llama
from flashcourse.model.exchange import (
    NO_ATTENTION,
    WAYS,
    attention_alone,
    exchanged,
    layer_inputs,
)
from flashcourse.serving import ContiguousKVCache, Engine, KVShape, make_load, serve
from flashcourse.serving.compared import NoAttentionRows, SdpaRows
from flashcourse.show import does_it_matter as show
from flashcourse.show.figure import png

SIZE = Size(32, 2, 4, 2, 8, 64, 96, 64, None, 2, 2, 1e-3)


@pytest.fixture(scope="module")
def model():
    model = small_llama(SIZE, attention="sdpa").eval()
    with torch.no_grad():  # random weights nearly echo their input; this makes attention decide
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(40)
            layer.self_attn.v_proj.weight.mul_(10)
    return model


@pytest.fixture(scope="module")
def ids():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, SIZE.vocab, (2, 19), generator=generator)


@torch.no_grad()
def test_every_way_computes_the_same_and_is_put_back(model, ids):
    expected = model(input_ids=ids, use_cache=False).logits
    for way in WAYS:
        with exchanged(model, way) as same:
            assert same is model
            logits = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        assert model.config._attn_implementation == "sdpa"
    with exchanged(model, NO_ATTENTION):
        nothing = model(input_ids=ids, use_cache=False).logits
    assert (nothing - expected).abs().max() > 0.1
    with pytest.raises(ValueError, match=r"way must be one of .*'sdpa math'"):
        exchanged(model, "sdpa math").__enter__()


def test_it_is_put_back_after_an_error(model):
    with pytest.raises(RuntimeError, match="stop"), exchanged(model, "eager"):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "sdpa"


def test_attention_alone_agrees_on_a_models_own_inputs(model, ids):
    layers = layer_inputs(model, ids)
    assert len(layers) == SIZE.layers
    assert model.config._attn_implementation == "sdpa"
    for q, k, v in layers:
        assert q.shape == (2, SIZE.heads, 19, SIZE.head_dim)
        assert k.shape == v.shape == (2, SIZE.heads_kv, 19, SIZE.head_dim)
        outs = {way: attention_alone(way)(q, k, v) for way in WAYS}
        for out in outs.values():
            torch.testing.assert_close(out, outs["eager"], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="way must be one of"):
        attention_alone(NO_ATTENTION)


def test_a_layers_inputs_are_those_of_the_text(model, ids):
    (q, _, _), *_ = layer_inputs(model, ids)
    (other, _, _), *_ = layer_inputs(model, ids.flip(1))
    assert (q - other).abs().max() > 0.01


def served(model, kind, attention="naive"):
    lengths = [(5, 6), (17, 3), (9, 9), (30, 4), (3, 12), (12, 5)]
    cache = kind(KVShape.of(model), tokens=3 * 48, longest=48)
    engine = Engine(model, cache, token_budget=16, attention=attention)
    return [request.output for request in serve(engine, make_load(lengths, SIZE.vocab))]


def test_a_service_with_sdpa_gives_the_same_tokens_and_one_without_attention_others(model):
    expected = served(model, ContiguousKVCache)
    assert served(model, SdpaRows) == expected
    nothing = served(model, NoAttentionRows)
    assert [len(tokens) for tokens in nothing] == [len(tokens) for tokens in expected]
    assert all(a != b for a, b in zip(nothing, expected, strict=True))


def test_garbage_in_unused_slots_stays_there(model):
    class Garbage(SdpaRows):
        def begin(self, tokens):
            sequence = super().begin(tokens)
            row = self._row[sequence] * self.longest
            self.k[:, row : row + self.longest] = 1e4
            self.v[:, row : row + self.longest] = 1e4
            return sequence

    assert served(model, Garbage) == served(model, ContiguousKVCache)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_amdahl_agrees_with_adding_up_the_times(share, factor):
    before, after = 1.0, (1 - share) + share / factor
    assert amdahl_speedup(share, factor) == pytest.approx(before / after)


def test_amdahl_has_a_limit_and_refuses_nonsense():
    assert amdahl_speedup(0.75, math.inf) == 4
    assert amdahl_speedup(1.0, math.inf) == math.inf
    with pytest.raises(ValueError, match="share"):
        amdahl_speedup(1.1, 2)
    with pytest.raises(ValueError, match="factor"):
        amdahl_speedup(0.5, 0)


def test_a_share_is_never_negative():
    assert share_of_part(4.0, 1.0) == 0.75
    assert share_of_part(4.0, 4.1) == 0
    with pytest.raises(ValueError, match="positive"):
        share_of_part(0.0, 1.0)


def rows():
    return [
        {"n": n, "phase": phase, "way": way, "ms": None if (n, way) == (128, "b") else n * 0.1}
        for n in (64, 128)
        for phase in ("prefill", "decode", "training step")
        for way in ("a", "b")
    ]


def test_every_figure_draws():
    figures = [
        show.draw_errors({"a": 1e-5, "b": 0.0}, 1e-4, "t"),
        show.draw_errors({"a": 0.0}, None, "t"),
        show.draw_quality({"a": {"x": 0.0, "y": 1e-6}, "b": {"x": 1e-2}}, "t"),
        show.draw_phases(rows(), "ms", "milliseconds", "t"),
        show.draw_shares({"a": {"p": {64: 0.1, 128: 0.2}}, "b": {"p": {64: 0.0}}}, "t"),
        show.draw_amdahl(amdahl_speedup, 0.5, 4, {"x": (0.2, 1.1)}),
        show.draw_predicted([1, 2], {"a": [1.0, 2.0]}, {"a": [1.0, None]}, "t"),
        show.draw_survival({"kernel": 4.0, "model": 1.5, "service": 0.9}, "t"),
    ]
    for figure in figures:
        assert isinstance(figure, Figure)
        assert png(figure).startswith(b"\x89PNG")


def test_amdahls_title_and_the_crosses_say_what_was_given():
    assert (
        "the whole 1.60×, at most 2.00×"
        in show.draw_amdahl(amdahl_speedup, 0.5, 4).axes[0].get_title()
    )
    figure = show.draw_phases(rows(), "ms", "milliseconds", "t")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "× the next length ran out of memory" in labels
    with pytest.raises(ValueError, match="no row has a value of 'bytes'"):
        show.draw_phases(rows(), "bytes", "MiB", "t")
