"""Why SDPA does not use a backend: PyTorch's own check, its reasons in plain words, and the fix."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashcourse.measure.backend import CUDNN, EFFICIENT, FLASH, MATH

BACKENDS = {
    FLASH: SDPBackend.FLASH_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    MATH: SDPBackend.MATH,
}
_CAN_USE: dict[str, Callable[..., bool]] = {
    FLASH: torch.backends.cuda.can_use_flash_attention,
    EFFICIENT: torch.backends.cuda.can_use_efficient_attention,
    CUDNN: torch.backends.cuda.can_use_cudnn_attention,
}

# (what PyTorch's message contains, what it means, what to do). The first that matches is used.
EXPLANATIONS: tuple[tuple[str, str, str], ...] = (
    (r"runtime disabled", "it is switched off",
     "leave the `sdpa_kernel` block, or call `torch.backends.cuda.enable_*_sdp(True)`"),
    (r"not compiled with|was not compiled|is not built", "this build of PyTorch does not have it",
     "install a CUDA build of PyTorch"),
    (r"non-null attn_mask", "it takes no attn_mask",
     "say causal with is_causal=True, use torch.nn.attention.bias for the bottom-right diagonal, "
     "or FlexAttention for another pattern"),
    (r"is_causal.*(seq|seqlen)", "is_causal needs as many queries as keys",
     "use torch.nn.attention.bias.causal_lower_right, or flash_attention of the course, whose "
     "diagonal is bottom-right"),
    (r"to (all )?be of (the same )?dtype|all of dtype|dtype.*\{",
     "it does not compute in this dtype",
     "convert q, k and v to float16 or bfloat16"),
    (r"only supports (gpu )?arch|gpu architectures|sm_?\d+.*or greater|compute capability",
     "this GPU is not among those it was written for",
     "use another backend: EFFICIENT runs on older GPUs"),
    (r"zero seq", "a sequence has no tokens", "skip the call: there is nothing to attend to"),
    (r"4 dimensional", "q, k and v must have 4 dimensions",
     "reshape to (batch, heads, sequence, head_dim)"),
    (r"stride 1", "the last dimension must be contiguous", "call .contiguous() on the inputs"),
    (r"same num_heads|num_heads|grouped|GQA|enable_gqa|number of heads",
     "query and key have different numbers of heads",
     "pass enable_gqa=True; a backend that refuses even then needs "
     "k.repeat_interleave(heads_q // heads_kv, 1)"),
    (r"same batch_size|batch_size", "the batch sizes differ",
     "expand k and v to q's batch: SDPA's fused backends do not broadcast"),
    (r"non-zero dropout|[Dd]ropout", "it has no dropout here",
     "pass dropout_p=0.0; in evaluation SDPA does not switch it off for you"),
    (r"[Nn]ested", "it does not take these nested tensors", "pad, or use varlen_attn"),
    (r"requires? grad|gradient", "it cannot give this gradient",
     "a mask that needs no gradient, or MATH"),
    (r"same last dimension.*: (\d+), Key\.size\(-1\): \1, Value\.size\(-1\): \1\b",
     "it does not have kernels for this head_dim",
     "FLASH stops at head_dim 256; EFFICIENT or MATH takes more"),
    (r"same last dimension", "q, k and v must have one head_dim here, and a supported one",
     "pad the narrower ones with zeros and cut the output, or use MATH"),
    (r"last dimension|head_?dim|head dimension|size\(-1\)|embed",
     "it does not have kernels for this head_dim",
     "pad head_dim with zeros to a multiple of 8 (and keep `scale` of the true head_dim); above "
     "the largest size use MATH"),
    (r"[Dd]eterministic", "it is not deterministic", "allow it, or use another backend"),
    (r"cudnn version|cuDNN version|frontend", "this cuDNN is too old", "install a newer PyTorch"),
    (r"attn_mask|[Aa]ttention mask", "it does not take this attn_mask",
     "check its shape, dtype and strides, or use another backend"),
    (r"stride", "it does not take this memory layout", "call .contiguous() on the inputs"),
)  # fmt: skip
NOISE = re.compile(r"kernel not used because|has been runtime disabled|Triggered internally")


@dataclass(frozen=True)
class Verdict:
    """What one backend says to one call.

    Attributes:
        backend: MATH, FLASH, EFFICIENT or CUDNN.
        allowed: True if SDPA may use it.
        reason: why not, in plain words; empty if allowed.
        fix: what to do about it; empty if allowed.
        messages: what PyTorch said, unchanged.
    """

    backend: str
    allowed: bool
    reason: str = ""
    fix: str = ""
    messages: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.allowed:
            return f"{self.backend}: allowed"
        return f"{self.backend}: refused, because {self.reason}. Fix: {self.fix}."


class WhyNot(Mapping[str, Verdict]):
    """A :class:`Verdict` for each backend; printed, one a line.

    Attributes:
        chosen: the backend SDPA would take here and now, or None if all are refused.
    """

    def __init__(self, verdicts: dict[str, Verdict], chosen: str | None) -> None:
        self._verdicts = verdicts
        self.chosen = chosen

    def __getitem__(self, backend: str) -> Verdict:
        return self._verdicts[backend]

    def __iter__(self) -> Iterator[str]:
        return iter(self._verdicts)

    def __len__(self) -> int:
        return len(self._verdicts)

    def __str__(self) -> str:
        lines = [str(verdict) for verdict in self._verdicts.values()]
        return "\n".join([*lines, f"SDPA would take {self.chosen or 'none of them: it raises'}."])

    __repr__ = __str__


def why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
) -> WhyNot:
    """For each backend of SDPA: may it compute this call, and if not, why, and what helps?

    Nothing is computed. On a GPU PyTorch's ``can_use_*`` functions are asked, on a CPU its
    dispatcher. What is switched off now, by ``sdpa_kernel`` for instance, counts as refused.

    Args:
        q: ``(batch, heads_q, seq_q, head_dim)``, as for ``scaled_dot_product_attention``.
        k, v: ``(batch, heads_kv, seq_k, head_dim)``.
        attn_mask, dropout_p, is_causal, enable_gqa: the other arguments of the call.

    Returns:
        A mapping from MATH, FLASH, EFFICIENT and CUDNN to a :class:`Verdict`, which prints as
        one line each, and ``chosen``.

    Raises:
        TypeError: q, k or v is not a tensor.
        ValueError: the arguments contradict each other, so that SDPA itself would raise.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if attn_mask is not None and is_causal:
        raise ValueError(
            "SDPA refuses attn_mask together with is_causal=True; put the causal mask "
            "into attn_mask"
        )
    call = _Call(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa)
    _refuse_what_nothing_takes(call)
    verdicts = {name: _verdict(name, call) for name in BACKENDS}
    number = _ask_dispatcher(call)[0]
    names = {backend.value: name for name, backend in BACKENDS.items()}
    chosen = names.get(number)
    # MATH is what is left for the dispatcher; whether it can compute the call, it does not ask.
    return WhyNot(verdicts, chosen if chosen and verdicts[chosen].allowed else None)


@dataclass(frozen=True)
class _Call:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool


def _refuse_what_nothing_takes(call: _Call) -> None:
    """Raise ValueError if shapes, dtypes or devices contradict each other.

    MATH takes everything that SDPA takes. It is asked with tensors that hold no data.
    """
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    if call.attn_mask is not None:
        tensors["attn_mask"] = call.attn_mask
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"SDPA needs all tensors on one device, got {devices}")
    if not _math_verdict(call).allowed:
        return  # its own reason says more
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            torch.nn.functional.scaled_dot_product_attention(
                empty["q"], empty["k"], empty["v"], empty.get("attn_mask"),
                call.dropout_p, call.is_causal, enable_gqa=call.enable_gqa,
            )  # fmt: skip
    except RuntimeError as error:
        shapes = {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
        raise ValueError(f"SDPA does not take these arguments: {shapes}: {error}") from error


def _verdict(name: str, call: _Call) -> Verdict:
    if name == MATH:
        return _math_verdict(call)
    if call.q.device.type == "cuda":
        allowed, messages = _ask_cuda(name, call)
    elif name == FLASH:
        if not torch.backends.cuda.flash_sdp_enabled():
            allowed, messages = False, ("Flash attention has been runtime disabled.",)
        else:
            with sdpa_kernel(BACKENDS[FLASH]):
                number, messages = _ask_dispatcher(call)
            allowed = number == BACKENDS[FLASH].value
    else:
        where = f"its kernels are for CUDA; these tensors are on {call.q.device.type}"
        return Verdict(name, False, where, "move q, k and v to a GPU")
    if allowed:
        return Verdict(name, True)
    return Verdict(name, False, *explain(messages), messages)


def _math_verdict(call: _Call) -> Verdict:
    if not torch.backends.cuda.math_sdp_enabled():
        return Verdict(MATH, False, *explain(("Math attention has been runtime disabled.",)))
    if not call.q.is_floating_point():
        dtype = str(call.q.dtype).removeprefix("torch.")
        return Verdict(MATH, False, f"it does not compute in {dtype}", "convert to a float dtype")
    if call.q.dim() >= 3 and not call.enable_gqa:
        heads = {call.q.shape[-3], call.k.shape[-3]}
        if len(heads) > 1 and 1 not in heads:
            return Verdict(MATH, False, *explain(("num_heads",)))
    return Verdict(MATH, True)


def explain(messages: tuple[str, ...]) -> tuple[str, str]:
    """(reason, fix) in plain words for PyTorch's messages; unknown ones are passed on as they are.

    Args:
        messages: what PyTorch warned, in its order. Several reasons are joined by "; ".
    """
    reasons: dict[str, str] = {}
    for message in messages:
        for pattern, reason, fix in EXPLANATIONS:
            if re.search(pattern, message):
                detail = re.search(r"[Gg]ot (.*?)(?: instead)?(?:\.(?: .*)?)?$", message)
                reasons[reason + (f" ({detail[1]})" if detail else "")] = fix
                break
        else:
            reasons[f"PyTorch says: {message}"] = "see the message"
    if not reasons:
        return "PyTorch gives no reason", "check that this build of PyTorch and this device have it"
    return "; ".join(reasons), "; ".join(dict.fromkeys(reasons.values()))


def _ask_cuda(name: str, call: _Call) -> tuple[bool, tuple[str, ...]]:
    parameters = torch.backends.cuda.SDPAParams(
        call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal, call.enable_gqa
    )
    with _hearing() as messages:
        allowed = _CAN_USE[name](parameters, True)
    return allowed, tuple(messages)


def _ask_dispatcher(call: _Call) -> tuple[int, tuple[str, ...]]:
    """The number of the backend SDPA would take (-1: none), and what it warned meanwhile."""
    with _hearing() as messages:
        try:
            number = torch._fused_sdp_choice(
                call.q, call.k, call.v, call.attn_mask, call.dropout_p, call.is_causal,
                enable_gqa=call.enable_gqa,
            )  # fmt: skip
        except RuntimeError as error:
            # Nothing is left: SDPA raises. The reasons came as warnings before.
            if "iable backend" not in str(error) and "vailable kernel" not in str(error):
                raise ValueError(f"SDPA does not take these arguments: {error}") from error
            number = -1
    return int(number), tuple(m for m in messages if not NOISE.search(m))


@contextmanager
def _hearing() -> Iterator[list[str]]:
    """Collect what PyTorch warns meanwhile.

    Some of its functions warn through Python. Others, the ``can_use_*`` of CUDA among them, write
    to the process's standard error, below ``sys.stderr``. What stands there and is no warning of
    PyTorch's is passed on.
    """
    messages: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        os.dup2(file.fileno(), 2)
        try:
            yield messages
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            written = file.read()
    messages += [_clean(str(warning.message)) for warning in caught]
    for line in written.decode(errors="replace").splitlines():
        warned = re.match(r"\[W[^\]]*\] Warning: (.*)", line)
        if warned:
            messages.append(_clean(warned[1]))
        else:
            print(line, file=sys.stderr)


def _clean(message: str) -> str:
    """Without the place in PyTorch's source that is appended to a warning."""
    message = re.sub(r"\s*\(Triggered internally at .*\)\s*$", "", message)
    return re.sub(r"\s*\(function \w+\)\s*$", "", message).strip()
