"""The side of a helper: it takes units of attention and of scans, and computes them with the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from h3kv import _native
from h3kv.attention.offload import Helper
from h3kv.core.errors import NotRegisteredError
from h3kv.memory.mailbox import SPIN_NS
from h3kv.memory.work_area import WorkArea

_OK: Final = 0
_BURIED: Final = 5
"""`h3::MailboxResult`."""


@dataclass(frozen=True, slots=True)
class TracedHelp:
    """What was done for one attention or scan whose request is traced."""

    context: bytes
    """Packed, of the span that asked."""
    start_ns: int
    """Monotonic."""
    end_ns: int
    units: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class HelperStatistics:
    """Of one helper, in total."""

    jobs: int
    units: int
    """That were done in time."""
    refused: int
    """Requests and units: malformed, or with an address outside of the regions."""
    late: int
    """Units that were taken away before they were done."""
    read_bytes: int
    busy_ns: int
    in_flight: int
    """Units, now."""
    scans: int = 0
    """Units of scans, among `units`."""

    def __add__(self, other: HelperStatistics) -> HelperStatistics:
        return HelperStatistics(
            jobs=self.jobs + other.jobs,
            units=self.units + other.units,
            refused=self.refused + other.refused,
            late=self.late + other.late,
            read_bytes=self.read_bytes + other.read_bytes,
            busy_ns=self.busy_ns + other.busy_ns,
            in_flight=self.in_flight + other.in_flight,
            scans=self.scans + other.scans,
        )


NO_WORK: Final = HelperStatistics(0, 0, 0, 0, 0, 0, 0)


class AttentionHelper:
    """One helper. `serve` is for one thread; `statistics` for any.

    Args:
        area: the work region.
        helper: the place that the owner of the sequences gave it.
        ranges: begin and end of each region that is mapped here. What a job names outside of them is refused.
        spin_ns: how long it looks for work before it sleeps.
    """

    def __init__(
        self, area: WorkArea, helper: Helper, *, ranges: Sequence[tuple[int, int]], spin_ns: int = SPIN_NS
    ) -> None:
        self._area = area
        self.helper = helper
        self._native = _native.OffloadHelper(
            area.board,
            area.mailbox.native,
            (helper.member.id, helper.member.epoch),
            helper.number,
            list(ranges),
            spin_ns,
        )

    def serve(self, *, deadline_ns: int) -> TracedHelp | None:
        """Help until the deadline, without the GIL. It returns sooner, with what was done, once a request is traced.

        Raises:
            NotRegisteredError: this helper was buried.
        """
        result, context, start_ns, end_ns, units, read_bytes = self._native.serve(deadline_ns)
        if context is not None:
            return TracedHelp(context, start_ns, end_ns, units, read_bytes)
        if result == _BURIED:
            number = self.helper.number
            raise NotRegisteredError(f"helper {number} was taken for dead: register again", client_id=number)
        return None

    def statistics(self) -> HelperStatistics:
        """Totals so far."""
        jobs, units, refused, late, read_bytes, busy_ns, in_flight = self._native.counts()
        return HelperStatistics(
            jobs, units, refused, late, read_bytes, busy_ns, in_flight=in_flight, scans=self._native.scans()
        )
