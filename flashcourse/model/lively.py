"""An untrained model whose next token depends on all it has read, for comparing caches."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def make_lively(model: Any, factor: float = 6.0, sharpness: float = 5.0) -> Any:
    """Scale the layers' random weights up, in place, and return the model in evaluation mode.

    With the weights that a training begins with, layers add next to nothing to the embedding: the
    model repeats its last token for ever, and a broken cache goes unnoticed. Scaled, every token
    hangs on the whole text before it.

    Args:
        model: a Llama with random weights.
        factor: of all matrices in the layers.
        sharpness: one more factor, of queries and keys, so that attention chooses.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and ".layers." in name:
            weight.mul_(factor)
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(sharpness)
    return model.eval()
