"""Attention and index search of decode steps spread over helping processes, with the numbers of this process alone.

    attend -> job -> units -> helpers (in any number)
                  -> units -> threads of this process        merged here, in position order
    scan   -> job -> the same                                clusters are chosen here

Pages and planes that lie in shared regions can be read by helpers; units of others are computed here, and so is
whatever no helper took, or did not finish within some times that a unit takes. `native/include/h3/offload.hpp` has the
protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3kv import _native
from h3kv.core.ports import AttendCall, BatchCall
from h3kv.memory.mailbox import Member
from h3kv.memory.region_format import ADDRESS_BASE, REGIONS_MAX, WINDOW_BYTES
from h3kv.memory.work_area import WorkArea
from h3kv.telemetry.trace_context import PACKED_BYTES, UNTRACED

REGION_ADDRESSES: Final = (ADDRESS_BASE, ADDRESS_BASE + REGIONS_MAX * WINDOW_BYTES)
"""Where shared regions lie, in every process."""


@dataclass(frozen=True, slots=True)
class Helper:
    """One thread that helps."""

    member: Member
    """Its place among the workers of the mailbox."""
    number: int
    """No other helper of this region has had it."""


@dataclass(frozen=True, slots=True)
class ScanStatistics:
    """What became of scans of an index, in total. Fields as of `OffloadStatistics`."""

    scans: int
    shared: int
    units: int
    units_helped: int
    units_revoked: int
    units_refused: int
    without_room: int


NO_SCANS: Final = ScanStatistics(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class OffloadStatistics:
    """What became of attentions, in total, and who helps now."""

    attentions: int
    shared: int
    """Attentions of which helpers could take a part."""
    units: int
    """Of the shared ones."""
    units_helped: int
    """Computed by helpers."""
    units_revoked: int
    """Taken away from a helper that was too slow, and computed here."""
    units_refused: int
    """Handed back by a helper, and computed here."""
    without_room: int
    """Attentions for which no job was free or large enough."""
    helpers: int
    quarantined_jobs: int
    """Jobs that are not used again until a late helper lets go, or is buried."""
    scanning: ScanStatistics = NO_SCANS
    """Of the searches of retrieval, which are shared as attentions are."""


class SpreadAttention:
    """Satisfies `core.ports.Offload`. All methods may be called from any thread; of several attentions and scans at
    once, one is spread.

    Args:
        area: the work region, opened by this process. It stays the caller's, and open for longer than this.
        shared: range of addresses that helpers can read.
    """

    def __init__(self, area: WorkArea, *, shared: tuple[int, int] = REGION_ADDRESSES) -> None:
        self._area = area
        self._member = area.mailbox.register_caller()
        self.first_number = area.board.next_helper()
        """Helpers of earlier owners have smaller numbers, those of this one larger ones."""
        self._native = _native.OffloadCaller(
            area.board, area.mailbox.native, (self._member.id, self._member.epoch), shared
        )
        self._trace = UNTRACED
        self._scanner = self._native.scanner(UNTRACED)

    def attend(self, call: AttendCall) -> None:
        """See `Offload.attend`."""
        self._native.attend(self._trace, call)

    def attend_batch(self, call: BatchCall) -> None:
        """See `Offload.attend_batch`."""
        self._native.attend_batch(self._trace, call)

    def scanner(self) -> _native.OffloadScanner:
        """See `Offload.scanner`."""
        return self._scanner

    def trace(self, context: bytes) -> None:
        """The packed context under which helpers report what they do for the next attentions and scans."""
        assert len(context) == PACKED_BYTES, f"{len(context)} bytes are no context"
        if context != self._trace:
            self._trace, self._scanner = context, self._native.scanner(context)

    def join(self) -> Helper:
        """A place for a helper, which takes units from now on.

        Raises:
            PeerBusyError: all places are taken.
        """
        helper = Helper(self._area.mailbox.register_worker(), self._area.board.next_helper())
        self._native.join(helper.number)
        return helper

    def bury(self, helper: Helper) -> None:
        """Take back what a helper held that is dead, or has gone for good. A second time it does nothing."""
        self._native.bury(helper.number)
        self._area.mailbox.bury_worker(helper.member)

    def bury_earlier(self) -> None:
        """The same for all helpers that joined an earlier owner of the sequences. None of them may live."""
        self._native.bury_earlier()

    def statistics(self) -> OffloadStatistics:
        """Totals since this was made, and who helps now."""
        attentions, shared, units, helped, revoked, refused, without_room = self._native.counts()
        return OffloadStatistics(
            attentions,
            shared,
            units,
            units_helped=helped,
            units_revoked=revoked,
            units_refused=refused,
            without_room=without_room,
            helpers=self._native.helpers(),
            quarantined_jobs=self._native.quarantined(),
            scanning=ScanStatistics(*self._native.scan_counts()),
        )

    def close(self) -> None:
        """Ask for no more help. Nobody attends through it any more. Calling it again does nothing."""
        self._area.mailbox.bury_caller(self._member)

    def check_integrity(self) -> None:
        """Assert that no job is held and no request under way. Nobody may be at work."""
        assert self._native.quarantined() == 0, f"{self._native.quarantined()} jobs are held by late helpers"
        self._area.mailbox.check_integrity()
        census = self._area.mailbox.census()
        assert census.free == self._area.mailbox.geometry.entries, census
