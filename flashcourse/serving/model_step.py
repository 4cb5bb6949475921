"""One pass of a Transformers model over tokens of many requests, with a cache of ours.

All tokens lie behind each other in one row. Everything but attention treats each token alone, so
the model's own code runs unchanged; attention is exchanged for a function that writes keys and
values into the cache and reads each request's own.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flashcourse.serving.kv_cache import ATTENTION, KVCache, round_up
from flashcourse.serving.scheduler import Work

NAME = "course_serving"  # without "flash": Transformers takes such names for packages to load
ROWS_ON_GPU = 8  # decoding batches are padded to multiples of this, so that few shapes occur


@dataclass(frozen=True)
class _Group:
    """Requests with equally many new tokens: one call of the kernel a layer."""

    start: int  # of its tokens in the row
    batch: int
    seq_q: int
    where: Any


@dataclass(frozen=True)
class _Step:
    """What the layers of one pass share."""

    cache: KVCache
    slots: torch.Tensor
    groups: list[_Group]
    attention: str


class ServedModel:
    """A model that shares another's weights and attends through a cache.

    Args:
        model: a causal language model of Transformers (5.17 or newer); it stays as it is.
        attention: "flashcourse", the kernels, or "naive", their slow twins.

    Raises:
        ValueError: there is no such attention.
    """

    def __init__(self, model: Any, attention: str = "flashcourse") -> None:
        import transformers

        if attention not in ATTENTION:
            raise ValueError(f"attention must be one of {ATTENTION}, got {attention!r}")
        transformers.AttentionInterface.register(NAME, serving_attention)
        # A copy of the modules around the same tensors: its config can name another attention.
        shared = [*model.parameters(), *model.buffers()]
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared}).eval()
        self.model.set_attn_implementation(NAME)
        self.attention = attention
        self.decode_rows = ROWS_ON_GPU if model.device.type == "cuda" else 1

    @torch.inference_mode()
    def logits(self, cache: KVCache, work: Sequence[Work], wanted: Sequence[Work]) -> torch.Tensor:
        """Run the work's tokens through the model, into the cache.

        Args:
            work: new tokens; their slots are already the sequences'.
            wanted: those of the work whose last token's logits are asked for.

        Returns:
            ``(len(wanted), vocab)``.
        """
        ids, positions, slots, groups, last = [], [], [], [], {}
        total = 0
        for seq_q, members in _by_length(work):
            members.sort(key=lambda w: cache.order(w.sequence))
            batch = len(members)
            if seq_q == 1:
                batch = round_up(batch, self.decode_rows)
            where = cache.locate([w.sequence for w in members], batch)
            groups.append(_Group(total, batch, seq_q, where))
            for number, w in enumerate(members):
                stop = w.start + w.count
                ids += w.request.tokens[w.start : stop]
                positions.append(np.arange(w.start, stop))
                slots.append(cache.slots(w.sequence, w.start, stop))
                last[id(w)] = total + (number + 1) * seq_q - 1
            total += batch * seq_q
        padding = np.zeros(total - len(ids), np.int64)  # at the end, because decoding is the last
        rows = np.array([last[id(w)] for w in wanted], np.int64)
        tokens = np.array(ids, np.int64)
        packed = np.concatenate([tokens, padding, *positions, padding, *slots, rows])
        packed_ids, packed_positions, packed_slots, packed_rows = (
            torch.from_numpy(packed)
            .to(cache.device)
            .split([total, total, total - len(padding), len(rows)])
        )
        step = _Step(cache, packed_slots, groups, self.attention)
        return self.model(
            input_ids=packed_ids[None],
            position_ids=packed_positions[None],
            use_cache=False,
            logits_to_keep=packed_rows,
            serving_step=step,
        ).logits[0]


def serving_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    serving_step: _Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers calls it: into the cache, and out of it.

    Args:
        query: ``(1, heads_q, tokens, head_dim)``, the row of all requests' new tokens.
        key, value: ``(1, heads_kv, tokens, head_dim)``.
        serving_step: where everything lies.

    Returns:
        ``(1, tokens, heads_q, head_dim)`` and None.

    Raises:
        ValueError: the model was called by somebody else than the engine, or needs what the
            engine does not have.
    """
    if serving_step is None:
        raise ValueError("this model serves an engine; call the one that the engine was made from")
    if dropout or sliding_window is not None or softcap is not None:
        raise ValueError("the engine serves models without dropout, sliding window and softcap")
    step, layer = serving_step, int(module.layer_idx)  # type: ignore[arg-type]
    real = step.slots.shape[0]  # tokens behind are padding
    k, v = (t[0].transpose(0, 1)[:real] for t in (key, value))  # (tokens, heads_kv, head_dim)
    step.cache.write(layer, step.slots, k, v)
    parts = []
    for group in step.groups:
        stop = group.start + group.batch * group.seq_q
        q = query[0, :, group.start : stop].unflatten(1, (group.batch, group.seq_q))
        out = step.cache.attend(
            layer, q.transpose(0, 1), group.where, attention=step.attention, scale=scaling
        )  # (batch, heads_q, seq_q, head_dim)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None].contiguous(), None


def _by_length(work: Sequence[Work]) -> list[tuple[int, list[Work]]]:
    """The work by its number of new tokens, single ones last."""
    groups = defaultdict(list)
    for w in work:
        groups[w.count].append(w)
    return sorted(groups.items(), reverse=True)
