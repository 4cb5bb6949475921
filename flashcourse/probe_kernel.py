"""The smallest Triton kernel that can go wrong the way real ones do: a dot, a loop, a tail."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_of_product(a, b, out, rows, BLOCK: tl.constexpr):
    """``out = softmax(a @ b)``: ``a (rows, BLOCK)``, ``b (BLOCK, BLOCK)``, float32, one program."""
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    # The loop ends at a number known at run time only: some interpreters fail on just that.
    for first in range(0, rows, BLOCK):
        tile = (first + i[:, None]) * BLOCK + j[None, :]
        inside = first + i[:, None] < rows
        # "ieee": by default a GPU may round float32 operands to TF32, and the comparison would
        # fail.
        s = tl.dot(
            tl.load(a + tile, mask=inside, other=0.0),
            tl.load(b + i[:, None] * BLOCK + j[None, :]),
            input_precision="ieee",
        )
        p = tl.exp(s - tl.max(s, 1)[:, None])
        tl.store(out + tile, p / tl.sum(p, 1)[:, None], mask=inside)
