"""From logits to tokens: greedy, or drawn with a number that only the request decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that draws token ``index`` of a request with this seed.

    It depends on nothing else, so a request that is preempted and computed again, or served in
    other company, draws the same tokens. Philox, a counter-based generator: Salmon et al. (2011).
    """
    generator = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=index))
    return int(generator.integers(2**32)) / 2**32


def sample(
    logits: torch.Tensor, temperatures: Sequence[float], draws: Sequence[float]
) -> list[int]:
    """One token a row. Reading the result waits for the GPU, once.

    Args:
        logits: ``(rows, vocab)``.
        temperatures: one a row; 0 takes the largest logit.
        draws: one number in [0, 1) a row, from :func:`uniform`; unused where greedy.

    Raises:
        FloatingPointError: a row of logits holds no number.
    """
    best, tokens = logits.float().max(dim=-1)
    if any(temperatures):
        device = logits.device
        heat = torch.tensor(temperatures, dtype=torch.float64, device=device)
        at = torch.tensor(draws, dtype=torch.float64, device=device)
        hot = heat > 0
        scores = logits.double() / torch.where(hot, heat, 1.0)[:, None]
        steps = scores.softmax(dim=-1).cumsum(dim=-1)
        # The first token whose step ends beyond the draw; one of probability 0 has no step.
        drawn = (steps <= (at * steps[:, -1])[:, None]).sum(dim=-1)
        tokens = torch.where(hot, drawn, tokens)
    both = torch.stack([tokens, best.isnan().long()]).tolist()
    if any(both[1]):
        raise FloatingPointError(
            f"the logits of row {both[1].index(1)} are NaN: the weights or the cache are broken"
        )
    return both[0]
