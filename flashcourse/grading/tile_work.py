"""Watching how an answer works through the score matrix: in tiles, in PyTorch, without autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashcourse.grading.judge import FORBIDDEN_ATTENTION, judge_operators
from flashcourse.grading.question import Answer, Case, Observation

# Whatever makes probabilities of scores takes an exponential, and takes it of the scores.
_EXPONENTIALS = ("exp", "exp_", "exp2", "exp2_", "expm1", "expm1_", "sigmoid", "sigmoid_")
_SUMMED_EXPONENTIALS = ("logsumexp",)


class TileWatch(TorchDispatchMode):
    """Records, while active, how much was exponentiated at once, and how much was computed.

    Attributes:
        largest: the most numbers that one operator took an exponential of.
        computed: numbers that operators returned, views among them, all together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.computed = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the watch of allocations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.computed += result.numel()
        name = func.overloadpacket.__name__
        taken = None
        if name in _EXPONENTIALS or name in _SUMMED_EXPONENTIALS:
            taken = args[0]
        elif name in ("pow", "float_power") and not isinstance(args[0], torch.Tensor):
            taken = args[1]  # e ** s
        if taken is not None:
            self.largest = max(self.largest, taken.numel())
        return result


def visible_pairs(seq_q: int, seq_k: int, is_causal: bool) -> int:
    """Pairs of query i and key j with ``j <= i + seq_k - seq_q``, or all of them."""
    if not is_causal:
        return seq_q * seq_k
    return sum(max(0, i + seq_k - seq_q + 1) for i in range(seq_q))


def call_watching(answer: Answer, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """How the answer made its output; the inputs (q, k, and more) ask for no gradient.

    Each visible score is an entry of a tensor that some operator returned, however the answer is
    written; an answer in NumPy or in plain numbers has next to none.
    """
    recorded = False

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal recorded
        recorded = True
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with TileWatch() as watch, hooks:
        answer(*args, **kwargs)
    (batch, heads, seq_q), seq_k = args[0].shape[:3], args[1].shape[2]
    pairs = visible_pairs(seq_q, seq_k, bool(kwargs.get("is_causal", False)))
    return {
        "in PyTorch": watch.computed >= batch * heads * pairs,
        "exponentials at once": watch.largest,
        "differentiated automatically": recorded,
    }


def judge_work(case: Case, observation: Observation) -> str | None:
    """Judge that the answer computed every visible score itself, in PyTorch, without autograd."""
    if not observation.output["in PyTorch"]:
        return (
            "PyTorch's operators returned fewer numbers than there are scores: compute with "
            "tensors, not with NumPy or plain numbers"
        )
    if observation.output["differentiated automatically"]:
        return (
            "autograd recorded your operations: it stores every tile of P, which is the memory "
            "that this lab saves. Write the formulas instead"
        )
    return judge_operators(observation, FORBIDDEN_ATTENTION)


def judge_tiles(case: Case, observation: Observation) -> str | None:
    """Judge that scores were held a tile at a time, and computed in PyTorch.

    Beside tiles an answer may copy its inputs (to repeat KV heads, or in double precision), so
    the case must be one in which the score matrix is much larger than these.
    """
    message = judge_work(case, observation)
    if message:
        return message
    q, k = case.args[:2]
    tile = case.kwargs["block_q"] * case.kwargs["block_k"]
    matrix = f"the whole score matrix has {q.shape[2]}×{k.shape[2]} numbers, a tile only {tile:,}"
    most = 4 * tile + 2 * k.numel()
    if observation.largest_numel > most:
        shape = "×".join(str(size) for size in observation.largest_shape)
        return (
            f"you allocated a {shape} tensor of {observation.largest_numel:,} numbers: {matrix}; "
            f"{most:,} numbers are enough"
        )
    at_once = observation.output["exponentials at once"]
    if at_once > 2 * tile:
        return (
            f"you took the exponential of {at_once:,} scores at once: {matrix}. Hold "
            f"{case.kwargs['block_q']} × {case.kwargs['block_k']} of them at a time"
        )
    inputs = sum(t.numel() for t in case.args)
    most = 8 * tile + 4 * inputs
    if observation.live_numel > most:
        return (
            f"your tensors held {observation.live_numel:,} numbers at once, and {most:,} are "
            f"enough: {matrix}. A tile that has been used can be forgotten"
        )
    return None
