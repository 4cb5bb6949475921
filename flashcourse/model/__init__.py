"""A small language model, its text and tokenizer, and the course's kernels in Transformers."""

from flashcourse.model.batches import (
    draw_batches,
    on_device,
    packed_batch,
    padded_batch,
    padding_share,
    padding_share_of_epoch,
)
from flashcourse.model.contamination import Contaminated, assert_no_contamination, contamination
from flashcourse.model.corpus import Corpus, CorpusMissing, hub_dataset, standard_library
from flashcourse.model.keep import Trained, load_model, save_model, trained_model
from flashcourse.model.small_llama import SIZES, Size, count_parameters, small_llama
from flashcourse.model.texts import TEXTS
from flashcourse.model.tokenizer import encode, train_tokenizer
from flashcourse.model.training import LAYOUTS, Layout, TrainingRun, held_out_loss, train
from flashcourse.model.transformers_attention import NotSupported, register_with_transformers

__all__ = [
    "LAYOUTS",
    "SIZES",
    "TEXTS",
    "Contaminated",
    "Corpus",
    "CorpusMissing",
    "Layout",
    "NotSupported",
    "Size",
    "Trained",
    "TrainingRun",
    "assert_no_contamination",
    "contamination",
    "count_parameters",
    "draw_batches",
    "encode",
    "held_out_loss",
    "hub_dataset",
    "load_model",
    "on_device",
    "packed_batch",
    "padded_batch",
    "padding_share",
    "padding_share_of_epoch",
    "register_with_transformers",
    "save_model",
    "small_llama",
    "standard_library",
    "train",
    "train_tokenizer",
    "trained_model",
]
