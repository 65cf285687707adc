"""Which blocks hold KV of a document, by their keys alone.

keys of a prompt     root  k0  k1  k2 | k3  k4
                           ---------   ------
a document           own: k0 k1 k2     ends: k2, so that k3, which holds its last tokens too, and all that
                                       continues it belong to it as well
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from h3kv.core.types import BlockKey


@dataclass(frozen=True, slots=True)
class Reach:
    """What is erased with a document."""

    own: frozenset[BlockKey]
    """Whole blocks that hold its tokens."""
    ends: frozenset[BlockKey]
    """Keys before its last tokens, which fill no block: whatever continues them holds these. The root key where it has
    no whole block."""
    spared: frozenset[BlockKey] = frozenset()
    """Blocks that other documents begin with too: they stay, and what continues them otherwise goes."""

    def covers(self, parent: BlockKey, keys: Sequence[BlockKey], found: set[BlockKey]) -> bool:
        """Whether any of consecutive blocks belongs to it.

        Args:
            parent: the key before them.
            keys: theirs, in order.
            found: keys that were found to belong to it so far; those of these blocks are added.
        """
        is_covered = False
        for key in keys:
            if key not in self.spared and (key in self.own or parent in self.ends or parent in found):
                found.add(key)
                is_covered = True
            parent = key
        return is_covered


def join(reaches: Iterable[Reach], spared: Iterable[BlockKey]) -> Reach:
    """All of them as one, beside blocks that stay."""
    own: set[BlockKey] = set()
    ends: set[BlockKey] = set()
    for each in reaches:
        own |= each.own
        ends |= each.ends
    return Reach(frozenset(own), frozenset(ends), frozenset(spared))
