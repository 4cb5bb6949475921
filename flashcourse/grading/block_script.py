"""What an allocator of KV blocks must do, step by step, whichever free block it chooses.

A script is a list of steps on sequences that are named by numbers. :func:`run_script` lets an
allocator do them and writes down what can be seen from outside; a :class:`Ledger` says what must
happen, and :mod:`flashcourse.grading.block_judge` compares the two.
"""

from __future__ import annotations

import operator
from typing import Any

from flashcourse.grading.observe import describe_error
from flashcourse.grading.question import Answer

Step = tuple[Any, ...]
# ("allocate", new, num_tokens) · ("append", seq) · ("fork", seq, new) · ("free", seq)
# ("stale", method, seq): the method is called with a sequence that has been freed
OUT = "OutOfBlocks"
TAKEN = "it returned the handle of"


def name_of(seq: int) -> str:
    """A sequence's name in messages: a, b, …, z, then s26."""
    return chr(ord("a") + seq) if seq < 26 else f"s{seq}"


def describe(step: Step) -> str:
    """A step as the line of Python that it stands for."""
    kind, *parts = step
    if kind == "allocate":
        return f"{name_of(parts[0])} = allocate({parts[1]})"
    if kind == "fork":
        return f"{name_of(parts[1])} = fork({name_of(parts[0])})"
    if kind == "stale":
        return f"{parts[0]}({name_of(parts[1])}) with {name_of(parts[1])} freed"
    return f"{kind}({name_of(parts[0])})"


# What must happen -------------------------------------------------------------------------------


class Ledger:
    """An allocator that never runs out of names: every block it takes has a new one.

    Args:
        num_blocks: how many blocks may be in use at once.
        block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.freed: list[int] = []
        self.taken = 0

    def readers(self, block: int) -> list[int]:
        """The sequences that hold a block."""
        return [seq for seq, table in self.tables.items() if block in table]

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(set().union(*self.tables.values()))

    def needed(self, step: Step) -> int:
        """How many free blocks a step takes."""
        kind, *parts = step
        if kind == "allocate":
            return int(-(-parts[1] // self.block_size))
        if kind == "append":
            full = self.lengths[parts[0]] % self.block_size == 0
            return int(full or len(self.readers(self.tables[parts[0]][-1])) > 1)
        return 0

    def do(self, step: Step) -> tuple[str, tuple[int, int] | None]:
        """Do a step: its outcome (ok, refused or OutOfBlocks), and the copy an append asks for."""
        kind, *parts = step
        if kind == "stale":
            return "refused", None
        count = self.needed(step)
        if count > self.num_free:
            return OUT, None
        new = list(range(self.taken, self.taken + count))
        self.taken += count
        if kind == "allocate":
            self.tables[parts[0]], self.lengths[parts[0]] = new, parts[1]
        elif kind == "fork":
            self.tables[parts[1]] = list(self.tables[parts[0]])
            self.lengths[parts[1]] = self.lengths[parts[0]]
        elif kind == "free":
            del self.tables[parts[0]], self.lengths[parts[0]]
            self.freed.append(parts[0])
        else:
            return "ok", self._append(parts[0], new)
        return "ok", None

    def _append(self, seq: int, new: list[int]) -> tuple[int, int] | None:
        table, full = self.tables[seq], self.lengths[seq] % self.block_size == 0
        self.lengths[seq] += 1
        if full:
            table += new
        elif new:
            old, table[-1] = table[-1], new[0]
            return old, new[0]
        return None


# What does happen -------------------------------------------------------------------------------


class _Names:
    """New names for the numbers of blocks, in the order in which they are seen.

    A block that no table holds loses its name, and gets another when it comes back. So two
    allocators that differ only in which free block they choose are told alike.
    """

    def __init__(self) -> None:
        self.names: dict[int, int] = {}
        self.given = 0

    def rename(self, tables: dict[int, list[int]]) -> dict[int, list[int]]:
        held = {block: None for table in tables.values() for block in table}
        for block in held:
            if block not in self.names:
                self.names[block], self.given = self.given, self.given + 1
        self.names = {block: self.names[block] for block in held}
        return {seq: [self.names[block] for block in table] for seq, table in tables.items()}


def run_script(answer: Answer, num_blocks: int, block_size: int, steps: list[Step]) -> Any:
    """Let an allocator do a script; what can be seen after every step, as plain data.

    Returns:
        a list with a dict for the beginning and one for each step: outcome (ok, refused, the name
        of the error, or whose handle was given out twice), returned (of append),
        num_free, tables by sequence with blocks renamed, and outside: a number that is no block's.
    """
    allocator = answer(num_blocks, block_size)
    handles: dict[int, Any] = {}
    freed: dict[int, Any] = {}
    names, ledger = _Names(), Ledger(num_blocks, block_size)

    def taken_by(handle: Any) -> int | None:
        """The sequence that has this handle already."""
        return next((seq for seq, h in handles.items() if h is handle or h == handle), None)

    def seen(outcome: str, returned: Any = None) -> dict[str, Any]:
        before = dict(names.names)
        tables = {seq: _table(allocator, handle) for seq, handle in sorted(handles.items())}
        outside = any(b not in range(num_blocks) for table in tables.values() for b in table)
        renamed = names.rename(tables)
        if isinstance(returned, list):
            old, new = returned
            after = names.names
            returned = [{**after, **before}.get(old, -1), {**before, **after}.get(new, -1)]
        return {
            "outcome": outcome,
            "returned": returned,
            "num_free": _num_free(allocator),
            "tables": renamed,
            "outside": outside,
        }

    log = [seen("ok")]
    for kind, *parts in steps:
        if kind == "stale":
            method, seq = parts
            if seq not in freed or taken_by(freed[seq]) is not None:
                log.append(seen("refused"))  # its handle was given out anew: nothing to ask
            else:
                log.append(seen(_try(getattr(allocator, method), freed[seq])))
            continue
        if kind != "allocate" and parts[0] not in handles:
            break  # an earlier step failed that should not have
        outcome, returned = "ok", None
        due, _ = ledger.do((kind, *parts))
        try:
            if kind in ("allocate", "fork"):
                if kind == "allocate":
                    new, handle = parts[0], allocator.allocate(parts[1])
                else:
                    new, handle = parts[1], allocator.fork(handles[parts[0]])
                other = taken_by(handle)
                if other is not None:
                    log.append(seen(f"{TAKEN} {name_of(other)}"))
                    break
                handles[new] = handle
            elif kind == "free":
                allocator.free(handles[parts[0]])
                freed[parts[0]] = handles.pop(parts[0])
            else:
                returned = _pair(allocator.append(handles[parts[0]]))
        except Exception as error:
            if OUT in {cls.__name__ for cls in type(error).__mro__}:
                outcome = OUT
            elif due == OUT and not isinstance(error, NotImplementedError):
                outcome = type(error).__name__
            else:
                raise
        log.append(seen(outcome, returned))
        if outcome != due:
            break  # what follows has another beginning than the ledger's
    return log


def run_beside(answer: Answer, num_blocks: int, block_size: int, steps: list[Step]) -> Any:
    """The same while a second allocator of the same kind is at work; or the error, in words."""
    try:
        return run_script(lambda *sizes: _Beside(answer, *sizes), num_blocks, block_size, steps)
    except NotImplementedError:
        raise
    except Exception as error:
        return describe_error(error)


class _Beside:
    """An allocator that passes every call on, and lets a second one work before each.

    The second gives out two sequences' blocks at the most. It frees none: that an old handle comes
    again is judged elsewhere.
    """

    def __init__(self, answer: Answer, num_blocks: int, block_size: int) -> None:
        self.first, self.second = answer(num_blocks, block_size), answer(num_blocks, block_size)
        self.held: list[Any] = []

    @property
    def num_free(self) -> Any:
        return self.first.num_free

    def allocate(self, num_tokens: int) -> Any:
        self.work()
        return self.first.allocate(num_tokens)

    def append(self, seq: Any) -> Any:
        self.work()
        return self.first.append(seq)

    def fork(self, seq: Any) -> Any:
        self.work()
        return self.first.fork(seq)

    def free(self, seq: Any) -> None:
        self.work()
        self.first.free(seq)

    def block_table(self, seq: Any) -> Any:
        return self.first.block_table(seq)

    def work(self) -> None:
        if len(self.held) < 2:
            self.held.append(self.second.allocate(1))
        else:
            self.second.block_table(self.held[0])


def _try(method: Any, handle: Any) -> str:
    try:
        method(handle)
    except NotImplementedError:
        raise
    except (KeyError, ValueError):
        return "refused"
    except Exception as error:
        return type(error).__name__
    return "ok"


def _table(allocator: Any, handle: Any) -> list[int]:
    table = allocator.block_table(handle)
    try:
        return [operator.index(block) for block in table]
    except TypeError:
        message = f"block_table returned {type(table).__name__}, expected a list of block numbers"
        raise TypeError(message) from None


def _num_free(allocator: Any) -> int:
    value = allocator.num_free
    value = value() if callable(value) else value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"num_free is of type {type(value).__name__}, expected an int") from None


def _pair(returned: Any) -> Any:
    """None, the two numbers, or the name of the type that came instead.

    A list of the copies to make, with one pair or none, says the same as the pair or None.
    """
    if isinstance(returned, (list, tuple)) and len(returned) == 1:
        (returned,) = returned
    if returned is None or (isinstance(returned, (list, tuple)) and not returned):
        return None
    try:
        old, new = returned
        return [operator.index(old), operator.index(new)]
    except (TypeError, ValueError):
        return type(returned).__name__
