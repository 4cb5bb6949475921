"""A check that many questions share: what one call returned is not overwritten by the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from flashcourse.grading.question import Answer, Case, Check, Observation

LARGE = 2**24  # numbers: no answer to a small case is that large, and what is wrong is not copied


def call_twice(answer: Answer, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """(what the first call returned, the same after a second call with other numbers).

    The second call has the shapes, dtypes and layouts of the first; its floating point numbers
    have the other sign.
    """
    result = answer(*args, **kwargs)
    kept = tree_map(_copied, result)
    answer(*(tree_map(_negated, a) for a in args), **kwargs)
    return kept, result


def fresh_check(cases: Callable[[torch.Generator], Iterable[Case]]) -> Check:
    """The check; ``cases`` draws one or two small inputs, each with floating point numbers."""
    return Check("every call returns new tensors", cases, judge_fresh, call_twice)


def judge_fresh(case: Case, observation: Observation) -> str | None:
    """None if the first result is still what it was."""
    kept, result = (tree_leaves(tree) for tree in observation.output)
    if len(kept) != len(result) or not all(map(_same, kept, result)):
        return (
            "a second call with other numbers changed what the first one had returned: both "
            "returned the same memory. Make the result anew in every call"
        )
    return None


def _same(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor) or old.numel() > LARGE:
        return True  # another check has judged it
    if old.is_floating_point():
        old, new = old.nan_to_num(), new.nan_to_num()
    return torch.equal(old, new)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.numel() <= LARGE:
        return leaf.detach().clone()
    return leaf


def _negated(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    other = torch.empty_strided(
        leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
    ).copy_(-leaf.detach())
    return other.requires_grad_(leaf.requires_grad)
