"""Gradients that cannot be differentiated again, and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Gradients = tuple[torch.Tensor, ...]


def first_order(name: str, compute: Callable[..., Gradients], *inputs: Any) -> Gradients:
    """``compute(*inputs)`` for the backward of an autograd function.

    With ``create_graph=True`` PyTorch records what a backward does. It cannot look into a kernel,
    and would take the gradients for constants: a penalty on them would silently be left out.

    Args:
        name: of the attention function, for the message.
        compute: gives the gradients; it is called without recording.
        inputs: all tensors that the gradients depend on, and what else ``compute`` takes.
    """
    if not torch.is_grad_enabled():
        return compute(*inputs)
    return _FirstOrder.apply(name, compute, *inputs)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(name, compute, *inputs):
        return compute(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"{ctx.name} has no second derivative: its backward is not recorded. Use "
            "naive_attention, which PyTorch can differentiate any number of times"
        )
