"""A plain training loop that counts what it costs: real tokens a second, memory, loss."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashcourse.model.batches import IGNORED, on_device, packed_batch, padded_batch

WARM_UP_SHARE = 0.05
SMALLEST_RATE = 0.1  # of the peak, at the end


@dataclass(frozen=True)
class Layout:
    """One way to put documents into a model.

    Attributes:
        name: for tables and figures.
        attention: Transformers' ``attn_implementation``.
        make: makes a batch from documents.
    """

    name: str
    attention: str
    make: Callable[[Sequence[Sequence[int]]], dict[str, Any]]


def _packed_for_a_mask(documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    return packed_batch(documents, keywords=False)


LAYOUTS = (
    # The strongest padded form: padding on the right needs no mask in a causal model, so the
    # fused kernel runs at full speed over tokens and padding.
    Layout("padded, flash", "flashcourse", padded_batch),
    Layout("packed, block mask", "sdpa", _packed_for_a_mask),
    Layout("packed, varlen", "flashcourse", packed_batch),
)


@dataclass(frozen=True)
class TrainingRun:
    """What one training run did.

    Attributes:
        name: the layout's.
        losses: mean over the targets of each step, before its update.
        tokens: real tokens of each step; padding does not count.
        slots: tokens and padding of each step.
        seconds: of each step, from its batch to its update; the next batch is made meanwhile.
        peak_bytes: the most that PyTorch held on the GPU; None on a CPU.
    """

    name: str
    losses: list[float]
    tokens: list[int]
    slots: list[int]
    seconds: list[float]
    peak_bytes: int | None

    def tokens_per_second(self, skip: int = 3) -> float:
        """Real tokens a second, without the first ``skip`` steps, which compile and allocate."""
        skip = min(skip, len(self.seconds) - 1)
        return sum(self.tokens[skip:]) / sum(self.seconds[skip:])

    def step_ms(self, skip: int = 3) -> float:
        """The median step, in milliseconds."""
        kept = sorted(self.seconds[min(skip, len(self.seconds) - 1) :])
        return kept[len(kept) // 2] * 1e3

    def final_loss(self, last: int = 20) -> float:
        """The mean loss of the last steps."""
        return sum(self.losses[-last:]) / len(self.losses[-last:])


def train(
    model: Any,
    batches: Iterable[Sequence[Sequence[int]]],
    layout: Layout,
    *,
    steps: int,
    learning_rate: float,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    stop_after: int | None = None,
    report: Callable[[int, float], None] | None = None,
) -> TrainingRun:
    """Train with AdamW, warm-up and a cosine, on one batch of documents a step.

    The loss is the mean over all targets of a step, whatever the layout: the mean of the means of
    documents would count a token of a short one more.

    Args:
        model: a causal language model in float32; it is moved to ``device``.
        batches: groups of tokenised documents.
        layout: how they become a batch. The model must have its ``attention``.
        steps: how many of the batches are used.
        dtype: the dtype of matrix products and attention (autocast); None or float32: none.
        stop_after: end after so many steps of a schedule made for ``steps``; None: all.
        report: called with the step and its loss. Reading a loss waits for the GPU.

    Raises:
        ValueError: the model's attention is not the layout's, or the batches end too early.
        FloatingPointError: the loss is no number.
    """
    if model.config._attn_implementation != layout.attention:
        raise ValueError(
            f"the layout {layout.name!r} needs attn_implementation={layout.attention!r}, the model "
            f"has {model.config._attn_implementation!r}: model.set_attn_implementation(...)"
        )
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    model.to(device).train()
    # 0.95: short runs; weights of one dimension are gains, which decay would only shrink.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype not in (None, torch.float32))
    losses, tokens, slots, seconds = [], [], [], []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    wanted = steps if stop_after is None else min(stop_after, steps)
    prepared = _prepared(itertools.islice(batches, wanted), layout)
    following = next(prepared, None)
    for step in range(wanted):
        if following is None:
            raise ValueError(f"batches ended after {step} steps; {steps} were asked for")
        documents, batch = following
        start = time.perf_counter()
        batch = on_device(batch, device)
        with autocast:
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        # On a GPU all that only queued work: the next batch is made meanwhile.
        following = next(prepared, None)
        losses.append(loss.item())  # waits for the GPU, so the step's time is whole
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(len(d) for d in documents))
        slots.append(batch["input_ids"].numel())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss of step {step} is {losses[-1]}")
        if report is not None:
            report(step, losses[-1])
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return TrainingRun(layout.name, losses, tokens, slots, seconds, peak)


def _prepared(
    groups: Iterable[Sequence[Sequence[int]]], layout: Layout
) -> Iterator[tuple[Sequence[Sequence[int]], dict[str, Any]]]:
    for documents in groups:
        yield documents, layout.make(documents)


@torch.no_grad()
def held_out_loss(
    model: Any,
    documents: Sequence[Sequence[int]],
    *,
    batch: int = 16,
    dtype: torch.dtype | None = None,
) -> float:
    """Mean loss over all targets of the documents, in nats a token; packed rows.

    Raises:
        ValueError: no document has a target (two tokens or more).
    """
    device = model.device
    was_training = model.training
    model.eval()
    total = targets = 0.0
    enabled = dtype not in (None, torch.float32)
    try:
        for start in range(0, len(documents), batch):
            packed = on_device(packed_batch(documents[start : start + batch]), device)
            count = int((packed["labels"] != IGNORED).sum())
            if count == 0:
                continue
            with torch.autocast(device.type, dtype=dtype, enabled=enabled):
                loss = model(**packed, use_cache=False).loss
            total += loss.item() * count
            targets += count
    finally:
        model.train(was_training)
    if not targets:
        raise ValueError("no document has two tokens: there is nothing to predict")
    return total / targets


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    warm = max(1, round(steps * WARM_UP_SHARE))
    if step < warm:
        return (step + 1) / warm
    way = (step - warm) / max(1, steps - warm)
    return SMALLEST_RATE + (1 - SMALLEST_RATE) * 0.5 * (1 + math.cos(math.pi * way))
