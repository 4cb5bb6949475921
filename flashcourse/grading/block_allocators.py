"""A right allocator of KV blocks, and wrong ones: each with one place changed."""

from __future__ import annotations

from typing import Any, ClassVar


class OutOfBlocks(RuntimeError):
    """There are fewer free blocks than are needed."""


class Allocator:
    """A right answer. The free blocks are a stack; ``order`` changes which is taken first."""

    order = -1  # the last, 0 is the first

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.unused = list(range(num_blocks))
        self.readers = dict.fromkeys(self.unused, 0)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.count = 0

    @property
    def num_free(self) -> int:
        return len(self.unused)

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_full(self, length: int) -> bool:
        return length % self.block_size == 0

    def must_copy(self, seq: int) -> bool:
        return self.readers[self.tables[seq][-1]] > 1

    def take(self, count: int) -> list[int]:
        if count > len(self.unused):
            raise OutOfBlocks
        blocks = [self.unused.pop(self.order) for _ in range(count)]
        for block in blocks:
            self.readers[block] = 1
        return blocks

    def release(self, block: int) -> None:
        self.readers[block] -= 1
        if self.readers[block] == 0:
            self.unused.append(block)

    def start(self, table: list[int], length: int) -> int:
        self.count += 1
        self.tables[self.count], self.lengths[self.count] = table, length
        return self.count

    def allocate(self, num_tokens: int) -> int:
        return self.start(self.take(self.blocks_of(num_tokens)), num_tokens)

    def append(self, seq: int) -> Any:
        moved = None
        if self.is_full(self.lengths[seq]):
            self.tables[seq] += self.take(1)
        elif self.must_copy(seq):
            moved = self.copy(seq)
        self.lengths[seq] += 1
        return moved

    def copy(self, seq: int) -> Any:
        table = self.tables[seq]
        (new,), old = self.take(1), table[-1]
        table[-1] = new
        self.release(old)
        return old, new

    def fork(self, seq: int) -> int:
        for block in self.tables[seq]:
            self.readers[block] += 1
        return self.start(list(self.tables[seq]), self.lengths[seq])

    def free(self, seq: int) -> None:
        for block in self.tables.pop(seq):
            self.release(block)

    def block_table(self, seq: int) -> list[int]:
        return self.tables[seq]


# allocate and append ----------------------------------------------------------------------------


class Floor(Allocator):
    def blocks_of(self, num_tokens: int) -> int:
        return num_tokens // self.block_size

    def is_full(self, length: int) -> bool:
        return length % self.block_size == 0 or not length // self.block_size


class OneMore(Allocator):
    def blocks_of(self, num_tokens: int) -> int:
        return num_tokens // self.block_size + 1


class OneTokenLate(Allocator):
    def is_full(self, length: int) -> bool:
        return length % self.block_size == 1 and length > 1


class OneTokenEarly(Allocator):
    def is_full(self, length: int) -> bool:
        return (length + 1) % self.block_size == 0


class EveryToken(Allocator):
    def is_full(self, length: int) -> bool:
        return True


class NeverANewBlock(Allocator):
    def is_full(self, length: int) -> bool:
        return False


class LastBlockKept(Allocator):
    def take(self, count: int) -> list[int]:
        if count >= len(self.unused):
            raise OutOfBlocks
        return super().take(count)


class LengthFirst(Allocator):
    def append(self, seq: int) -> Any:
        self.lengths[seq] += 1
        moved = None
        if self.is_full(self.lengths[seq] - 1):
            self.tables[seq] += self.take(1)
        elif self.must_copy(seq):
            moved = self.copy(seq)
        return moved


class TakesOneByOne(Allocator):
    def take(self, count: int) -> list[int]:
        return [block for _ in range(count) for block in super(TakesOneByOne, self).take(1)]


class TokensForBlocks(Allocator):
    def allocate(self, num_tokens: int) -> int:
        if num_tokens > len(self.unused):
            raise OutOfBlocks
        return super().allocate(num_tokens)


class AlwaysAsks(Allocator):
    def append(self, seq: int) -> Any:
        if not self.unused:
            raise OutOfBlocks
        return super().append(seq)


# fork and copy ----------------------------------------------------------------------------------


class WritesShared(Allocator):
    def must_copy(self, seq: int) -> bool:
        return False


class NotCounted(Allocator):
    def fork(self, seq: int) -> int:
        return self.start(list(self.tables[seq]), self.lengths[seq])


class CopiesAll(Allocator):
    def fork(self, seq: int) -> int:
        return self.start(self.take(len(self.tables[seq])), self.lengths[seq])


class CopiesLast(Allocator):
    def fork(self, seq: int) -> int:
        *shared, _ = self.tables[seq]
        (own,) = self.take(1)
        for block in shared:
            self.readers[block] += 1
        return self.start([*shared, own], self.lengths[seq])


class OneList(Allocator):
    def fork(self, seq: int) -> int:
        for block in self.tables[seq]:
            self.readers[block] += 1
        return self.start(self.tables[seq], self.lengths[seq])


class OnlyLastCounted(Allocator):
    def fork(self, seq: int) -> int:
        self.readers[self.tables[seq][-1]] += 1
        return self.start(list(self.tables[seq]), self.lengths[seq])


class CopiesFull(Allocator):
    def append(self, seq: int) -> Any:
        full, moved = self.is_full(self.lengths[seq]), None
        if self.must_copy(seq):
            moved = self.copy(seq)
        if full:
            self.tables[seq] += self.take(1)
        self.lengths[seq] += 1
        return moved


class CopiesForever(Allocator):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.forked: set[int] = set()

    def fork(self, seq: int) -> int:
        new = super().fork(seq)
        self.forked |= set(self.tables[new])
        return new

    def take(self, count: int) -> list[int]:
        blocks = super().take(count)
        self.forked -= set(blocks)
        return blocks

    def must_copy(self, seq: int) -> bool:
        return self.tables[seq][-1] in self.forked


class OldStillCounted(Allocator):
    def copy(self, seq: int) -> Any:
        table = self.tables[seq]
        (new,), old = self.take(1), table[-1]
        table[-1] = new
        return old, new


class OldGivenBack(Allocator):
    def copy(self, seq: int) -> Any:
        table = self.tables[seq]
        (new,), old = self.take(1), table[-1]
        table[-1] = new
        self.unused.append(old)
        return old, new


class OthersMove(Allocator):
    def copy(self, seq: int) -> Any:
        (new,), old = self.take(1), self.tables[seq][-1]
        for other, table in self.tables.items():
            if other != seq:
                moved = [new if block == old else block for block in table]
                self.readers[new] += moved != table
                self.tables[other] = moved
        self.readers[new] -= 1
        self.readers[old] = 1
        return old, new


class NewOld(Allocator):
    def copy(self, seq: int) -> Any:
        return super().copy(seq)[::-1]


class OnlyNew(Allocator):
    def copy(self, seq: int) -> Any:
        return super().copy(seq)[1]


class SaysNothing(Allocator):
    def append(self, seq: int) -> Any:
        super().append(seq)


class TellsNewBlocks(Allocator):
    def append(self, seq: int) -> Any:
        last = self.tables[seq][-1]
        moved = super().append(seq)
        return (last, self.tables[seq][-1]) if last != self.tables[seq][-1] else moved


# free -------------------------------------------------------------------------------------------


class Leaks(Allocator):
    def free(self, seq: int) -> None:
        del self.tables[seq]


class LeaksShared(Allocator):
    def free(self, seq: int) -> None:
        for block in self.tables.pop(seq):
            if self.readers[block] == 1:
                self.release(block)


class FreesShared(Allocator):
    def free(self, seq: int) -> None:
        self.unused += self.tables.pop(seq)


class FreesLastOnly(Allocator):
    def free(self, seq: int) -> None:
        self.release(self.tables.pop(seq)[-1])


class SharedTables(Allocator):
    """Tables in the class: one dict for all allocators."""

    shared_tables: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.tables = self.shared_tables


class FreedTwice(Allocator):
    def free(self, seq: int) -> None:
        for block in self.tables.pop(seq, []):
            self.release(block)


class StillThere(Allocator):
    def free(self, seq: int) -> None:
        for block in self.tables[seq]:
            self.release(block)


class NegativeReaders(Allocator):
    """It never forgets a table, and returns a block whenever its count is not above 0."""

    def release(self, block: int) -> None:
        self.readers[block] -= 1
        if self.readers[block] <= 0:
            self.unused.append(block)

    def free(self, seq: int) -> None:
        for block in self.tables[seq]:
            self.release(block)
