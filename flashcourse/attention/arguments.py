"""Checks of the arguments that every attention function shares, made before any work starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch

HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
WIDER_THAN_ALL = 2**62  # keys either side: more than a tensor can hold


@dataclass(frozen=True)
class Options:
    """The options of one call, resolved: no default is left open.

    ``left`` and ``right`` count the visible keys either side of the bottom-right diagonal
    ``j = i + seq_k - seq_q``; None is unlimited. ``is_causal`` is folded in as ``right = 0``.
    """

    scale: float
    left: int | None
    right: int | None
    softcap: float | None

    @property
    def masked(self) -> bool:
        """True if some query may be forbidden some key."""
        return self.left is not None or self.right is not None


def resolve_options(
    head_dim: int,
    *,
    is_causal: bool,
    scale: float | None,
    window_size: tuple[int | None, int | None] | None,
    softcap: float | None,
    return_lse: bool,
) -> Options:
    """Check the options of an attention call and fill in the defaults.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has a value that is not allowed.
    """
    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    if scale is None:
        scale = head_dim**-0.5
    elif not _is_number(scale):
        raise TypeError(f"scale must be a number or None, got {scale!r}")
    elif not _is_finite(scale):
        raise ValueError(f"scale must be finite, got {_short(scale)}")
    if softcap is not None:
        if not _is_number(softcap):
            raise TypeError(f"softcap must be a positive number or None, got {softcap!r}")
        if not (_is_finite(softcap) and softcap > 0):
            raise ValueError(
                f"softcap must be positive and finite, got {_short(softcap)}; None switches it off"
            )
    left, right = _resolve_window(window_size)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return Options(float(scale), left, right, None if softcap is None else float(softcap))


def check_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check q, k and v in the layout ``(batch, heads, sequence, head_dim)``.

    Raises:
        TypeError: an argument is not a tensor, or its dtype is not one of ``dtypes``.
        ValueError: shapes, dtypes or devices do not fit together.
    """
    if _quickly_right(q, k, v, dtypes):
        return
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, dtypes)
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, sequence, head_dim), "
                f"got shape {tuple(tensor.shape)}"
            )
    check_same("dtype", q=q.dtype, k=k.dtype, v=v.dtype)
    check_same("device", q=q.device, k=k.device, v=v.device)
    check_same("batch size", q=q.shape[0], k=k.shape[0], v=v.shape[0])
    check_same("number of heads", k=k.shape[1], v=v.shape[1])
    check_same("sequence length", k=k.shape[2], v=v.shape[2])
    check_same("head_dim", q=q.shape[3], k=k.shape[3], v=v.shape[3])
    check_heads(q.shape[1], k.shape[1])
    check_head_dim(q.shape[3])


def _quickly_right(q: object, k: object, v: object, dtypes: tuple[torch.dtype, ...]) -> bool:
    """True if nothing is wrong; the slower checks then find out what. Saves 10 µs a call."""
    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        return False
    if not (q.dim() == k.dim() == 4 and k.shape == v.shape and q.dtype in dtypes):
        return False
    if not (q.layout == k.layout == v.layout == torch.strided):
        return False
    batch, heads_q, _, head_dim = q.shape
    batch_k, heads_kv, _, head_dim_k = k.shape
    return (
        batch == batch_k
        and head_dim == head_dim_k
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and heads_kv >= 1
        and heads_q >= 1
        and heads_q % heads_kv == 0
        and 1 <= head_dim <= MAX_HEAD_DIM
    )


def check_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Check ``q (total_q, heads_q, head_dim)``, ``k``, ``v (total_k, heads_kv, head_dim)`` and
    their offsets. The values of offsets on a GPU are not read: that would wait for the GPU.

    Raises:
        TypeError: an argument is not a tensor, or its dtype is not one of ``dtypes``.
        ValueError: shapes, dtypes, devices or offsets do not fit together.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, dtypes)
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} must have 3 dimensions (total, heads, head_dim), "
                f"got shape {tuple(tensor.shape)}"
            )
    check_same("dtype", q=q.dtype, k=k.dtype, v=v.dtype)
    check_same("number of heads", k=k.shape[1], v=v.shape[1])
    check_same("total length", k=k.shape[0], v=v.shape[0])
    check_same("head_dim", q=q.shape[2], k=k.shape[2], v=v.shape[2])
    check_heads(q.shape[1], k.shape[1])
    check_head_dim(q.shape[2])
    check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    check_same(
        "device", q=q.device, k=k.device, v=v.device,
        cu_seqlens_q=cu_seqlens_q.device, cu_seqlens_k=cu_seqlens_k.device,
    )  # fmt: skip
    check_same(
        "length (num_sequences + 1)",
        cu_seqlens_q=cu_seqlens_q.shape[0],
        cu_seqlens_k=cu_seqlens_k.shape[0],
    )
    for name, bound, offsets in (
        ("max_seqlen_q", max_seqlen_q, cu_seqlens_q), ("max_seqlen_k", max_seqlen_k, cu_seqlens_k),
    ):  # fmt: skip
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)):
            raise TypeError(f"{name} must be an integer or None, got {bound!r}")
        if bound is not None and bound < 0:
            raise ValueError(f"{name} must be 0 or more, got {bound}")
        if bound is not None and _can_read(offsets):
            longest = max(offsets.diff().tolist(), default=0)
            if longest > bound:
                raise ValueError(
                    f"{name} is {bound}, but a sequence has length {longest}; it must be an upper "
                    "bound, or None"
                )


def check_offsets(name: str, offsets: torch.Tensor, total: int) -> None:
    """Check cumulative sequence lengths; their values only where reading them costs no wait."""
    check_tensor(name, offsets, (torch.int32,))
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(
            f"{name} must have 1 dimension (num_sequences + 1), got shape {tuple(offsets.shape)}"
        )
    if _can_read(offsets):
        values = offsets.tolist()
        if values[0] != 0 or values != sorted(values) or values[-1] > total:
            raise ValueError(
                f"{name} must start at 0, never fall and end at most at the total of {total}, "
                f"got {values if len(values) <= 10 else [*values[:9], '...', values[-1]]}"
            )


def _can_read(offsets: torch.Tensor) -> bool:
    """True if reading the values neither waits for a GPU nor breaks a trace."""
    return offsets.device.type == "cpu" and not torch.compiler.is_compiling()


def check_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that ``tensor`` is a dense tensor of one of ``dtypes``; raise TypeError otherwise."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} has layout {layout}; allowed is strided: call .to_dense()")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        came = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name} has dtype {came}; allowed are {allowed}")


def check_same(what: str, **values: object) -> None:
    """Check that the named values agree; raise ValueError naming each otherwise."""
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name} has {value}" for name, value in values.items())
        raise ValueError(f"{' and '.join(values)} must agree in {what}: {listed}")


def check_heads(heads_q: int, heads_kv: int) -> None:
    """Check that the query heads split evenly over the KV heads; raise ValueError otherwise."""
    if heads_q < 1 or heads_kv < 1 or heads_q % heads_kv:
        raise ValueError(
            f"q has {heads_q} heads and k has {heads_kv}; heads_q must be a positive multiple "
            "of heads_kv"
        )


def check_head_dim(head_dim: int) -> None:
    """Check that head_dim is between 1 and 256; raise ValueError otherwise."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be between 1 and {MAX_HEAD_DIM}, got {head_dim}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    """False also for an integer that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"


def _resolve_window(window_size: object) -> tuple[int | None, int | None]:
    if window_size is None:
        return None, None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right) or None, got {window_size!r}")
    sides = []
    for name, side in zip(("left", "right"), window_size, strict=True):
        if side is not None and (not isinstance(side, int) or isinstance(side, bool)):
            raise TypeError(f"window_size {name} must be an integer or None, got {side!r}")
        if side is not None and side < -1:
            raise ValueError(
                f"window_size {name} must be 0 or more, or -1 or None for no limit, got {side}"
            )
        sides.append(None if side in (None, -1) or side >= WIDER_THAN_ALL else side)
    return sides[0], sides[1]
