"""HOST and the cold store where `nvme_io` owns them."""

from __future__ import annotations

import contextlib
from typing import Final

import torch

from h3kv.composition import survey
from h3kv.config import Settings
from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import Telemetry
from h3kv.core.units import NS_PER_S
from h3kv.engine.remote_tiers import RemoteTiers, open_remote_tiers, wire_layout
from h3kv.engine.tiers import TierStores
from h3kv.memory.region import Region
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.sizing import device_store, tiering_of
from h3kv.tiers.remote import RemoteColdStore
from h3kv.tiers.remote.link import HOST, NodeLink

REGIONS_SOCKET: Final = "regions.sock"
"""Beside the socket of its calls, `nvme_io` passes on its regions."""
OWNER_NS: Final = 60 * NS_PER_S
"""For `nvme_io` to be there, and to have read what its store kept."""


class RemoteTierOpener:
    """Opens the tiers of one node, and keeps them going. Satisfies `StoresOpener`.

    Args:
        settings: of the node.
        owner: where `nvme_io` serves.
        name: of this process.
        boot_token: of this process.
        device: where the model lies.
        closing: ends the connection, after the node is closed.
    """

    def __init__(
        self,
        settings: Settings,
        owner: UnixAddress,
        *,
        name: str,
        boot_token: bytes,
        device: torch.device,
        closing: contextlib.ExitStack,
    ) -> None:
        self._settings = settings
        self._owner = owner
        self._name = name
        self._boot_token = boot_token
        self._device = device
        self._closing = closing
        self._link: NodeLink | None = None
        self._tiers: RemoteTiers | None = None

    def __call__(self, layout: CacheLayout, fingerprint: bytes, telemetry: Telemetry) -> TierStores:
        """The tiers. What `nvme_io` measures is on its own page.

        Raises:
            PeerError: nobody serves there in time.
            ConfigError: it serves another layout, has no HOST memory, or a cap is too small.
            RegionError: a region cannot be mapped here.
        """
        del telemetry
        channel = self._closing.enter_context(PeerChannel(self._owner))
        self._link = NodeLink(
            self._owner.path.with_name(REGIONS_SOCKET),
            channel,
            layout=wire_layout(layout, fingerprint),
            name=self._name,
            boot_token=self._boot_token,
        )
        self._closing.callback(self._link.close)
        self._link.open(OWNER_NS)
        host = self._link.region(HOST)
        if host is None:
            raise ConfigError("nvme_io has no HOST memory: set its host_bytes", field="host_bytes")
        tiering = tiering_of(
            self._settings, host_bytes=host.geometry.blocks * host.geometry.block_bytes, index_bytes=None
        )
        device = device_store(self._settings, layout, survey(self._device))
        self._tiers = open_remote_tiers(layout, device, tiering, self._link)
        return self._tiers.stores

    @property
    def link(self) -> NodeLink:
        """To `nvme_io`, after the tiers were opened. It stays this object's."""
        assert self._link is not None, "the tiers were not opened"
        return self._link

    def region(self, purpose: str) -> Region | None:
        """A region that `nvme_io` serves, after the tiers were opened. It stays the connection's."""
        return None if self._link is None else self._link.region(purpose)

    def trace(self, context: bytes) -> None:
        """Say which trace what is read and written from now on belongs to, as `pack_context` packs it."""
        cold = None if self._tiers is None else self._tiers.stores.cold
        if isinstance(cold, RemoteColdStore):
            cold.trace(context)

    def tick(self) -> None:
        """Between two steps: have room leased ahead of its use.

        Raises:
            H3Error: the owner began anew without what lay in HOST: this process must begin anew too.
        """
        if self._link is not None and self._link.fault is not None:
            raise self._link.fault
        if self._tiers is not None:
            self._tiers.tick()
