"""The block allocator under random use: nothing lost, nothing in two hands, no text changed."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from plugins.machine import THOROUGH

from flashcourse.serving import BlockAllocator, OutOfBlocks

# Prefixes of each other, and equal pages behind different ones.
TEXTS = ([1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 1, 1, 1, 1], [2, 2, 1, 1, 1, 1], [3], [1, 1, 1])


def snapshot(allocator: BlockAllocator) -> tuple:
    return (
        allocator.num_free,
        allocator.kept_pages,
        allocator.used,
        allocator.sequences,
        [allocator.block_table(s) for s in allocator.sequences],
        [allocator.length(s) for s in allocator.sequences],
        [allocator.references(page) for page in range(allocator.num_pages)],
    )


class Allocating(RuleBasedStateMachine):
    """Random use of an allocator, beside a memory that it stands for.

    Attributes:
        memory: in each slot what a KV cache would hold: it depends on all tokens up to there.
        texts: what each sequence must read there.
    """

    kind = BlockAllocator
    pages = 7
    page_size = 2

    def __init__(self):
        super().__init__()
        self.allocator = self.kind(self.pages, self.page_size)
        self.memory = [[None] * self.page_size for _ in range(self.pages)]
        self.texts: dict[int, list[int]] = {}

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.texts)))

    def write(self, sequence, tokens):
        """Grow a sequence by tokens, as the paged cache does; OutOfBlocks must change nothing."""
        before = snapshot(self.allocator)
        try:
            copies = self.allocator.append(sequence, len(tokens))
        except OutOfBlocks:
            assert snapshot(self.allocator) == before
            return False
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        table = self.allocator.block_table(sequence)
        start = len(self.texts[sequence])
        self.texts[sequence] = self.texts[sequence] + list(tokens)
        for slot in range(start, start + len(tokens)):
            content = tuple(self.texts[sequence][: slot + 1])
            self.memory[table[slot // self.page_size]][slot % self.page_size] = content
        self.allocator.publish(sequence, self.texts[sequence])
        return True

    @rule(text=st.sampled_from(TEXTS))
    def begin(self, text):
        sequence = self.allocator.begin(text)
        found = self.allocator.length(sequence)
        assert found < len(text)  # somebody has to compute the last token
        self.texts[sequence] = text[:found]
        if not self.write(sequence, text[found:]):
            self.free_one(sequence)

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        before = snapshot(self.allocator)
        try:
            sequence = self.allocator.allocate(count)
        except OutOfBlocks:
            assert snapshot(self.allocator) == before
            assert -(-count // self.page_size) > before[0]
            return
        assert self.allocator.length(sequence) == count
        self.allocator.free(sequence)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(1, 2), max_size=4))
    def append(self, data, tokens):
        self.write(self.pick(data), tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data):
        sequence = self.pick(data)
        free = self.allocator.num_free
        copy = self.allocator.fork(sequence)
        assert self.allocator.num_free == free  # by reference
        self.texts[copy] = list(self.texts[sequence])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data):
        self.free_one(self.pick(data))

    def free_one(self, sequence):
        self.allocator.free(sequence)
        del self.texts[sequence]
        with pytest.raises(KeyError, match="was freed"):
            self.allocator.free(sequence)

    @invariant()
    def everybody_reads_his_own_text(self):
        for sequence, text in self.texts.items():
            table = self.allocator.block_table(sequence)
            assert self.allocator.length(sequence) == len(text)
            assert len(table) == -(-len(text) // self.page_size)
            read = [
                self.memory[table[slot // self.page_size]][slot % self.page_size]
                for slot in range(len(text))
            ]
            assert read == [tuple(text[: slot + 1]) for slot in range(len(text))]

    @invariant()
    def references_add_up(self):
        tables = [self.allocator.block_table(s) for s in self.allocator.sequences]
        for page in range(self.pages):
            assert self.allocator.references(page) == sum(table.count(page) for table in tables)
        held = {page for table in tables for page in table}
        assert self.allocator.num_free == self.pages - len(held)
        assert held.isdisjoint(self.allocator.kept_pages)
        filled = {
            (page, slot)
            for sequence, table in zip(self.allocator.sequences, tables, strict=True)
            for number, page in enumerate(table)
            for slot in range(
                min(
                    self.page_size,
                    self.allocator.length(sequence) - number * self.page_size,
                )
            )
        }
        assert self.allocator.used == len(filled)

    def teardown(self):
        for sequence in list(self.texts):
            self.free_one(sequence)
        assert self.allocator.num_free == self.pages
        assert self.allocator.used == 0
        everything = self.allocator.allocate(self.pages * self.page_size)
        assert sorted(self.allocator.block_table(everything)) == list(range(self.pages))


def drive(machine, examples, steps, phases=tuple(Phase)):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True,
            database=None, phases=phases, report_multiple_bugs=False, print_blob=False,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("pages", "page_size"), [(7, 2), (3, 1), (5, 4)])
def test_random_use(pages, page_size):
    machine = type("Machine", (Allocating,), {"pages": pages, "page_size": page_size})
    drive(machine, *((300, 100) if THOROUGH else (25, 30)))


class NoCopyOnWrite(BlockAllocator):
    def append(self, sequence, count=1):
        last = self._of(sequence).pages[-1:]
        holders = [self._references[page] for page in last]
        for page in last:
            self._references[page] = 1
        try:
            return super().append(sequence, count)
        finally:
            for page, number in zip(last, holders, strict=True):
                self._references[page] = number


class FreesWhatOthersHold(BlockAllocator):
    def free(self, sequence):
        for page in self._of(sequence).pages:
            self._references[page] = 1
        super().free(sequence)


class ForgetsThePagesBefore(BlockAllocator):
    def publish(self, sequence, tokens):
        self._of(sequence).key = b""
        super().publish(sequence, tokens)


class TakesBeforeItCounts(BlockAllocator):
    def append(self, sequence, count=1):
        for _ in range(count):
            copies = super().append(sequence, 1)
        return copies if count else []


class LosesCopies(BlockAllocator):
    def append(self, sequence, count=1):
        super().append(sequence, count)
        return []


class KeepsPagesItEvicted(BlockAllocator):
    def _take(self):
        known = dict(self._page_of)
        page = super()._take()
        self._page_of.update((key, p) for key, p in known.items() if p == page)
        return page


@pytest.mark.parametrize(
    "broken",
    [
        NoCopyOnWrite,
        FreesWhatOthersHold,
        ForgetsThePagesBefore,
        TakesBeforeItCounts,
        LosesCopies,
        KeepsPagesItEvicted,
    ],
)
def test_random_use_finds_a_broken_allocator(broken):
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
        drive(type("Machine", (Allocating,), {"kind": broken}), 200, 30, [Phase.generate])


def test_a_fork_shares_until_one_of_them_writes():
    allocator = BlockAllocator(8, 4)
    first = allocator.allocate(6)
    second = allocator.fork(first)
    assert allocator.block_table(first) == allocator.block_table(second)
    full, last = allocator.block_table(first)
    copies = allocator.append(second)
    assert [source for source, _ in copies] == [last]
    assert allocator.block_table(second)[0] == full
    assert allocator.block_table(second)[1] == copies[0][1] != last
    assert allocator.append(first) == []  # alone again: it may write where it is
    assert allocator.references(full) == 2


def test_full_last_pages_are_not_copied():
    allocator = BlockAllocator(8, 4)
    first = allocator.allocate(4)
    second = allocator.fork(first)
    assert allocator.append(second) == []
    assert len(allocator.block_table(second)) == 2


def test_prefixes_are_found_by_all_tokens_before_them():
    allocator = BlockAllocator(8, 2)
    text = [1, 2, 3, 4, 5]
    first = allocator.allocate(5)
    allocator.publish(first, text)
    assert allocator.length(allocator.begin(text)) == 4
    assert allocator.length(allocator.begin([9, 9, 3, 4, 5])) == 0
    assert allocator.length(allocator.begin([1, 2, 3, 4])) == 2  # one token is left to compute
    assert allocator.length(allocator.begin([1, 2])) == 0


def test_nothing_is_found_before_it_was_published_or_when_sharing_is_off():
    allocator = BlockAllocator(8, 2)
    allocator.allocate(4)
    assert allocator.length(allocator.begin([1, 2, 3, 4, 5])) == 0
    private = BlockAllocator(8, 2, share_prefixes=False)
    private.publish(private.allocate(4), [1, 2, 3, 4])
    assert private.length(private.begin([1, 2, 3, 4, 5])) == 0


def test_the_longest_unused_prefix_is_evicted_first_and_its_end_before_its_beginning():
    allocator = BlockAllocator(4, 1)
    for text in ([1, 2], [3, 4]):
        sequence = allocator.allocate(2)
        allocator.publish(sequence, text)
        allocator.free(sequence)
    assert (allocator.num_free, allocator.num_kept) == (4, 4)
    allocator.allocate(1)
    assert allocator.evictions == 1
    found = allocator.begin([1, 2, 9])
    assert allocator.length(found) == 1  # 2 is gone, 1 is still there
    allocator.free(found)
    assert allocator.length(allocator.begin([3, 4, 9])) == 2


def test_a_found_page_is_no_longer_to_be_had():
    allocator = BlockAllocator(2, 1)
    sequence = allocator.allocate(1)
    allocator.publish(sequence, [7])
    allocator.free(sequence)
    found = allocator.begin([7, 8])
    with pytest.raises(OutOfBlocks, match="2 pages of 1 slots, and 1 of 2 can be had"):
        allocator.append(found, 2)


@pytest.mark.parametrize(("pages", "page_size"), [(0, 4), (4, 0), (-1, 1)])
def test_sizes_are_positive(pages, page_size):
    with pytest.raises(ValueError, match="at least 1"):
        BlockAllocator(pages, page_size)


def test_wrong_calls():
    allocator = BlockAllocator(4, 2)
    sequence = allocator.allocate(3)
    with pytest.raises(ValueError, match="negative"):
        allocator.append(sequence, -1)
    with pytest.raises(ValueError, match="3 slots in use, but only 2 tokens"):
        allocator.publish(sequence, [1, 2])
    with pytest.raises(KeyError, match="no sequence 99"):
        allocator.block_table(99)
