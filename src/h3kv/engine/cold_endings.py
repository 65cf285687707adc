"""The end of a prefix that lies in the cold store alone: read, or computed again where that is faster.

What is computed again is there twice afterwards. The newer segments lie in memory, so they are found first from then
on; the older ones stay in the cold store until they are the least recently used.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.ports import Directory, Telemetry
from h3kv.engine.prefix import Mount
from h3kv.engine.segment import Phase, Segment
from h3kv.engine.segments import SegmentTable
from h3kv.engine.sequence_kv import SequenceKv
from h3kv.engine.speeds import Speeds
from h3kv.policy.load_or_recompute import Choice, ColdMount, mounts_to_keep
from h3kv.telemetry import names


@dataclass(frozen=True, slots=True)
class Ending:
    """What was decided for one prefix."""

    loaded_tokens: int = 0
    """Of the segments that are read."""
    dropped: tuple[Mount, ...] = ()
    """Not pinned any more: their tokens are computed."""

    @property
    def dropped_tokens(self) -> int:
        """Tokens that were found and are computed all the same."""
        return sum(mount.blocks for mount in self.dropped) * BLOCK_TOKENS


class ColdEndings:
    """Decides for each sequence that begins. Not thread-safe.

    Args:
        segments: of the mounts.
        directory: where the segments are found.
        speeds: as measured.
        telemetry: receives what was chosen.
        is_choosing: whether there is a choice. Otherwise all is read.
    """

    def __init__(
        self,
        segments: SegmentTable,
        directory: Directory,
        speeds: Speeds,
        *,
        telemetry: Telemetry,
        is_choosing: bool,
    ) -> None:
        self._is_choosing = is_choosing
        self._segments = segments
        self._directory = directory
        self._speeds = speeds
        self._telemetry = telemetry
        # Of sequences that run: what they compute again.
        self._older: dict[SequenceKv, list[Segment]] = {}

    def choose(self, mounts: list[Mount]) -> Ending:
        """Decide for a prefix. The mounts whose tokens are computed faster are unpinned and taken off the list.

        Called before anything is brought into memory for them.
        """
        run = list(itertools.takewhile(_is_cold, reversed(mounts)))[::-1]
        can_choose = self._is_choosing and bool(run)
        first = len(mounts) - len(run)
        kept = mounts_to_keep(
            sum(mount.blocks for mount in mounts[:first]) * BLOCK_TOKENS,
            [self._cost(mount) for mount in run],
            prefill=self._speeds.prefill() if can_choose else None,
            reading=self._speeds.reading() if can_choose else None,
        )
        while len(mounts) > first + kept:
            self._segments.unpin(mounts.pop().segment)
        loaded = sum(mount.blocks for mount in run[:kept]) * BLOCK_TOKENS
        return Ending(loaded, tuple(run[kept:]))

    def began(self, kv: SequenceKv, ending: Ending) -> None:
        """A sequence has begun from what was kept."""
        kv.recomputed_tokens = ending.dropped_tokens
        if ending.dropped:
            self._older[kv] = [mount.segment for mount in ending.dropped]
            self._count(Choice.RECOMPUTE, 1, ending.dropped_tokens)
            self._count(Choice.LOAD, 0, ending.loaded_tokens)
        elif ending.loaded_tokens:
            self._count(Choice.LOAD, 1, ending.loaded_tokens)

    def ended(self, kv: SequenceKv) -> None:
        """A sequence was closed: what it computed and shared is found before what it was to replace."""
        for segment in self._older.pop(kv, ()):
            if segment.phase is Phase.SEALED and self._segments.find(segment.id) is segment:
                self._directory.withdraw(segment.keys, segment.id)
                self._directory.publish(segment.keys, segment.id)

    def check_integrity(self, running: int) -> None:
        """Assert that nothing is remembered of sequences that ended."""
        assert len(self._older) <= running, "a sequence ended and its older segments are still remembered"

    def _cost(self, mount: Mount) -> ColdMount:
        """What reading a mount takes: a partly used segment is read as a whole."""
        layout = self._segments.layout
        slab_bytes = layout.slab.content_bytes(mount.segment.room_blocks)
        return ColdMount(mount.blocks * BLOCK_TOKENS, layout.layers, layout.layers * slab_bytes)

    def _count(self, choice: Choice, requests: int, tokens: int) -> None:
        self._telemetry.count(names.LOAD_OR_RECOMPUTE, requests, choice=choice)
        self._telemetry.count(names.LOAD_OR_RECOMPUTE_TOKENS, tokens, choice=choice)


def _is_cold(mount: Mount) -> bool:
    """Whether it lies in the cold store alone, and is not on its way."""
    segment = mount.segment
    return segment.cold_L is not None and segment.home_L is None and segment.arrival is None
