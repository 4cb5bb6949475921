"""The trained model of the course: trained once, kept whole or not at all, used by many lessons."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flashcourse import runtime
from flashcourse.model.batches import draw_batches
from flashcourse.model.corpus import Corpus, standard_library
from flashcourse.model.small_llama import Size, size_named, small_llama
from flashcourse.model.tokenizer import encode, train_tokenizer
from flashcourse.model.training import LAYOUTS, TrainingRun, held_out_loss, train
from flashcourse.model.transformers_attention import register_with_transformers

HOME_VARIABLE = "FLASHCOURSE_HOME"
RECIPE = 1  # raise it when a model trained before would no longer be the course's
CARD = "flashcourse.json"


@dataclass(frozen=True)
class Trained:
    """A model with what belongs to it.

    Attributes:
        model: in evaluation mode on the course's device, in float32.
        tokenizer: its tokenizer.
        card: how it was made: sizes, corpus, losses, versions.
        folder: where it is kept.
    """

    model: Any
    tokenizer: Any
    card: dict[str, Any]
    folder: Path


def home() -> Path:
    """Where models are kept: ``$FLASHCOURSE_HOME``, or ``~/.cache/flashcourse``."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".cache" / "flashcourse")


def trained_model(
    size: str | None = None,
    *,
    folder: str | Path | None = None,
    corpus: Corpus | None = None,
    attention: str = "flashcourse",
    steps: int | None = None,
    seed: int = 0,
    retrain: bool = False,
) -> Trained:
    """The course's model: loaded if it was trained before, otherwise trained now and kept.

    Args:
        size: "tiny", "small" or "base"; None: small on a GPU, tiny on a CPU.
        folder: where to keep it; None: under :func:`home`, by size.
        corpus: what to learn from; None: Python's standard library.
        attention: the implementation the returned model uses. On a CPU training uses PyTorch's
            attention over packed rows: the same numbers, and Triton's interpreter takes hours.
        steps: of training; None: the size's.
        retrain: train even if there is one.

    Raises:
        ValueError: the folder holds something else than a model of this recipe and size.
    """
    size = size or ("small" if runtime.has_gpu() else "tiny")
    shape = size_named(size)
    place = Path(folder) if folder is not None else home() / "models" / f"{size}-{RECIPE}"
    if not retrain and place.exists():
        return load_model(place, attention=attention, size=size)
    corpus = corpus or standard_library(shape.documents)
    model, tokenizer, card = _train(size, shape, corpus, steps or shape.steps, seed)
    save_model(place, model, tokenizer, card)
    return load_model(place, attention=attention, size=size)


def _train(
    name: str, shape: Size, corpus: Corpus, steps: int, seed: int
) -> tuple[Any, Any, dict[str, Any]]:
    import transformers

    tokenizer = train_tokenizer(corpus.train, shape.vocab)
    documents = encode(tokenizer, corpus.train, shape.longest)
    held_out = encode(tokenizer, corpus.held_out, shape.longest)
    layout = LAYOUTS[2] if runtime.has_gpu() else LAYOUTS[1]
    model = small_llama(shape, attention=layout.attention, seed=seed)
    dtype = runtime.compute_dtype()
    if dtype == torch.float16:  # its gradients need scaling, which this loop leaves out
        dtype = torch.float32
    batches = draw_batches(documents, shape.batch, steps, seed=seed)
    run: TrainingRun = train(
        model, batches, layout, steps=steps, learning_rate=shape.learning_rate,
        device=runtime.device(), dtype=dtype,
    )  # fmt: skip
    card = {
        "recipe": RECIPE,
        "size": name,
        "shape": asdict(shape),
        "corpus": corpus.source,
        "documents": len(documents),
        "steps": steps,
        "seed": seed,
        "train_loss": run.final_loss(),
        "held_out_loss": held_out_loss(model, held_out, dtype=dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return model, tokenizer, card


def save_model(folder: str | Path, model: Any, tokenizer: Any, card: dict[str, Any]) -> None:
    """Keep a model: the folder appears whole, or is as it was before.

    Everything is written beside it and then renamed, so a run that is cut off leaves at most a
    folder ``.partial-…``, which nothing reads and the next save of this model removes.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".partial-{folder.name}-"
    for left in folder.parent.glob(f"{prefix}*"):
        if not _in_use(left):
            shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=folder.parent))
    try:
        new = work / "new"
        with _no_progress_bars():
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
        (new / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            os.replace(folder, work / "old")
        os.replace(new, folder)
    finally:
        old = work / "old"
        if old.exists() and not folder.exists():  # the second rename failed: put it back
            os.replace(old, folder)
        shutil.rmtree(work, ignore_errors=True)


def load_model(
    folder: str | Path, *, attention: str = "flashcourse", size: str | None = None
) -> Trained:
    """A kept model, on the course's device, in evaluation mode.

    Raises:
        FileNotFoundError: there is no folder.
        ValueError: it holds something else, or another size or recipe.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no model in {folder}; trained_model() makes one")
    card_path = folder / CARD
    if not card_path.is_file():
        raise ValueError(f"{folder} was not written by this course: it has no {CARD}")
    card = json.loads(card_path.read_text(encoding="utf-8"))
    if card.get("recipe") != RECIPE or size not in (None, card.get("size")):
        raise ValueError(
            f"{folder} holds a {card.get('size')} model of recipe {card.get('recipe')}; wanted "
            f"{size or 'any size'} of recipe {RECIPE}. Remove it, or train with retrain=True."
        )
    register_with_transformers()
    with _no_progress_bars():
        model: Any = LlamaForCausalLM.from_pretrained(
            folder, attn_implementation=attention, dtype=torch.float32, local_files_only=True
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Trained(model.to(runtime.device()).eval(), tokenizer, card, folder)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A bar for a file that is read in a moment only fills a notebook's output."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _in_use(work: Path) -> bool:
    """True if the process that makes this folder still runs."""
    pid = work.name.rsplit("-", 2)[-2]
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
