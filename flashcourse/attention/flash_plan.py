"""From tensors to launches: which kernel, its tiles, its grid, its arguments. Needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from flashcourse import runtime
from flashcourse.attention.flash_kernels import has_gluon, kernel_for, runs_gluon
from flashcourse.attention.flash_machine import check_machine
from flashcourse.attention.flash_sizes import (
    INT32_MAX,
    FlashOptions,
    descriptors_fit,
    factors,
    heads_together,
    keys_seen,
    multiprocessors,
    needs_int64,
    tiles_of,
    window,
)
from flashcourse.attention.tuning import Kernel, Tiles, bucket_of, tiles_for


class Launch:
    """One kernel, ready to be launched again and again on other tensors of the same layout.

    Triton looks at every argument of every call to find the compiled kernel that fits. Everything
    it looks at (dtypes, strides, alignment, options) is part of the key under which a Launch is
    kept, so from the second call on the kernel is launched directly.
    """

    def __init__(
        self,
        kernel: Any,
        name: str,
        tiles: Tiles,
        programs: int,
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
    ) -> None:
        self.kernel, self.name, self.tiles = kernel, name, tiles
        self.grid = (programs, 1, 1)
        self.numbers, self.constants = numbers, constants
        self.tma = bool(constants.get("TMA"))
        self.compiled: Any = None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        device = tensors[0].device  # type: ignore[union-attr]
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(tensors)
        else:
            self._run(tensors)

    def _run(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        if self.tma:
            triton.set_allocator(_allocate)
        if self.compiled is not None:
            self.compiled[self.grid](*tensors, *self.numbers, *self.constants.values())
            return
        if runtime.interpreting():  # a GPU's profile has the kernel's name; give this one the same
            with torch.profiler.record_function(f"flashcourse::{self.name}"):
                self._launch(tensors)
        else:
            self.compiled = self._launch(tensors)

    def _launch(self, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        """Compile, or find what was compiled, and launch; returns the compiled kernel."""
        try:
            return self.kernel[self.grid](
                *tensors, *self.numbers, **self.constants, **compiler_options(self.tiles)
            )
        except OutOfResources as error:
            raise RuntimeError(
                f"the {self.name} kernel does not fit this GPU with {self.tiles}: {error}. "
                f"{self.advice()}"
            ) from error

    def advice(self) -> str:
        """What to do about tiles that do not fit."""
        return (
            "Make the tiles smaller: flashcourse.attention.tuning.force_tiles"
            f"({self.name}=Tiles(block_q, block_k, warps, stages)), or fewer stages; and "
            "remake the table for this GPU with `python -m flashcourse bench --tune`."
        )


def plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    options: FlashOptions,
) -> Launch:
    """The launch that writes ``out`` and lse.

    Raises:
        ValueError, RuntimeError: the kernel cannot run on these tensors here.
    """
    check_machine(q)
    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    by_hand = has_gluon() and descriptors_fit(q, k, v, all_heads=True)
    left, right = window(options, seq_q, seq_k, cu_seqlens)
    keys = keys_seen(seq_q, seq_k, left, right, cu_seqlens)
    tiles = tiles_for("forward", head_dim, q.element_size(), q.device, by_hand, keys)
    num_tiles, num_sequences = tiles_of(seq_q, tiles.block_q, cu_seqlens)
    section = heads_together(num_tiles, heads * batch, k, 1, left, right, cu_seqlens)
    scale, cap_in, cap_out = factors(options, q.dtype == torch.float32)
    numbers = (
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        heads, heads // k.shape[1], num_tiles, section, num_sequences, seq_q, seq_k,
        abs(scale), left or 0, right or 0, cap_in if scale >= 0 else -cap_in, cap_out,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_D": bucket_of(head_dim),
        "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k,
        "VARLEN": cu_seqlens is not None, "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None, "SOFTCAP": options.softcap is not None,
        "NEGATE": scale < 0, "WIDE": needs_int64(tiles, q, k, v, out),
        "TMA": tiles.tma and (by_hand if tiles.gluon else descriptors_fit(k, v)),
    }  # fmt: skip
    programs = _checked("forward", num_tiles * heads * batch)
    kernel = kernel_for("forward", tiles, bool(constants["TMA"]))
    if runs_gluon(tiles, bool(constants["TMA"])):
        numbers = (*numbers, programs)
        if cu_seqlens is None:  # equal shares of the work: each program takes several tiles
            pairs = right is not None and left is None
            programs = min(-(-programs // 2) if pairs else programs, multiprocessors(q.device))
    return Launch(kernel, "forward", tiles, programs, numbers, constants)


def plan_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    d_lse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    options: FlashOptions,
) -> tuple[Launch, Launch]:
    """The launch that writes ``dq`` and delta, and the one that reads delta for ``dk``, ``dv``.

    Raises:
        ValueError, RuntimeError: a kernel cannot run on these tensors here.
    """
    check_machine(q)
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    group = heads // heads_kv
    left, right = window(options, seq_q, seq_k, cu_seqlens_q)
    scale, cap_in, cap_out = factors(options, q.dtype == torch.float32)
    last_numbers = (options.scale, scale, left or 0, right or 0, cap_in, cap_out)
    size = {"HEAD_DIM": head_dim, "BLOCK_D": bucket_of(head_dim)}
    mask = {
        "VARLEN": cu_seqlens_q is not None, "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None, "SOFTCAP": options.softcap is not None,
    }  # fmt: skip

    by_hand = has_gluon() and descriptors_fit(k, v)
    tiles = tiles_for("backward_q", head_dim, q.element_size(), q.device, by_hand)
    num_tiles, num_sequences = tiles_of(seq_q, tiles.block_q, cu_seqlens_q)
    section = heads_together(num_tiles, heads * batch, k, 1, left, right, cu_seqlens_q)
    numbers = (
        *q.stride(), *k.stride(), *v.stride(), *out.stride(), *d_out.stride(), *dq.stride(),
        heads, group, num_tiles, section, num_sequences, seq_q, seq_k, *last_numbers,
    )  # fmt: skip
    constants = {
        **size, "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, **mask,
        "HAS_DLSE": d_lse is not None, "WIDE": needs_int64(tiles, q, k, v, out, d_out, dq),
        "TMA": tiles.tma and descriptors_fit(k, v),
    }  # fmt: skip
    programs = _checked("backward_q", num_tiles * heads * batch)
    kernel = kernel_for("backward_q", tiles, bool(constants["TMA"]))
    for_q = Launch(kernel, "backward_q", tiles, programs, numbers, constants)

    by_hand = has_gluon() and descriptors_fit(q, d_out)
    tiles = tiles_for("backward_kv", head_dim, q.element_size(), q.device, by_hand)
    num_tiles, num_sequences = tiles_of(seq_k, tiles.block_k, cu_seqlens_k)
    section = heads_together(num_tiles, heads_kv * batch, q, group, left, right, cu_seqlens_k)
    numbers = (
        *q.stride(), *k.stride(), *v.stride(), *d_out.stride(), *dk.stride(), *dv.stride(),
        heads_kv, group, num_tiles, section, num_sequences, seq_q, seq_k, *last_numbers,
    )  # fmt: skip
    constants = {
        **size, "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, **mask,
        "GROUPED": group > 1, "WIDE": needs_int64(tiles, q, k, v, d_out, dk, dv),
        # Triton's loop over a group has no descriptor for each of its heads, Gluon's has.
        "TMA": tiles.tma and descriptors_fit(q, d_out) and (
            group == 1 or (tiles.gluon and has_gluon() and q.stride(1) > 0 and d_out.stride(1) > 0)
        ),
    }  # fmt: skip
    programs = _checked("backward_kv", num_tiles * heads_kv * batch)
    kernel = kernel_for("backward_kv", tiles, bool(constants["TMA"]))
    for_kv = Launch(kernel, "backward_kv", tiles, programs, numbers, constants)
    return for_q, for_kv


def _checked(name: Kernel, programs: int) -> int:
    if programs > INT32_MAX:
        raise ValueError(f"the {name} kernel would need {programs} programs; a grid has 2^31")
    return programs


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the descriptors that a kernel builds, 128 bytes each."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


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
