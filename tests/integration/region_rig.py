"""What the tests of regions share: an owner in this process, and other processes that they start and kill."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.leases import LeaseTable
from h3kv.memory.region import SHARED_KINDS, Region
from h3kv.memory.region_format import OpaqueGeometry, RegionGeometry, RegionIdentity
from h3kv.memory.region_hub import HolderJoined, HubEvent, RegionHub

PROGRAM = Path(__file__).with_name("region_process.py")
GEOMETRY = RegionGeometry(block_bytes=8192, blocks=64)
SECOND = 10**9
TOKEN = b"o" * 16


class Child:
    """A process of `region_process.py`."""

    def __init__(self, role: str, socket_path: Path, number: int) -> None:
        command = [sys.executable, str(PROGRAM), role, str(socket_path), str(number)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def tell(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, do: str, **fields: Any) -> dict[str, Any]:
        self.tell(do, **fields)
        return self.answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.process.wait(timeout=30)


class Owner:
    """An owner in this process."""

    def __init__(self, socket_path: Path, *, token: bytes = TOKEN, adopt_s: float = 20.0) -> None:
        self.hub = RegionHub.open(socket_path, boot_token=token)
        try:
            self.regions = self.adopted = self.hub.adopt(int(adopt_s * SECOND))
        except BaseException:
            self.hub.close()
            raise
        if not self.adopted:
            self.regions = (
                Region.create(GEOMETRY, identity=RegionIdentity(1, "host", token), kinds=SHARED_KINDS),
                Region.create(OpaqueGeometry(4096), identity=RegionIdentity(2, "table", token)),
            )
        self.host = next(region for region in self.regions if region.geometry.blocks)
        self.leases = LeaseTable(self.host.table)
        self.hub.serve(self.regions)

    def events(self, count: int = 1) -> list[HubEvent]:
        found: list[HubEvent] = []
        deadline = time.monotonic() + 30
        while len(found) < count:
            assert time.monotonic() < deadline, found
            found += self.hub.poll(SECOND)
            self.hub.check_integrity()
        return found

    def connect(self, child: Child) -> int:
        """Let a holder in, which must map the regions anew."""
        child.tell("connect", timeout_s=20)
        (joined,) = self.events()
        assert isinstance(joined, HolderJoined) and not joined.has_returned
        assert child.answer() == {"outcome": "mapped", "holder": joined.holder, "regions": ["host", "table"]}
        return joined.holder

    def stop(self) -> None:
        """End as a process does that is killed: nobody is told, nothing is tidied up but by the kernel."""
        self.leases.check_integrity()
        del self.leases
        self.hub.close()
        for region in self.regions:
            region.close()
        gc.collect()
        assert not any(region.is_mapped for region in self.regions)


def filled(owner: Owner, child: Child, holder: int, *, mark: int) -> list[SlotHandle]:
    units = owner.leases.lease(holder, 2)
    assert units is not None
    child.do("begin", units=units)
    slots = child.do("fill", sizes=[16, 4, 1], mark=mark)["slots"]
    return [SlotHandle(Tier.HOST, slot, blocks, generation) for slot, blocks, generation in slots]
