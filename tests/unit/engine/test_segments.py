import ctypes
from collections.abc import Iterable, Iterator, Sequence

import pytest

from h3kv.core.errors import TierFullError
from h3kv.core.ports import AddressableStore
from h3kv.core.types import BlockKey, BlockLocation, SegmentId, SegmentLabel, SlabKey
from h3kv.engine.directory import MemoryDirectory
from h3kv.engine.indexes import SegmentIndexes
from h3kv.engine.placement import Placer
from h3kv.engine.prefix import Mount, cover, mount_prefix, reusable_blocks
from h3kv.engine.segment import Phase, Segment
from h3kv.engine.segments import SegmentTable
from h3kv.policy.eviction import Candidate
from h3kv.policy.placement import PlacementConfig
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.clock import ManualClock
from h3kv.testing.engines import LAYOUT, tiny_store
from h3kv.testing.fake_store import FakeStore
from h3kv.testing.faulty_store import FaultyStore, InjectedFaultError


class World:
    """A table over a store of 32 blocks of two layers."""

    def __init__(self, store: AddressableStore | None = None) -> None:
        self.store = store or tiny_store(32)
        self.directory = MemoryDirectory()
        self.telemetry = Recorder()
        self.serve(SegmentTable)

    def serve(self, kind: type[SegmentTable]) -> None:
        clock = ManualClock()
        indexes = SegmentIndexes(LAYOUT, None, None, clock=clock)
        self.table = table = kind(
            self.store, LAYOUT, directory=self.directory, telemetry=self.telemetry, indexes=indexes, clock=clock
        )
        config = PlacementConfig(has_nvme=False)
        self.placer = Placer(table, host=None, config=config, telemetry=self.telemetry, clock=ManualClock())

    def sealed(self, name: str, blocks: int, *, parent: SegmentId | None = None) -> SegmentId:
        (segment,) = self.table.open([blocks])
        above = None if parent is None else self.table._segments[parent]
        self.table.seal(segment, label(name, blocks), parent=above)
        self.table.unpin(segment)
        return segment.id

    def used_blocks(self) -> int:
        return self.store.statistics().used_bytes // LAYOUT.block_bytes

    def close(self) -> None:
        self.table.check_integrity()
        self.placer.evict_all()
        self.table.check_integrity()
        assert self.table.statistics().segments == 0
        assert self.used_blocks() == 0
        assert len(self.directory) == 0


def keys(name: str, blocks: int) -> list[BlockKey]:
    return [BlockKey(f"{name}{block}".encode()) for block in range(blocks)]


def label(name: str, blocks: int) -> SegmentLabel:
    return SegmentLabel(tuple(keys(name, blocks)), parent=BlockKey(b"root"))


def test_segments_open_all_or_nothing_with_a_slot_in_each_layer() -> None:
    world = World()
    first, second = world.table.open([1, 16])
    assert world.used_blocks() == 17
    assert len(second.addresses_L) == LAYOUT.layers
    assert len({*first.addresses_L, *second.addresses_L}) == 4
    with pytest.raises(TierFullError) as caught:
        world.table.open([1, 16])
    assert caught.value.needed_bytes == 17 * LAYOUT.block_bytes
    assert caught.value.free_bytes == 15 * LAYOUT.block_bytes
    assert world.used_blocks() == 17
    world.table.unpin(first)
    world.table.unpin(second)
    world.close()


def test_sealing_publishes_keys_and_leaves_the_bytes_where_they_are() -> None:
    world = World()
    (segment,) = world.table.open([16])
    for layer, address in enumerate(segment.addresses_L):
        ctypes.memset(address, layer + 1, LAYOUT.slab.size_bytes(3))
    assert world.directory.find(keys("a", 3)) == []
    world.table.seal(segment, label("a", 3), parent=None)
    assert segment.phase is Phase.SEALED
    assert world.directory.find(keys("a", 4)) == [BlockLocation(segment.id, at) for at in range(3)]
    for layer, address in enumerate(segment.addresses_L):
        handle = world.store.lookup(SlabKey(segment.id, layer))
        assert handle is not None
        assert world.store.address(handle) == address
        assert ctypes.string_at(address, 3) == bytes([layer + 1]) * 3
    world.table.unpin(segment)
    world.close()


def test_open_segment_goes_with_its_pin_and_a_sealed_one_stays() -> None:
    world = World()
    sealed, dropped = world.table.open([2, 2])
    world.table.seal(sealed, label("a", 2), parent=None)
    world.table.unpin(dropped)
    world.table.unpin(sealed)
    assert world.used_blocks() == 2
    assert world.table.statistics().sealed == 1
    world.close()


def test_room_is_made_by_evicting_the_least_recently_used() -> None:
    world = World()
    old, new = world.sealed("a", 16), world.sealed("b", 16)
    pinned = world.table.pin(old, keys=keys("a", 1))
    assert pinned is not None
    world.table.unpin(pinned)
    (segment,) = world.table.open([1])
    assert world.directory.find(keys("b", 1)) == []
    assert len(world.directory.find(keys("a", 16))) == 16
    assert world.table.pin(new, keys=keys("b", 1)) is None
    assert world.telemetry.value(names.EVICTED_SEGMENTS, tier="device") == 1
    world.table.unpin(segment)
    world.close()


def test_free_room_is_taken_without_asking_who_could_go(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.sealed("a", 16)

    def refuse(candidates: Iterable[Candidate]) -> Iterator[SegmentId]:
        raise AssertionError("nothing has to go")

    with monkeypatch.context() as patch:
        patch.setattr("h3kv.policy.placement.order_evictions", refuse)
        (segment,) = world.table.open([16])
    world.table.unpin(segment)
    world.close()


def test_pinned_segments_are_never_evicted() -> None:
    world = World()
    first, _ = world.sealed("a", 16), world.sealed("b", 16)
    pinned = world.table.pin(first, keys=keys("a", 16))
    assert pinned is not None
    with pytest.raises(TierFullError):
        world.table.open([16, 1])
    assert world.table.statistics().sealed == 2, "a refusal that the sum shows evicts nothing"
    (second,) = world.table.open([16])
    assert len(world.directory.find(keys("a", 16))) == 16
    world.table.unpin(pinned)
    world.table.unpin(second)
    world.close()


def test_room_in_pieces_is_joined_by_further_eviction() -> None:
    world = World()
    small = [world.sealed(name, 1) for name in "abcdefgh"]
    (middle,) = world.table.open([16])
    (rest,) = world.table.open([8])
    for segment in small[1::2]:
        found = world.table.pin(segment, keys=[])
        assert found is not None
        world.table.unpin(found)
    world.table.unpin(rest)
    assert world.used_blocks() == 24
    (opened,) = world.table.open([16])
    assert opened.room_blocks == 16
    world.table.unpin(opened)
    world.table.unpin(middle)
    world.close()


def test_pin_refuses_a_segment_that_holds_other_blocks() -> None:
    world = World()
    segment = world.sealed("a", 2)
    assert world.table.pin(segment, keys=keys("b", 1)) is None
    assert world.table.pin(segment, keys=keys("a", 3)) is None
    assert world.table.pin(SegmentId(99), keys=[]) is None
    world.close()


@pytest.mark.parametrize("broken", [1, 2])
def test_segment_whose_move_failed_serves_its_owner_and_is_never_found(broken: int) -> None:
    world = World(FaultyStore(tiny_store(32), broken_moves=[broken]))
    (segment,) = world.table.open([2])
    world.table.seal(segment, label("a", 2), parent=None)
    assert segment.phase is Phase.PRIVATE
    assert world.directory.find(keys("a", 2)) == []
    assert world.table.pin(segment.id, keys=keys("a", 2)) is None
    assert world.telemetry.value(names.FAILED_SEALS, tier="device") == 1
    world.table.check_integrity()
    world.table.unpin(segment)
    assert world.used_blocks() == 0
    world.close()


def test_segment_whose_moves_are_refused_serves_its_owner_and_is_never_found() -> None:
    world = World(FaultyStore(tiny_store(32), broken_calls={"submit": [1]}))
    (segment,) = world.table.open([2])
    world.table.seal(segment, label("a", 2), parent=None)
    assert segment.phase is Phase.PRIVATE
    assert world.table.is_settled
    assert world.directory.find(keys("a", 2)) == []
    assert world.telemetry.value(names.FAILED_SEALS, tier="device") == 1
    world.table.check_integrity()
    world.table.unpin(segment)
    assert world.used_blocks() == 0
    world.close()


def test_interrupt_while_moves_are_submitted_goes_on_to_the_caller() -> None:
    world = World(FaultyStore(tiny_store(32), broken_calls={"submit": [1]}, refusal=KeyboardInterrupt()))
    (segment,) = world.table.open([2])
    with pytest.raises(KeyboardInterrupt):
        world.table.seal(segment, label("a", 2), parent=None)
    world.table.check_integrity()
    world.table.unpin(segment)
    world.close()


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize("refusal", [None, KeyboardInterrupt()])
def test_segments_whose_addresses_are_refused_hold_nothing(call: int, refusal: BaseException | None) -> None:
    """Two segments in two layers ask for four addresses."""
    world = World(FaultyStore(tiny_store(32), broken_calls={"address": [call]}, refusal=refusal))
    with pytest.raises(KeyboardInterrupt if refusal else InjectedFaultError):
        world.table.open([1, 16])
    assert world.table.statistics().segments == 0
    assert world.used_blocks() == 0
    for segment in world.table.open([1, 16]):
        world.table.unpin(segment)
    world.close()


@pytest.mark.parametrize("broken", [None, 1, 2])
def test_segment_given_up_while_its_moves_are_in_flight_ends_well(broken: int | None) -> None:
    store = FaultyStore(
        FakeStore(LAYOUT.slab, capacity_blocks=64, latency_polls=3), broken_moves=[] if broken is None else [broken]
    )
    world = World(store)
    (segment,) = world.table.open([2])
    world.table.seal(segment, label("a", 2), parent=None)
    world.table.unpin(segment)
    assert segment.phase is Phase.SEALING
    world.table.check_integrity()
    for _ in range(3):
        world.placer.tick()
    assert len(world.directory.find(keys("a", 2))) == (2 if broken is None else 0)
    assert world.used_blocks() == (2 if broken is None else 0)
    world.close()


def test_last_token_of_a_prompt_is_always_computed() -> None:
    assert [reusable_blocks(tokens) for tokens in (1, 64, 65, 128, 129)] == [0, 0, 1, 1, 2]


def locations(*pairs: tuple[int, int]) -> list[BlockLocation]:
    return [BlockLocation(SegmentId(segment), index) for segment, index in pairs]


def test_locations_are_covered_by_beginnings_of_segments() -> None:
    assert cover([]) == []
    assert cover(locations((1, 0))) == [(1, 1)]
    assert cover(locations((1, 0), (2, 0), (2, 1))) == [(1, 1), (2, 2)]
    assert cover(locations((1, 0), (2, 0), (2, 1), (3, 2), (3, 3))) == [(1, 1), (3, 4)]
    assert cover(locations((1, 0), (2, 0), (3, 1), (2, 2))) == [(1, 1), (2, 3)]


def test_contradicting_locations_are_a_miss() -> None:
    assert cover(locations((1, 3))) == []


def test_known_prefix_is_mounted_under_pins() -> None:
    world = World()
    first = world.sealed("a", 1)
    second = world.sealed("b", 4, parent=first)
    mounts = mount_prefix([*keys("a", 1), *keys("b", 3)], world.directory, world.table)
    assert [(mount.segment.id, mount.blocks) for mount in mounts] == [(first, 1), (second, 3)]
    assert world.table.statistics().pins == 2
    assert world.table.statistics().pinned_bytes == 5 * LAYOUT.block_bytes
    for mount in mounts:
        world.table.unpin(mount.segment)
    world.close()


class InterruptedTable(SegmentTable):
    """Its second pin is interrupted."""

    pins_taken = 0

    def pin(self, segment: SegmentId, *, keys: Sequence[BlockKey]) -> Segment | None:
        self.pins_taken += 1
        if self.pins_taken == 2:
            raise KeyboardInterrupt
        return super().pin(segment, keys=keys)


def test_interrupt_between_two_pins_leaves_none() -> None:
    world = World()
    world.serve(InterruptedTable)
    first = world.sealed("a", 1)
    world.sealed("b", 4, parent=first)
    with pytest.raises(KeyboardInterrupt):
        mount_prefix([*keys("a", 1), *keys("b", 3)], world.directory, world.table)
    assert world.table.statistics().pins == 0
    world.close()


def test_hit_that_is_lost_before_it_is_pinned_is_recomputed() -> None:
    world = World()
    first = world.sealed("a", 1)
    gone = BlockKey(b"gone")
    world.directory.publish([gone], SegmentId(77))
    mounts = mount_prefix([*keys("a", 1), gone], world.directory, world.table)
    assert mounts == [Mount(world.table._segments[first], 1)]
    world.directory.withdraw([gone], SegmentId(77))
    world.table.unpin(mounts[0].segment)
    world.close()


def test_held_segment_stays_until_it_is_let_go_as_often() -> None:
    world = World()
    held, other = world.sealed("a", 4), world.sealed("b", 4)
    segment = world.table.find(held)
    assert segment is not None
    world.table.hold(segment)
    world.table.hold(segment)
    assert world.table.held_blocks == 4
    assert world.placer.evict_all() == 1
    assert world.table.find(other) is None
    world.table.let_go(segment)
    assert world.placer.evict_all() == 0
    world.table.check_integrity()
    world.table.let_go(segment)
    world.table.let_go(segment)
    assert world.table.held_blocks == 0
    world.close()


def test_withdrawn_segment_is_found_by_nobody_and_what_continues_it_is_not_shared() -> None:
    world = World()
    segment = world.table.pin(world.sealed("a", 2), keys=keys("a", 2))
    assert segment is not None
    world.table.hold(segment)
    world.table.withdraw(segment)
    world.table.withdraw(segment)
    assert world.table.held_blocks == 0
    assert world.directory.find(keys("a", 2)) == []
    assert world.table.pin(segment.id, keys=keys("a", 2)) is None
    (child,) = world.table.open([1])
    world.table.seal(child, label("b", 1), parent=segment)
    assert world.directory.find(keys("b", 1)) == []
    address = world.store.address(segment.home_L[0])
    ctypes.memset(address, 7, 64)
    world.table.check_integrity()
    world.table.unpin(child)
    world.table.unpin(segment)
    assert world.table.find(segment.id) is segment, "whoever unpins it does not wait for zeros"
    world.table.check_integrity()
    world.table.give_up(child)
    world.table.give_up(segment)
    assert ctypes.string_at(address, 64) == bytes(64), "its bytes lie there still"
    assert world.table.statistics().segments == 0
    world.close()


def test_segment_that_continues_one_of_a_document_is_erased_as_that_is() -> None:
    world = World()
    parent = world.table.find(world.sealed("a", 1))
    assert parent is not None
    parent.is_erased = True
    child = world.table.find(world.sealed("b", 1, parent=parent.id))
    assert child is not None
    assert child.is_erased
    assert child.keys == tuple(keys("b", 1))
    addresses = [world.store.address(child.home_L[0]), world.store.address(parent.home_L[0])]
    for address in addresses:
        ctypes.memset(address, 7, 64)
    world.close()
    assert [ctypes.string_at(address, 64) for address in addresses] == [bytes(64)] * 2
