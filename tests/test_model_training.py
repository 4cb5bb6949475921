"""Corpus, tokenizer, batches, training, and keeping a model whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from flashcourse.model import (
    LAYOUTS,
    TEXTS,
    Contaminated,
    CorpusMissing,
    Layout,
    Size,
    assert_no_contamination,
    contamination,
    count_parameters,
    draw_batches,
    encode,
    held_out_loss,
    hub_dataset,
    load_model,
    packed_batch,
    padded_batch,
    padding_share,
    padding_share_of_epoch,
    save_model,
    small_llama,
    standard_library,
    train,
    train_tokenizer,
    trained_model,
)
from flashcourse.model.documents import find_documents
from flashcourse.model.training import _rate

SMALL = Size(32, 1, 2, 1, 16, 48, 300, 24, 60, 4, 6, 3e-3)
PADDED_SDPA = Layout("padded, sdpa", "sdpa", padded_batch)
documents_strategy = st.lists(
    st.lists(st.integers(3, 60), min_size=1, max_size=9), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def corpus():
    return standard_library(200)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_tokenizer(corpus.train, 300)


@pytest.fixture(scope="module")
def documents(corpus, tokenizer):
    return encode(tokenizer, corpus.train, SMALL.longest)


# Corpus and tokenizer ---------------------------------------------------------------------------


def test_the_corpus_is_the_same_each_time_and_held_out_by_module(corpus):
    assert standard_library(200) == corpus
    assert len(corpus.train) == 200
    assert corpus.held_out
    assert not set(corpus.train) & set(corpus.held_out)
    assert any("def " in d for d in corpus.train)


def test_a_class_is_cut_at_its_first_method(tmp_path):
    for number in range(60):  # enough modules that some are held out
        (tmp_path / f"m{number}.py").write_text(
            f'class C{number}:\n    """A docstring that is long enough to be kept."""\n\n'
            "    @property\n    def method(self):\n        return 'a body that is long enough'\n"
        )
    (tmp_path / "broken.py").write_text("def f(:\n")
    found = standard_library(folder=tmp_path)
    texts = found.train + found.held_out
    assert len(texts) == 120
    assert sum(t.startswith("class") and "return" not in t for t in texts) == 60
    assert sum(t.startswith("def method") for t in texts) == 60


def test_no_source_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(CorpusMissing, match="give another folder"):
        standard_library(folder=tmp_path)


def test_hub_dataset(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        hub_dataset("any/name")
    fake = types.SimpleNamespace(
        load_dataset=lambda name, split, streaming: ({"text": f"{name} {i}"} for i in range(99))
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = hub_dataset("a/b", limit=40)
    assert (len(found.train), len(found.held_out)) == (38, 2)
    with pytest.raises(CorpusMissing, match="no column 'body'; it has text"):
        hub_dataset("a/b", column="body")


@pytest.mark.parametrize("language", TEXTS)
def test_the_tokenizer_gives_every_text_back(tokenizer, language):
    ids = tokenizer(TEXTS[language])["input_ids"]
    assert tokenizer.decode(ids) == TEXTS[language]


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_the_tokenizer_gives_any_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_encode_marks_both_ends_and_cuts(tokenizer):
    (whole,) = encode(tokenizer, ["def f(): pass"], 100)
    assert (whole[0], whole[-1]) == (1, 2)
    (cut,) = encode(tokenizer, ["def f(): pass"], 3)
    assert cut == whole[:3]
    with pytest.raises(ValueError, match="longest must be 2 or more"):
        encode(tokenizer, ["x"], 1)
    with pytest.raises(ValueError, match="vocab_size must be 259 or more"):
        train_tokenizer(["x"], 100)


# Batches ----------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(documents=documents_strategy)
def test_packed_batch_is_the_collator_s(documents):
    ours = packed_batch(documents)
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": d} for d in documents]
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[key], value), key
            assert ours[key].dtype == value.dtype, key
        else:
            assert ours[key] == value


@settings(max_examples=50, deadline=None)
@given(documents=documents_strategy)
def test_both_layouts_hold_the_same_targets(documents):
    padded, packed = padded_batch(documents, mask=True), packed_batch(documents)
    assert padded["attention_mask"].sum() == packed["input_ids"].numel()
    targets = [b["labels"][b["labels"] != -100].tolist() for b in (padded, packed)]
    assert targets[0] == targets[1]
    assert len(targets[0]) == sum(map(len, documents)) - len(documents)
    lengths = [len(d) for d in documents]
    share = 1 - padded["attention_mask"].float().mean().item()
    assert padding_share(lengths) == pytest.approx(share, abs=1e-6)


def test_batches_refuse_nothing():
    with pytest.raises(ValueError, match="documents is empty"):
        packed_batch([])
    with pytest.raises(ValueError, match="document 1 has no tokens"):
        padded_batch([[1], []])


def test_sorting_wastes_less_and_an_epoch_passes_through_all():
    lengths = [1 + i % 17 for i in range(100)]
    waste = {o: padding_share_of_epoch(lengths, 8, order=o) for o in ("random", "sorted")}
    assert waste["sorted"] < 0.1 < 0.3 < waste["random"]
    groups = list(draw_batches([[i] for i in range(12)], 4, 6))
    assert sorted(d[0] for g in groups[:3] for d in g) == list(range(12))
    with pytest.raises(ValueError, match="batch must be 1 to 12"):
        next(draw_batches([[i] for i in range(12)], 13, 1))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(documents_strategy, min_size=1, max_size=3), hide=st.booleans(), data=st.data()
)
def test_documents_are_the_same_with_and_without_reading_values(rows, hide, data):
    """The two ways to find documents agree, and with the lengths they were made from."""
    total = max(sum(map(len, row)) for row in rows)
    positions = torch.zeros(len(rows), total, dtype=torch.long)
    exists = torch.zeros(len(rows), total, dtype=torch.bool)
    lengths = []
    for i, row in enumerate(rows):
        flat = [p for d in row for p in range(len(d))]
        positions[i, : len(flat)] = torch.tensor(flat)
        exists[i, : len(flat)] = True
        lengths += [len(d) for d in row]
    if not exists.all():
        hide = True
    mask = (exists, exists) if hide else None
    read = find_documents(len(rows), total, total, mask, positions)
    fixed = find_documents(len(rows), total, total, mask, positions, may_read=False)
    if read is None:  # one document a row
        assert lengths == [total] * len(rows)
        return
    assert read.cu_seqlens_q.diff().tolist() == lengths
    if fixed is None:  # one token a row
        assert total == 1
        return
    assert [n for n in fixed.cu_seqlens_q.diff().tolist() if n] == lengths
    if hide:
        real = sum(lengths)
        assert torch.equal(read.order_q, fixed.order_q[:real])
        assert fixed.order_q.sort().values.tolist() == list(range(len(rows) * total))


# Contamination ----------------------------------------------------------------------------------


def test_the_check_sees_each_way_to_contaminate(documents):
    model = small_llama(SMALL, attention="sdpa")
    batch = packed_batch(documents[:4], keywords=False)
    clean = {**batch, "use_cache": False}
    assert contamination(model, clean) == [0.0] * 4
    assert_no_contamination(model, clean)
    lengths = [len(d) for d in documents[:4]]
    without = {"input_ids": batch["input_ids"], "use_cache": False}
    for wrong, known in (
        (batch, None),  # the cache at its default
        ({**clean, "attention_mask": torch.ones_like(batch["input_ids"])}, None),
        (without, lengths),
    ):
        with pytest.raises(Contaminated, match="3 of 4 documents see others"):
            assert_no_contamination(model, wrong, known)
    with pytest.raises(ValueError, match="pass lengths="):
        contamination(model, without)
    with pytest.raises(ValueError, match="add up to 5"):
        contamination(model, without, [2, 3])
    with pytest.raises(ValueError, match="nothing to contaminate"):
        contamination(model, packed_batch(documents[:1]))


@pytest.mark.needs_triton
def test_the_course_s_attention_is_clean_with_the_cache_at_its_default():
    model = small_llama(SMALL)
    documents = [[5, 9, 7], [4, 8, 11, 3], [6, 6]]
    assert_no_contamination(model.to("cuda" if torch.cuda.is_available() else "cpu"), {
        k: v.to(model.device) if isinstance(v, torch.Tensor) else v
        for k, v in packed_batch(documents, keywords=False).items()
    })  # fmt: skip


# Training ---------------------------------------------------------------------------------------


def test_padded_and_packed_training_have_the_same_losses(documents):
    runs = []
    for layout in (PADDED_SDPA, LAYOUTS[1]):
        model = small_llama(SMALL, attention=layout.attention)
        batches = draw_batches(documents, 4, 6)
        runs.append(train(model, batches, layout, steps=6, learning_rate=3e-3))
    padded, packed = runs
    assert padded.losses == pytest.approx(packed.losses, abs=2e-4)
    assert padded.tokens == packed.tokens == packed.slots
    assert all(slots >= tokens for slots, tokens in zip(padded.slots, padded.tokens, strict=True))
    assert packed.losses[-1] < packed.losses[0] - 0.05
    assert packed.tokens_per_second() > 0
    assert packed.peak_bytes is None or packed.peak_bytes > 0
    model = small_llama(SMALL, attention="sdpa")
    batches = draw_batches(documents, 4, 6)
    part = train(model, batches, PADDED_SDPA, steps=6, learning_rate=3e-3, stop_after=3)
    assert part.losses == padded.losses[:3]


@pytest.mark.needs_triton
def test_the_course_s_attention_trains_to_the_same_losses():
    documents = [[1, 5, 9, 2], [1, 7, 2], [1, 4, 8, 11, 3, 2]]
    losses = []
    for layout in (PADDED_SDPA, LAYOUTS[0], LAYOUTS[2]):
        model = small_llama(SMALL, attention=layout.attention)
        run = train(
            model, [documents] * 2, layout, steps=2, learning_rate=3e-3,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip
        losses.append(run.losses)
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == pytest.approx(losses[0], abs=1e-4)


def test_training_refuses_what_would_mislead(documents):
    model = small_llama(SMALL, attention="sdpa")
    with pytest.raises(ValueError, match="needs attn_implementation='flashcourse'"):
        train(model, [], LAYOUTS[2], steps=1, learning_rate=1e-3)
    with pytest.raises(ValueError, match="batches ended after 1 steps"):
        train(model, [documents[:2]], PADDED_SDPA, steps=2, learning_rate=1e-3)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="loss of step 0 is nan"):
        train(model, [documents[:2]], PADDED_SDPA, steps=1, learning_rate=1e-3)


def test_held_out_loss_counts_every_token_once(documents):
    model = small_llama(SMALL, attention="sdpa")
    one_by_one = held_out_loss(model, documents[:6], batch=1)
    assert held_out_loss(model, documents[:6], batch=4) == pytest.approx(one_by_one, abs=1e-5)
    with pytest.raises(ValueError, match="nothing to predict"):
        held_out_loss(model, [[1]])


def test_the_learning_rate_rises_and_falls():
    rates = [_rate(step, 100) for step in range(100)]
    assert max(rates) == 1
    assert rates[0] < rates[3] < rates[5]
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_sizes():
    assert 10e6 < count_parameters(small_llama("small", attention="sdpa")) < 30e6
    with pytest.raises(ValueError, match="there are tiny, small, base"):
        small_llama("large")


# Kept whole or not at all -----------------------------------------------------------------------


def test_a_trained_model_is_kept_and_found_again(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("FLASHCOURSE_HOME", str(tmp_path))
    first = trained_model("tiny", corpus=corpus, steps=3)
    monkeypatch.setattr("flashcourse.model.keep.train", None)  # nothing is trained again
    again = trained_model("tiny")
    assert again.card == first.card
    assert again.card["held_out_loss"] > 0
    assert again.folder.is_relative_to(tmp_path)
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert again.tokenizer("def f()") == first.tokenizer("def f()")
    with pytest.raises(ValueError, match="holds a tiny model of recipe 1; wanted small"):
        load_model(first.folder, size="small")
    assert [p.name for p in first.folder.parent.iterdir()] == [first.folder.name]


def test_saving_replaces_whole(tmp_path, tokenizer, monkeypatch):
    model = small_llama(SMALL, attention="sdpa")
    place = tmp_path / "model"
    save_model(place, model, tokenizer, {"recipe": 1, "size": "a"})
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    save_model(place, model, tokenizer, {"recipe": 1, "size": "b"})
    assert load_model(place, attention="sdpa").card["size"] == "b"

    def broken(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "save_pretrained", broken)
    with pytest.raises(KeyboardInterrupt):
        save_model(place, model, tokenizer, {"recipe": 1, "size": "c"})
    assert load_model(place, attention="sdpa").card["size"] == "b"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    with pytest.raises(FileNotFoundError, match="trained_model"):
        load_model(tmp_path / "none")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="was not written by this course"):
        load_model(tmp_path / "other")


def test_a_killed_run_leaves_no_model_and_the_next_save_cleans_up(tmp_path, tokenizer):
    script = textwrap.dedent(
        f"""
        import os, signal
        from flashcourse.model import keep, small_llama, Size
        model = small_llama({SMALL!r}, attention="sdpa")
        class Tokenizer:
            def save_pretrained(self, folder):
                os.kill(os.getpid(), signal.SIGKILL)  # the weights are written, the rest is not
        keep.save_model({str(tmp_path / "model")!r}, model, Tokenizer(), {{}})
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=dict(os.environ))
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "model").exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".partial-model-")
    model = small_llama(SMALL, attention="sdpa")
    save_model(tmp_path / "model", model, tokenizer, {"recipe": 1, "size": "a"})
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
