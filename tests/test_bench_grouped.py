"""The race between grouped heads and repeated ones: its check, and that it needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashcourse import runtime
from flashcourse.attention import flash_attention
from flashcourse.bench import grouped

pytestmark = pytest.mark.needs_triton


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    monkeypatch.setattr(grouped, "BATCH", 1)
    monkeypatch.setattr(grouped, "HEADS", 4)
    monkeypatch.setattr(grouped, "HEADS_KV", 2)
    monkeypatch.setattr(grouped, "HEAD_DIM", 16)
    return grouped.grouped_inputs(40, "cpu", torch.float32)


def test_both_are_the_same_attention(inputs: dict[str, list[torch.Tensor]]) -> None:
    q, k, _, do = inputs["grouped"]
    assert k.shape[1] == 2
    assert inputs["repeated"][1].shape == q.shape == do.shape
    grouped.check_grouped(inputs)


@pytest.mark.parametrize("what", ["out", "dk"])
def test_a_wrong_group_is_found(what: str, inputs: dict[str, list[torch.Tensor]]) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        if k.shape[1] == q.shape[1]:
            return flash_attention(q, k, v, **options)
        if what == "out":  # heads of a group told apart by the remainder
            return flash_attention(q, *(t.repeat(1, 2, 1, 1) for t in (k, v)), **options)
        return flash_attention(q, k.detach() + 0 * k, v, **options)  # no gradient of the keys

    with pytest.raises(AssertionError, match=f"^{what} with grouped heads"):
        grouped.check_grouped(inputs, attend)


@pytest.mark.skipif(runtime.has_gpu(), reason="there is a GPU")
def test_it_is_not_timed_on_a_cpu() -> None:
    with pytest.raises(RuntimeError, match="needs a GPU"):
        next(grouped.race_grouped())


@pytest.mark.needs_gpu
def test_a_row_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "BATCH", 1)
    (row,) = grouped.race_grouped([512])
    assert all(row[part]["ratio"] > 0.2 for part in ("forward", "backward"))
