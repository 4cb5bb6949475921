"""What each choice of block sizes compiles to: a table made ahead of time, read by a lesson.

``python tools/compile_blocks.py`` makes it from the kernel in the lesson; that takes minutes, and
no GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parent / "data" / "forward_blocks.json"
CHOICES = ("target", "block_q", "block_k", "num_warps", "num_stages")


@dataclass(frozen=True)
class BlockPoint:
    """What one configuration compiled to; see :class:`flashcourse.measure.compiled.Compiled`."""

    shared_bytes: int
    threads: int
    registers: int
    spilled_bytes: int


class BlockTable:
    """Compiled configurations by (target, block_q, block_k, num_warps, num_stages).

    Attributes:
        description: one line that says how the table was made, and warns if it was made from
            another text of the kernel than the one that was asked about.
    """

    def __init__(self, content: dict, fingerprint: str) -> None:
        self._rows = {
            tuple(row[: len(CHOICES)]): BlockPoint(*row[len(CHOICES) :]) for row in content["rows"]
        }
        self.matches = content["fingerprint"] == fingerprint
        self.description = (
            f"{len(self._rows)} configurations compiled ahead of time by {content['made_by']} "
            f"with Triton {content['triton']}: {content['kernel']}"
        )
        if not self.matches:
            self.description += (
                ". The kernel here is not the one of the table any more: the numbers are those of "
                "the lesson's kernel as it was handed out"
            )

    def options(self, choice: str) -> list:
        """The values that a choice takes in the table, in order; choices are :data:`CHOICES`."""
        index = CHOICES.index(choice)
        return sorted(
            {key[index] for key in self._rows}, key=lambda value: (len(str(value)), value)
        )

    def row(
        self, target: str, block_q: int, block_k: int, num_warps: int, num_stages: int
    ) -> BlockPoint:
        """One configuration.

        Raises:
            KeyError: the table has no such configuration; the message lists what there is.
        """
        key = (target, block_q, block_k, num_warps, num_stages)
        if key not in self._rows:
            there = "; ".join(f"{choice}: {self.options(choice)}" for choice in CHOICES)
            raise KeyError(
                f"the table has no {dict(zip(CHOICES, key, strict=True))}. It has {there}"
            )
        return self._rows[key]


def load_block_table(fingerprint: str) -> BlockTable:
    """The committed table.

    Args:
        fingerprint: :func:`flashcourse.measure.kernel_source.kernel_fingerprint` of the kernel
            that the reader has in front of them.
    """
    return BlockTable(json.loads(TABLE.read_text(encoding="utf-8")), fingerprint)
