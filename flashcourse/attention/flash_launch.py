"""From tensors to kernel launches: strides, grid, options, tiles. Needs Triton.

Every tensor here is ``(batch, heads, seq, head_dim)``; a varlen batch is a batch of one whose
sequences lie behind each other, told apart by ``cu_seqlens``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from flashcourse import runtime
from flashcourse.attention.flash_kernels import has_gluon, kernel_for
from flashcourse.attention.flash_machine import check_machine
from flashcourse.attention.tuning import Tiles, bucket_of, forced_tiles, tiles_for

LOG2E = math.log2(math.e)
INT32_MAX = 2**31 - 1
FEW_QUERIES = 8
MOST_TOGETHER = 64  # heads whose tiles are dealt out together
MOST_COPIED = 2**27  # entries of k and v each: 1 GiB as float32, together


class FlashOptions(NamedTuple):
    """The options as the kernels take them; windows count keys, None is unlimited."""

    scale: float
    left: int | None
    right: int | None
    softcap: float | None


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
        if programs > INT32_MAX:
            raise ValueError(f"the {name} kernel would need {programs} programs; a grid has 2^31")
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
        try:
            compiled = self.kernel[self.grid](
                *tensors, *self.numbers, **self.constants, **compiler_options(self.tiles)
            )
        except OutOfResources as error:
            raise RuntimeError(
                f"the {self.name} kernel does not fit this GPU with {self.tiles}: {error}. "
                f"{self.advice()}"
            ) from error
        if not runtime.interpreting():
            self.compiled = compiled

    def advice(self) -> str:
        """What to do about tiles that do not fit."""
        return (
            "Make the tiles smaller: flashcourse.attention.tuning.force_tiles"
            f"({self.name}=Tiles(block_q, block_k, warps, stages)), or fewer stages; and "
            "remake the table for this GPU with `python -m flashcourse bench --tune`."
        )


# Launches by everything that decides them; forgotten all at once when there are this many.
_launches: dict[Any, Any] = {}
MOST_LAUNCHES = 2048


def _remember(key: Any, value: Any) -> Any:
    if len(_launches) >= MOST_LAUNCHES:
        _launches.clear()
    _launches[key] = value
    return value


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
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    key = (
        "forward", options, _layout(q), _layout(k), _layout(v),
        _sequences(cu_seqlens_q), _sequences(cu_seqlens_k), forced_tiles(),
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _remember(key, _plan_forward(q, k, v, out, cu_seqlens_q, options))
    launch(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
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
    out = _unrounded(q, k, v, out, cu_seqlens_q, options)
    if _widened(q):
        widened = launch_backward(
            d_out.float(), d_lse, q.float(), k.float(), v.float(), out.float(), lse,
            cu_seqlens_q, cu_seqlens_k, options,
        )  # fmt: skip
        return dq.copy_(widened[0]), dk.copy_(widened[1]), dv.copy_(widened[2])
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    if d_lse is not None:
        d_lse = d_lse.contiguous()
    delta = torch.empty_like(lse)
    key = (
        "backward", options, _layout(q), _layout(k), _layout(v), _layout(out), _layout(d_out),
        d_lse is None, _sequences(cu_seqlens_q), _sequences(cu_seqlens_k), forced_tiles(),
    )  # fmt: skip
    launches = _launches.get(key)
    if launches is None:
        tensors = (q, k, v, out, d_out, dq, dk, dv)
        launches = _remember(
            key, _plan_backward(*tensors, d_lse, cu_seqlens_q, cu_seqlens_k, options)
        )
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    if dq.numel():  # the kernel for dQ also writes delta, which the next one reads
        launches[0](q, k, v, out, d_out, dq, lse, d_lse, delta, *cu_seqlens)
    if dk.numel():
        launches[1](q, k, v, d_out, dk, dv, lse, delta, *cu_seqlens)
    return dq, dk, dv


def _unrounded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    options: FlashOptions,
) -> torch.Tensor:
    """``out``, or where there are few queries, what it was before it was rounded to 16 bits.

    Where one key has nearly all the weight, dS = P (dP - delta) is a small difference, and delta
    comes from the rounded out. Among many rows others have larger errors; a single one is alone
    with it, and computing its out again in float32 is cheap, unless k and v are very large.
    """
    if q.dtype == torch.float32 or q.shape[2] > FEW_QUERIES or cu_seqlens is not None:
        return out
    if k.numel() > MOST_COPIED:
        return out
    return launch_forward(q.float(), k.float(), v.float(), None, None, options)[0]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the choice and the compilation of a kernel depend on."""
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0,
    )  # fmt: skip


def _sequences(cu_seqlens: torch.Tensor | None) -> tuple[int, bool] | None:
    if cu_seqlens is None:
        return None
    return cu_seqlens.shape[0], cu_seqlens.data_ptr() % 16 == 0


def _plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    options: FlashOptions,
) -> Launch:
    check_machine(q)
    batch, heads, seq_q, head_dim = q.shape
    seq_k = k.shape[2]
    by_hand = has_gluon() and _descriptors_fit(k, v)
    left, right = _window(options, seq_q, seq_k, cu_seqlens)
    keys = _keys_seen(seq_q, seq_k, left, right, cu_seqlens)
    tiles = tiles_for("forward", head_dim, q.element_size(), q.device, by_hand, keys)
    num_tiles, num_sequences = _tiles_of(seq_q, tiles.block_q, cu_seqlens)
    section = _heads_together(k, 1, left, right, cu_seqlens)
    scale, cap_in, cap_out = _factors(options)
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
        "NEGATE": scale < 0, "WIDE": _needs_int64(tiles, q, k, v, out),
        "TMA": tiles.tma and _descriptors_fit(k, v),
    }  # fmt: skip
    programs = num_tiles * heads * batch
    kernel = kernel_for("forward", tiles, bool(constants["TMA"]))
    if kernel is not kernel_for("forward", tiles, False):  # the one scheduled by hand
        numbers = (*numbers, programs)
        if cu_seqlens is None:  # equal shares of the work: each program takes several tiles
            pairs = right is not None and left is None
            programs = min(-(-programs // 2) if pairs else programs, _multiprocessors(q.device))
    return Launch(kernel, "forward", tiles, programs, numbers, constants)


def _plan_backward(
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
    check_machine(q)
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    group = heads // heads_kv
    left, right = _window(options, seq_q, seq_k, cu_seqlens_q)
    scale, cap_in, cap_out = _factors(options)
    factors = (options.scale, scale, left or 0, right or 0, cap_in, cap_out)
    size = {"HEAD_DIM": head_dim, "BLOCK_D": bucket_of(head_dim)}
    mask = {
        "VARLEN": cu_seqlens_q is not None, "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None, "SOFTCAP": options.softcap is not None,
    }  # fmt: skip

    by_hand = has_gluon() and _descriptors_fit(k, v)
    tiles = tiles_for("backward_q", head_dim, q.element_size(), q.device, by_hand)
    num_tiles, num_sequences = _tiles_of(seq_q, tiles.block_q, cu_seqlens_q)
    section = _heads_together(k, 1, left, right, cu_seqlens_q)
    numbers = (
        *q.stride(), *k.stride(), *v.stride(), *out.stride(), *d_out.stride(), *dq.stride(),
        heads, group, num_tiles, section, num_sequences, seq_q, seq_k, *factors,
    )  # fmt: skip
    constants = {
        **size, "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, **mask,
        "HAS_DLSE": d_lse is not None, "WIDE": _needs_int64(tiles, q, k, v, out, d_out, dq),
        "TMA": tiles.tma and _descriptors_fit(k, v),
    }  # fmt: skip
    programs = num_tiles * heads * batch
    kernel = kernel_for("backward_q", tiles, bool(constants["TMA"]))
    for_q = Launch(kernel, "backward_q", tiles, programs, numbers, constants)

    by_hand = has_gluon() and _descriptors_fit(q, d_out)
    tiles = tiles_for("backward_kv", head_dim, q.element_size(), q.device, by_hand)
    num_tiles, num_sequences = _tiles_of(seq_k, tiles.block_k, cu_seqlens_k)
    section = _heads_together(q, group, left, right, cu_seqlens_k)
    numbers = (
        *q.stride(), *k.stride(), *v.stride(), *d_out.stride(), *dk.stride(), *dv.stride(),
        heads_kv, group, num_tiles, section, num_sequences, seq_q, seq_k, *factors,
    )  # fmt: skip
    constants = {
        **size, "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, **mask,
        "GROUPED": group > 1, "WIDE": _needs_int64(tiles, q, k, v, d_out, dk, dv),
        # Triton's loop over a group has no descriptor for each of its heads, Gluon's has.
        "TMA": tiles.tma and _descriptors_fit(q, d_out) and (
            group == 1 or (tiles.gluon and has_gluon())
        ),
    }  # fmt: skip
    programs = num_tiles * heads_kv * batch
    kernel = kernel_for("backward_kv", tiles, bool(constants["TMA"]))
    for_kv = Launch(kernel, "backward_kv", tiles, programs, numbers, constants)
    return for_q, for_kv


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _widened(q: torch.Tensor) -> bool:
    """True if the interpreter must compute this in float32.

    Triton's interpreter multiplies bfloat16 numbers as if their bits were integers, and rounds to
    bfloat16 without carrying. There bfloat16 inputs are computed in float32 and only the results
    are rounded: more exact than a GPU, which rounds P and dS to bfloat16 as well.
    """
    return q.dtype == torch.bfloat16 and runtime.interpreting()


def _tiles_of(seq: int, block: int, cu_seqlens: torch.Tensor | None) -> tuple[int, int]:
    """Programs per head, and the number of sequences (see ``locate_tile``)."""
    if cu_seqlens is None:
        return -(-seq // block), 0
    num_sequences = cu_seqlens.numel() - 1
    return seq // block + num_sequences + 1, num_sequences


def _keys_seen(
    seq_q: int, seq_k: int, left: int | None, right: int | None, cu_seqlens: torch.Tensor | None
) -> float:
    """How many keys a query sees, on average (from eight of them)."""
    if cu_seqlens is not None:  # of sequences that are alike: the offsets stay on the GPU
        num_sequences = max(1, cu_seqlens.numel() - 1)
        seq_q, seq_k = -(-seq_q // num_sequences), -(-seq_k // num_sequences)
    seen = 0
    for i in range(8):
        diagonal = (2 * i + 1) * seq_q // 16 + seq_k - seq_q
        first = 0 if left is None else max(0, diagonal - left)
        last = seq_k - 1 if right is None else min(seq_k - 1, diagonal + right)
        seen += max(0, last - first + 1)
    return seen / 8


def _heads_together(
    others: torch.Tensor, group: int, left: int | None, right: int | None,
    cu_seqlens: torch.Tensor | None,
) -> int:  # fmt: skip
    """``section`` of ``locate_tile``: 1 where all tiles are alike, or a window makes them so.

    Args:
        others: one of the two tensors that a program walks over, with ``group`` heads a program.
    """
    if right is None or left is not None or cu_seqlens is not None:
        return 1
    of_one_head = 2 * group * others.shape[2] * others.shape[3] * others.element_size()
    return max(1, min(MOST_TOGETHER, _l2_bytes(others.device) // 2 // max(1, of_one_head)))


@functools.cache
def _l2_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 2**20  # for the interpreter any number is right
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


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


def _needs_int64(tiles: Tiles, *tensors: torch.Tensor) -> bool:
    """True if an offset inside one tile may not fit int32."""
    block = max(tiles.block_q, tiles.block_k)
    for tensor in tensors:
        stride_n, stride_d = tensor.stride()[2:]
        if block * stride_n + tensor.shape[3] * stride_d > INT32_MAX:
            return True
    return False


def _descriptors_fit(*tensors: torch.Tensor) -> bool:
    """True if the copy engine can read these tensors."""
    return all(map(_descriptor_fits, tensors))


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
