"""Which sequence holds which pages: reference counts, copy-on-write, shared prefixes, eviction.

Numbers only. The keys and values lie in :mod:`flashcourse.serving.paged_cache`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flashcourse.serving.kv_cache import CacheFull


class OutOfBlocks(CacheFull):
    """No page is free and none can be evicted. Nothing has changed."""


@dataclass
class _Held:
    """What a sequence holds.

    Attributes:
        pages: in order; always just enough for ``length``.
        length: slots in use.
        published: pages from the first on that others can find.
        key: of the last published page.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    published: int = 0
    key: bytes = b""


class BlockAllocator:
    """Deals out pages of a KV cache (Kwon et al., 2023, section 4.2 to 4.4).

    A page is in one of three places: *free*; *held* by one sequence or more, counted; or *kept*:
    held by none, but its full page of tokens is known and the next sequence that begins with the
    same tokens finds it. Kept pages are evicted when no free one is left, the longest unused first.

    Args:
        num_pages: pages there are.
        page_size: slots (tokens) a page.
        share_prefixes: keep and find full pages by their tokens.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(self, num_pages: int, page_size: int, *, share_prefixes: bool = True) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}"
            )
        self.num_pages, self.page_size = num_pages, page_size
        self.share_prefixes = share_prefixes
        self.used = 0  # slots of held pages that hold a token; a shared slot counts once
        self.evictions = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._references = [0] * num_pages
        self._filled = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._held: dict[int, _Held] = {}
        self._next = 0

    @property
    def num_free(self) -> int:
        """Pages that can be dealt out: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """How many pages are kept: no sequence holds them, but a new one may find them."""
        return len(self._kept)

    @property
    def kept_pages(self) -> list[int]:
        """The kept pages, the next to be evicted first."""
        return list(self._kept)

    @property
    def sequences(self) -> list[int]:
        """The sequences there are, the oldest first."""
        return list(self._held)

    def length(self, sequence: int) -> int:
        """Slots in use by a sequence."""
        return self._of(sequence).length

    def block_table(self, sequence: int) -> list[int]:
        """A sequence's pages in order: slot ``n`` lies in page ``table[n // page_size]``."""
        return list(self._of(sequence).pages)

    def references(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._references[page]

    def allocate(self, num_tokens: int = 0) -> int:
        """A new sequence with ``num_tokens`` slots.

        Raises:
            OutOfBlocks: there are too few pages.
        """
        sequence = self._new(_Held())
        try:
            self.append(sequence, num_tokens)
        except Exception:
            del self._held[sequence]
            raise
        return sequence

    def begin(self, tokens: Sequence[int]) -> int:
        """A new sequence that already holds the published pages ``tokens`` begin with.

        ``length`` then says how many tokens were found. At least the last token is left to the
        caller, because somebody has to compute what comes after it.
        """
        held = _Held()
        if self.share_prefixes:
            key = b""
            for start in range(0, len(tokens) - self.page_size, self.page_size):
                key = _chain(key, tokens[start : start + self.page_size])
                page = self._page_of.get(key)
                if page is None:
                    break
                if self._references[page] == 0:
                    del self._kept[page]
                    self.used += self.page_size
                self._references[page] += 1
                held.pages.append(page)
                held.key = key
            held.published = len(held.pages)
            held.length = held.published * self.page_size
        return self._new(held)

    def append(self, sequence: int, count: int = 1) -> list[tuple[int, int]]:
        """Give a sequence ``count`` more slots.

        Returns:
            Pages to copy, as (from, to), before anything is written: the last page, if it is
            partly filled and shared, gets a copy of its own (copy-on-write).

        Raises:
            OutOfBlocks: there are too few pages.
            ValueError: a negative count.
        """
        held = self._of(sequence)
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        inside = held.length % self.page_size  # slots in use of a last page that is not full
        split = count > 0 and inside > 0 and self._references[held.pages[-1]] > 1
        pages = -(-(held.length + count) // self.page_size) - len(held.pages) + split
        if pages > self.num_free:
            raise OutOfBlocks(
                f"{count} more tokens need {pages} pages of {self.page_size} slots, and "
                f"{self.num_free} of {self.num_pages} can be had: free a sequence first"
            )
        copies = []
        if split:
            shared = held.pages[-1]
            held.pages[-1] = self._take()
            self._fill(held.pages[-1], inside)
            self._release(shared)
            copies.append((shared, held.pages[-1]))
        end = held.length + count
        while held.length < end:
            if held.length % self.page_size == 0:
                held.pages.append(self._take())
            room = self.page_size - held.length % self.page_size
            step = min(room, end - held.length)
            self._fill(held.pages[-1], step)
            held.length += step
        return copies

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """Say which tokens a sequence's slots hold, so that its full pages can be found.

        Args:
            tokens: of the whole sequence; more than its slots are allowed.

        Raises:
            ValueError: there are more slots than tokens.
        """
        held = self._of(sequence)
        if len(tokens) < held.length:
            raise ValueError(
                f"the sequence has {held.length} slots in use, but only {len(tokens)} tokens came"
            )
        if not self.share_prefixes:
            return
        while (held.published + 1) * self.page_size <= held.length:
            start = held.published * self.page_size
            held.key = _chain(held.key, tokens[start : start + self.page_size])
            page = held.pages[held.published]
            # Two sequences that computed the same tokens at once: the first page is found.
            if held.key not in self._page_of and page not in self._key_of:
                self._page_of[held.key] = page
                self._key_of[page] = held.key
            held.published += 1

    def fork(self, sequence: int) -> int:
        """A second sequence with the same content: it holds the same pages, nothing is copied."""
        held = self._of(sequence)
        for page in held.pages:
            self._references[page] += 1
        return self._new(replace(held, pages=list(held.pages)))

    def free(self, sequence: int) -> None:
        """End a sequence. Pages that nobody else holds are free, or kept if they were published.

        Raises:
            KeyError: there is no such sequence, or it was freed before.
        """
        held = self._of(sequence)
        del self._held[sequence]
        for page in reversed(held.pages):  # the end of a text is evicted before its beginning
            self._release(page)

    def _of(self, sequence: int) -> _Held:
        if sequence not in self._held:
            raise KeyError(f"there is no sequence {sequence}: it was freed, or never allocated")
        return self._held[sequence]

    def _new(self, held: _Held) -> int:
        sequence = self._next
        self._next += 1
        self._held[sequence] = held
        return sequence

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self.evictions += 1
        self._references[page] = 1
        self._filled[page] = 0
        return page

    def _fill(self, page: int, slots: int) -> None:
        self._filled[page] += slots
        self.used += slots

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page]:
            return
        self.used -= self._filled[page]
        if page in self._key_of:
            self._kept[page] = None
        else:
            self._free.append(page)


def _chain(key: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a page: of its tokens and of all before them, so that equal pages in different
    places differ. A cryptographic hash: nobody can make a page that is taken for another's."""
    return hashlib.blake2b(key + array("q", tokens).tobytes(), digest_size=16).digest()
