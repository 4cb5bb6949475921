"""The course's kernels inside Transformers, as ``attn_implementation="flashcourse"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashcourse.attention import flash_attention, flash_attention_varlen
from flashcourse.model.documents import Remembered, find_documents, split_mask

NAME = "flashcourse"
OLDEST_TRANSFORMERS = (5, 17)
_INSTEAD = 'Use attn_implementation="sdpa" or "eager" for this model.'
_documents = Remembered()


class NotSupported(ValueError):
    """Something the course's kernels cannot do; the message names what can."""

    def __init__(self, what: str, instead: str = _INSTEAD) -> None:
        super().__init__(f"the flashcourse attention does not support {what}. {instead}")


def register_with_transformers() -> None:
    """Make ``attn_implementation="flashcourse"`` known to Transformers (5.17 or newer).

    Models then run on :func:`~flashcourse.attention.flash_attention` and, where a batch holds
    padding or several documents a row, on the varlen kernel. Documents are recognised by their
    ``position_ids`` whatever the mask and the cache are, or given by ``cu_seq_lens_q`` and
    ``cu_seq_lens_k``. Calling it twice does nothing more.

    Under ``torch.compile`` nothing may depend on values. With ``position_ids`` alone every token
    could then be a document, which costs programs that find nothing to do: give ``cu_seq_lens_*``
    there (``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``).

    Two models made from one config object share its ``attn_implementation``: copy the config.

    Raises:
        ImportError: Transformers is missing or older than 5.17.
    """
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST_TRANSFORMERS:
        raise ImportError(
            f"flashcourse needs Transformers {'.'.join(map(str, OLDEST_TRANSFORMERS))} or newer, "
            f"found {transformers.__version__}: pip install -U transformers"
        )
    transformers.AttentionInterface.register(NAME, flashcourse_attention)
    transformers.AttentionMaskInterface.register(NAME, flashcourse_mask)
    _keep_transformers_from_downloading()


def _keep_transformers_from_downloading() -> None:
    """Transformers takes every name with "flash" in it for a package or kernel it must load."""
    from transformers import modeling_flash_attention_utils as utils

    load = getattr(utils, "_lazy_imports", None)
    if load is None or getattr(load, "knows_flashcourse", False):
        return

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return _not_through_here, _not_through_here, None, utils._pad_input, utils._unpad_input
        return load(implementation, *args, **kwargs)

    lazy_imports.knows_flashcourse = True  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports


def _not_through_here(*args: Any, **kwargs: Any) -> Any:
    raise NotSupported("this model's own way of calling FlashAttention")


def flashcourse_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers calls it.

    Args:
        module: the attention layer; its ``is_causal`` counts if the argument is None.
        query: ``(batch, heads_q, seq_q, head_dim)``.
        key, value: ``(batch, heads_kv, seq_k, head_dim)``, with the cache and its empty slots.
        attention_mask: what :func:`flashcourse_mask` returned.
        (the others): as Transformers names them. A ``sliding_window`` counts the query itself.

    Returns:
        ``(batch, seq_q, heads_q, head_dim)``, contiguous, and None for the weights. Queries that
        are padding get 0.

    Raises:
        NotSupported: dropout, attention weights, masks of another kind, sinks, position biases.
    """
    _refuse_what_is_not_supported(dropout, kwargs)
    query, key, value = _as_autocast(query, key, value)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and not causal:
        raise NotSupported("a sliding window without a causal mask")
    options: dict[str, Any] = {
        "is_causal": bool(causal),
        "scale": scaling,
        "window_size": None if sliding_window is None else (sliding_window - 1, 0),
        "softcap": softcap,
    }
    batch, seq_q, seq_k = query.shape[0], query.shape[2], key.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # (batch, seq, heads, head_dim)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if attention_mask is not None:
            raise NotSupported(
                "cu_seq_lens together with padding or with the empty slots of a static cache",
                "Leave attention_mask and the cache out: cu_seq_lens say where documents are.",
            )
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k belong together; one is None")
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        cu_q, cu_k = (o.to(query.device, torch.int32) for o in (cu_seq_lens_q, cu_seq_lens_k))
        max_q, max_k = _as_int(max_length_q), _as_int(max_length_k)
        out: Any = flash_attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, **options)
        return out.view(batch, seq_q, *out.shape[1:]).contiguous(), None

    _check_mask(attention_mask, batch, seq_q, seq_k)
    if position_ids is not None and not causal:
        position_ids = None  # positions order a text; without causality they are not asked
    _check_positions(position_ids, batch, seq_q)
    sizes = (batch, seq_q, seq_k)
    if _values_may_be_read(query):
        documents = _documents.find(sizes, attention_mask, position_ids)
    else:
        documents = find_documents(
            *sizes, split_mask(attention_mask, sizes), position_ids, may_read=False
        )
    if documents is None:
        out = flash_attention(query, key, value, **options)
        return out.transpose(1, 2).contiguous(), None

    q, k, v = (t.flatten(0, 1) for t in (q, k, v))  # (batch · seq, heads, head_dim)
    flat = q
    if documents.order_q is not None and documents.order_k is not None:
        q = q.index_select(0, documents.order_q)
        k, v = (t.index_select(0, documents.order_k) for t in (k, v))
    cu_q, cu_k = documents.cu_seqlens_q, documents.cu_seqlens_k
    out = flash_attention_varlen(q, k, v, cu_q, cu_k, seq_q, seq_k, **options)
    if documents.order_q is not None:  # back to their places; what is padding gets 0
        out = torch.zeros_like(flat).index_copy(0, documents.order_q, out)
    return out.view(batch, seq_q, *out.shape[1:]).contiguous(), None


def flashcourse_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Which keys and queries exist, for :func:`flashcourse_attention`: never a square mask.

    Args:
        q_length, kv_length: tokens and key slots of this call.
        q_offset: slots filled before this call (a tensor for a static cache).
        kv_offset: the position of the first key slot; a sliding cache has dropped those before.
        mask_function: the pattern Transformers asks for; anything but causal, causal with a
            window, several documents a row, and all-to-all is refused.
        attention_mask: bool ``(batch, seen)``, False is padding; None: no padding.

    Returns:
        bool ``(batch, kv_length + q_length)``, first the keys, then the queries; None: all exist.

    Raises:
        NotSupported: another pattern.
    """
    compiling = torch.compiler.is_compiling()
    if use_vmap:
        raise NotSupported("masks with a function of their own (or_mask_function and the like)")
    bidirectional = _is_bidirectional(mask_function)
    if not compiling:
        _check_pattern(mask_function)
    filled = q_offset + q_length  # key positions below this have been written
    known = isinstance(filled, int)
    slack = not known or filled < kv_offset + kv_length
    if attention_mask is None and (bidirectional or not slack):
        return None
    if attention_mask is not None:
        device = attention_mask.device
        if not bidirectional and known and attention_mask.shape[1] < filled:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, but the model has seen "
                f"{filled} tokens with this call: it must cover the cached ones too"
            )
    slots = torch.arange(kv_length, device=device) + kv_offset
    keys = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    queries = torch.ones(batch_size, q_length, dtype=torch.bool, device=device)
    if not bidirectional:
        keys = keys & (slots < filled)
    if attention_mask is not None:
        missing = kv_offset + kv_length - attention_mask.shape[1]
        mask = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
        keys = keys & mask[:, kv_offset : kv_offset + kv_length]
        if not bidirectional:
            queries = mask[:, torch.arange(q_length, device=device) + q_offset]
    both = torch.cat([keys, queries], dim=1)
    if not compiling and not _capturing(both) and bool(both.all()):
        return None
    return both


_COMBINED = (
    "and_masks.<locals>.and_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
)
_KNOWN = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
)  # fmt: skip


def _is_bidirectional(mask_function: Callable[..., Any] | None) -> bool:
    from transformers.masking_utils import bidirectional_mask_function

    return mask_function is bidirectional_mask_function


def _check_pattern(mask_function: Callable[..., Any] | None) -> None:
    """Refuse a pattern the attention function would not know of."""
    if mask_function is None:
        return
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    if name in _COMBINED:
        for cell in mask_function.__closure__ or ():
            held = cell.cell_contents
            for part in held if isinstance(held, tuple) else (held,):
                if callable(part):
                    _check_pattern(part)
    elif name not in _KNOWN:
        raise NotSupported(f"the mask pattern {name.split('.')[0]}")


def _refuse_what_is_not_supported(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise NotSupported(
            f"dropout inside attention (got {dropout})",
            'Set attention_dropout=0 in the config, or use attn_implementation="sdpa".',
        )
    if kwargs.get("output_attentions"):
        raise NotSupported(
            "attention weights: they are never stored",
            'Use attn_implementation="eager" with output_attentions=True.',
        )
    for name, what in (("s_aux", "attention sinks (s_aux)"), ("position_bias", "a position bias")):
        if kwargs.get(name) is not None:
            raise NotSupported(what)
    if kwargs.get("block_table") is not None:
        raise NotSupported("Transformers' paged cache", 'Use attn_implementation="sdpa" there.')


def _check_mask(mask: Any, batch: int, seq_q: int, seq_k: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.dtype != torch.bool:
        came = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask)
        raise NotSupported(
            f"an arbitrary mask (got {came})",
            "Give a 2-D attention_mask (batch, seq) of tokens and padding, or packed position_ids; "
            'for any other mask use attn_implementation="sdpa" or "eager".',
        )
    if tuple(mask.shape) != (batch, seq_k + seq_q):
        raise ValueError(
            f"the mask has shape {tuple(mask.shape)}; for {seq_k} keys and {seq_q} queries in "
            f"{batch} rows it must be {(batch, seq_k + seq_q)}, as flashcourse_mask makes it"
        )


def _check_positions(position_ids: torch.Tensor | None, batch: int, seq_q: int) -> None:
    if position_ids is None:
        return
    shape = tuple(position_ids.shape)
    if position_ids.dim() != 2 or shape[0] not in (1, batch) or shape[1] != seq_q:
        raise NotSupported(f"position_ids of shape {shape} for {batch} rows of {seq_q} tokens")


def _as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast, attention runs in its dtype, like PyTorch's own; rotary leaves float32."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) for t in tensors)


def _as_int(length: Any) -> int | None:
    """A tensor would have to be read, which waits for the GPU; the kernel needs no maximum."""
    return length if isinstance(length, int) else None


def _values_may_be_read(tensor: torch.Tensor) -> bool:
    return not torch.compiler.is_compiling() and not _capturing(tensor)


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
