"""The known mistakes of lab7.block_allocator, with a name and an explanation."""

from __future__ import annotations

from flashcourse.grading import block_allocators as wrong
from flashcourse.grading.question import Mistake

_KNOWN: tuple[tuple[type[wrong.Allocator], str, str], ...] = (
    (
        wrong.Floor,
        "the last block of allocate is missing",
        "tokens that do not fill a block need one all the same: round up, not down.",
    ),
    (
        wrong.OneMore,
        "one block too many at a multiple of block_size",
        "n // block_size + 1 is wrong where block_size divides n: round up.",
    ),
    (
        wrong.OneTokenLate,
        "a new block one token late",
        "the token after a full block found no slot: a block is needed when length % block_size "
        "is 0 before the token is added.",
    ),
    (
        wrong.OneTokenEarly,
        "a new block one token early",
        "the last slot of a block is used too: a block is needed when length % block_size is 0 "
        "before the token is added.",
    ),
    (wrong.EveryToken, "a block for every token", "a block holds block_size tokens."),
    (
        wrong.NeverANewBlock,
        "append never takes a block",
        "when the last block is full, the table must grow.",
    ),
    (
        wrong.LastBlockKept,
        "OutOfBlocks although it just fits",
        "the last free block can be taken: more than num_free must be needed before it fails.",
    ),
    (
        wrong.TokensForBlocks,
        "tokens compared with blocks",
        "num_free counts blocks, num_tokens counts tokens: compare the blocks they need.",
    ),
    (
        wrong.AlwaysAsks,
        "append needs a free block even if it takes none",
        "a token that fits into the last block needs no new one.",
    ),
    (
        wrong.TakesOneByOne,
        "a failing allocate keeps what it took",
        "it took blocks one by one until there was none. Compare with num_free first, or give back "
        "before raising.",
    ),
    (
        wrong.LengthFirst,
        "a failing append counts the token",
        "the length grew before OutOfBlocks was raised. Change things after what can fail.",
    ),
    (
        wrong.WritesShared,
        "copy missing on write",
        "append wrote into a block that another sequence reads. With more than one reader a copy "
        "comes first.",
    ),
    (
        wrong.NotCounted,
        "fork does not count the new reader",
        "each block of the table has one reader more after a fork; otherwise the first free gives "
        "it back under the other's hands.",
    ),
    (
        wrong.OnlyLastCounted,
        "fork counts the last block alone",
        "all blocks of the table have one reader more, not only the last.",
    ),
    (
        wrong.CopiesAll,
        "fork copies everything",
        "a fork takes no block: it shares them, and a block is copied when it is written to.",
    ),
    (
        wrong.CopiesLast,
        "fork copies the last block at once",
        "the last block is shared as well, until one of its readers writes to it.",
    ),
    (
        wrong.OneList,
        "one table for both",
        "the fork got the same list object, so what is appended to one appears in the other. Copy "
        "the list of numbers; that copies no block.",
    ),
    (
        wrong.CopiesFull,
        "a full block is copied",
        "the next token goes into a new block, so nothing is written to the shared one.",
    ),
    (
        wrong.CopiesForever,
        "copied although nobody else reads it",
        "that a block was shared once does not count: its last reader writes in place.",
    ),
    (
        wrong.OldStillCounted,
        "the old block keeps its reader",
        "after the copy the sequence reads the old block no longer: one reader less.",
    ),
    (
        wrong.OldGivenBack,
        "the old block is given back at the copy",
        "others still read it: it is free only when nobody does.",
    ),
    (
        wrong.OthersMove,
        "the others get the copy",
        "the sequence that writes moves to the new block; those that only read stay.",
    ),
    (
        wrong.NewOld,
        "new before old",
        "append returns (old block, new block): copy from the first into the second.",
    ),
    (
        wrong.OnlyNew,
        "only the new block is returned",
        "whoever copies needs both: (old block, new block).",
    ),
    (
        wrong.SaysNothing,
        "append does not say what to copy",
        "the table names a new block, and its first slots are empty until somebody copies them: "
        "return (old block, new block).",
    ),
    (
        wrong.TellsNewBlocks,
        "a copy asked for at a new block",
        "a block taken because the last is full has nothing to be copied into it: return None.",
    ),
    (wrong.Leaks, "leak on free", "the blocks of a freed sequence were never given back."),
    (
        wrong.LeaksShared,
        "leak of shared blocks",
        "free gives back what has one reader and forgets to count down the rest, so the last "
        "reader cannot give it back.",
    ),
    (
        wrong.FreesShared,
        "free gives back shared blocks",
        "another sequence still reads them; a block is free when its last reader goes.",
    ),
    (
        wrong.FreesLastOnly,
        "free gives back the last block alone",
        "every block of the table loses a reader.",
    ),
    (
        wrong.SharedTables,
        "one dict of tables for all allocators",
        "a dict or list in the body of the class exists once. Make it in __init__, as self.tables.",
    ),
    (
        wrong.FreedTwice,
        "double free accepted",
        "freeing a sequence again must raise: whoever does it has lost track of what it holds.",
    ),
    (
        wrong.StillThere,
        "a freed sequence stays usable",
        "its blocks were given back and its table was kept, so it writes where others do.",
    ),
    (
        wrong.NegativeReaders,
        "double free gives blocks back twice",
        "the same block is twice among the free ones, and soon has two owners.",
    ),
)


def _variant(answer: type[wrong.Allocator]) -> type[wrong.Allocator]:
    """The same mistake by somebody who takes the free block that waits longest."""
    return type(answer.__name__, (answer,), {"order": 0})


MISTAKES = tuple(
    Mistake(name, explanation, answer, (_variant(answer),)) for answer, name, explanation in _KNOWN
)
