"""Whole slabs on their way to the server's store and back, and the answers that are waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import H3Error, RequestError, SlabCorruptError, StaleHandleError, TierBrokenError
from h3kv.core.hashing import KEY_BYTES
from h3kv.core.types import Completion, Fetch, Move, SlabKey, SlotHandle, Tier
from h3kv.tiers.cold.extents import Extent, Phase
from h3kv.tiers.cold.ops import address_of
from h3kv.tiers.remote import records
from h3kv.tiers.remote.exchange import Exchange
from h3kv.tiers.remote.records import FETCH_DTYPE, HANDLE_DTYPE, WRITE_DTYPE, Failure, Kind, Record
from h3kv.tiers.remote.session import SharedRanges
from h3kv.tiers.remote.slab_mirror import SlabMirror

FETCHES_MAX = 4096
"""In one record: 196 KiB."""


@dataclass(frozen=True, slots=True)
class _Answer:
    record: Record
    failure: Failure | None


class Transfers:
    """Moves and fetches in flight. Not thread-safe.

    Args:
        mirror: whose slabs they are.
        exchange: how the server is reached.
        memory: that it reaches.
    """

    def __init__(self, mirror: SlabMirror, exchange: Exchange, memory: SharedRanges) -> None:
        self._mirror = mirror
        self._exchange = exchange
        self._memory = memory
        self._writes: dict[int, Extent] = {}
        self._fetches: dict[int, Fetch] = {}
        self._ended: list[tuple[int, Completion]] = []
        # Segments that the server has written, or has not: visible with the next `take_ended`.
        self._written: list[tuple[int, Extent, TierBrokenError | None]] = []
        self._answers: dict[int, _Answer | None] = {}
        self.erasing: dict[int, int] = {}
        """Blocks of one layer of each call of `erase` that the server has not said to be done."""

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` would give something."""
        return bool(self._ended or self._written)

    @property
    def in_flight(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._writes or self._fetches or self.erasing)

    def take_ended(self) -> list[Completion]:
        """What ended since the last call, in the order in which it began."""
        self.publish()
        ended, self._ended = sorted(self._ended, key=lambda pair: pair[0]), []
        return [completion for _, completion in ended]

    def publish(self) -> None:
        """Make segments visible that were written."""
        written, self._written = self._written, []
        for number, extent, fault in written:
            ended = self._mirror.segments.end_writing(extent, fault)
            self._ended += [(number, completion) for completion in ended]

    def check_memory(self, moves: Sequence[Move | Fetch]) -> None:
        """Raise RequestError unless the server reaches all sources and targets."""
        for move in moves:
            view = move.target if isinstance(move, Fetch) else move.source
            assert view is not None
            if view.nbytes and not self._memory.holds(address_of(view), view.nbytes):
                raise RequestError("the server of the cold store does not reach this memory: use slots of a region")

    def reserve(self, sizes: Sequence[int], *, deadline_ns: int) -> list[SlotHandle]:
        """The server's handles of the first slab of each segment. Raises what the server says, or TierBrokenError."""
        record = records.pack(Kind.RESERVE, 0, bytes(sizes), count=len(sizes))
        answer = self._ask(record, deadline_ns=deadline_ns)
        return records.read_handles(records.items(answer, HANDLE_DTYPE))

    def ask_wrapped(self, theirs_L: Sequence[SlotHandle], *, deadline_ns: int) -> list[bool]:
        """Whether each slab is stored wrapped. Raises as `reserve`."""
        record = records.pack(Kind.WRAPPED, 0, records.handle_rows(theirs_L), count=len(theirs_L))
        return [bool(each) for each in self._ask(record, deadline_ns=deadline_ns).body]

    def join(self, extent: Extent, layer: int, move: Move) -> None:
        """Add a slab to its segment, which is sent when it is whole."""
        self._end_moves(self._mirror.segments.join(extent, layer, move))
        if extent.phase is Phase.WRITING:
            number = self._exchange.numbers()
            self._writes[number] = extent
            theirs_L = self._mirror.theirs(extent)
            assert theirs_L is not None, "checked before"
            self._exchange.send(_write_record(number, theirs_L[0], extent))

    def end_waiting(self, extent: Extent) -> None:
        """End the moves of a segment that will not become whole."""
        self._end_moves(self._mirror.segments.end_waiting(extent))

    def fetch(self, fetches: Sequence[Fetch], sources: Sequence[tuple[Extent, int]]) -> None:
        """Begin fetches; those that cannot be end at once."""
        rows: list[tuple[int, ...]] = []
        number = first = self._exchange.numbers(len(fetches))
        begun: dict[int, Fetch] = {}
        for fetch, (extent, layer) in zip(fetches, sources, strict=True):
            theirs_L = self._mirror.theirs(extent) if self._mirror.knows(extent) else None
            size = min(fetch.target.nbytes, self._written_bytes(extent) - fetch.offset_bytes)
            error = self._refusal(fetch, extent, theirs_L)
            if error is not None or size <= 0:
                self._ended.append((number, Completion(fetch, error)))
            else:
                assert theirs_L is not None
                theirs, target = theirs_L[layer], address_of(fetch.target)
                rows.append((theirs.slot, theirs.generation, theirs.blocks, 0, fetch.offset_bytes, target, size))
                begun[first + len(rows) - 1] = fetch
            number += 1
        self._fetches |= begun
        for at in range(0, len(rows), FETCHES_MAX):
            part_N = np.array(rows[at : at + FETCHES_MAX], dtype=FETCH_DTYPE)
            self._exchange.send(records.pack(Kind.FETCH, first + at, part_N.tobytes(), count=part_N.size))

    def release(self, theirs: Sequence[SlotHandle]) -> None:
        """Give the server's slots back."""
        for at in range(0, len(theirs), FETCHES_MAX):
            part = theirs[at : at + FETCHES_MAX]
            self._exchange.send(records.pack(Kind.RELEASE, 0, records.handle_rows(part), count=len(part)))
        self._exchange.flush()

    def erase(self, theirs: Sequence[SlotHandle], *, blocks: int) -> None:
        """Have the server's slots overwritten, and give them back.

        Args:
            theirs: perhaps none: then what was begun before is waited for, also by an earlier client.
            blocks: of one layer, that count as used until the server says that it is done.
        """
        parts = [theirs[at : at + FETCHES_MAX] for at in range(0, len(theirs), FETCHES_MAX)] or [()]
        for part in parts:
            number = self._exchange.numbers()
            self.erasing[number] = blocks if part is parts[-1] else 0
            self._exchange.send(records.pack(Kind.ERASE, number, records.handle_rows(part), count=len(part)))
        self._exchange.flush()

    def take(self, record: Record) -> bool:
        """Take a completion if it is of a transfer or an answer."""
        if record.kind is Kind.FETCHED:
            numbers_N: NDArray[np.uint64] = records.items(record, np.dtype("<u8"))
            for number in numbers_N.tolist():
                self._end_fetch(number, None)
            return True
        if record.kind is Kind.WRITTEN:
            self._end_write(record.number, None, records.items(record, np.dtype("<u4")).tolist())
            return True
        if record.kind in {Kind.RESERVED, Kind.IS_WRAPPED}:
            self._take_answer(record, None)
            return True
        if record.kind is Kind.ERASED:
            self.erasing.pop(record.number, None)
            return True
        if record.kind is Kind.FAILED:
            return self._take_failure(record)
        return False

    def end_all(self, error: H3Error) -> None:
        """The server is gone: all that was in flight ends so."""
        for number in list(self._writes):
            self._end_write(number, error, ())
        for number in list(self._fetches):
            self._end_fetch(number, error)

    def _take_failure(self, record: Record) -> bool:
        number = record.number
        if number in self._answers:
            self._take_answer(record, records.read_failure(record))
        elif number in self._writes:
            extent = self._writes[number]
            assert extent.segment is not None
            self._end_write(number, records.read_failure(record).error(SlabKey(extent.segment, 0)), ())
        elif number in self._fetches:
            fetch = self._fetches[number]
            error = records.read_failure(record).error(fetch.key)
            self._end_fetch(number, error)
        else:
            return False
        return True

    def _ask(self, record: bytes, *, deadline_ns: int) -> Record:
        number = self._exchange.numbers()
        numbered = records.numbered(record, number)
        self._exchange.awaited_total += 1
        self._answers[number] = None
        self._exchange.send(numbered)
        self._exchange.flush()
        try:
            while (answer := self._answers[number]) is None:
                seen = self._exchange.signal
                self._exchange.pump()
                left_ns = deadline_ns - time.monotonic_ns()
                if self._answers[number] is None:
                    if left_ns <= 0 or not self._exchange.is_open:
                        raise TierBrokenError(
                            "the process that owns the cold store does not answer: see whether it runs", tier=Tier.NVME
                        )
                    self._exchange.wait(seen, left_ns)
        finally:
            del self._answers[number]
        if answer.failure is not None:
            raise answer.failure.error(None)
        return answer.record

    def _take_answer(self, record: Record, failure: Failure | None) -> None:
        if record.number in self._answers:
            self._answers[record.number] = _Answer(record, failure)
        elif record.kind is Kind.RESERVED:
            # Nobody waits for it any more.
            self.release(self._all_slabs(records.read_handles(records.items(record, HANDLE_DTYPE))))

    def _all_slabs(self, firsts: Iterable[SlotHandle]) -> list[SlotHandle]:
        return [slab for first in firsts for slab in self._mirror.slabs_from(first)]

    def _end_write(self, number: int, error: H3Error | None, wrapped_L: Sequence[int]) -> None:
        extent = self._writes.pop(number, None)
        if extent is None:
            return
        # A stale slab is one that was released here meanwhile: the mirror knows which.
        is_there = error is None or isinstance(error, StaleHandleError)
        fault = None if is_there else TierBrokenError(str(error), tier=Tier.NVME)
        if self._mirror.knows(extent):
            self._mirror.note_wrapped(extent, wrapped_L or [0] * len(extent.handles_L))
        self._written.append((number, extent, fault))

    def _end_fetch(self, number: int, error: H3Error | None) -> None:
        fetch = self._fetches.pop(number, None)
        if fetch is not None:
            if isinstance(error, SlabCorruptError):
                self._retire(fetch)
            self._ended.append((number, Completion(fetch, error)))

    def _retire(self, fetch: Fetch) -> None:
        """The server gave the segment up."""
        segments = self._mirror.segments
        if segments.extents.owns(fetch.source):
            segments.retire(segments.extents.find(fetch.source)[0])

    def _end_moves(self, ended: Iterable[Completion]) -> None:
        number = self._exchange.numbers()
        self._ended += [(number, completion) for completion in ended]

    def _written_bytes(self, extent: Extent) -> int:
        return extent.pieces * self._mirror.geometry.mark.check_bytes

    def _refusal(
        self, fetch: Fetch, extent: Extent, theirs_L: Sequence[SlotHandle] | None
    ) -> SlabCorruptError | TierBrokenError | StaleHandleError | None:
        if extent.phase is Phase.RETIRED:
            return lost(fetch.key)
        if theirs_L is None or not self._exchange.is_open:
            message = f"{fetch.key} cannot be read while the process that owns the cold store is gone"
            return TierBrokenError(f"{message}: try again once it is back", tier=Tier.NVME)
        return None


def lost(key: SlabKey) -> SlabCorruptError:
    """A slab whose segment was given up, or did not outlive the server."""
    return SlabCorruptError(f"{key} is lost to the cold store: compute its tokens again", key=key)


def _write_record(number: int, theirs: SlotHandle, extent: Extent) -> bytes:
    moves = [extent.moves[layer] for layer in range(len(extent.handles_L))]
    sources = [move.source for move in moves if move.source is not None]
    assert len(sources) == len(moves) and len({source.nbytes for source in sources}) == 1
    label = extent.label
    head_N = np.array(
        [(theirs.slot, theirs.generation, theirs.blocks, int(label is not None), sources[0].nbytes)], dtype=WRITE_DTYPE
    )
    addresses_L = np.array([address_of(source) for source in sources], dtype="<u8")
    tail = bytes(KEY_BYTES) if label is None else b"".join((label.parent, *label.keys))
    body = head_N.tobytes() + addresses_L.tobytes() + tail
    return records.pack(Kind.WRITE, number, body, count=0 if label is None else len(label.keys))
