"""Every measurement of nvme_io, under names that `h3kv.telemetry.names` declares."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from h3kv.core.ports import Telemetry
from h3kv.core.types import StoreStatistics, Tier
from h3kv.core.units import NS_PER_S
from h3kv.memory.buddy import UNIT_BLOCKS
from h3kv.telemetry import names
from h3kv.telemetry.access_probe import AccessProbe, AccessStatistics
from h3kv.tiers.remote.link import HOST
from services.nvme_io.node_loop import NodeLoop

CHANNEL: Final = "cold"
"""Label of the records that wait to be taken."""
_MS_PER_S: Final = 1_000
_READS, _READ_MS = 0, 3
"""Fields of /sys/dev/block/*/stat: reads completed, milliseconds that they took."""

_log = logging.getLogger(__name__)


class Observer:
    """Looks at the loop about once a second, on its thread.

    Args:
        telemetry: where measurements go.
        store: path of the cold store; None: there is none.
    """

    def __init__(self, telemetry: Telemetry, store: Path | None) -> None:
        self._telemetry = telemetry
        self._disk = None if store is None else _DiskReads(store)
        self._probe: AccessProbe | None = None
        self._holders: set[str] = set()
        self._purposes: set[tuple[str, str]] = set()
        self._retries = 0
        self.access: AccessStatistics | None = None
        """Of HOST memory."""
        tier = Tier.NVME.value
        for kind in ("read", "write"):
            telemetry.count(names.IO_ERRORS, 0, tier=tier, kind=kind)
        for name in (
            names.CORRUPT_SLABS,
            names.STORE_AREAS_TAKEN,
            names.WRITTEN_BYTES,
            names.READ_BYTES,
            names.WRITE_BUDGET_REFUSALS,
            names.SSD_RETRIES,
        ):
            telemetry.count(name, 0, tier=tier)
        telemetry.gauge(names.CONTROLLER_CONNECTED, 0)
        telemetry.gauge(names.REGION_PINS, 0)

    def look(self, loop: NodeLoop) -> None:
        """Measure once."""
        self._look_at_regions(loop)
        self._look_at_tiers(loop)
        self._look_at_access(loop)
        if self._disk is not None:
            wait_s = self._disk.wait_seconds()
            if wait_s is not None:
                self._telemetry.gauge(names.DISK_READ_WAIT, wait_s, disk=self._disk.name)

    def close(self) -> None:
        """Let go of the memory that is probed."""
        self._probe = None

    def _look_at_regions(self, loop: NodeLoop) -> None:
        held = loop.regions.holders
        self._telemetry.gauge(names.REGION_HOLDERS, len(held))
        found = {(purpose, region.kind.value): region.size_bytes for purpose, region in loop.regions.by_purpose.items()}
        for purpose, kind in self._purposes | found.keys():
            self._telemetry.gauge(names.REGION_SIZE, found.get((purpose, kind), 0), purpose=purpose, kind=kind)
        self._purposes |= found.keys()
        leases = loop.regions.leases.get(HOST)
        units = dict.fromkeys(self._holders, 0)
        for holder, name in held.items():
            units[name] = units.get(name, 0) + (0 if leases is None else len(leases.units_of(holder)))
        for name, count in units.items():
            self._telemetry.gauge(names.LEASED_UNITS, count, holder=name)
        self._holders |= units.keys()
        self._telemetry.gauge(names.REGION_PINS, sum(pins_of(loop, holder) for holder in loop.clients))

    def _look_at_tiers(self, loop: NodeLoop) -> None:
        for statistics in tier_statistics(loop):
            tier = statistics.tier.value
            self._telemetry.gauge(names.TIER_CAPACITY, statistics.capacity_bytes, tier=tier)
            self._telemetry.gauge(names.TIER_USED, statistics.used_bytes, tier=tier)
        io = loop.io_statistics()
        if io is not None:
            self._telemetry.gauge(names.IO_RING_DEPTH, io.in_flight, tier=Tier.NVME.value)
            retries = io.retries + io.short_transfers
            self._telemetry.count(names.SSD_RETRIES, max(retries - self._retries, 0), tier=Tier.NVME.value)
            self._retries = retries
        self._telemetry.gauge(names.MAILBOX_DEPTH, waiting_records(loop), mailbox=CHANNEL)

    def _look_at_access(self, loop: NodeLoop) -> None:
        host = loop.regions.by_purpose.get(HOST)
        if self._probe is None and host is not None:
            # Memory of HOST that nobody wrote would cost something else: a buffer of its own stands for it.
            self._probe = AccessProbe()
        if self._probe is not None:
            self._probe.sample()
            self.access = self._probe.statistics()
            if self.access is not None:
                self._telemetry.gauge(names.HOST_ACCESS, self.access.mean_ns / NS_PER_S)
                self._telemetry.gauge(names.HOST_ACCESS_JITTER, self.access.jitter_ns / NS_PER_S)


def tier_statistics(loop: NodeLoop) -> list[StoreStatistics]:
    """Occupancy of HOST and NVME, as far as there are any."""
    found: list[StoreStatistics] = []
    host = loop.regions.by_purpose.get(HOST)
    if host is not None:
        blocks = host.table["blocks"]
        used_bytes = int(blocks.sum()) * host.geometry.block_bytes
        slabs = int((blocks > 0).sum())
        capacity_bytes = host.geometry.blocks // UNIT_BLOCKS * UNIT_BLOCKS * host.geometry.block_bytes
        found.append(StoreStatistics(Tier.HOST, capacity_bytes, used_bytes, slabs, 0, 0))
    if loop.server is not None:
        found.append(loop.server.store.statistics())
    return found


def pins_of(loop: NodeLoop, holder: int) -> int:
    """Pins of a client's running sequences on segments in HOST."""
    channels = loop.regions.channels
    return 0 if channels is None else channels.pins(holder)


def waiting_records(loop: NodeLoop) -> int:
    """Records that clients have pushed and the loop has not taken."""
    channels, server = loop.regions.channels, loop.server
    if channels is None or server is None:
        return 0
    return sum(max(channels.posted(holder) - server.taken(holder), 0) for holder in loop.clients)


class _DiskReads:
    """Average wait of reads on the disk below a path, over the time between two looks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = "unknown"
        self._statistics: Path | None = None
        self._before: tuple[int, int] | None = None

    def wait_seconds(self) -> float | None:
        """None where the system does not say; 0 without reads."""
        try:
            fields = self._find().read_text(encoding="ascii").split()
        except (OSError, ValueError) as error:
            _log.debug("the disk of %s tells nothing: %s", self._path, error)
            return None
        now = int(fields[_READS]), int(fields[_READ_MS])
        reads, read_ms = (0, 0) if self._before is None else (now[0] - self._before[0], now[1] - self._before[1])
        self._before = now
        return read_ms / reads / _MS_PER_S if reads else 0.0

    def _find(self) -> Path:
        if self._statistics is None:
            status = self._path.stat()
            number = status.st_rdev or status.st_dev
            node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
            self.name, self._statistics = node.name, node / "stat"
        return self._statistics
