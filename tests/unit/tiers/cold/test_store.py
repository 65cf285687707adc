"""A store over more than one life of a process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError, SlabCorruptError, StaleHandleError, TierFullError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType, Fetch, Move, SegmentId, SlabKey, SlotHandle, StoredSegment
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import (
    FINGERPRINT,
    LAYOUT,
    OTHER_FINGERPRINT,
    is_intact,
    moves_of,
    open_store,
    payload,
    read_segment,
    restore,
    settle,
    submit_segments,
    write_segments,
)
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.geometry import MIB, AreaGeometry, capacity_for, layout_mark

OTHER_LAYOUT = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.FP32, head_dim=32), kv_heads=1), layers=2)


def overwrite(path: Path, offset: int) -> None:
    """Flip one bit on the disk."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))
        os.fsync(file.fileno())


def slab_at(path: Path, number: int, layer: int) -> int:
    """Where a slab lies in the file."""
    content = path.read_bytes()
    return content.index(bytes(payload(number, layer, 4096)))


def keep(store: ColdStore) -> dict[int, StoredSegment]:
    kept = restore(store)
    store.check_integrity()
    return kept


def test_restart_keeps_every_segment_with_label_and_bytes(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path, units=4)) as store:
        write_segments(store, [(1, 16), (2, 3), (3, 1), (4, 8), (5, 2)])
    with contextlib.closing(open_store(tmp_path, units=4)) as store:
        kept = keep(store)
        assert sorted(kept) == [1, 2, 3, 4, 5]
        assert len(kept[2].label.keys) == 3
        assert kept[2].handles_L[0].blocks == 4
        assert store.statistics().slabs_visible == 10
        assert all(is_intact(store, segment) for segment in kept.values())
        assert store.lookup(SlabKey(kept[1].segment, 1)) == kept[1].handles_L[1]
        store.release([handle for segment in kept.values() for handle in segment.handles_L])
        assert store.statistics().used_bytes == 0
        store.check_integrity()
    with contextlib.closing(open_store(tmp_path, units=4)) as store:
        assert keep(store) == {}


def test_segment_without_label_ends_with_the_process(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        handles = store.reserve([2, 2])
        moves = moves_of(handles, 1, 2, layout=LAYOUT)
        store.submit([Move(move.key, move.target, move.source) for move in moves])
        assert [completion.error for completion in settle(store, 2)] == [None, None]
        write_segments(store, [(2, 1)])
    with contextlib.closing(open_store(tmp_path)) as store:
        assert sorted(keep(store)) == [2]
        assert store.statistics().used_bytes == LAYOUT.block_bytes


def test_same_segment_written_twice_is_found_once(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(1, 2)])
        handles = store.reserve([2, 2])
        again = [
            Move(SlabKey(SegmentId(77), move.key.layer), move.target, move.source, move.label)
            for move in moves_of(handles, 1, 2, layout=LAYOUT)
        ]
        store.submit(again)
        assert [completion.error for completion in settle(store, 2)] == [None, None]
    with contextlib.closing(open_store(tmp_path)) as store:
        assert len(keep(store)) == 1
        assert store.statistics().used_bytes == 2 * LAYOUT.block_bytes


def test_completions_of_a_segment_come_together_once_all_layers_were_submitted(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        handles = store.reserve([1, 1])
        moves = moves_of(handles, 1, 1, layout=LAYOUT)
        store.submit(moves[:1])
        store.wait(10_000_000)
        assert store.poll() == []
        store.submit(moves[1:])
        assert {completion.move.key.layer for completion in settle(store, 2)} == {0, 1}


def test_segment_of_which_a_slot_was_released_never_becomes_whole(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        handles = store.reserve([1, 1])
        moves = moves_of(handles, 1, 1, layout=LAYOUT)
        store.submit(moves[:1])
        store.release(handles[1:])
        assert [type(completion.error) for completion in settle(store, 1)] == [StaleHandleError]
        store.submit(moves[:1])
        assert [type(completion.error) for completion in settle(store, 1)] == [StaleHandleError]
        store.release(handles[:1])
        assert store.statistics().used_bytes == 0
        store.check_integrity()
    with contextlib.closing(open_store(tmp_path)) as store:
        assert keep(store) == {}


def test_slots_of_a_failed_try_are_released_without_hiding_the_next_one(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        first = store.reserve([1, 1])
        store.submit(moves_of(first, 1, 1, layout=LAYOUT)[:1])
        store.release(first[1:])
        settle(store, 1)
        second = write_segments(store, [(1, 1)])[1]
        store.release(first[:1])
        assert store.lookup(SlabKey(SegmentId(1), 0)) == second[0]
        store.check_integrity()


def test_flipped_byte_is_noticed_counted_and_gone_for_good(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(1, 4), (2, 4)])
        path = store.path
    overwrite(path, slab_at(path, 1, 1) + 300)
    telemetry = Recorder()
    with contextlib.closing(open_store(tmp_path, telemetry=telemetry)) as store:
        kept = keep(store)
        damaged = kept[1]
        errors = [error for _, error in read_segment(store, damaged.segment, damaged.handles_L)]
        assert errors[0] is None
        assert isinstance(errors[1], SlabCorruptError)
        assert telemetry.value(names.CORRUPT_SLABS, tier="nvme") == 1
        assert telemetry.value(names.READ_BYTES, tier="nvme") == LAYOUT.slab.size_bytes(4), "of the slab that came back"
        assert store.lookup(SlabKey(damaged.segment, 0)) is None
        target = memoryview(bytearray(4096 * 2))
        store.submit([Fetch(SlabKey(damaged.segment, 0), damaged.handles_L[0], target)])
        assert isinstance(settle(store, 1)[0].error, SlabCorruptError)
        assert is_intact(store, kept[2])
        store.check_integrity()
        store.release(damaged.handles_L)
        write_segments(store, [(3, 16)])
        store.check_integrity()
    with contextlib.closing(open_store(tmp_path)) as store:
        assert sorted(keep(store)) == [2, 3]


def test_damaged_header_is_a_miss(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(1, 1), (2, 1)])
        path = store.path
    overwrite(path, path.read_bytes().index(b"H3EXTENT") + 30)
    telemetry = Recorder()
    with contextlib.closing(open_store(tmp_path, telemetry=telemetry)) as store:
        assert len(keep(store)) == 1
        assert telemetry.value(names.CORRUPT_SLABS, tier="nvme") == 1
    with contextlib.closing(open_store(tmp_path, telemetry=telemetry)) as store:
        assert len(keep(store)) == 1
        assert telemetry.value(names.CORRUPT_SLABS, tier="nvme") == 1


def test_engine_that_runs_is_shown(tmp_path: Path) -> None:
    telemetry = Recorder()
    config = ColdStoreConfig(capacity_bytes=capacity_for(LAYOUT, units=1), backend="threads")
    store = ColdStore.open(tmp_path, LAYOUT, fingerprint=FINGERPRINT, config=config, telemetry=telemetry)
    store.close()
    store.close()
    assert telemetry.value(names.IO_BACKEND, tier="nvme", backend="threads") == 1
    assert telemetry.value(names.STORE_DEGRADED, tier="nvme") == 0


def test_opening_and_closing_leaves_no_descriptors(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    open_store(tmp_path).close()
    gc.collect()
    before = descriptors()
    for _ in range(10):
        with contextlib.closing(open_store(tmp_path)) as store:
            write_segments(store, [(1, 1)])
        with pytest.raises(ConfigError):
            open_store(tmp_path, capacity_bytes=MIB + 4096)
    assert descriptors() <= before


def test_unaligned_sources_and_targets_are_copied(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        handles = store.reserve([1, 1])
        size = LAYOUT.slab.block_bytes
        sources = [memoryview(bytearray(size + 1))[1:] for _ in range(2)]
        for layer, source in enumerate(sources):
            source[:] = payload(1, layer, size)
        moves = moves_of(handles, 1, 1, layout=LAYOUT)
        store.submit([Move(m.key, m.target, s, m.label) for m, s in zip(moves, sources, strict=True)])
        assert [completion.error for completion in settle(store, 2)] == [None, None]
        target = memoryview(bytearray(size + 1))[1:]
        store.submit([Fetch(moves[1].key, handles[1], target)])
        assert settle(store, 1)[0].error is None
        assert target == payload(1, 1, size)


def test_bytes_on_disk_never_exceed_the_cap_while_three_times_of_it_are_written(tmp_path: Path) -> None:
    cap = capacity_for(LAYOUT, units=3)
    telemetry = Recorder()
    with contextlib.closing(open_store(tmp_path, units=3, telemetry=telemetry)) as store:
        oldest: list[int] = []
        handles: dict[int, list[SlotHandle]] = {}
        for number in range(1, 3 * 48 // 8 + 4):
            with contextlib.suppress(TierFullError):
                handles |= write_segments(store, [(number, 8)])
            while number not in handles:
                store.release(handles[oldest.pop(0)])
                with contextlib.suppress(TierFullError):
                    handles |= write_segments(store, [(number, 8)])
            oldest.append(number)
            files = [path.stat() for path in tmp_path.iterdir()]
            assert sum(max(file.st_size, file.st_blocks * 512) for file in files) <= cap + 4096
            store.check_integrity()
        assert telemetry.value(names.WRITTEN_BYTES, tier="nvme") > 3 * store.statistics().capacity_bytes
    with contextlib.closing(open_store(tmp_path, units=3)) as store:
        kept = keep(store)
        assert sorted(kept) == oldest
        assert all(is_intact(store, segment) for segment in kept.values())


def areas_of_one_unit(tmp_path: Path, areas: int) -> int:
    """Make a store with areas of one unit each; its cap."""
    from h3kv.tiers.cold.format import format_store
    from h3kv.tiers.io import IoEngine

    area_bytes = -(-AreaGeometry(layout_mark(LAYOUT), 0).unit_bytes // 65536) * 65536
    capacity = MIB + areas * area_bytes
    _, geometry = format_store(
        tmp_path,
        lambda files: IoEngine.open(files, depth=4),
        capacity_bytes=capacity,
        area_bytes=area_bytes,
        yes=None,
    )
    assert geometry.areas == areas
    return capacity


def test_two_models_live_side_by_side(tmp_path: Path) -> None:
    capacity = areas_of_one_unit(tmp_path, 4)
    for fingerprint, numbers in ((FINGERPRINT, [1, 2]), (OTHER_FINGERPRINT, [11, 12])):
        with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity, fingerprint=fingerprint)) as store:
            assert keep(store) == {}
            write_segments(store, [(number, 16) for number in numbers])
    for fingerprint, numbers in ((FINGERPRINT, [1, 2]), (OTHER_FINGERPRINT, [11, 12])):
        with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity, fingerprint=fingerprint)) as store:
            kept = keep(store)
            assert sorted(kept) == numbers
            assert all(is_intact(store, segment) for segment in kept.values())


def test_another_layout_of_the_same_fingerprint_is_a_miss(tmp_path: Path) -> None:
    capacity = areas_of_one_unit(tmp_path, 4)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        write_segments(store, [(1, 4)])
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity, layout=OTHER_LAYOUT)) as store:
        assert keep(store) == {}
        write_segments(store, [(2, 4)], layout=OTHER_LAYOUT)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        assert sorted(keep(store)) == [1]


def test_area_of_the_model_unused_for_longest_is_taken_and_only_then_is_the_store_full(tmp_path: Path) -> None:
    capacity = areas_of_one_unit(tmp_path, 2)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        write_segments(store, [(1, 16)])
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity, fingerprint=OTHER_FINGERPRINT)) as store:
        write_segments(store, [(11, 16)])
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        assert sorted(keep(store)) == [1]
    opened = {"capacity_bytes": capacity, "fingerprint": bytes([7]) * 32, "telemetry": (telemetry := Recorder())}
    with contextlib.closing(open_store(tmp_path, **opened)) as store:
        assert keep(store) == {}
        write_segments(store, [(21, 16)])
    assert telemetry.value(names.STORE_AREAS_TAKEN, tier="nvme") == 1
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity, fingerprint=OTHER_FINGERPRINT)) as store:
        assert keep(store) == {}
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        kept = keep(store)
        assert sorted(kept) == [1]
        assert is_intact(store, kept[1])
        write_segments(store, [(2, 16)])
        with pytest.raises(TierFullError):
            store.reserve([1, 1])
        store.check_integrity()
    # What the first model left in the area before the others had it does not come back.
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        assert sorted(keep(store)) == [1, 2]


def test_lower_cap_drops_areas_and_cuts_the_file(tmp_path: Path) -> None:
    capacity = areas_of_one_unit(tmp_path, 4)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        write_segments(store, [(number, 16) for number in (1, 2, 3, 4)])
    lower = MIB + (capacity - MIB) // 2
    with contextlib.closing(open_store(tmp_path, capacity_bytes=lower)) as store:
        assert store.path.stat().st_size <= lower
        kept = keep(store)
        assert sorted(kept) == [1, 2]
        assert all(is_intact(store, segment) for segment in kept.values())
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        assert store.path.stat().st_size == capacity
        assert sorted(keep(store)) == [1, 2]
        write_segments(store, [(5, 16), (6, 16)])
        with pytest.raises(TierFullError):
            store.reserve([1, 1])


def test_cap_below_one_area_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    capacity = areas_of_one_unit(tmp_path, 2)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        write_segments(store, [(1, 16)])
    with pytest.raises(ConfigError, match="holds no area"):
        open_store(tmp_path, capacity_bytes=MIB + 4096)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity)) as store:
        assert sorted(keep(store)) == [1]


def test_model_whose_segments_do_not_fit_an_area_is_refused(tmp_path: Path) -> None:
    capacity = areas_of_one_unit(tmp_path, 2)
    large = CacheLayout(slab=LAYOUT.slab, layers=8)
    with pytest.raises(ConfigError, match="--area"):
        open_store(tmp_path, capacity_bytes=capacity, layout=large)


def test_writes_stop_at_the_budget_of_the_day(tmp_path: Path) -> None:
    telemetry = Recorder()
    budget = 16 * LAYOUT.block_bytes

    def reopen(day: int) -> ColdStore:
        return open_store(tmp_path, write_bytes_per_day=budget, day=day, telemetry=telemetry)

    with contextlib.closing(reopen(1)) as store:
        write_segments(store, [(1, 4)])
        with pytest.raises(TierFullError, match="write_bytes_per_day"):
            store.reserve([8, 8])
        (a, b) = store.reserve([1, 1])
        store.release([a, b])
    for day in (1, 0):
        with contextlib.closing(reopen(day)) as store, pytest.raises(TierFullError, match="today"):
            store.reserve([8, 8])
    assert telemetry.value(names.WRITE_BUDGET_REFUSALS, tier="nvme") == 3
    with contextlib.closing(reopen(1)) as store:
        write_segments(store, [(2, 1)])
    with contextlib.closing(reopen(2)) as store:
        write_segments(store, [(3, 4)])


def test_room_under_a_fetch_is_not_written_before_the_fetch_has_ended(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path, units=1)) as store:
        for number in range(1, 40):
            (handles,) = submit_segments(store, [(number, 16)]).values()
            assert [completion.error for completion in settle(store, 2)] == [None, None]
            targets = [memoryview(bytearray(LAYOUT.slab.size_bytes(16))) for _ in range(2)]
            store.submit(
                [Fetch(SlabKey(SegmentId(number), layer), handles[layer], targets[layer]) for layer in range(2)]
            )
            store.release(handles)
            ended = []
            for _ in itertools.count():
                try:
                    store.release(store.reserve([16, 16]))
                    break
                except TierFullError:
                    store.wait(10_000_000)
                    ended += store.poll()
            assert len(ended) == 2
            assert [bytes(target) for target in targets] == [
                bytes(payload(number, layer, len(targets[layer]))) for layer in range(2)
            ]
        store.check_integrity()
