"""Who competes, and why somebody does not."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from flashcourse import attention
from flashcourse.bench.grids import Shape
from flashcourse.measure.why_not import BACKENDS, why_not

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
OURS = "flashcourse"
PAGE_SIZES = (16, 64)
SLOW, SLOW_LIMIT = ("MATH", "EFFICIENT"), 4096


class LeftOut(Exception):
    """This candidate does not take part in this shape; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """Something that computes attention.

    Attributes:
        name: as the table shows it.
        prepare: called with a shape and its q, k, v; returns the call to check and to time, or
            raises :class:`LeftOut`.
    """

    name: str
    prepare: Callable[[Shape, torch.Tensor, torch.Tensor, torch.Tensor], Run]


def all_candidates(tutorial: Path | None = None) -> list[Candidate]:
    """Every candidate the course knows, present or not.

    Args:
        tutorial: the file of Triton's fused-attention tutorial (``06-fused-attention.py``).
    """
    return [
        Candidate(OURS, _ours),
        *(Candidate(f"{OURS}, pages of {n}", functools.partial(_paged, n)) for n in PAGE_SIZES),
        *(Candidate(f"SDPA {name}", functools.partial(_sdpa, name)) for name in BACKENDS),
        Candidate("FlexAttention", _flex),
        Candidate("PyTorch varlen_attn", _varlen_attn),
        Candidate("flash-attn", _flash_attn),
        Candidate("flash-attn-4", _flash_attn_4),
        Candidate("Triton tutorial", functools.partial(_tutorial, tutorial)),
    ]


def _options(shape: Shape) -> dict[str, Any]:
    window = None if shape.window is None else (shape.window, 0)
    return {"is_causal": shape.is_causal, "window_size": window}


def offsets(shape: Shape, device: torch.device) -> torch.Tensor:
    """cu_seqlens of a packed shape, int32."""
    lengths = torch.tensor((0, *(shape.lengths or ())), dtype=torch.int32)
    return lengths.cumsum(0, dtype=torch.int32).to(device)


def _packed(t: torch.Tensor) -> torch.Tensor:
    return t[0].transpose(0, 1)  # (total, heads, head_dim)


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).unsqueeze(0)  # (1, heads, total, head_dim)


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _ours(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    options = _options(shape)
    if shape.lengths is not None:
        varlen = _of_the_course("flash_attention_varlen")
        cu = offsets(shape, q.device)
        return lambda q, k, v: _dense(varlen(_packed(q), _packed(k), _packed(v), cu, cu, **options))
    if shape.seq_q == 1:
        decode = _of_the_course("flash_decode")
        filled = torch.full((shape.batch,), shape.seq_k, dtype=torch.int32, device=q.device)
        return lambda q, k, v: decode(q, k, v, filled)
    return lambda q, k, v: attention.flash_attention(q, k, v, **options)  # type: ignore[return-value]


def _paged(page_size: int, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """The same cache cut into pages that lie in memory in a random order."""
    if shape.seq_q != 1 or shape.lengths is not None:
        raise LeftOut("pages are for decoding: one query a sequence")
    if shape.seq_k % page_size:
        raise LeftOut(f"not measured where {page_size} does not divide the length")
    pages = shape.seq_k // page_size
    drawn = torch.randperm(shape.batch * pages, device=q.device)
    table = drawn.view(shape.batch, pages).to(torch.int32)
    filled = torch.full((shape.batch,), shape.seq_k, dtype=torch.int32, device=q.device)

    def cut(cache: torch.Tensor) -> torch.Tensor:
        size = (shape.batch * pages, page_size, shape.heads_kv, shape.head_dim)
        store = torch.empty(size, dtype=cache.dtype, device=cache.device)
        for entry, own in zip(cache, table.long(), strict=True):  # (heads_kv, seq_k, head_dim)
            store[own] = entry.transpose(0, 1).reshape(pages, *size[1:])
        return store

    k_pages, v_pages = cut(k), cut(v)
    paged = _of_the_course("paged_attention")
    return lambda q, k, v: paged(q, k_pages, v_pages, table, filled)


def _of_the_course(name: str) -> Callable[..., Any]:
    function = getattr(attention, name, None)
    if function is None:
        raise LeftOut(f"the course has no {name} yet")
    return function


def _sdpa(name: str, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if shape.lengths is not None:
        raise LeftOut("SDPA takes no packed batch: it needs a mask over all tokens, or padding")
    if shape.window is not None:
        raise LeftOut("SDPA has no window: it needs a mask over all pairs, and then saves nothing")
    if shape.is_causal and shape.seq_q != shape.seq_k:
        raise LeftOut("SDPA's is_causal is aligned to the top left: another function")
    if name in SLOW and shape.seq_q > SLOW_LIMIT:
        raise LeftOut(f"not measured beyond {SLOW_LIMIT} queries: it would take most of the run")
    gqa = shape.heads != shape.heads_kv
    verdict = why_not(q, k, v, is_causal=shape.is_causal, enable_gqa=gqa)[name]
    if not verdict.allowed:
        raise LeftOut(f"refused: {verdict.reason}")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=shape.is_causal, enable_gqa=gqa
            )

    return run


@functools.cache
def _compiled_flex() -> tuple[Any, Any]:
    import torch._functorch.config
    from torch.nn.attention import flex_attention as flex

    # A backward that is run several times on one graph may not reuse the forward's buffers.
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex.flex_attention, dynamic=False), flex.create_block_mask


def _flex(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if shape.lengths is not None:
        raise LeftOut("not measured on packed batches")
    if not shape.flex:
        raise LeftOut("not measured at this length and dtype: each shape costs a compilation")
    torch._dynamo.reset()  # shapes of before are not seen again, and their number is limited
    flex, create_block_mask = _compiled_flex()
    block_mask = None
    if shape.is_causal:
        offset, window = shape.seq_k - shape.seq_q, shape.window

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = j <= i + offset
            return seen if window is None else seen & (j >= i + offset - window)

        block_mask = create_block_mask(
            visible, None, None, shape.seq_q, shape.seq_k, device=q.device.type
        )
    gqa = shape.heads != shape.heads_kv
    return lambda q, k, v: flex(q, k, v, block_mask=block_mask, enable_gqa=gqa)


def _varlen_attn(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if shape.lengths is None:
        raise LeftOut("it is for packed batches")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise LeftOut("this PyTorch has no varlen_attn (2.10 brought it)") from None
    import inspect

    takes = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {
        "is_causal": True
    }  # fmt: skip
    cu, longest = offsets(shape, q.device), max(shape.lengths)
    options = causal if shape.is_causal else {}
    return lambda q, k, v: _dense(
        _first(varlen_attn(_packed(q), _packed(k), _packed(v), cu, cu, longest, longest, **options))
    )


def _flash_attn(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    module = _installed("flash_attn", "flash_attn_func", "flash-attn")
    return _of_flash_attn(module, shape)


def _flash_attn_4(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    module = _installed("flash_attn.cute", "flash_attn_func", "flash-attn-4")
    return _of_flash_attn(module, shape)


def _installed(module: str, function: str, package: str) -> Any:
    try:
        found = importlib.import_module(module)
    except ImportError:
        raise LeftOut(f"{package} is not installed here") from None
    except Exception as error:  # built for another torch: any error of the loader
        raise LeftOut(f"{package} does not load here: {str(error).splitlines()[0]}") from error
    if not hasattr(found, function):
        raise LeftOut(f"{package} is not installed here ({module} has no {function})")
    return found


def _of_flash_attn(module: Any, shape: Shape) -> Run:
    if shape.lengths is not None:
        raise LeftOut("not measured on packed batches")
    options: dict[str, Any] = {"causal": shape.is_causal}
    if shape.window is not None:
        options["window_size"] = (shape.window, 0)
    return lambda q, k, v: _first(
        module.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    ).transpose(1, 2)


@functools.cache
def _load_tutorial(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("triton_fused_attention_tutorial", path)
    if spec is None or spec.loader is None:
        raise LeftOut(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks the source of a kernel up there
    spec.loader.exec_module(module)
    return module


def _tutorial(
    path: Path | None, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Run:
    if path is None:
        raise LeftOut("not given: --tutorial 06-fused-attention.py of Triton's repository")
    if shape.lengths is not None or shape.window is not None or shape.seq_q != shape.seq_k:
        raise LeftOut("the tutorial has square shapes without a window only")
    if shape.heads != shape.heads_kv:
        raise LeftOut("the tutorial has no grouped heads")
    if shape.dtype != "float16":
        raise LeftOut("the tutorial computes in float16 only")
    try:
        module = _load_tutorial(path)
    except ImportError as error:
        raise LeftOut(f"the tutorial does not load here: {error}") from error
    scale = shape.head_dim**-0.5
    return lambda q, k, v: module.attention(q, k, v, shape.is_causal, scale, False)
