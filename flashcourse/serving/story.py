"""A block allocator with words in its pages, one picture an event: for showing what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashcourse.serving.block_allocator import BlockAllocator


@dataclass(frozen=True)
class Scene:
    """The pages after one event.

    Attributes:
        caption: what happened.
        words: of each page's slots; None: never written.
        references: of each page.
        kept: pages that nobody holds, but a new sequence may find.
        tables: each sequence's pages, by name.
        lengths: each sequence's slots in use, by name.
        changed: pages that were written or copied in this event.
    """

    caption: str
    words: tuple[tuple[str | None, ...], ...]
    references: tuple[int, ...]
    kept: frozenset[int]
    tables: dict[str, tuple[int, ...]]
    lengths: dict[str, int]
    changed: frozenset[int]


class PageStory:
    """Events on a :class:`BlockAllocator`, each kept as a :class:`Scene`.

    Args:
        num_pages, page_size: of the allocator.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.allocator = BlockAllocator(num_pages, page_size)
        self.scenes: list[Scene] = []
        self._words: list[list[str | None]] = [[None] * page_size for _ in range(num_pages)]
        self._sequence: dict[str, int] = {}
        self._text: dict[str, list[str]] = {}
        self._number: dict[str, int] = {}  # words as token ids

    def begin(self, name: str, words: Sequence[str]) -> None:
        """A new sequence with a prompt; what is published of it is found."""
        tokens = self._tokens(words)
        sequence = self._sequence[name] = self.allocator.begin(tokens)
        found = self.allocator.length(sequence)
        self._text[name] = list(words[:found])
        size = self.allocator.page_size
        how = f"{found // size} of its pages found, the rest written" if found else "written"
        self._write(name, words[found:], f"{name} begins: {len(words)} tokens, {how}")

    def write(self, name: str, *words: str) -> None:
        """A sequence grows."""
        self._write(name, words, f"{name} writes {' '.join(words)!r}")

    def fork(self, name: str, copy: str) -> None:
        """A second sequence with the same content."""
        self._sequence[copy] = self.allocator.fork(self._sequence[name])
        self._text[copy] = list(self._text[name])
        self._keep(f"{copy} is forked from {name}: the same pages, nothing copied", frozenset())

    def free(self, name: str) -> None:
        """A sequence ends."""
        self.allocator.free(self._sequence.pop(name))
        del self._text[name]
        self._keep(f"{name} ends: its pages are counted down", frozenset())

    def _write(self, name: str, words: Sequence[str], caption: str) -> None:
        sequence = self._sequence[name]
        copies = self.allocator.append(sequence, len(words))
        for source, target in copies:
            self._words[target] = list(self._words[source])
            caption += f"; page {source} is shared, so it is copied to page {target} first"
        table, size = self.allocator.block_table(sequence), self.allocator.page_size
        changed = set()
        for slot, word in enumerate(words, len(self._text[name])):
            page = table[slot // size]
            if slot % size == 0:
                self._words[page] = [None] * size
            self._words[page][slot % size] = word
            changed.add(page)
        self._text[name] += words
        self.allocator.publish(sequence, self._tokens(self._text[name]))
        self._keep(caption, frozenset(changed))

    def _keep(self, caption: str, changed: frozenset[int]) -> None:
        pages = range(self.allocator.num_pages)
        self.scenes.append(
            Scene(
                caption,
                tuple(tuple(page) for page in self._words),
                tuple(self.allocator.references(page) for page in pages),
                frozenset(self.allocator.kept_pages),
                {n: tuple(self.allocator.block_table(s)) for n, s in self._sequence.items()},
                {n: self.allocator.length(s) for n, s in self._sequence.items()},
                changed,
            )
        )

    def _tokens(self, words: Sequence[str]) -> list[int]:
        return [self._number.setdefault(word, len(self._number)) for word in words]
