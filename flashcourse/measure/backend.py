"""Which attention really ran: read from the profiler, not from a configuration.

A name in a configuration is a wish. What ran is in the profile of the call: PyTorch's operators
(on any device), and the names of the kernels on a GPU, which also show a replayed CUDA graph or a
kernel that was launched past PyTorch's dispatcher.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Literal

import torch

MATH, FLASH, EFFICIENT, CUDNN = "MATH", "FLASH", "EFFICIENT", "CUDNN"
OURS = "flashcourse"
FLEX = "FLEX"
FLEX_UNFUSED = "FLEX (not compiled)"
FLASH_ATTN = "flash-attn"
PLAIN = "PLAIN"

Direction = Literal["forward", "backward"]

# Order matters: the first pattern that matches a name decides. `_for_cpu` is SDPA's flash path on
# the CPU; `_flash_attention_forward` is the part that varlen_attn and nested tensors call directly.
OPERATORS: tuple[tuple[str, str], ...] = (
    (r"^aten::_scaled_dot_product_flash_attention", FLASH),
    (r"^aten::_flash_attention_(forward|backward)", FLASH),
    (r"^aten::_scaled_dot_product_efficient_attention", EFFICIENT),
    (r"^aten::_efficient_attention_(forward|backward)", EFFICIENT),
    (r"^aten::_scaled_dot_product_cudnn_attention", CUDNN),
    (r"^aten::_cudnn_attention_(forward|backward)", CUDNN),
    (r"^aten::_scaled_dot_product_attention_math", MATH),
    # An ordinary call of flash_attention goes past the dispatcher, through an autograd function;
    # in the interpreter each launch leaves its name.
    (r"^flashcourse::|^_Flash(Backward)?$", OURS),
    (r"^flash_attn(_2|_3|_4)?::", FLASH_ATTN),
    (r"^FlexAttentionAutogradOp(Backward)?$", FLEX_UNFUSED),
)
# PyTorch's copy of FlashAttention-2 lives in the namespace pytorch_flash, the package in flash.
# Inductor names the kernel of a template triton_tem_fused_…; flex_attention is in the name.
KERNELS: tuple[tuple[str, str], ...] = (
    (r"pytorch_flash::flash_(fwd|bwd)", FLASH),
    (r"fmha_cutlass[FB]_|PyTorchMemEffAttention", EFFICIENT),
    (r"^cudnn_.*sdpa|^cudnn_.*(fprop|bprop).*flash", CUDNN),
    (r"^triton_tem_.*flex_(attention|decoding)", FLEX),
    (r"\bflash::(flash_(fwd|bwd)|FlashAttn)|flash_attn.*cute|FlashAttention(Forward|Backward)Sm",
     FLASH_ATTN),
    (r"^_?(flash|paged|decode|varlen|merge_splits)_[a-z_]*kernel(_[0-9a-z]+)*$", OURS),
)  # fmt: skip
BACKWARD = re.compile(r"backward|bwd|bprop|fmha_cutlassB|Backward", re.IGNORECASE)
SPLIT = re.compile(r"split_?kv|flex_decoding|_split|combine|_merge|::merge", re.IGNORECASE)

EXPONENTIALS = {"aten::softmax", "aten::_softmax", "aten::_safe_softmax", "aten::exp"}
PRODUCTS = {"aten::bmm", "aten::baddbmm"}
PLAIN_BACKWARDS = {"aten::_softmax_backward_data", "BmmBackward0"}


class Backend(str):
    """The name of the backend that ran, and the evidence.

    It is a string: the forward's backend, or the backward's where only a backward ran. Several
    backends in one call are joined by " + ", in alphabetical order; nothing that looks like
    attention gives ``"none"``.

    Attributes:
        forward, backward: the backend of each direction, or None if it did not run. MATH and
            plain attention have no backward operator of their own: that of softmax or bmm stands
            for it.
        operators: the operators that say so, sorted.
        kernels: the GPU kernels that say so, sorted; empty on a CPU.
        split_kv: True if the keys were cut among several programs, as decoding does.
    """

    forward: str | None
    backward: str | None
    operators: tuple[str, ...]
    kernels: tuple[str, ...]
    split_kv: bool

    def __new__(
        cls,
        forward: str | None,
        backward: str | None = None,
        operators: Iterable[str] = (),
        kernels: Iterable[str] = (),
    ) -> Backend:
        backend = super().__new__(cls, forward or backward or "none")
        backend.forward, backend.backward = forward, backward
        backend.operators, backend.kernels = tuple(operators), tuple(kernels)
        backend.split_kv = any(SPLIT.search(n) for n in (*backend.kernels, *backend.operators))
        return backend

    def __repr__(self) -> str:
        parts = [f"forward {self.forward or 'did not run'}"]
        if self.backward is not None:
            parts.append(f"backward {self.backward}")
        if self.split_kv:
            parts.append("keys split among programs")
        return f"<Backend {', '.join(parts)}>"

    def __reduce__(self) -> tuple[type[Backend], tuple[object, ...]]:
        return Backend, (self.forward, self.backward, self.operators, self.kernels)

    @property
    def evidence(self) -> str:
        """Operators and kernels, one a line; long kernel names are cut."""
        lines = [f"operator {name}" for name in self.operators]
        lines += [f"kernel   {name[:90]}{'…' * (len(name) > 90)}" for name in self.kernels]
        return "\n".join(lines) or "no operator or kernel of attention in the profile"


def which_backend(fn: Callable[[], object]) -> Backend:
    """Run ``fn()`` once under PyTorch's profiler and say which attention ran in it.

    Args:
        fn: called without arguments, once, and once more if ``torch.compile`` had to compile
            something. A forward, a backward, or both; a whole model too.

    Returns:
        A :class:`Backend`: a string, such as ``"FLASH"``, with ``forward``, ``backward`` and the
        evidence. The names: MATH, FLASH, EFFICIENT and CUDNN (SDPA's; FLASH is also its fused path
        on a CPU), flashcourse (the course's kernels), FLEX (compiled FlexAttention, on a GPU),
        "FLEX (not compiled)", flash-attn (the packages), PLAIN (exponentials between matrix
        products and no fused operator, as in an eager model), none.

    Raises:
        TypeError: ``fn`` cannot be called.
    """
    if not callable(fn):
        raise TypeError(
            f"fn must be callable without arguments, got {type(fn).__name__}; "
            "wrap the call: which_backend(lambda: f(x))"
        )
    operators, kernels = _profile(fn)
    if any("dynamo_timed" in name for name in operators):
        # It was traced and compiled just now: tracing leaves operators that compute nothing.
        operators, kernels = _profile(fn)
    return classify(operators, kernels)


def classify(operators: Iterable[str], kernels: Iterable[str] = ()) -> Backend:
    """The backend that names of operators and kernels stand for.

    Args:
        operators: names of PyTorch's operators, as the profiler gives them.
        kernels: names of GPU kernels.
    """
    operators, kernels = set(operators), set(kernels)
    found: dict[Direction, set[str]] = {"forward": set(), "backward": set()}
    known_operators, known_kernels = [], []
    for name in sorted(operators):
        if (backend := _match(name, OPERATORS)) is not None:
            found[_direction(name)].add(backend)
            known_operators.append(name)
    by_operator = {direction: bool(backends) for direction, backends in found.items()}
    for name in sorted(kernels):
        if (backend := _match(name, KERNELS)) is None:
            continue
        known_kernels.append(name)
        # An operator says more than its kernel: varlen_attn of PyTorch may run another's kernel.
        if not by_operator[_direction(name)]:
            found[_direction(name)].add(backend)
    if not found["forward"] and _plain_forward(operators):
        found["forward"].add(PLAIN)
        known_operators += sorted(operators & (EXPONENTIALS | PRODUCTS))
    plain_backward = operators & PLAIN_BACKWARDS
    if plain_backward and not found["backward"] and found["forward"] <= {MATH, PLAIN}:
        found["backward"].add(MATH if MATH in found["forward"] else PLAIN)
        known_operators += sorted(plain_backward)
    joined = {way: " + ".join(sorted(backends)) or None for way, backends in found.items()}
    return Backend(joined["forward"], joined["backward"], known_operators, known_kernels)


def _match(name: str, patterns: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, backend in patterns:
        if re.search(pattern, name):
            return backend
    return None


def _direction(name: str) -> Direction:
    return "backward" if BACKWARD.search(name) else "forward"


def _plain_forward(operators: set[str]) -> bool:
    """Exponentials and matrix products, while no operator of a fused attention was seen."""
    return bool(operators & EXPONENTIALS) and bool(operators & PRODUCTS)


def _profile(fn: Callable[[], object]) -> tuple[set[str], set[str]]:
    """Names of the operators and of the GPU kernels of one call."""
    # Read when the profiler starts for the first time: without it, its log goes to the terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Pp]rofiler.*")
        with profile(activities=activities, acc_events=True) as profiler:
            fn()
            if on_gpu:
                torch.cuda.synchronize()
        events = profiler.events() or []
    operators = {event.name for event in events if event.device_type == DeviceType.CPU}
    kernels = {event.name for event in events if event.device_type != DeviceType.CPU}
    return operators, kernels
