"""What the questions of labs 4 and 5 share: where they can be judged, and whose work it was."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from flashcourse import runtime
from flashcourse.grading.fresh import fresh_check
from flashcourse.grading.judge import FORBIDDEN_ATTENTION, judge_operators, score_tolerance
from flashcourse.grading.question import Answer, Case, Check, Mistake, Observation

UNTIMED = "FLASHCOURSE_UNTIMED"  # a variable: a notebook that `grade` runs measures no time
EPS16 = torch.finfo(torch.float16).eps
FEW_BITS = 71.4375  # loses nothing in float16, nor does a quarter of it times log2(e)
TILES = (64, 32, 16, 128)  # the sides that a learner's tiles may have
# Mistakes whose numbers depend on the tiles, and on which side of them.
DEPENDS = {
    "the accumulator is not rescaled": "k",
    "the sum is not rescaled": "k",
    "divided by the sum in every tile": "k",
    "the mean of each tile's own softmax": "k",
    "one maximum for the whole tile": "qk",
    "the last keys are dropped": "k",
    "the last queries are dropped": "q",
    "the causal loop stops a tile early": "qk",
    "the causal loop stops a key early": "qk",
    "keys past the end take part": "k",
    "delta from one tile only": "k",
    "softmax of each tile instead of exp(s − lse)": "k",
    "P not normalised": "k",
    "dq overwritten by each block of keys": "qk",
    "dk and dv overwritten by each block of queries": "qk",
    "the causal loop over keys stops a tile early": "qk",
    "the causal loop over queries begins a tile late": "qk",
    "the causal loop over keys stops a key early": "qk",
    "the causal loop over queries begins a query late": "qk",
}
# What explains a mistake of that name, in three labs.
FLOAT16_ACCUMULATOR = (
    "the running output was kept in float16, or in the inputs' dtype: it overflows above 65,504 "
    "and loses digits at every tile. m, l and o live in float32."
)
# Products, exponentials and sums in PyTorch: what the kernels are for.
PRODUCTS = (
    "mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "inner",
    "einsum", "tensordot", "linear", "bilinear", "convolution", "cdist", "linalg_vecdot",
    "_cdist_forward", "_scaled_mm", "_grouped_mm",
)  # fmt: skip
EXPONENTIALS = ("exp", "exp2", "expm1", "pow", "sigmoid", "tanh", "logsumexp", "logaddexp")
FORBIDDEN_WORK = (*FORBIDDEN_ATTENTION, *PRODUCTS, *EXPONENTIALS)


# Where an answer can be judged ------------------------------------------------------------------


def needs_triton() -> str:
    """Why this machine can run no Triton kernel; an empty string where it can."""
    if not runtime.triton_installed():
        return (
            "Triton is not installed. On Linux: `pip install triton`; macOS and Windows have no "
            "Triton, so use WSL2, the devcontainer or Colab"
        )
    if not runtime.has_gpu() and not runtime.interpreting():
        return (
            "there is no GPU, and Triton's interpreter is switched off (TRITON_INTERPRET=0): "
            "leave that variable unset"
        )
    import triton.runtime.interpreter  # the gates that note a launch must exist

    assert triton.runtime.interpreter is not None
    return ""


def where_it_ran() -> str:
    """What to say beside a pass: on a CPU the kernels were interpreted, not compiled."""
    return "verified in Triton's interpreter" if runtime.interpreting() else ""


def needs_matrix_units() -> str:
    """Why this machine cannot verify a speed; an empty string where it can."""
    if not runtime.has_gpu() or runtime.interpreting():
        return "speed needs a GPU; Triton's interpreter says nothing about it"
    capability = runtime.compute_capability()
    if torch.version.hip is None and capability is not None and capability < (8, 0):
        name = f"compute capability {capability[0]}.{capability[1]}"
        return (
            f"this GPU ({torch.cuda.get_device_name()}, {name}) is older than what Triton's matrix "
            "products support (8.0): there they run without the matrix units, and no kernel "
            "written in Triton can be fast"
        )
    if UNTIMED in os.environ:
        return "`grade` runs other notebooks beside this one; it measures speed by itself"
    return ""


# The inputs -------------------------------------------------------------------------------------


def here(tensor: torch.Tensor) -> torch.Tensor:
    """A drawn tensor on the device that the kernels run on, with its strides."""
    device = runtime.device()
    if tensor.device == device:
        return tensor
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def as_half(case: Case) -> Case:
    """The same case in float16, floats rounded; what is float32 by definition (lse) stays so."""
    args = tuple(a.half() if a.dim() == 4 else a for a in case.args)
    return Case(f"{case.description}, float16", args, case.kwargs)


def amid_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with NaN behind the end of every row and of every sequence."""
    *front, rows, columns = tensor.shape
    buffer = tensor.new_full((*front, rows + 3, columns + 5), math.nan)
    view = buffer[..., :rows, :columns]
    view.copy_(tensor)
    return view


def read_with(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """What a kernel reads that is given these strides for it; 0 where memory ends."""
    start = tensor.storage_offset()
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, stride, strict=True))
    if start + last < size:  # the memory of a wide tensor can be too large to copy
        return tensor.as_strided(tensor.shape, stride, start).clone()
    memory = tensor.as_strided((size - start,), (1,), start)
    memory = torch.nn.functional.pad(memory, (0, last + 1 - memory.numel()))
    return memory.as_strided(tensor.shape, stride).clone()


def from_first_entry(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes a tensor for contiguous; 0 where memory ends."""
    dense = torch.empty(tensor.shape, device="meta").stride()
    return read_with(tensor, dense)


def new_tensors_check(cases: Callable[[torch.Generator], Iterable[Case]]) -> Check:
    """``fresh_check``, whose second call changes the sign of the first argument alone.

    With all signs changed the scores, and delta, would be the same as before.
    """
    return replace(fresh_check(cases), call=_call_again)


def _call_again(answer: Answer, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    result = answer(*args, **kwargs)
    kept = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result)
    answer(-args[0], *args[1:], **kwargs)
    return kept, result


# Whose work it was ------------------------------------------------------------------------------


def judge_own_kernel(
    observation: Observation, forbidden: tuple[str, ...] = FORBIDDEN_WORK, tensors: int = 2
) -> str | None:
    """Judge that a Triton kernel of the learner's own did the work, and PyTorch none of it.

    Args:
        forbidden: the PyTorch operators that would do the work.
        tensors: how many tensors such a kernel is given at the least.
    """
    message = judge_operators(observation, forbidden)
    if message:
        if "bmm" in observation.operators and "bmm" in forbidden:
            message += " (einsum and @ run as bmm)"
        return f"{message}: PyTorch may allocate, reshape and copy; the numbers come from a kernel"
    own = [launch for launch in observation.launches if launch.own]
    if not own:
        others = ", ".join(sorted({launch.kernel for launch in observation.launches}))
        return "no Triton kernel of yours was launched" + (f", only {others}" if others else "")
    if all(launch.tensors < tensors for launch in own):
        names = ", ".join(sorted({launch.kernel for launch in own}))
        return f"your kernel ({names}) was launched without the inputs and outputs of the task"
    return None


def half_tolerance(largest_score: float, largest_value: float) -> float:
    """The error that any right float16 attention may make, however it is written.

    P and out are each rounded to float16, by half an eps of themselves; a q that is scaled before
    the product is rounded too, which moves every score by half an eps of its terms. The sums are
    float32.
    """
    return EPS16 * (1 + largest_score / 2) * max(largest_value, 1e-3) + score_tolerance(
        largest_score, largest_value
    )


FIRST_KEYS = 16  # of weight 1, where a sum in float16 has steps of 2⁻⁶
LOW_VALUE = 1.984375  # just below 2, where a rounding of out is smallest: it adds least to P's


def set_small_weights(q: torch.Tensor, first: torch.Tensor, others: torch.Tensor) -> None:
    """Make the first keys of a row outweigh each other one by e^9.97, in place.

    What 128 of the others add, 0.006, is less than half a step of float16 at 16: a sum that is
    rounded to it at every tile, of any size, never grows. The numbers lose nothing if they are
    scaled in float16, for base e or 2.

    Args:
        q: float16 queries, head_dim 16.
        first, others: their keys.
    """
    for tensor in (q, others, first):
        tensor.zero_()
    q[..., 0], first[..., 0] = FEW_BITS / 64, FEW_BITS / 2


def small_weights_tolerance(moved: float, keys: int) -> float:
    """The error of out that any right float16 answer may make in such a row, with all values
    LOW_VALUE.

    P is rounded by half an eps, or by half of the smallest float16 number where it is below the
    normal ones, out by half a step; a score moves by ``moved`` if q or k was scaled in float16.
    """
    rounded = EPS16 / 2 + 2.0**-25 * keys + moved
    return (rounded + score_tolerance(10.0, 1.0)) * LOW_VALUE + EPS16 / 2


# Known mistakes in PyTorch, with the tiles that a learner may have chosen -------------------------


def tiled_mistake(mistake: Mistake, adapt: Callable[[Answer, int, int], Answer]) -> Mistake:
    """A mistake of lab 3 as one of labs 4 and 5: tiles are no argument there.

    Where the numbers depend on the tiles, all that a learner may have chosen are tried.

    Args:
        adapt: makes the answer of the later lab from that of lab 3 and a tile's two sides.
    """
    first, *others = (
        adapt(mistake.answer, block_q, block_k)
        for block_q in _sides("q", mistake)
        for block_k in _sides("k", mistake)
    )
    return Mistake(mistake.name, mistake.explanation, first, tuple(others))


def either(*mistakes: Mistake) -> Mistake:
    """One mistake that shows in several ways."""
    first, *others = mistakes
    more = tuple(answer for other in others for answer in (other.answer, *other.variants))
    return Mistake(first.name, first.explanation, first.answer, first.variants + more)


def _sides(which: str, mistake: Mistake) -> tuple[int, ...]:
    return TILES if which in DEPENDS.get(mistake.name, "") else TILES[:1]


def on_cpu(tensor: Any) -> Any:
    """The tensor as float32 on the CPU, where lab 3's functions work."""
    return tensor.detach().cpu().float() if isinstance(tensor, torch.Tensor) else tensor
