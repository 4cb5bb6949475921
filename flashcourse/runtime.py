"""What this machine can run: the GPU, the dtype to use, and how Triton's kernels are run.

Nothing here needs Triton to be installed, and only :func:`prepare_triton` acts at import.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INTERPRETER_NOTE = (
    "flashcourse: no GPU found, so Triton's kernels run in its interpreter on the CPU. "
    "The results are the same; the speed is not worth measuring."
)


class TritonMissing(ImportError):
    """A Triton kernel was called on a machine where Triton is not installed."""


class TritonImportedFirst(RuntimeError):
    """Triton was imported before flashcourse could switch its interpreter on."""


def has_gpu() -> bool:
    """True if PyTorch sees a GPU it can run on (CUDA or ROCm). False also if torch is missing.

    A torch that does not load counts as missing: the doctor says what is wrong with it.
    """
    try:
        import torch
    except Exception:  # a library that does not fit raises OSError, NumPy's ABI AttributeError, ...
        return False
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device the lessons use: the first GPU, else the CPU."""
    import torch

    return torch.device("cuda" if has_gpu() else "cpu")


def compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the first GPU, or None without one."""
    if not has_gpu():
        return None
    import torch

    return torch.cuda.get_device_capability()


def compute_dtype() -> torch.dtype:
    """The dtype to use here: bfloat16 from compute capability 8.0, float16 below, float32 on a CPU.

    ``torch.cuda.is_bf16_supported()`` is not asked: it says True on a T4, which emulates bfloat16.
    """
    import torch

    capability = compute_capability()
    if capability is None:
        return torch.float32
    if torch.version.hip is not None or capability >= (8, 0):
        return torch.bfloat16
    return torch.float16


def triton_installed() -> bool:
    """True if Triton can be imported; it is not imported to find out."""
    if "triton" in sys.modules:
        return sys.modules["triton"] is not None  # None is how an import is blocked
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """True if Triton's kernels run in its interpreter rather than on a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def prepare_triton() -> None:
    """On a machine without a GPU, switch Triton's interpreter on, and say so once.

    Triton reads ``TRITON_INTERPRET`` while it is imported: its own library of kernels is built
    one way or the other then. Child processes inherit the setting and stay silent. A setting made
    by hand stays: with ``TRITON_INTERPRET=0`` kernels can be compiled for GPUs that are not here.

    Raises:
        TritonImportedFirst: Triton is already imported without its interpreter, and there is no
            GPU for what it would compile.
    """
    if not triton_installed() or "TRITON_INTERPRET" in os.environ or has_gpu():
        return
    if "triton" in sys.modules:
        raise TritonImportedFirst(
            "Triton was imported before flashcourse, on a machine without a GPU. Its interpreter "
            "can only be switched on before that. Restart Python and import flashcourse first, "
            "or start Python with TRITON_INTERPRET=1."
        )
    os.environ["TRITON_INTERPRET"] = "1"
    print(INTERPRETER_NOTE, file=sys.stderr)


def require_triton(what: str) -> Any:
    """Import Triton and return it, or explain what to use where it cannot be installed.

    Args:
        what: the thing that needs Triton, as the learner called it.

    Raises:
        TritonMissing: Triton is not installed.
    """
    try:
        import triton
    except ImportError as error:
        raise TritonMissing(
            f"{what} needs Triton, which is not installed here ({error}). On Linux: "
            "`pip install triton`. macOS and Windows have no Triton wheels: use the "
            "devcontainer, WSL2 or Colab (see README.md). Everything written in plain PyTorch "
            "works here."
        ) from error
    return triton
