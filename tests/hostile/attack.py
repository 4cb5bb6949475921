"""An attack: the source of a softmax cell, with what the grader may call it."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

RIGHT = """
def right(x):
    import math
    m = x.amax(dim=-1, keepdim=True)
    p = torch.exp(x - torch.where(m == -math.inf, 0.0, m))
    l = p.sum(dim=-1, keepdim=True)
    return p / torch.where(l == 0, 1.0, l)
"""


@dataclass(frozen=True)
class Attack:
    """The cell's source, and the statuses that are right for it."""

    source: str
    statuses: tuple[str, ...]


def attack(source: str, *statuses: str) -> Attack:
    return Attack("import torch\n" + RIGHT + dedent(source), statuses)
