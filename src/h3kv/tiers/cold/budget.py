"""How many bytes may be written in a day. SSDs wear out by bytes written."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable
from typing import Final

from h3kv.tiers.cold.geometry import BUDGET_OFFSET
from h3kv.tiers.cold.ops import Op, write_of
from h3kv.tiers.cold.record import Kind, pack_record, twin_offset, unpack_twin

_SPENT: Final = struct.Struct("<QQ")


def utc_day() -> int:
    """Number of today, in UTC."""
    return dt.datetime.now(dt.UTC).toordinal()


class WriteBudget:
    """Bytes written today, kept with the store.

    A new day begins when the day's number grows. A clock that goes back keeps what was spent.

    Args:
        limit_bytes: of a day; None: unlimited, only counted.
        twin: the stored record.
        today: number of the day now.
    """

    def __init__(self, limit_bytes: int | None, twin: bytes, today: Callable[[], int]) -> None:
        record = unpack_twin(Kind.BUDGET, twin)
        self.limit_bytes = limit_bytes
        self._today = today
        self._sequence = 0 if record is None else record.sequence
        self._day, self._spent_bytes = (0, 0) if record is None else _SPENT.unpack(record.payload)
        self.promised_bytes = 0
        """Of reserved room that was not written yet."""

    @property
    def spent_bytes(self) -> int:
        """Bytes written today."""
        today = self._today()
        if today > self._day:
            self._spent_bytes = 0
        self._day = today
        return int(self._spent_bytes)

    @property
    def left_bytes(self) -> int | None:
        """What may still be promised today; None: anything."""
        return None if self.limit_bytes is None else self.limit_bytes - self.spent_bytes - self.promised_bytes

    def allows(self, size_bytes: int) -> bool:
        """Whether so many bytes may still be promised today."""
        return self.left_bytes is None or size_bytes <= self.left_bytes

    def spend(self, size_bytes: int) -> Op:
        """Count a write, and the write that keeps the count."""
        self._spent_bytes = self.spent_bytes + size_bytes
        self._sequence += 1
        payload = _SPENT.pack(self._day, self._spent_bytes)
        return write_of(twin_offset(BUDGET_OFFSET, self._sequence), pack_record(Kind.BUDGET, self._sequence, payload))
