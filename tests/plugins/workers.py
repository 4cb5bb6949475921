"""How many processes share the tests: one a core, two at the most where there is no GPU.

On a GPU the tests run one after the other: two at once would disturb each other's times and
memory. Each process computes with one thread, so that two do not fight for the cores.
"""

from __future__ import annotations

import os

import pytest

from flashcourse import runtime

MOST = 2  # a worker holds PyTorch and a notebook's kernel: about 2 GB


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    if runtime.has_gpu():
        return 0
    return min(MOST, os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch

        torch.set_num_threads(1)
