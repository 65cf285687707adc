"""Sizes of the segments that a sequence opens, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator


class Rooms:
    """Gives them out. Sizes are in blocks.

    Args:
        sizes_from: those for the sequence's blocks from a given one on, in order.
        first_block: the first that needs one.
    """

    def __init__(self, sizes_from: Callable[[int], Iterator[int]], first_block: int) -> None:
        self._sizes_from = sizes_from
        self._sizes = sizes_from(first_block)

    def restart(self, first_block: int) -> None:
        """Begin again, for the blocks from this one on."""
        self._sizes = self._sizes_from(first_block)

    def take(self) -> int:
        """The next size."""
        return next(self._sizes)

    def put_back(self, size: int) -> None:
        """The last one that was taken is the next again: where there is no room now there may be later."""
        self._sizes = itertools.chain([size], self._sizes)

    def take_all(self, blocks: int) -> list[int]:
        """The next sizes, for so many blocks together at least."""
        sizes: list[int] = []
        while sum(sizes) < blocks:
            sizes.append(self.take())
        return sizes
