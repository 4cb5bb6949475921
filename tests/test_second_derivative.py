"""Gradients of gradients: right from plain attention, refused by kernels, never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flashcourse.attention import (
    flash_attention,
    flash_attention_varlen,
    naive_attention,
    tiled_attention,
)

HERE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence through the varlen interface."""
    offsets = torch.tensor([0, q.shape[2]], dtype=torch.int32, device=q.device)
    flat = (t[0].transpose(0, 1) for t in (q, k, v))
    out = flash_attention_varlen(*flat, offsets, offsets)
    assert isinstance(out, torch.Tensor)
    return out.transpose(0, 1)[None]


KERNELS = [
    pytest.param(flash_attention, marks=pytest.mark.needs_triton),
    pytest.param(packed, marks=pytest.mark.needs_triton),
    tiled_attention,
]


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn((1, 1, 5, 16), generator=generator).to(HERE).requires_grad_() for _ in range(3)
    ]


def penalty(grads: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([g.square().sum() for g in grads]).sum()


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["sum", "square"])
def test_a_penalty_on_gradients_is_refused(attention: Any, loss: Callable) -> None:
    """With a plain sum nothing that flows into the backward needs a gradient; q, k and v do."""
    qkv = leaves()
    grads = torch.autograd.grad(loss(attention(*qkv)), qkv, create_graph=True)
    plain = leaves()
    expected = torch.autograd.grad(loss(naive_attention(*plain)), plain, create_graph=True)
    for came, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(came, right, atol=1e-4, rtol=1e-4)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*naive_attention"):
        penalty(grads).backward()
    penalty(expected).backward()
    assert plain[0].grad is not None
    assert plain[0].grad.abs().max() > 0.01


@pytest.mark.needs_triton
def test_transforms_refuse_it_too() -> None:
    q, k, v = (t.detach() for t in leaves())

    def loss(attention: Callable, q: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v).sum()

    def twice(attention: Callable) -> torch.Tensor:
        once = torch.func.grad(partial(loss, attention))
        return torch.func.grad(lambda q: once(q).square().sum())(q)

    assert twice(naive_attention).abs().max() > 0.01
    with pytest.raises(NotImplementedError, match="no second derivative"):
        twice(flash_attention)
