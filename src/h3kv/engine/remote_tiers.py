"""The tiers of a process whose HOST memory and cold store are another's."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.types import Tier
from h3kv.engine.leased_units import UnitStock
from h3kv.engine.needs import TieringConfig
from h3kv.engine.tiers import TierStores
from h3kv.memory.buddy import UNIT_BLOCKS
from h3kv.memory.cuda_registration import CudaRegistration, cuda_runtime
from h3kv.memory.leases import NOBODY, LeasedRoom
from h3kv.memory.region import Region
from h3kv.memory.region_format import SlotTableView
from h3kv.rpc.nvme_io_client import WireLayout
from h3kv.tiers.cold.geometry import cold_layout
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig
from h3kv.tiers.host import SharedHostStore
from h3kv.tiers.index_store import IndexStore, SharedIndexStore
from h3kv.tiers.remote import RemoteColdStore
from h3kv.tiers.remote.link import HOST, INDEX, NodeLink
from h3kv.tiers.remote.session import SharedRanges

STOCK_SEGMENTS: Final = 2
"""Full segments that room is leased for ahead: the next one of each of two sequences."""


@dataclass(frozen=True, slots=True)
class RemoteTiers:
    """Stores as an embedded node has them, and what keeps leases ahead of their use."""

    stores: TierStores
    room: LeasedRoom
    stock: UnitStock

    def tick(self) -> None:
        """Between two steps."""
        self.stock.tick(self.room)


def wire_layout(layout: CacheLayout, fingerprint: bytes) -> WireLayout:
    """What `nvme_io` is told of a model.

    Args:
        layout: of its KV.
        fingerprint: `Fingerprint.digest()` of it.
    """
    mark = cold_layout(layout)
    page = layout.slab.page
    return WireLayout(
        fingerprint,
        layout.layers,
        layout.slab.block_bytes,
        IndexStore.layer_bytes(layout) if page.encoding.is_clustered else 0,
        check_bytes=layout.slab.check_bytes,
        element_bytes=mark.element_bytes,
        encoding=page.encoding.value,
        layout_version=mark.mark.layout_version,
    )


def open_remote_tiers(
    layout: CacheLayout, device: DeviceStoreConfig, tiering: TieringConfig, link: NodeLink
) -> RemoteTiers:
    """The tiers of a model over regions and a cold store of `nvme_io`. `TierStores.close` ends them, not the link.

    Args:
        layout: of the model, as the link has registered it.
        device: cap of this process's own tier.
        tiering: how HOST and the device share the work; caps of HOST are the owner's.
        link: open.

    Raises:
        ConfigError: a cap is too small.
        HostMemoryError: the device is a CUDA device, and CUDA refuses to register the HOST region.
        ShapeError: a region is divided for another layout.
        TierBrokenError: the owner has just ended. It is found again soon.
    """
    host_region = link.region(HOST)
    if host_region is None:
        raise ConfigError("the owner of the regions has no HOST memory: set its host_bytes", field="host_bytes")
    with contextlib.ExitStack() as stack:
        on_device = DeviceStore(layout.slab, device)
        stack.callback(on_device.close)
        table = host_region.table
        stock = UnitStock(
            link.lease, link.give_back, keep=_stock_units(layout, host_region), free=lambda: _free_units(table)
        )
        stack.callback(stock.close)
        room = LeasedRoom(Tier.HOST, table, stock.more)
        host = SharedHostStore(layout.slab, host_region, room)
        stack.callback(host.close)
        runtime = cuda_runtime() if on_device.arena.is_cuda else None
        if runtime is not None:
            stack.callback(CudaRegistration(host_region, runtime).close)
        index_region = link.region(INDEX)
        cold: RemoteColdStore | None = None
        index: IndexStore | None = None
        if link.registration is not None and link.registration.cold_capacity_bytes:
            if index_region is not None and layout.slab.page.encoding.is_clustered:
                index = SharedIndexStore(layout, index_region, _index_room(index_region, link.holder))
            reached = SharedRanges([each for each in (host_region, index_region) if each is not None])
            cold = RemoteColdStore(cold_layout(layout), link, reached)
            stack.callback(cold.close)
        stores = TierStores(
            layout,
            on_device,
            host=host,
            cold=cold,
            index=index,
            io=None,
            volume=None,
            tiering=tiering,
            closing=stack.pop_all(),
        )
    return RemoteTiers(stores, room, stock)


def _stock_units(layout: CacheLayout, region: Region) -> int:
    """Of a full segment one unit for each layer; of a small HOST no more than a fourth."""
    return min(STOCK_SEGMENTS * layout.layers, region.geometry.blocks // UNIT_BLOCKS // 4)


def _free_units(table: SlotTableView) -> int:
    return int(np.count_nonzero(table["holder"][::UNIT_BLOCKS] == NOBODY))


def _index_room(region: Region, holder: int) -> LeasedRoom:
    """All of the index region, which the owner leases to the client that registers a layout."""
    units = np.flatnonzero(region.table["holder"][::UNIT_BLOCKS] == holder).tolist()

    def more(wanted: int) -> list[int]:
        nonlocal units
        if wanted > len(units):
            return []
        taken, units = units[:wanted], units[wanted:]
        return taken

    return LeasedRoom(Tier.HOST, region.table, more)
