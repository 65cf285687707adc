"""Reading ahead over a store whose fetches end late."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from h3kv.core.errors import SlabCorruptError, SlabUnavailableError
from h3kv.core.types import Move, SegmentId, SlabKey, SlotHandle, Tier
from h3kv.engine.stream import Readable, SlabStream
from h3kv.testing.clock import ManualClock
from h3kv.testing.engines import LAYOUT
from h3kv.testing.fake_store import FakeStore
from h3kv.testing.faulty_store import FaultyStore
from h3kv.tiers.host import HostStore, HostStoreConfig

SLAB_BYTES = LAYOUT.slab.size_bytes(1)
SLABS = [SlabKey(SegmentId(segment), layer) for layer in range(2) for segment in range(1, 8)]


class World:
    """Seven slabs in each of two layers in a slow store, and a few staging slots."""

    def __init__(self, slots: int, *, corrupt: tuple[int, ...] = ()) -> None:
        self.fake = fake = FakeStore(LAYOUT.slab, capacity_blocks=64, latency_polls=2, tier=Tier.NVME)
        self.handles: dict[SlabKey, SlotHandle] = dict(zip(SLABS, fake.reserve([1] * len(SLABS)), strict=True))
        for number, (slab, handle) in enumerate(self.handles.items()):
            fake.submit([Move(slab, handle, memoryview(bytes([number + 1]) * SLAB_BYTES))])
        while fake.statistics().slabs_visible < len(SLABS):
            fake.poll()
        self.cold = FaultyStore(fake, corrupt_fetches=corrupt)
        self.host = HostStore(LAYOUT.slab, HostStoreConfig(capacity_bytes=LAYOUT.slab.size_bytes(16)))
        self.resident: dict[SlabKey, int] = {}
        self.polls = 0
        self.stream = SlabStream(
            self.cold,
            self.host,
            self.host.reserve([1] * slots),
            locate=self.locate,
            poll=self.poll,
            clock=ManualClock(step_ns=1_000_000),
            wait_ns=10_000_000_000,
        )

    def locate(self, slab: SlabKey) -> Readable:
        return Readable(self.resident.get(slab), False, self.handles.get(slab), SLAB_BYTES)

    def poll(self) -> None:
        self.polls += 1
        for completion in self.cold.poll():
            assert self.stream.end_fetch(completion)

    def step(self) -> Iterator[tuple[SlabKey, int]]:
        """Every slab of the plan with its first byte, as a decode step takes them."""
        for layer in range(2):
            left = [slab for slab in SLABS if slab.layer == layer]
            while left:
                addresses = self.stream.take(left)
                taken, left = left[: len(addresses)], left[len(addresses) :]
                for slab, address in zip(taken, addresses, strict=True):
                    yield slab, int(np.frombuffer(self.host.arena.numpy(), dtype=np.uint8)[self.offset(address)])
                self.stream.give_back(taken)
                self.stream.check_integrity()

    def offset(self, address: int) -> int:
        return address - self.host.arena.data_ptr()

    def close(self) -> None:
        self.stream.drain()
        self.stream.check_integrity()
        self.host.close()


@pytest.mark.parametrize("slots", [4, 5, 16])
def test_slabs_come_in_order_and_whole_step_after_step(slots: int) -> None:
    world = World(slots)
    for _ in range(3):
        world.stream.plan(SLABS)
        assert list(world.step()) == [(slab, number + 1) for number, slab in enumerate(SLABS)]
    world.close()


def test_next_step_is_read_ahead_while_this_one_ends() -> None:
    world = World(4)
    world.stream.plan(SLABS)
    list(world.step())
    for _ in range(4):
        world.poll()
    polls = world.polls
    assert world.stream.take(SLABS[:1])
    assert world.polls == polls + 1, "it was there already"
    world.stream.give_back(SLABS[:1])
    world.close()


def test_slab_outside_the_plan_is_fetched_when_it_is_wanted() -> None:
    world = World(4)
    world.stream.plan(SLABS[:7])
    (address,) = world.stream.take([SLABS[10]])
    assert world.host.arena[world.offset(address)] == 11
    world.stream.give_back([SLABS[10]])
    world.close()


def test_new_plan_waits_for_the_slots_of_the_old_one() -> None:
    world = World(4)
    world.stream.plan(SLABS)
    world.stream.plan(list(reversed(SLABS)))
    (address, *_) = world.stream.take([SLABS[13]])
    assert world.host.arena[world.offset(address)] == 14
    world.stream.give_back([SLABS[13]])
    world.close()


def test_slab_in_memory_is_read_where_it_lies() -> None:
    world = World(4)
    world.resident[SLABS[0]] = 4096
    world.stream.plan(SLABS)
    assert world.stream.take(SLABS[:1]) == [4096]
    world.stream.give_back(SLABS[:1])
    world.close()


def test_reading_ahead_falls_into_step_again_after_a_surprise() -> None:
    world = World(4)
    world.resident = {SLABS[3]: 12345}
    world.stream.plan(SLABS)
    world.resident = {}
    steps = 4
    for _ in range(steps):
        assert [slab for slab, _ in world.step()] == SLABS
        world.stream.plan(SLABS)
    read = world.stream.bytes_fetched_total // SLAB_BYTES
    assert read <= steps * len(SLABS) + 2 * 4, "each surprise costs a few slabs, once"
    world.close()


def test_corrupt_slab_is_an_error_and_the_others_still_come() -> None:
    world = World(4, corrupt=(2,))
    world.stream.plan(SLABS)
    world.stream.give_back(SLABS[: len(world.stream.take(SLABS[:1]))])
    with pytest.raises(SlabCorruptError):
        world.stream.take(SLABS[1:2])
    assert len(world.stream.take(SLABS[2:3])) == 1
    world.stream.give_back(SLABS[2:3])
    world.close()


def test_slabs_taken_before_a_corrupt_one_of_their_group_are_given_out() -> None:
    world = World(12, corrupt=(3,))
    world.stream.plan(SLABS)
    taken = world.stream.take(SLABS[:7])
    assert len(taken) == 2
    world.stream.give_back(SLABS[:2])
    with pytest.raises(SlabCorruptError):
        world.stream.take(SLABS[2:7])
    world.stream.check_integrity()
    assert world.stream.take(SLABS[3:7])
    world.stream.give_back(SLABS[3:7])
    world.close()


def test_slab_whose_reading_failed_is_read_from_memory_once_it_lies_there() -> None:
    world = World(4, corrupt=(1,))
    world.stream.plan(SLABS)
    for _ in range(4):
        world.poll()
    world.resident[SLABS[0]] = 4096
    assert world.stream.take(SLABS[:1]) == [4096]
    world.stream.give_back(SLABS[:1])
    world.close()


def test_plan_that_does_not_repeat_ends_with_its_last_slab() -> None:
    world = World(8)
    for _ in range(2):
        world.stream.plan(SLABS, repeats=False)
        list(world.step())
        for _ in range(4):
            world.poll()
        world.stream.check_integrity()
        assert not world.stream._ready
    world.close()


def test_slab_that_is_gone_or_does_not_come_is_unavailable() -> None:
    world = World(4)
    del world.handles[SLABS[3]]
    with pytest.raises(SlabUnavailableError, match="is gone"):
        world.stream.take([SLABS[3]])
    world.fake._latency_polls = 1 << 60
    with pytest.raises(SlabUnavailableError, match="did not come within 10 s"):
        world.stream.take([SLABS[4]])
    world.stream.check_integrity()
    world.host.close()
