"""From tensors to kernel launches: strides, grid, options, tiles. Needs Triton.

Every tensor here is ``(batch, heads, seq, head_dim)``; a varlen batch is a batch of one whose
sequences lie behind each other, told apart by ``cu_seqlens``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from flashcourse import runtime
from flashcourse.attention.flash_backward import (
    flash_backward_kv_kernel,
    flash_backward_q_kernel,
)
from flashcourse.attention.flash_forward import flash_forward_kernel
from flashcourse.attention.tuning import Tiles, bucket_of, tiles_for

LOG2E = math.log2(math.e)
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class FlashOptions:
    """The options as the kernels take them; windows count keys, None is unlimited."""

    scale: float
    left: int | None
    right: int | None
    softcap: float | None


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    options: FlashOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, and lse ``(batch, heads_q, seq_q)`` float32."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if _widened(q):
        wide, lse = launch_forward(
            q.float(), k.float(), v.float(), cu_seqlens_q, cu_seqlens_k, options
        )
        return out.copy_(wide), lse
    cu_seqlens_q, cu_seqlens_k = _dense(cu_seqlens_q), _dense(cu_seqlens_k)

    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    tiles = tiles_for("forward", head_dim, q.element_size(), q.device)
    num_tiles, num_sequences = _tiles_of(seq_q, tiles.block_q, cu_seqlens_q)
    left, right = _window(options, seq_q, seq_k, cu_seqlens_q)
    wide_index = _needs_int64(max(tiles.block_q, tiles.block_k), q, k, v, out)
    tma = _use_descriptors(tiles, k, v)
    scale, cap_in, cap_out = _factors(options)
    _launch(
        flash_forward_kernel, "forward", tiles, q, num_tiles * heads * batch,
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        heads, heads // k.shape[1], num_tiles, num_sequences, seq_q, seq_k,
        abs(scale), left or 0, right or 0, cap_in if scale >= 0 else -cap_in, cap_out,
        HEAD_DIM=head_dim, BLOCK_D=bucket_of(head_dim),
        BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k,
        VARLEN=cu_seqlens_q is not None, HAS_LEFT=left is not None, HAS_RIGHT=right is not None,
        SOFTCAP=options.softcap is not None, NEGATE=scale < 0, WIDE=wide_index, TMA=tma,
    )  # fmt: skip
    return out, lse


def launch_backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    options: FlashOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, each with the shape, dtype and layout of its input."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if _widened(q):
        widened = launch_backward(
            d_out.float(), d_lse, q.float(), k.float(), v.float(), out.float(), lse,
            cu_seqlens_q, cu_seqlens_k, options,
        )  # fmt: skip
        return dq.copy_(widened[0]), dk.copy_(widened[1]), dv.copy_(widened[2])

    cu_seqlens_q, cu_seqlens_k = _dense(cu_seqlens_q), _dense(cu_seqlens_k)
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    group = heads // heads_kv
    left, right = _window(options, seq_q, seq_k, cu_seqlens_q)
    scale, cap_in, cap_out = _factors(options)
    delta = torch.empty_like(lse)
    d_lse = _dense(d_lse)
    shared = {
        "HEAD_DIM": head_dim, "BLOCK_D": bucket_of(head_dim), "VARLEN": cu_seqlens_q is not None,
        "HAS_LEFT": left is not None, "HAS_RIGHT": right is not None,
        "SOFTCAP": options.softcap is not None,
    }  # fmt: skip
    factors = (options.scale, scale, left or 0, right or 0, cap_in, cap_out)

    tiles = tiles_for("backward_q", head_dim, q.element_size(), q.device)
    num_tiles, num_sequences = _tiles_of(seq_q, tiles.block_q, cu_seqlens_q)
    if dq.numel():  # the kernel also writes delta, which the next one reads
        _launch(
            flash_backward_q_kernel, "backward_q", tiles, q, num_tiles * heads * batch,
            q, k, v, out, d_out, dq, lse, d_lse, delta, cu_seqlens_q, cu_seqlens_k,
            *q.stride(), *k.stride(), *v.stride(), *out.stride(), *d_out.stride(), *dq.stride(),
            heads, group, num_tiles, num_sequences, seq_q, seq_k, *factors,
            BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, HAS_DLSE=d_lse is not None,
            WIDE=_needs_int64(max(tiles.block_q, tiles.block_k), q, k, v, out, d_out, dq),
            TMA=_use_descriptors(tiles, k, v),
            **shared,
        )  # fmt: skip

    tiles = tiles_for("backward_kv", head_dim, q.element_size(), q.device)
    num_tiles, num_sequences = _tiles_of(seq_k, tiles.block_k, cu_seqlens_k)
    if dk.numel():
        _launch(
            flash_backward_kv_kernel, "backward_kv", tiles, q, num_tiles * heads_kv * batch,
            q, k, v, d_out, dk, dv, lse, delta, cu_seqlens_q, cu_seqlens_k,
            *q.stride(), *k.stride(), *v.stride(), *d_out.stride(), *dk.stride(), *dv.stride(),
            heads_kv, group, num_tiles, num_sequences, seq_q, seq_k, *factors,
            BLOCK_Q=tiles.block_q, BLOCK_K=tiles.block_k, GROUPED=group > 1,
            WIDE=_needs_int64(max(tiles.block_q, tiles.block_k), q, k, v, d_out, dk, dv),
            TMA=group == 1 and _use_descriptors(tiles, q, d_out),
            **shared,
        )  # fmt: skip
    return dq, dk, dv


def _widened(q: torch.Tensor) -> bool:
    """True if the interpreter must compute this in float32.

    Triton's interpreter multiplies bfloat16 numbers as if their bits were integers, and rounds to
    bfloat16 without carrying. There bfloat16 inputs are computed in float32 and only the results
    are rounded: more exact than a GPU, which rounds P and dS to bfloat16 as well.
    """
    return q.dtype == torch.bfloat16 and runtime.interpreting()


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _tiles_of(seq: int, block: int, cu_seqlens: torch.Tensor | None) -> tuple[int, int]:
    """Programs per head, and the number of sequences (see ``locate_tile``)."""
    if cu_seqlens is None:
        return -(-seq // block), 0
    num_sequences = cu_seqlens.numel() - 1
    return seq // block + num_sequences + 1, num_sequences


def _window(
    options: FlashOptions, seq_q: int, seq_k: int, cu_seqlens: torch.Tensor | None
) -> tuple[int | None, int | None]:
    """The window, without sides that hide nothing, and small enough for int32."""
    left, right = options.left, options.right
    if cu_seqlens is None:  # the last query stands at the last key, the first at seq_k - seq_q
        left = None if left is not None and left >= seq_k - 1 else left
        right = None if right is not None and right >= seq_q - 1 else right
    limit = seq_q + seq_k
    return (
        None if left is None else min(left, limit),
        None if right is None else min(right, limit),
    )


def _factors(options: FlashOptions) -> tuple[float, float, float]:
    """(scale in units of log 2, factor into the tanh, factor out of it in units of log 2)."""
    if options.softcap is None:
        return options.scale * LOG2E, 0.0, 0.0
    return options.scale * LOG2E, options.scale / options.softcap, options.softcap * LOG2E


def _needs_int64(block: int, *tensors: torch.Tensor) -> bool:
    """True if an offset inside one tile may not fit int32."""
    for tensor in tensors:
        stride_n, stride_d = tensor.stride()[2:]
        if block * stride_n + tensor.shape[3] * stride_d > INT32_MAX:
            return True
    return False


def _use_descriptors(tiles: Tiles, *tensors: torch.Tensor) -> bool:
    """True if the tiles ask for the copy engine and it can read these tensors."""
    if not (tiles.tma and all(map(_descriptor_fits, tensors))):
        return False
    triton.set_allocator(_allocate)
    return True


def _descriptor_fits(tensor: torch.Tensor) -> bool:
    """True if the copy engine can read it: dense rows, base and strides multiples of 16 bytes."""
    *outer, last = tensor.stride()
    size = tensor.element_size()
    return (
        last == 1
        and tensor.shape[3] * size >= 16
        and tensor.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 for stride in outer)
        and outer[2] > 0
    )


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the descriptors that a kernel builds, 128 bytes each."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _launch(
    kernel: Any,
    name: str,
    tiles: Tiles,
    like: torch.Tensor,
    programs: int,
    *args: Any,
    **constants: Any,
) -> None:
    if programs > INT32_MAX:
        raise ValueError(f"the {name} kernel would need {programs} programs; the grid ends at 2^31")
    _check_machine(like)
    run: Callable[..., Any] = kernel[(programs,)]
    compiled_with = compiler_options(tiles)
    try:
        if like.device.type == "cuda" and like.device.index != torch.cuda.current_device():
            with torch.cuda.device(like.device):
                run(*args, **constants, **compiled_with)
        else:
            run(*args, **constants, **compiled_with)
    except OutOfResources as error:
        raise RuntimeError(
            f"the {name} kernel does not fit this GPU with {tiles}: {error}. "
            "Make the tiles smaller: flashcourse.attention.tuning.force_tiles"
            f"({name}=Tiles(block_q, block_k, warps, stages)), or fewer stages; and remake the "
            "table for this GPU with `python -m flashcourse bench --tune`."
        ) from error


def compiler_options(tiles: Tiles) -> dict[str, Any]:
    """The tiles' part of what Triton is told when it compiles."""
    compiled_with: dict[str, Any] = {
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": True,  # Triton 3.10 changes the default; the softmax counts on it
    }
    if tiles.registers is not None:
        compiled_with["maxnreg"] = tiles.registers
    return compiled_with


def _check_machine(like: torch.Tensor) -> None:
    if runtime.interpreting():
        _check_interpreter()
        return
    if like.device.type != "cuda":
        raise ValueError(
            f"flash_attention got tensors on {like.device}, and Triton's kernels are compiled for "
            "the GPU of this machine. Move the tensors there with .to('cuda'), or start Python "
            "with TRITON_INTERPRET=1 to run the kernels on the CPU."
        )
    if like.dtype == torch.bfloat16:
        _check_bfloat16(like.device)


@functools.cache
def _check_bfloat16(device: torch.device) -> None:
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(
            "q has dtype bfloat16, which this GPU has no arithmetic for (compute capability 8.0 "
            "or newer has); use float16 or float32"
        )


@triton.jit
def _double(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, 2.0 * tl.load(x + offsets))


@functools.cache
def _check_interpreter() -> None:
    """Some pairs of Triton and NumPy make an interpreter that writes nothing, in silence."""
    x = torch.arange(16, dtype=torch.float32)
    y = torch.full_like(x, -1.0)
    _double[(1,)](x, y, BLOCK=16)
    if not torch.equal(y, 2.0 * x):
        raise RuntimeError(
            f"Triton {triton.__version__}'s interpreter computes wrong results on this machine "
            "(a known fault with some NumPy releases); update triton or numpy"
        )
