"""The regions of the node: made for a layout, or adopted from a forerunner; leased; served.

id   purpose    what lies in it
1    host       slots of blocks
2    index      slots of indexes; only for layouts that have any
3    channel    rings to and from the cold store
4    work       attention and index search that gpu_worker and ann_offload share
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.core.errors import ConfigError, StaleHandleError
from h3kv.core.units import describe_size
from h3kv.memory.buddy import UNIT_BLOCKS
from h3kv.memory.leases import LeaseTable
from h3kv.memory.region import SHARED_KINDS, Region
from h3kv.memory.region_format import Geometry, OpaqueGeometry, RegionGeometry, RegionIdentity
from h3kv.memory.region_hub import HubEvent, RegionHub
from h3kv.memory.work_area import PURPOSE as WORK
from h3kv.memory.work_area import WorkGeometry
from h3kv.rpc.nvme_io_client import WireLayout
from h3kv.tiers.remote.channel import GEOMETRY, ChannelRegion
from h3kv.tiers.remote.channel import PURPOSE as CHANNEL
from h3kv.tiers.remote.leased_memory import LeasedMemory
from h3kv.tiers.remote.link import HOST, INDEX

_IDS: Final = {HOST: 1, INDEX: 2, CHANNEL: 3, WORK: 4}


@dataclass(frozen=True, slots=True)
class RegionCaps:
    """Sizes of regions."""

    host_bytes: int
    index_bytes: int
    helpers: int
    """Threads that may help with attention at once; with 0, there is no region for it."""


class NodeRegions:
    """Owns the hub and the regions. Not thread-safe.

    Args:
        socket_path: where regions are passed on.
        boot_token: of this process.
        caps: of regions that are made.
        group: that may open the socket too; None: the owner alone.
    """

    def __init__(self, socket_path: Path, *, boot_token: bytes, caps: RegionCaps, group: int | None) -> None:
        self._socket_path = socket_path
        self._boot_token = boot_token
        self._caps = caps
        self._group = group
        self.by_purpose: dict[str, Region] = {}
        self.leases: dict[str, LeaseTable] = {}
        self.channels: ChannelRegion | None = None
        self.memory: LeasedMemory | None = None
        self._retired: list[tuple[str, list[int]]] = []
        self._hub = self._open_hub()

    def start(self, adopt_ns: int) -> bool:
        """Adopt the forerunner's regions and serve them, or begin without any. Whether there were some.

        Raises:
            StoreBusyError: somebody has them mapped, and neither offers them nor lets go.
        """
        adopted = self._hub.adopt(adopt_ns)
        if adopted:
            self._take(adopted)
            returning = self._hub.awaited
            for purpose, leases in self.leases.items():
                for holder in leases.holders - returning:
                    self._retired.append((purpose, leases.retire(holder)))
            assert self.channels is not None
            self.channels.take_all_back()
        self._hub.serve(adopted)
        return bool(adopted)

    def make(self, layout: WireLayout) -> None:
        """Make the regions for a layout. Clients that came before are shown out: they come again.

        Raises:
            ConfigError: a cap is below one unit.
            HostMemoryError: the machine has too little memory left.
        """
        assert not self.by_purpose, "there are regions already"
        made = [self._create(HOST, _slots(layout.block_bytes, self._caps.host_bytes, name="host_bytes"))]
        try:
            if layout.index_bytes:
                made.append(self._create(INDEX, _index_slots(layout, self._caps.index_bytes)))
            made.append(self._create(CHANNEL, GEOMETRY))
            if self._caps.helpers:
                made.append(self._create(WORK, OpaqueGeometry(WorkGeometry(self._caps.helpers).size_bytes)))
        except BaseException:
            for region in made:
                region.close()
            raise
        self._take(made)
        self._hub.close()
        self._hub = self._open_hub()
        self._hub.serve(made)

    def check_layout(self, layout: WireLayout) -> None:
        """Raise ConfigError unless the regions are divided for this layout."""
        host, index = self.by_purpose[HOST].geometry.block_bytes, self.by_purpose.get(INDEX)
        found = {"block_bytes": host, "index_bytes": 0 if index is None else index.geometry.block_bytes}
        for field, served in found.items():
            if (wanted := getattr(layout, field)) != served:
                raise ConfigError(
                    f"{field} = {wanted}: the regions are divided for {served}; start all processes with one model, "
                    "encoding and layout",
                    field=field,
                )

    def lease_index(self, holder: int) -> None:
        """Give all of the index region to a holder: one client has a model's indexes."""
        leases = self.leases.get(INDEX)
        if leases is not None and leases.free_units:
            leases.lease(holder, leases.free_units)

    def retire(self, holder: int) -> None:
        """Take back all that a holder has which is gone, as soon as nothing is written into it any more."""
        for purpose, leases in self.leases.items():
            self._retired.append((purpose, leases.retire(holder)))
        if self.channels is not None:
            self.channels.take_back(holder)

    def settle(self) -> None:
        """Make retired units free in which no I/O is under way."""
        waiting = []
        for purpose, units in self._retired:
            if self.memory is not None and self.memory.is_in_use(list(self.leases).index(purpose), units):
                waiting.append((purpose, units))
            else:
                self.leases[purpose].settle(units)
        self._retired = waiting

    def settle_all(self) -> None:
        """Of a forerunner whose I/O has ended: the store is ours."""
        for leases in self.leases.values():
            leases.settle_all()
        self._retired.clear()

    def give_back(self, holder: int, units: Sequence[int]) -> None:
        """Take units of HOST back. Raises StaleHandleError where one is not the holder's, or is written into."""
        assert self.memory is not None
        in_bounds = [unit for unit in units if 0 <= unit < self.host_units]
        if self.memory.is_in_use(0, in_bounds):
            raise StaleHandleError("a read or write of these units is under way: return them when it has ended")
        self.leases[HOST].give_back(holder, units)

    @property
    def host_units(self) -> int:
        """Of HOST in all."""
        host = self.by_purpose.get(HOST)
        return 0 if host is None else host.geometry.blocks // UNIT_BLOCKS

    @property
    def holders(self) -> dict[int, str]:
        """Names of clients by number."""
        return self._hub.holders

    def poll(self, timeout_ns: int) -> list[HubEvent]:
        """Who came and went."""
        return self._hub.poll(timeout_ns)

    def check_integrity(self) -> None:
        """Assert that every unit is free or leased once."""
        self._hub.check_integrity()
        for leases in self.leases.values():
            leases.check_integrity()

    def close(self) -> None:
        """Leave all clients; they keep the regions mapped for a successor."""
        self._hub.close()
        self.channels = self.memory = None
        self.leases.clear()
        for region in self.by_purpose.values():
            region.close()
        self.by_purpose.clear()

    def _open_hub(self) -> RegionHub:
        hub = RegionHub.open(
            self._socket_path, boot_token=self._boot_token, mode=0o600 if self._group is None else 0o660
        )
        if self._group is not None:
            try:
                os.chown(self._socket_path, -1, self._group)
            except OSError as error:
                hub.close()
                raise ConfigError(
                    f"{self._socket_path} cannot be given to group {self._group} ({error.strerror}): name a group of "
                    "this user",
                    field="socket_group",
                ) from error
        return hub

    def _create(self, purpose: str, geometry: Geometry) -> Region:
        identity = RegionIdentity(_IDS[purpose], purpose, self._boot_token)
        return Region.create(geometry, identity=identity, kinds=SHARED_KINDS)

    def _take(self, regions: Sequence[Region]) -> None:
        self.by_purpose = {region.identity.purpose: region for region in regions if region.identity is not None}
        with_slots = [purpose for purpose in (HOST, INDEX) if purpose in self.by_purpose]
        self.leases = {purpose: LeaseTable(self.by_purpose[purpose].table) for purpose in with_slots}
        self.memory = LeasedMemory([self.by_purpose[purpose] for purpose in with_slots])
        self.channels = ChannelRegion(self.by_purpose[CHANNEL])


def _slots(block_bytes: int, cap_bytes: int, *, name: str) -> RegionGeometry:
    unit_bytes = UNIT_BLOCKS * block_bytes
    units = cap_bytes // unit_bytes
    if units < 1:
        raise ConfigError(
            f"{name} = {describe_size(cap_bytes)}: below one unit of this model, {UNIT_BLOCKS} blocks x {block_bytes} "
            f"bytes = {unit_bytes} bytes",
            field=name,
        )
    return RegionGeometry(block_bytes, units * UNIT_BLOCKS)


def _index_slots(layout: WireLayout, cap_bytes: int) -> RegionGeometry:
    """Room for whole segments, one at least."""
    slots = max(cap_bytes // (layout.layers * layout.index_bytes), 1)
    return RegionGeometry(layout.index_bytes, -(-slots * layout.layers // UNIT_BLOCKS) * UNIT_BLOCKS)
