"""flashcourse: from the textbook attention formula to a FlashAttention-2 kernel of your own.

Importing the package settles one thing that must be settled before Triton is imported: on a
machine without a GPU, Triton's kernels run in its interpreter. See :mod:`flashcourse.runtime`.
"""

from flashcourse import runtime

__version__ = "0.1.0"

runtime.prepare_triton()
