"""The algorithm, one file a stage: naive → tiled, and the merge that joins the pieces."""

from flashcourse.attention.merge import merge_attention
from flashcourse.attention.naive import naive_attention
from flashcourse.attention.tiled import tiled_attention

__all__ = ["merge_attention", "naive_attention", "tiled_attention"]
