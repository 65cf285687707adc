"""Waiting for what the cold store does by itself."""

from __future__ import annotations

from typing import Final

from h3kv.core.ports import Clock, PersistentStore
from h3kv.core.units import NS_PER_S

ERASED_NS: Final = NS_PER_S
"""Longest time that a copy waits for room that is being erased."""


def wait_erased(cold: PersistentStore, clock: Clock) -> bool:
    """Wait until room that is being erased comes free; whether any did."""
    before, deadline_ns = cold.erasing, clock.now_ns() + ERASED_NS
    while cold.erasing >= before > 0 and (left_ns := deadline_ns - clock.now_ns()) > 0:
        cold.wait(left_ns)
    return cold.erasing < before
