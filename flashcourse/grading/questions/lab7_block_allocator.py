"""lab7.block_allocator: blocks with reference counts and copy-on-write, judged by behaviour."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashcourse.grading.block_judge import judge_beside, judge_script
from flashcourse.grading.block_script import Ledger, Step, describe, run_beside, run_script
from flashcourse.grading.draw import integer
from flashcourse.grading.mistakes_block_allocator import MISTAKES
from flashcourse.grading.question import Case, Check, Question

STEPS = 250  # of a random script
MOST_SEQUENCES = 7  # alive at once in it
STALE = ("free", "append", "fork", "block_table")
A, B, C, D, E = range(5)  # sequences, in messages a to e


def _case(num_blocks: int, block_size: int, steps: list[Step]) -> Case:
    text = "; ".join(describe(step) for step in steps)
    if len(steps) > 14:
        text = f"{len(steps)} random steps"
    described = f"BlockAllocator({num_blocks}, {block_size}): {text}"
    return Case(described, (num_blocks, block_size, steps))


def _appends(seq: int, count: int) -> list[Step]:
    return [("append", seq)] * count


# The scripts ------------------------------------------------------------------------------------


def _allocations(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 3, 5)
    whole = integer(generator, 2, 3)
    yield _case(
        12,
        size,
        [("allocate", A, whole * size + 1), ("allocate", B, 2 * size), ("allocate", C, 1)],
    )
    yield _case(5, 1, [("allocate", A, 2), ("allocate", B, 3), ("free", A), ("allocate", C, 2)])


def _boundaries(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 3, 4)
    yield _case(9, size, [("allocate", A, size + 1), *_appends(A, size + 1)])
    yield _case(9, size, [("allocate", A, size), ("allocate", B, 1), *_appends(A, 2)])
    yield _case(9, 1, [("allocate", A, 2), *_appends(A, 2)])


def _forks(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 3, 5)
    steps: list[Step] = [("allocate", A, 2 * size + 1), ("fork", A, B), ("fork", B, C)]
    yield _case(4, size, [*steps, ("allocate", D, size)])
    yield _case(3, size, [("allocate", A, 3 * size), ("fork", A, B)])


def _copies(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 4, 5)
    start: list[Step] = [("allocate", A, size + 1), ("fork", A, B)]
    yield _case(9, size, [*start, ("append", A), ("append", A), ("append", B)])
    yield _case(9, size, [*start, ("append", B), ("append", A), ("append", B)])
    yield _case(
        9,
        size,
        [*start, ("fork", A, C), ("append", B), ("append", C), ("append", A), ("fork", A, D)],
    )
    yield _case(9, size, [*start, ("free", A), ("append", B)])


def _full_blocks(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 3, 5)
    start: list[Step] = [("allocate", A, 2 * size), ("fork", A, B)]
    yield _case(9, size, [*start, ("append", A), ("append", B), ("append", A)])


def _frees(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 4, 5)
    yield _case(6, size, [("allocate", A, 3 * size), ("allocate", B, 2), ("free", A), ("free", B)])
    shared: list[Step] = [("allocate", A, 2 * size + 1), ("fork", A, B)]
    yield _case(6, size, [*shared, ("free", A), ("free", B), ("allocate", C, 6 * size)])
    yield _case(6, size, [*shared, ("free", B), ("free", A), ("allocate", C, 6 * size)])
    yield _case(6, size, [*shared, ("append", A), ("free", B), ("free", A)])
    yield _case(6, size, [*shared, ("append", B), ("append", A), ("free", B), ("free", A)])


def _out_of_blocks(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 3, 4)
    yield _case(4, size, [("allocate", A, 5 * size), ("allocate", A, 4 * size)])
    yield _case(4, size, [("allocate", A, 3 * size), ("allocate", B, size + 1), ("allocate", B, 1)])
    full: list[Step] = [("allocate", A, 2 * size), ("allocate", B, 1), ("append", A)]
    yield _case(3, size, [*full, ("append", B), ("free", B), *_appends(A, size), ("append", A)])
    shared: list[Step] = [("allocate", A, size + 1), ("fork", A, B), ("append", A)]
    yield _case(2, size, [*shared, ("free", B), *_appends(A, size - 1), ("append", A)])


def _stale(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 3, 5)
    start: list[Step] = [("allocate", A, size + 1), ("allocate", B, 1), ("free", A)]
    yield _case(6, size, [*start, ("stale", "free", A), ("append", B)])
    start = [("allocate", A, size + 1), ("fork", A, B), ("free", A)]
    yield _case(6, size, [*start, ("stale", "free", A), ("free", B)])
    start = [("allocate", A, size + 1), ("free", A)]
    for method in STALE[1:]:
        yield _case(6, size, [*start, ("stale", method, A)])


def _beside(generator: torch.Generator) -> Iterator[Case]:
    size = integer(generator, 3, 5)
    steps: list[Step] = [("allocate", A, size + 1), ("fork", A, B), ("append", A), ("append", B)]
    yield _case(6, size, [*steps, *_appends(B, size), ("free", A), ("free", B)])


def _random(generator: torch.Generator) -> Iterator[Case]:
    for num_blocks, block_size in ((7, 2), (16, 4), (24, integer(generator, 1, 9))):
        yield _case(num_blocks, block_size, _random_steps(generator, num_blocks, block_size))


def _random_steps(generator: torch.Generator, num_blocks: int, block_size: int) -> list[Step]:
    """A script in which everything happens, a full pool often."""
    ledger, count = Ledger(num_blocks, block_size), 0
    steps: list[Step] = []
    while len(steps) < STEPS:
        alive, dice = list(ledger.tables), integer(generator, 0, 99)
        seq = alive[integer(generator, 0, len(alive) - 1)] if alive else -1
        if dice < 60 and alive:
            step: Step = ("append", seq)
        elif dice < 70 and 0 < len(alive) < MOST_SEQUENCES:
            step, count = ("fork", seq, count), count + 1
        elif dice < 82 and len(alive) < MOST_SEQUENCES:
            tokens = integer(generator, 1, num_blocks * block_size // 2)
            step, count = ("allocate", count, tokens), count + 1
        elif dice < 95 and alive:
            step = ("free", seq)
        elif ledger.freed:
            method = STALE[integer(generator, 0, len(STALE) - 1)]
            step = ("stale", method, ledger.freed[integer(generator, 0, len(ledger.freed) - 1)])
        else:
            continue
        ledger.do(step)
        steps.append(step)
    return steps


QUESTION = Question(
    id="lab7.block_allocator",
    points=4,
    checks=(
        Check(
            "allocate takes as many blocks as its tokens fill",
            _allocations,
            judge_script,
            run_script,
        ),
        Check("append takes a block when the last is full", _boundaries, judge_script, run_script),
        Check("a fork shares every block and takes none", _forks, judge_script, run_script),
        Check("a shared block is copied before it is written", _copies, judge_script, run_script),
        Check("a full block is shared on", _full_blocks, judge_script, run_script),
        Check("a block is free when its last reader is", _frees, judge_script, run_script),
        Check("OutOfBlocks changes nothing", _out_of_blocks, judge_script, run_script),
        Check("a freed sequence is an error", _stale, judge_script, run_script),
        Check("two allocators share nothing", _beside, judge_beside, run_beside),
        Check("hundreds of random steps", _random, judge_script, run_script),
    ),
    mistakes=MISTAKES,
)
