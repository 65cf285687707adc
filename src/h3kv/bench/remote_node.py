"""A node in this process whose HOST memory and cold store are those of `nvme_io`, a process of its own.

What it has mapped stays mapped until this process ends: it is for a process that measures one thing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench.service_process import START_NS, service_process
from h3kv.bench.tiered import TokenCaps, kv_bytes, kv_layout
from h3kv.core.layout import CacheLayout
from h3kv.core.ports import Telemetry
from h3kv.core.types import Encoding
from h3kv.engine.config import EngineConfig
from h3kv.engine.needs import TieringConfig
from h3kv.engine.remote_tiers import RemoteTiers, open_remote_tiers, wire_layout
from h3kv.engine.tiers import TierStores
from h3kv.models.loader import LoadedModel
from h3kv.node import Node
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.telemetry.recorder import Recorder
from h3kv.tiers.device import DeviceStoreConfig
from h3kv.tiers.remote.link import NodeLink

INDEX_BYTES: Final = 64 << 20
"""More than one sequence of the lengths that are measured needs."""


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Where the process of a node over remote tiers keeps things."""

    sockets: Path
    """Its path must be short."""
    store: Path
    """Folder of the cold store."""
    store_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteNode:
    """A node, to be told of every step by `after_step`."""

    node: Node
    tiers: RemoteTiers

    def after_step(self) -> None:
        """Have room leased ahead of its use, as `gpu_worker` does between two steps."""
        self.tiers.tick()

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, model: LoadedModel, caps: TokenCaps, *, place: RemotePlace, encoding: Encoding
    ) -> Iterator[RemoteNode]:
        """The node, with `services.nvme_io` started for it.

        Args:
            model: to run.
            caps: of device and HOST, in tokens of this encoding.
            place: for sockets and store.
            encoding: of keys and values.

        Raises:
            ConfigError: a cap is too small, or `services` is not there: the wheel leaves it out.
            PeerError: the process does not come up.
        """
        layout = kv_layout(model, encoding)
        address = UnixAddress(place.sockets / "nvme_io.sock")
        settings = {
            "HOST_BYTES": f"{kv_bytes(layout, caps.host_tokens)}B",
            "INDEX_BYTES": f"{INDEX_BYTES}B",
            "STORE": str(place.store),
            "CAPACITY": f"{place.store_bytes}B",
        }
        with service_process("nvme_io", address, settings), contextlib.ExitStack() as stack:
            opener = _Opener(address, caps, stack)
            node = Node.open_over(
                model,
                opener,
                engine=EngineConfig(caps.chunk_tokens),
                encoding=encoding,
                clock=None,
                telemetry=Recorder(),
            )
            with node:
                yield cls(node, opener.tiers)


class _Opener:
    """Opens tiers over a link that lasts as long as its process: views of its regions may be left. The stack closes the
    channel of its calls.
    """

    def __init__(self, address: UnixAddress, caps: TokenCaps, closing: contextlib.ExitStack) -> None:
        self._address = address
        self._caps = caps
        self._closing = closing
        self.tiers: RemoteTiers

    def __call__(self, layout: CacheLayout, fingerprint: bytes, telemetry: Telemetry) -> TierStores:
        del telemetry
        channel = self._closing.enter_context(PeerChannel(self._address))
        link = NodeLink(
            self._address.path.with_name("regions.sock"),
            channel,
            layout=wire_layout(layout, fingerprint),
            name="bench",
            boot_token=os.urandom(16),
        )
        link.open(START_NS)
        tiering = TieringConfig(window_tokens=self._caps.window_tokens, chunk_tokens=self._caps.chunk_tokens)
        device = DeviceStoreConfig(kv_bytes(layout, self._caps.device_tokens))
        self.tiers = open_remote_tiers(layout, device, tiering, link)
        return self.tiers.stores
