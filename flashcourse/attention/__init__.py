"""The algorithm, one file a stage: naive → tiled → Triton → decode → paged, and the merge."""

from flashcourse.attention.decode import flash_decode
from flashcourse.attention.flash import flash_attention, flash_attention_varlen
from flashcourse.attention.merge import merge_attention
from flashcourse.attention.naive import naive_attention
from flashcourse.attention.naive_decode import naive_decode, naive_paged_attention
from flashcourse.attention.paged import paged_attention
from flashcourse.attention.tiled import tiled_attention

__all__ = [
    "flash_attention",
    "flash_attention_varlen",
    "flash_decode",
    "merge_attention",
    "naive_attention",
    "naive_decode",
    "naive_paged_attention",
    "paged_attention",
    "tiled_attention",
]
