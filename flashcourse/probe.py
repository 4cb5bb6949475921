"""Does Triton compute right numbers here? One tiny kernel, compared with PyTorch.

``python -m flashcourse.probe`` prints the answer as one line of JSON. The doctor runs it in a
process of its own, since a broken compiler or driver can take its process down with it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from flashcourse import runtime

ROWS, BLOCK = 29, 16  # two tiles, and a tail that must be masked
TOLERANCE = 1e-5
SENTINEL = 7.0  # no probability; stands where the kernel must not write


@dataclass(frozen=True)
class Probe:
    """What the kernel did: where it ran, the largest error against float64, and what is wrong."""

    where: str
    error: float
    problem: str = ""


def run_kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``softmax(a @ b)`` by Triton, for ``a (rows, 16)``, ``b (16, 16)`` float32.

    Returns:
        ``(rows rounded up to 16, 16)``: those past the end of ``a`` are left at ``SENTINEL``.

    Raises:
        TritonMissing: Triton is not installed.
    """
    runtime.require_triton("flashcourse's test kernel")
    from flashcourse.probe_kernel import softmax_of_product

    out = torch.full((-(-a.shape[0] // BLOCK) * BLOCK, BLOCK), SENTINEL, device=a.device)
    softmax_of_product[(1,)](a, b, out, a.shape[0], BLOCK=BLOCK)
    return out


def judge(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, where: str) -> Probe:
    """Compare the kernel's out with PyTorch in float64 on the same inputs."""
    rows = a.shape[0]
    expected = torch.softmax(a.double() @ b.double(), dim=-1)  # (rows, 16)
    error = (out[:rows].double() - expected).abs().max().item()
    problem = ""
    if not error <= TOLERANCE:  # NaN is not
        problem = f"its numbers are wrong: off by {error:.2g}, allowed are {TOLERANCE:g}"
        if not out[:rows].any():
            problem += ". It returned only zeros"
    elif not (out[rows:] == SENTINEL).all():
        problem = "it wrote outside its mask"
    return Probe(where, error, problem)


def probe() -> Probe:
    """Run the kernel once, on the GPU if there is one, else in Triton's interpreter."""
    generator = torch.Generator().manual_seed(0)
    device = runtime.device()
    a = torch.randn(ROWS, BLOCK, generator=generator).to(device)
    b = torch.randn(BLOCK, BLOCK, generator=generator).to(device)
    where = "interpreter" if runtime.interpreting() else "GPU"
    return judge(run_kernel(a, b), a, b, where)


if __name__ == "__main__":
    print(json.dumps(asdict(probe())))
