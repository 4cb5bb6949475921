"""The same documents as a padded batch and as a packed row, and what padding wastes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

IGNORED = -100  # the label that the loss leaves out
PAD_ID = 0
Documents = Sequence[Sequence[int]]


def padded_batch(
    documents: Documents, *, pad_id: int = PAD_ID, mask: bool = False
) -> dict[str, torch.Tensor]:
    """One document a row, filled up on the right to the longest.

    Args:
        mask: also return ``attention_mask``. A causal model whose padding is on the right needs
            none: no token sees what comes after it, and padding has no label.

    Returns:
        ``input_ids`` and ``labels``, int64 ``(documents, longest)``.
    """
    _check(documents)
    longest = max(len(d) for d in documents)
    ids = torch.full((len(documents), longest), pad_id)
    labels = torch.full_like(ids, IGNORED)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = labels[row, : len(document)] = torch.tensor(document)
    labels[:, 0] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if mask:
        lengths = torch.tensor([len(d) for d in documents])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch


def packed_batch(documents: Documents, *, keywords: bool = True) -> dict[str, Any]:
    """All documents behind each other in one row, as ``DataCollatorWithFlattening`` makes it.

    Args:
        keywords: also return ``cu_seq_lens_q/k`` and ``max_length_q/k``, which spare the model
            from finding the boundaries in ``position_ids``.

    Returns:
        ``input_ids``, ``position_ids`` (from 0 in each document) and ``labels`` (the first token
        of each document is predicted by nothing), int64 ``(1, total)``.
    """
    _check(documents)
    ids = torch.cat([torch.tensor(d) for d in documents])
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    labels = ids.masked_fill(positions == 0, IGNORED)
    batch: dict[str, Any] = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "labels": labels[None],
    }
    if keywords:
        lengths = torch.tensor([len(d) for d in documents])
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max())
        batch |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        batch |= {"max_length_q": longest, "max_length_k": longest}
    return batch


def on_device(batch: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """The batch with its tensors on a device."""
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def padding_share(lengths: Sequence[int]) -> float:
    """The share of a padded batch that is padding: 1 − mean / longest."""
    if not lengths:
        raise ValueError("lengths is empty")
    return 1 - sum(lengths) / (len(lengths) * max(lengths))


def padding_share_of_epoch(
    lengths: Sequence[int], batch: int, *, order: str = "random", seed: int = 0
) -> float:
    """The share of padding over one pass through all documents.

    Args:
        order: ``"random"``, or ``"sorted"`` by length, which wastes least and shows the model
            short documents first.
    """
    if order not in ("random", "sorted"):
        raise ValueError(f"order must be 'random' or 'sorted', got {order!r}")
    ordered = sorted(lengths) if order == "sorted" else list(lengths)
    if order == "random":
        random.Random(seed).shuffle(ordered)
    real = slots = 0
    for start in range(0, len(ordered), batch):
        group = ordered[start : start + batch]
        real += sum(group)
        slots += len(group) * max(group)
    return 1 - real / slots


def draw_batches(
    documents: Documents, batch: int, steps: int, *, seed: int = 0
) -> Iterator[list[Sequence[int]]]:
    """``steps`` groups of ``batch`` documents, passing through all before any comes again."""
    if batch < 1 or batch > len(documents):
        raise ValueError(f"batch must be 1 to {len(documents)} (the documents), got {batch}")
    rng = random.Random(seed)
    waiting: list[int] = []
    for _ in range(steps):
        if len(waiting) < batch:
            waiting = list(range(len(documents)))
            rng.shuffle(waiting)
        chosen, waiting = waiting[:batch], waiting[batch:]
        yield [documents[i] for i in chosen]


def _check(documents: Documents) -> None:
    if not documents:
        raise ValueError("documents is empty; a batch needs one at least")
    for number, document in enumerate(documents):
        if len(document) == 0:
            raise ValueError(f"document {number} has no tokens")
