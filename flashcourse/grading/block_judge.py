"""Comparing what an allocator of KV blocks did, step by step, with what it must do.

A block's number is never compared: only which entries of which tables are one block, and which are
not.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from flashcourse.grading.block_script import OUT, TAKEN, Ledger, Step, describe, name_of
from flashcourse.grading.question import Case, Observation


def judge_script(case: Case, observation: Observation) -> str | None:
    """The first step after which something differs from what must happen, or None."""
    num_blocks, block_size, steps = case.args
    log = observation.output
    if not isinstance(log, list) or not all(_is_entry(entry) for entry in log) or not log:
        return "expected an allocator whose steps can be followed"
    ledger, pairs = Ledger(num_blocks, block_size), _Pairs()
    if log[0]["num_free"] != num_blocks:
        return f"num_free of a new allocator is {log[0]['num_free']}, expected {num_blocks}"
    for number, step in enumerate(steps, start=1):
        if number >= len(log):
            return f"step {number}, `{describe(step)}`, could not be done"
        needed = ledger.needed(step) if step[0] != "stale" else 0
        free = ledger.num_free
        outcome, copy = ledger.do(step)
        message = _outcome(step, outcome, log[number], needed, free)
        message = message or pairs.compare(ledger, log[number]["tables"])
        message = message or _numbers(ledger, log[number])
        if message is None and step[0] == "append" and outcome == "ok":
            message = _returned(copy, log[number]["returned"], pairs)
        if message:
            unchanged = "" if outcome == "ok" else " (a call that raises must change nothing)"
            note = unchanged if log[number]["outcome"] == outcome else ""
            return f"step {number}, `{describe(step)}`: {message}{note}"
    return None


def judge_beside(case: Case, observation: Observation) -> str | None:
    """The same for an allocator that had a second one of its kind beside it."""
    if isinstance(observation.output, str):
        message: str | None = f"it raised {observation.output}"
    else:
        message = judge_script(case, observation)
    if message is None:
        return None
    return (
        f"{message} (a second allocator was at work too. If everything else passes: what belongs "
        "to one is made in __init__ and kept in self, not in the class or in a global)"
    )


def _is_entry(entry: Any) -> bool:
    """True if it is what :func:`run_script` writes: the process it ran in is not trusted."""
    keys = {"outcome", "returned", "num_free", "tables", "outside"}
    if not isinstance(entry, dict) or set(entry) != keys or not isinstance(entry["tables"], dict):
        return False
    tables = entry["tables"].values()
    numbers = [n for table in tables if isinstance(table, list) for n in [None, *table]]
    return numbers.count(None) == len(tables) and all(type(n) in (int, type(None)) for n in numbers)


def _outcome(
    step: Step, expected: str, entry: dict[str, Any], needed: int, free: int
) -> str | None:
    came = entry["outcome"]
    if came == expected:
        return None
    blocks = f"it needs {_blocks(needed)}, and {_are(free)} free"
    did = "it returned" if came == "ok" else f"it raised {came}"
    if str(came).startswith(TAKEN):
        return f"{came}, and both are alive: two living sequences have different handles"
    if expected == "refused":
        did = "it was accepted" if came == "ok" else did
        return f"{did}, expected an error: a KeyError or a ValueError"
    if expected == OUT:
        return f"{did}, expected OutOfBlocks: {blocks}"
    return f"it raised {came}, though {blocks}"


def _numbers(ledger: Ledger, entry: dict[str, Any]) -> str | None:
    if entry["outside"]:
        return f"a table holds a number outside 0 to {ledger.num_blocks - 1}"
    if entry["num_free"] != ledger.num_free:
        used = ledger.num_blocks - ledger.num_free
        return (
            f"num_free is {entry['num_free']}, expected {ledger.num_free}: the tables hold "
            f"{used} of {ledger.num_blocks} blocks"
        )
    return None


def _returned(copy: tuple[int, int] | None, came: Any, pairs: _Pairs) -> str | None:
    if copy is None:
        if came is None:
            return None
        what = "a pair of blocks" if isinstance(came, list) else f"a value of type {came}"
        return f"append returned {what}, expected None: nothing has to be copied"
    expected = [pairs.names.get(copy[0]), pairs.names.get(copy[1])]
    if came == expected:
        return None
    if came is None:
        return "append returned None, expected (old block, new block): the shared one was replaced"
    if isinstance(came, list):
        reverse = came == expected[::-1]
        return "append returned " + (
            "(new block, old block), expected (old block, new block)"
            if reverse
            else "two blocks which are not (old block, new block)"
        )
    return f"append returned a value of type {came}, expected (old block, new block)"


class _Pairs:
    """Which of the ledger's blocks is which of the allocator's: one to one, if all is right."""

    def __init__(self) -> None:
        self.names: dict[int, Any] = {}
        self.blocks: dict[Any, int] = {}

    def compare(self, ledger: Ledger, tables: dict[Any, Any]) -> str | None:
        """What is wrong with the tables, or None."""
        for seq, expected in ledger.tables.items():
            message = self._compare(ledger, seq, expected, tables.get(seq, []))
            if message:
                return message
        return None

    def _compare(self, ledger: Ledger, seq: int, expected: list[int], came: Any) -> str | None:
        name, length = name_of(seq), ledger.lengths[seq]
        if not isinstance(came, list) or len(came) != len(expected):
            return (
                f"the table of {name} has {_blocks(len(came))}, expected {len(expected)}: "
                f"{length} tokens in blocks of {ledger.block_size}"
            )
        for entry, (block, theirs) in enumerate(zip(expected, came, strict=True)):
            if self.names.setdefault(block, theirs) != theirs:
                others = [name_of(other) for other in ledger.readers(block) if other != seq]
                if others:
                    return (
                        f"entry {entry} of {name}'s table is not the block that {others[0]} has "
                        "there, and they share it"
                    )
                return (
                    f"entry {entry} of {name}'s table is another block than before, and nothing "
                    "had to be moved"
                )
            if self.blocks.setdefault(theirs, block) != block:
                return self._two_owners(ledger, seq, entry, self.blocks[theirs])
        if max(Counter(came).values(), default=1) > 1:
            return f"the table of {name} holds a block twice"
        return None

    def _two_owners(self, ledger: Ledger, seq: int, entry: int, held: int) -> str:
        owners = [name_of(other) for other in ledger.readers(held)]
        name = name_of(seq)
        if owners == [name]:
            return f"the table of {name} holds a block twice"
        if owners:
            return (
                f"entry {entry} of {name}'s table is a block of {', '.join(owners)}: what one "
                "writes there, the other reads"
            )
        return f"entry {entry} of {name}'s table is a block that should have been given back"


def _blocks(count: int) -> str:
    return f"{count} block" + ("" if count == 1 else "s")


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"
