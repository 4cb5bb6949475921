"""An attention written a second time, for tests only: loops over rows, float64, no shared code."""

from __future__ import annotations

import math

import torch


def visible(i: int, j: int, seq_q: int, seq_k: int, is_causal: bool, window: tuple | None) -> bool:
    """May query i see key j? Straight from the interface's sentences."""
    diagonal = i + seq_k - seq_q
    if is_causal and j > diagonal:
        return False
    left, right = window or (None, None)
    if left not in (None, -1) and j < diagonal - left:
        return False
    return not (right not in (None, -1) and j > diagonal + right)


def mask(seq_q: int, seq_k: int, is_causal: bool, window: tuple | None) -> torch.Tensor:
    """bool (seq_q, seq_k), one pair at a time."""
    rows = [
        [visible(i, j, seq_q, seq_k, is_causal, window) for j in range(seq_k)] for i in range(seq_q)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(seq_q, seq_k)


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64, differentiable, head by head through PyTorch's own softmax."""
    q, k, v = q.double(), k.double(), v.double()
    heads_q, heads_kv = q.shape[1], k.shape[1]
    seen = mask(q.shape[2], k.shape[2], is_causal, window_size).to(q.device)
    some = seen.any(dim=1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    outs, lses = [], []
    for head in range(heads_q):
        k_head, v_head = (t[:, head // (heads_q // heads_kv)] for t in (k, v))
        s = torch.einsum("bid,bjd->bij", q[:, head], k_head) * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        # Rows that see nothing are computed unmasked and then dropped: no NaN to hide.
        s = s.masked_fill(~(seen | ~some[:, None]), float("-inf"))
        p = torch.softmax(s, dim=-1) if k.shape[2] else s
        outs.append(torch.where(some[:, None], p @ v_head, 0.0))
        if k.shape[2]:
            lses.append(torch.where(some, torch.logsumexp(s, dim=-1), float("-inf")))
        else:
            lses.append(torch.full(q[:, head].shape[:2], float("-inf"), dtype=torch.float64))
    return torch.stack(outs, dim=1), torch.stack(lses, dim=1)
