"""A check to keep: no document of a packed batch sees another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch


class Contaminated(AssertionError):
    """A document's logits changed when only other documents changed."""


@torch.no_grad()
def contamination(
    model: Any, batch: dict[str, Any], lengths: Sequence[int] | None = None, *, documents: int = 8
) -> list[float]:
    """How far each document's logits move when every other document is replaced.

    The batch runs as it is, with every argument in it: what is tested is how *you* call the
    model. Sizes stay the same, so a clean batch gives the very same numbers, in any dtype.

    Args:
        model: a causal language model; it is put in evaluation mode meanwhile.
        batch: what you call the model with; ``labels`` are left out.
        lengths: of the documents, in the flat order of the rows. None: read from
            ``cu_seq_lens_q`` or ``position_ids``.
        documents: at most this many are looked at, spread over the batch; each costs one run.

    Returns:
        For each document looked at, the largest change of a logit, over the largest logit.

    Raises:
        ValueError: the boundaries are not to be found, or do not fit the batch.
    """
    batch = {k: v for k, v in batch.items() if k != "labels"}
    ids = batch["input_ids"]
    offsets = _offsets(batch, lengths)
    if len(offsets) < 3:
        raise ValueError("the batch holds one document: there is nothing to contaminate it")
    was_training = model.training
    model.eval()
    count = len(offsets) - 1
    looked_at = torch.linspace(0, count - 1, min(count, documents)).round().int().tolist()
    try:
        before = model(**batch).logits.flatten(0, 1)
        moved = []
        for index in looked_at:
            mine = slice(offsets[index], offsets[index + 1])
            other = (ids + 1) % model.config.vocab_size
            other.view(-1)[mine] = ids.reshape(-1)[mine]
            after = model(**{**batch, "input_ids": other}).logits.flatten(0, 1)
            change = (after[mine] - before[mine]).abs().max()
            moved.append((change / before[mine].abs().max().clamp(min=1e-9)).item())
    finally:
        model.train(was_training)
    return moved


def assert_no_contamination(
    model: Any,
    batch: dict[str, Any],
    lengths: Sequence[int] | None = None,
    *,
    documents: int = 8,
    tolerance: float = 1e-5,
) -> None:
    """Raise :class:`Contaminated` if a document of the batch sees another.

    Call it once before a training run, with the model and a batch as your loop makes them. The
    arguments are those of :func:`contamination`.

    Args:
        tolerance: the largest relative change that passes. Clean batches change by 0, or by
            rounding where a library chooses another kernel.
    """
    moved = contamination(model, batch, lengths, documents=documents)
    worst = max(range(len(moved)), key=moved.__getitem__)
    if not moved[worst] <= tolerance:  # NaN is contamination too
        raise Contaminated(
            f"{sum(not m <= tolerance for m in moved)} of {len(moved)} documents see others: "
            f"replacing the others moved a logit by {moved[worst]:.2g} of the largest. "
            "Pass position_ids that start at 0 in each document, no attention_mask and "
            'use_cache=False; or use attn_implementation="flashcourse".'
        )


def _offsets(batch: dict[str, Any], lengths: Sequence[int] | None) -> list[int]:
    ids = batch["input_ids"]
    if lengths is not None:
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + int(length))
    elif batch.get("cu_seq_lens_q") is not None:
        offsets = batch["cu_seq_lens_q"].tolist()
    elif batch.get("position_ids") is not None:
        positions = batch["position_ids"].expand_as(ids)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = positions.diff(dim=1) != 1
        offsets = [*begins.flatten().nonzero().flatten().tolist(), ids.numel()]
    else:
        raise ValueError(
            "the batch has neither position_ids nor cu_seq_lens_q, so the documents' boundaries "
            "are not known: pass lengths=[...]"
        )
    if offsets[-1] != ids.numel() or any(b <= a for a, b in itertools.pairwise(offsets)):
        raise ValueError(
            f"the lengths add up to {offsets[-1]} and must be positive; "
            f"the batch has {ids.numel()} tokens"
        )
    return offsets
