"""A process that owns regions, or holds some: it does what it reads line by line and answers each line. JSON both ways.

Run by `region_rig.py`, and killed by tests.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from h3kv.core.errors import H3Error
from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.leases import LeasedRoom
from h3kv.memory.region import SHARED_KINDS, Region
from h3kv.memory.region_client import RegionClient
from h3kv.memory.region_format import OpaqueGeometry, RegionGeometry, RegionIdentity
from h3kv.memory.region_hub import HolderJoined, RegionHub

GEOMETRY = RegionGeometry(block_bytes=8192, blocks=64)
SECOND = 10**9


class Owner:
    def __init__(self, socket_path: Path, token: bytes) -> None:
        self.token = token
        self.hub = RegionHub.open(socket_path, boot_token=token)
        self.regions: tuple[Region, ...] = ()

    def start(self, adopt_s: float) -> dict[str, Any]:
        """Adopt or make the regions, and serve them."""
        self.regions = adopted = self.hub.adopt(int(adopt_s * SECOND))
        if not adopted:
            self.regions = (
                Region.create(GEOMETRY, identity=RegionIdentity(1, "host", self.token), kinds=SHARED_KINDS),
                Region.create(OpaqueGeometry(4096), identity=RegionIdentity(2, "table", self.token)),
            )
        self.hub.serve(self.regions)
        return {"adopted": [region.identity.purpose for region in adopted if region.identity]}

    def poll(self, events: int) -> dict[str, Any]:
        """Wait for so many events."""
        seen: list[list[Any]] = []
        while len(seen) < events:
            for event in self.hub.poll(20 * SECOND):
                if isinstance(event, HolderJoined):
                    seen.append(["joined", event.holder, event.name, event.has_returned])
                else:
                    seen.append(["gone", event.holder, event.name])
            self.hub.check_integrity()
        return {"events": seen}


class Holder:
    def __init__(self, socket_path: Path, token: bytes) -> None:
        self.client = RegionClient(socket_path, name=f"holder-{token[0]}", boot_token=token)
        self.units: list[int] = []

    def connect(self, timeout_s: float) -> dict[str, Any]:
        outcome = self.client.connect(int(timeout_s * SECOND))
        return {"outcome": outcome.value, "holder": self.client.holder, "regions": sorted(self.client.regions)}

    def begin(self, units: list[int]) -> dict[str, Any]:
        """A room in these units, which the test leased."""
        table = self.client.regions["host"].table
        self.room = LeasedRoom(Tier.HOST, table, lambda wanted: units[:wanted])
        self.handles: list[SlotHandle] = []
        return {}

    def fill(self, sizes: list[int], mark: int) -> dict[str, Any]:
        handles = self.room.reserve(sizes) or []
        for handle in handles:
            self.bytes_of(handle)[:] = mark
        self.handles += handles
        return {"slots": [[handle.slot, handle.blocks, handle.generation] for handle in handles]}

    def check(self, mark: int) -> dict[str, Any]:
        """Whether every slot still holds what was filled in."""
        self.room.check_integrity()
        return {"intact": all((self.bytes_of(handle) == mark).all() for handle in self.handles)}

    def spin(self, blocks: int) -> None:
        """Overwrite one slot with payloads that describe themselves, releasing it in between, until killed."""
        (handle,) = self.room.reserve([blocks]) or []
        say({"slot": handle.slot})
        while True:
            words = self.bytes_of(handle).view(np.uint64)
            words[:] = handle.generation
            self.room.release([handle])
            (handle,) = self.room.reserve([blocks]) or []

    def bytes_of(self, handle: SlotHandle) -> Any:
        start = handle.slot * GEOMETRY.block_bytes
        data = np.frombuffer(self.client.regions["host"].slots, dtype=np.uint8)
        return data[start : start + handle.blocks * GEOMETRY.block_bytes]

    def keep_view(self) -> dict[str, Any]:
        self.view = self.client.regions["host"].slots[:4]
        return {"bytes": list(self.view)}

    def drop_view(self) -> dict[str, Any]:
        del self.view
        return {}

    def await_end(self, timeout_s: float) -> dict[str, Any]:
        return {"ended": self.client.wait_for_end(int(timeout_s * SECOND))}

    def unmap(self) -> dict[str, Any]:
        if hasattr(self, "room"):
            del self.room
        gc.collect()
        self.client.unmap()
        return {}


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    role, socket_path, number = sys.argv[1:]
    actor = {"owner": Owner, "holder": Holder}[role](Path(socket_path), bytes([int(number)]) * 16)
    say({})
    for line in sys.stdin:
        call = json.loads(line)
        name = call.pop("do")
        try:
            answer = getattr(actor, name)(**call)
        except H3Error as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        say(answer)


if __name__ == "__main__":
    main()
