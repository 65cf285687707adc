"""A client of nvme_io that writes and reads without end, and checks every byte. Run by tests, and killed by them.

`python cold_load.py FOLDER NUMBER` says `{"rounds": n, "broken": n}` after each round. What it cannot do while the
server is gone it tries again.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import sys
import time
from pathlib import Path

import numpy as np

from h3kv.core.errors import H3Error, SlabError, StaleHandleError, TierError, TierFullError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import BlockKey, DType, Encoding, Fetch, Move, SegmentId, SegmentLabel, SlabKey, SlotHandle, Tier
from h3kv.core.units import NS_PER_S
from h3kv.memory.leases import LeasedRoom
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.nvme_io_client import WireLayout
from h3kv.testing.slot_views import SlotViews
from h3kv.tiers.cold.geometry import cold_layout
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE
from h3kv.tiers.remote import RemoteColdStore
from h3kv.tiers.remote.link import HOST, NodeLink
from h3kv.tiers.remote.session import SharedRanges

LAYOUT = CacheLayout(SlabLayout(PageLayout(DType.FP32, 16, Encoding.RAW), kv_heads=2), layers=2)
BLOCKS = 4
KEPT = 6
READS = 32
WAIT_NS = 20 * NS_PER_S


def wire() -> WireLayout:
    cold = cold_layout(LAYOUT)
    return WireLayout(
        bytes(range(32)),
        LAYOUT.layers,
        LAYOUT.slab.block_bytes,
        0,
        check_bytes=LAYOUT.slab.check_bytes,
        element_bytes=cold.element_bytes,
        encoding="raw",
        layout_version=cold.mark.layout_version,
    )


class Load:
    def __init__(self, link: NodeLink, number: int) -> None:
        region = link.region(HOST)
        assert region is not None
        self.room = LeasedRoom(Tier.HOST, region.table, link.lease)
        self.views = SlotViews(region)
        self.cold = RemoteColdStore(cold_layout(LAYOUT), link, SharedRanges([region]))
        self.start = region.address + region.geometry.data_offset
        self.chance = random.Random(number)
        self.next = number << 32
        self.broken = 0
        self.live: list[tuple[int, list[SlotHandle]]] = []
        self.segments: dict[int, SegmentId] = {}
        for kept in self.cold.restore(self.number):
            self.live.append((int.from_bytes(kept.label.keys[0][:8], "little"), list(kept.handles_L)))
            self.segments[self.live[-1][0]] = kept.segment
        self.sources = self.slots(LAYOUT.layers, 16)
        self.targets = self.slots(LAYOUT.layers, 16)

    def number(self) -> SegmentId:
        self.next += 1
        return SegmentId(self.next)

    def slots(self, count: int, blocks: int) -> list[SlotHandle]:
        handles = None
        end = time.monotonic() + 20
        while handles is None and time.monotonic() < end:
            handles = self.room.reserve([blocks] * count)
        assert handles is not None, "no room in HOST"
        return handles

    def turn(self) -> None:
        try:
            self.write()
            self.read()
            self.read_units()
        except (TierError, StaleHandleError):
            self.broken += 1
        while len(self.live) > KEPT:
            _, handles = self.live.pop(self.chance.randrange(len(self.live)))
            self.cold.release(handles)

    def fill(self, number: int) -> list[memoryview]:
        views = [self.views.bytes(handle)[: LAYOUT.slab.size_bytes(BLOCKS)] for handle in self.sources]
        for layer, view in enumerate(views):
            np.frombuffer(view, dtype=np.uint64)[:] = pattern(number, layer, view.nbytes)
        return views

    def write(self) -> None:
        segment = self.number()
        try:
            handles = self.cold.reserve([BLOCKS] * LAYOUT.layers)
        except TierFullError:
            if self.live:
                self.cold.release(self.live.pop(0)[1])
            return
        key = BlockKey(int(segment).to_bytes(8, "little") + bytes(24))
        label = SegmentLabel((key,) * BLOCKS, BlockKey(bytes(32)))
        views = self.fill(int(segment))
        moves = [
            Move(SlabKey(segment, layer), handle, view, label)
            for layer, (handle, view) in enumerate(zip(handles, views, strict=True))
        ]
        try:
            self.cold.submit(moves)
        except H3Error:
            self.cold.release(handles)
            raise
        if any(error is not None for error in self.settle(len(moves))):
            self.cold.release(handles)
            self.broken += 1
            return
        self.live.append((int(segment), handles))
        self.segments[int(segment)] = segment

    def read(self) -> None:
        if not self.live:
            return
        number, handles = self.chance.choice(self.live)
        targets = [self.views.bytes(handle)[: LAYOUT.slab.size_bytes(BLOCKS)] for handle in self.targets]
        fetches = [
            Fetch(SlabKey(self.segments[number], layer), handle, target)
            for layer, (handle, target) in enumerate(zip(handles, targets, strict=True))
        ]
        self.cold.submit(fetches)
        errors = self.settle(len(fetches))
        for layer, (error, target) in enumerate(zip(errors, targets, strict=True)):
            self.check(number, error)
            if error is None:
                found = np.frombuffer(target, dtype=np.uint64)
                assert (found == pattern(number, layer, target.nbytes)).all(), f"other bytes in segment {number}"

    def read_units(self) -> None:
        if not self.live:
            return
        number, handles = self.chance.choice(self.live)
        piece = LAYOUT.slab.check_bytes
        reads_N = np.zeros(READS, dtype=UNIT_READ_DTYPE)
        target = self.targets[0]
        reads_N["tag"] = np.arange(READS)
        reads_N["target"] = self.start + LAYOUT.slab.size_bytes(target.slot) + (np.arange(READS) % 8) * piece
        reads_N["offset"] = (np.arange(READS) % 8) * piece
        reads_N["size"], reads_N["is_ahead"] = piece, np.arange(READS) % 2
        self.cold.read_units(tuple(handles), reads_N.data)
        ended, end = 0, time.monotonic_ns() + WAIT_NS
        failed = []
        while ended < READS:
            assert time.monotonic_ns() < end, f"{ended} of {READS} reads ended"
            self.cold.wait_units(NS_PER_S, reads=READS - ended)
            units = self.cold.poll_units()
            failed += units.failed
            ended += len(units.tags) + len(units.failed)
        for each in failed:
            self.check(number, each.error)
        if not failed:
            view = self.views.bytes(target)[: 8 * piece]
            wanted = pattern(number, 0, LAYOUT.slab.size_bytes(BLOCKS))[: view.nbytes // 8]
            assert (np.frombuffer(view, dtype=np.uint64) == wanted).all(), f"other bytes in segment {number}"

    def check(self, number: int, error: Exception | None) -> None:
        """A segment that is lost is given up, one that cannot be read now is kept."""
        if error is None:
            return
        assert isinstance(error, TierError | SlabError | StaleHandleError), error
        self.broken += 1
        if isinstance(error, SlabError):
            gone = [each for each in self.live if each[0] == number]
            for each in gone:
                self.live.remove(each)
                self.cold.release(each[1])

    def settle(self, count: int) -> list[Exception | None]:
        ended: dict[int, Exception | None] = {}
        end = time.monotonic_ns() + WAIT_NS
        while len(ended) < count:
            assert time.monotonic_ns() < end, f"{len(ended)} of {count} moves ended"
            self.cold.wait(NS_PER_S)
            for completion in self.cold.poll():
                ended[completion.move.key.layer] = completion.error
        return [ended[layer] for layer in range(count)]


def pattern(number: int, layer: int, size_bytes: int) -> np.ndarray:
    return np.arange(size_bytes // 8, dtype=np.uint64) + np.uint64((number * 31 + layer) << 16)


def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    with PeerChannel(UnixAddress(folder / "nvme_io.sock")) as channel:
        link = NodeLink(
            folder / "regions.sock", channel, layout=wire(), name=f"load-{number}", boot_token=secrets.token_bytes(16)
        )
        link.open(30 * NS_PER_S)
        load = Load(link, number)
        rounds = 0
        while True:
            load.turn()
            load.cold.check_integrity()
            assert link.fault is None, link.fault
            rounds += 1
            said = {"rounds": rounds, "broken": load.broken, "sessions": link.sessions_total}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
