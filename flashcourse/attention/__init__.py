"""The algorithm, one file a stage: naive → tiled → Triton, and the merge that joins the pieces."""

from flashcourse.attention.flash import flash_attention, flash_attention_varlen
from flashcourse.attention.merge import merge_attention
from flashcourse.attention.naive import naive_attention
from flashcourse.attention.tiled import tiled_attention

__all__ = [
    "flash_attention",
    "flash_attention_varlen",
    "merge_attention",
    "naive_attention",
    "tiled_attention",
]
