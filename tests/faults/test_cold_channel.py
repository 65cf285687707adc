"""What a client writes into the channel of the cold store is checked: nonsense ends its channel and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from h3kv.core.errors import RequestError, TierBrokenError
from h3kv.core.layout import CacheLayout
from h3kv.core.types import BlockKey, Fetch, Move, SegmentId, SegmentLabel, SlabKey, SlotHandle
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import FINGERPRINT, LAYOUT
from h3kv.testing.served_cold_store import HOLDER, ServedColdStore, region_memory, slots_region
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.geometry import capacity_for
from h3kv.tiers.cold.ops import address_of
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE
from h3kv.tiers.remote import RemoteColdStore, records
from h3kv.tiers.remote import store as store_module
from h3kv.tiers.remote.channel import RECORD_BYTES_MAX, RING_BYTES
from h3kv.tiers.remote.records import FETCH_DTYPE, HANDLE_DTYPE, WRITE_DTYPE, Kind

SIZE_BYTES = LAYOUT.slab.content_bytes(2)
LAYERS = LAYOUT.layers
DEADLINE_S = 30.0


class Bench:
    """A store behind a channel, with one segment in it, and the client's side of the channel laid bare."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        region = slots_region(LAYOUT.slab.block_bytes, 16)
        config = ColdStoreConfig(capacity_bytes=capacity_for(CacheLayout(LAYOUT.slab, LAYERS), units=2))
        self.region = region
        self.served = ServedColdStore(
            lambda bell: ColdStore.open(
                folder, LAYOUT, fingerprint=FINGERPRINT, config=config, telemetry=Recorder(), bell=bell
            ),
            (region,),
        )
        stack.callback(self.served.close)
        self.memory: Callable[[int], memoryview] = stack.enter_context(region_memory(region))
        self.store: RemoteColdStore = self.served.open_client()
        self.handles = self.write(1)

    def write(self, number: int) -> list[SlotHandle]:
        handles = self.store.reserve([2] * LAYERS)
        key = BlockKey(number.to_bytes(32, "little"))
        self.store.submit([self.move(number, layer, handle, key) for layer, handle in enumerate(handles)])
        self.settle(LAYERS)
        return handles

    def move(self, number: int, layer: int, handle: SlotHandle, key: BlockKey) -> Move:
        source = self.memory(SIZE_BYTES)
        np.frombuffer(source, dtype=np.uint64)[:] = number * 100 + layer
        return Move(SlabKey(SegmentId(number), layer), handle, source, SegmentLabel((key, key), BlockKey(bytes(32))))

    def settle(self, count: int) -> list[Exception | None]:
        errors: list[Exception | None] = []
        end = time.monotonic() + DEADLINE_S
        while len(errors) < count:
            assert time.monotonic() < end
            self.store.wait(10_000_000)
            errors += [completion.error for completion in self.store.poll()]
        return errors

    def read(self, handles: list[SlotHandle], number: int) -> None:
        target = self.memory(SIZE_BYTES)
        self.store.submit([Fetch(SlabKey(SegmentId(number), 0), handles[0], target)])
        assert self.settle(1) == [None]
        assert (np.frombuffer(target, dtype=np.uint64) == number * 100).all()

    def push(self, record: bytes) -> None:
        """As a client that goes by no rules."""
        session = self.served.current
        assert session is not None
        assert session.side.outgoing.push(record)
        session.side.peer_bell.ring()

    def await_refusal(self) -> None:
        server = self.served.server
        assert server is not None
        end = time.monotonic() + DEADLINE_S
        while server.refused_total == 0:
            assert time.monotonic() < end, "nonsense was not noticed"
            select.select([], [], [], 0.001)

    def check_recovers(self) -> None:
        """The server goes on; the client, which learns that it is shut out, comes back by registering anew."""
        refused, end = self.served.current, time.monotonic() + DEADLINE_S
        while self.served.current is refused:
            assert time.monotonic() < end, "no other channel was asked for"
            self.store.poll()
        self.read(self.handles, 1)
        self.read(self.write(2), 2)
        self.store.check_integrity()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        yield Bench(tmp_path, stack)


def row(dtype: np.dtype, *values: int) -> bytes:
    return np.array([values], dtype=dtype).tobytes()


def write_record(*, blocks: int = 2, size: int = SIZE_BYTES, address: int = 0, keys: int = 2) -> bytes:
    addresses = np.full(LAYERS, address, dtype="<u8").tobytes()
    return records.pack(
        Kind.WRITE, 9, row(WRITE_DTYPE, 0, 1, blocks, 1, size) + addresses + bytes(32 * (keys + 1)), count=keys
    )


def units_record(target: int, *, slab_list: int = 1, size: int = 8192, offset: int = 0) -> bytes:
    reads_N = np.zeros(1, dtype=UNIT_READ_DTYPE)
    reads_N["target"], reads_N["size"], reads_N["offset"] = target, size, offset
    return records.pack(Kind.UNITS, 9, slab_list.to_bytes(8, "little") + reads_N.tobytes(), count=1)


MALFORMED = {
    "no head": b"abc",
    "unknown kind": records.pack(Kind.RESERVE, 1)[:0] + bytes([99]) + bytes(15),
    "a completion": records.pack(Kind.FETCHED, 1),
    "sizes that are none": records.pack(Kind.RESERVE, 1, bytes([3]), count=1),
    "another count": records.pack(Kind.RELEASE, 1, bytes(HANDLE_DTYPE.itemsize), count=2),
    "a count beyond all": records.pack(Kind.FETCH, 1, bytes(FETCH_DTYPE.itemsize), count=0xFFFFFFFF),
    "a move without addresses": records.pack(Kind.WRITE, 1, bytes(WRITE_DTYPE.itemsize), count=1),
    "a move of too many keys": write_record(keys=17),
    "a fetch of half a unit": records.pack(Kind.FETCH, 1, row(FETCH_DTYPE, 0, 1, 2, 0, 100, 0, 100), count=1),
    "a fetch beyond its slab": records.pack(Kind.FETCH, 1, row(FETCH_DTYPE, 0, 1, 2, 0, 0, 0, 1 << 40), count=1),
    "units of no list": units_record(0, slab_list=77),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_record_ends_the_channel_alone(bench: Bench, what: str) -> None:
    bench.push(MALFORMED[what])
    bench.await_refusal()
    bench.check_recovers()


def outside(bench: Bench) -> dict[str, int]:
    """Addresses that are not this client's."""
    start = bench.region.address + bench.region.geometry.data_offset
    unit_bytes = 16 * LAYOUT.slab.block_bytes
    return {
        "null": 0,
        "the slot table": bench.region.address + 4096,
        "before the slots": start - 4096,
        "behind them": start + bench.region.geometry.data_bytes,
        "over their end": start + bench.region.geometry.data_bytes - 4096,
        "a unit given back": start + 8 * unit_bytes,
        "our own": address_of(memoryview(bytearray(64))),
        "the last of all": (1 << 64) - 4096,
    }


@pytest.mark.parametrize(
    "where",
    [
        "null",
        "the slot table",
        "before the slots",
        "behind them",
        "over their end",
        "a unit given back",
        "our own",
        "the last of all",
    ],
)
@pytest.mark.parametrize("kind", ["fetch", "write", "units"])
def test_address_outside_of_the_leases_never_reaches_the_kernel(bench: Bench, where: str, kind: str) -> None:
    bench.served.leases[0].give_back(HOLDER, [8])
    address = outside(bench)[where]
    assert bench.served.server is not None
    theirs = next(iter(bench.served.server.ownership._segments())).handles_L[0]
    if kind == "fetch":
        values = (theirs.slot, theirs.generation, theirs.blocks, 0, 0, address, SIZE_BYTES)
        bench.push(records.pack(Kind.FETCH, 1 << 20, row(FETCH_DTYPE, *values), count=1))
    elif kind == "write":
        reserved = bench.store.reserve([2] * LAYERS)
        (owned,) = [each for each in bench.served.server.ownership._segments() if not each.is_written]
        slot = owned.handles_L[0]
        head = row(WRITE_DTYPE, slot.slot, slot.generation, slot.blocks, 1, SIZE_BYTES)
        body = head + np.full(LAYERS, address, dtype="<u8").tobytes() + bytes(96)
        bench.push(records.pack(Kind.WRITE, 1 << 20, body, count=2))
        del reserved
    else:
        bench.push(records.pack(Kind.SLABS, 1 << 20, records.handle_rows([theirs]), count=1))
        bench.push(units_record(address // 4096 * 4096, slab_list=1 << 20))
    bench.await_refusal()
    bench.check_recovers()


def test_record_that_is_none_ends_the_channel(bench: Bench) -> None:
    """Bytes in the ring itself: a length beyond all, a checksum that does not match, a position that cannot be."""
    channels = bench.served.channels
    ring = next(iter(channels._rings(0)))
    tail = ctypes.c_uint64.from_address(ring + 64)
    at = tail.value % RING_BYTES
    ctypes.c_uint32.from_address(ring + 128 + at).value = RECORD_BYTES_MAX + 1
    tail.value += 64
    channels.server_bell.ring()
    bench.await_refusal()
    bench.check_recovers()


def test_position_that_cannot_be_ends_the_channel(bench: Bench) -> None:
    ring = next(iter(bench.served.channels._rings(0)))
    ctypes.c_uint64.from_address(ring + 64).value += 2 * RING_BYTES
    bench.served.channels.server_bell.ring()
    bench.await_refusal()
    bench.check_recovers()


def test_stale_generation_fails_alone(bench: Bench) -> None:
    """A handle of before is an error of its own request: it may happen to an honest client."""
    assert bench.served.server is not None
    theirs = next(iter(bench.served.server.ownership._segments())).handles_L[0]
    target = address_of(bench.memory(SIZE_BYTES))
    values = (theirs.slot, theirs.generation + 1, theirs.blocks, 0, 0, target, SIZE_BYTES)
    bench.push(records.pack(Kind.FETCH, 1 << 20, row(FETCH_DTYPE, *values), count=1))
    bench.push(records.pack(Kind.RELEASE, 0, records.handle_rows([SlotHandle(theirs.tier, 4, 2, 77)]), count=1))
    bench.read(bench.handles, 1)
    bench.read(bench.write(2), 2)
    assert bench.served.server.refused_total == 0


def test_memory_that_the_server_does_not_reach_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(RequestError):
        bench.store.submit([Fetch(SlabKey(SegmentId(1), 0), bench.handles[0], memoryview(bytearray(SIZE_BYTES)))])
    bench.read(bench.handles, 1)


def test_reads_in_flight_end_and_lost_segments_are_told_when_the_server_begins_anew(bench: Bench) -> None:
    """What has a label is found again under the same handle; what has none is lost."""
    nameless = bench.store.reserve([2] * LAYERS)
    moves = [bench.move(5, layer, handle, BlockKey(bytes(32))) for layer, handle in enumerate(nameless)]
    bench.store.submit([Move(move.key, move.target, move.source, None) for move in moves])
    assert bench.settle(LAYERS) == [None] * LAYERS
    target = bench.memory(SIZE_BYTES)
    bench.served.end()
    bench.store.submit([Fetch(SlabKey(SegmentId(1), 0), bench.handles[0], target)])
    (error,) = bench.settle(1)
    assert isinstance(error, TierBrokenError)
    with pytest.raises(TierBrokenError):
        bench.store.reserve([2] * LAYERS)
    bench.served.start()
    bench.read(bench.handles, 1)
    assert bench.store.lookup(SlabKey(SegmentId(5), 0)) is None
    bench.store.release(nameless)
    bench.store.release(bench.handles)
    assert bench.store.statistics().used_bytes == 0
    bench.store.check_integrity()


def test_server_that_does_not_answer_is_not_waited_for_by_each_segment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ANSWER_NS", 20 * NS_PER_MS)
    held = threading.Event()
    server = bench.served.server
    assert server is not None
    monkeypatch.setattr(server.store, "reserve", lambda blocks: held.wait(DEADLINE_S) and [])
    with pytest.raises(TierBrokenError, match="does not answer: see"):
        bench.store.reserve([2] * LAYERS)
    monkeypatch.setattr(store_module, "ANSWER_NS", 3_600 * NS_PER_S)
    monkeypatch.setattr(bench.store, "_rests_until_ns", time.monotonic_ns() + 3_600 * NS_PER_S)
    monkeypatch.setattr(bench.store, "_heard_before", bench.store._exchange.heard_total)
    exchanges = bench.store.exchanges
    for _ in range(100):
        with pytest.raises(TierBrokenError, match="asked again soon"):
            bench.store.reserve([2] * LAYERS)
    assert bench.store.exchanges == exchanges
    held.set()
