"""When is a result right? The accuracy rule, in one place.

Inputs are drawn in the dtype under test. The reference is computed in float64 from those very
inputs, and plain attention in the dtype under test is the yardstick: a result may be wrong by at
most a few times what the plain computation is wrong by, plus the rounding of the reference itself.
"""

from __future__ import annotations

import torch

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
LSE_TOLERANCE = 1e-3
FLOAT32_EPS = torch.finfo(torch.float32).eps


def allowed_error(
    yardstick: torch.Tensor, reference: torch.Tensor, factor: float = OUTPUT_FACTOR
) -> float:
    """The largest error the accuracy rule allows.

    Args:
        yardstick: the plain computation's result, in the dtype under test.
        reference: the float64 result from the same inputs.
        factor: how many times the yardstick's error is allowed.
    """
    finite = torch.isfinite(reference) & torch.isfinite(yardstick)
    error = (yardstick.double() - reference.double())[finite].abs()
    largest = reference.double()[finite].abs()
    floor = torch.finfo(yardstick.dtype).eps * (largest.max().item() if largest.numel() else 0.0)
    return factor * (error.max().item() if error.numel() else 0.0) + floor


def score_bound(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> float:
    """What no score is larger than, before softcap: the sizes of the longest q and k, times scale.

    Args:
        q, k: ``(..., head_dim)``; where there are no rows the result is 0.
        scale: default ``head_dim ** -0.5``.
    """
    q_size, k_size = (t.double().norm(dim=-1).max().item() if t.numel() else 0.0 for t in (q, k))
    return (q.shape[-1] ** -0.5 if scale is None else abs(scale)) * q_size * k_size


def score_rounding(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> float:
    """The relative error that float32 scores bring into P, however the rest is computed.

    A score is a sum over head_dim. It is rounded by up to eps times the sizes of q and k, and
    P = e^s inherits that as a relative error. Softcap does not help: a score near 0, whose terms
    cancel, passes it unchanged. On a few entries the yardstick may be lucky; no computation is
    better on all.

    Args:
        q, k, scale: as in :func:`score_bound`.
    """
    return FLOAT32_EPS * (4.0 + score_bound(q, k, scale))


def delta_rounding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor,
    scale: float | None = None,
) -> float:  # fmt: skip
    """The absolute error of dQ and dK that dP - delta brings, where the two cancel.

    They are sums over head_dim in two orders (dO · V, and dO · O), so float32 leaves eps · |dP|
    even where they are equal: that is the price of never storing P (FlashAttention-2, algorithm 2).

    Args:
        q, k, v, d_out: ``(..., head_dim)``.
        scale: default ``head_dim ** -0.5``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    largest_dp = score_bound(d_out, v, scale=1.0)
    return 2 * FLOAT32_EPS * largest_dp * scale * max(largest(q), largest(k))


def largest(tensor: torch.Tensor) -> float:
    """The largest finite size of an entry; 0 if there is none."""
    finite = tensor[torch.isfinite(tensor)].abs()
    return finite.max().item() if finite.numel() else 0.0


def explain_difference(
    name: str, actual: torch.Tensor, expected: torch.Tensor, allowed: float | torch.Tensor
) -> str | None:
    """Say where and by how much ``actual`` differs from ``expected``; None if it is close enough.

    NaN and infinity must sit in the same places; elsewhere the error may be ``allowed`` at most.

    Args:
        name: what the tensor is, for the message.
        allowed: the largest absolute error that passes; a tensor, of a shape that broadcasts to
            the expected one, allows each entry its own.
    """
    if tuple(actual.shape) != tuple(expected.shape):
        return f"{name} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.numel() == 0:
        return None
    came, wanted = actual.double().cpu(), expected.double().cpu()
    special = ~torch.isfinite(came) | ~torch.isfinite(wanted)
    same_special = (came == wanted) | (came.isnan() & wanted.isnan())
    misplaced = special & ~same_special
    if misplaced.any():
        index = tuple(misplaced.nonzero()[0].tolist())
        return (
            f"{name}{list(index)} is {came[index].item():.6g}, expected "
            f"{wanted[index].item():.6g}; {int(misplaced.sum())} of {came.numel()} entries are "
            "NaN or infinite on one side only"
        )
    error = torch.where(special, 0.0, (came - wanted).abs())
    limit = torch.as_tensor(allowed, dtype=torch.float64).broadcast_to(error.shape)
    outside = error > limit
    if not outside.any():
        return None
    worst = error[outside].max()
    index = tuple(torch.nonzero(outside & (error == worst))[0].tolist())
    return (
        f"{name}{list(index)} is {came[index].item():.6g}, expected {wanted[index].item():.6g}: "
        f"an error of {worst.item():.2g} where {limit[index].item():.2g} is allowed; "
        f"{int(outside.sum())} of {came.numel()} entries are outside"
    )
