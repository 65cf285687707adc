"""Slabs that are stored with fewer bytes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3kv.core.errors import SlabCorruptError, TierBrokenError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType, Encoding, Fetch, Move, SegmentId, SlabKey
from h3kv.memory.copies import CopyMeter
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import (
    LAYOUT,
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
from h3kv.tiers.cold import data_writes, fetches
from h3kv.tiers.cold.codec import Codec, Job
from h3kv.tiers.cold.fetches import BESIDE_SLOT
from h3kv.tiers.cold.unit_reads import UNIT_READ_DTYPE
from h3kv.tiers.cold.verify import verify_store
from h3kv.tiers.cold.wrap import JOINED, UNWRAPPED, element_bytes, unwrap, wrap
from h3kv.tiers.io import IoEngine

CODES = CacheLayout(
    slab=SlabLayout(page=PageLayout(dtype=DType.FP32, head_dim=16, encoding=Encoding.K8V4), kv_heads=2), layers=2
)


def flip_byte(path: Path, packed: bytes) -> None:
    """Damage a wrapped slab on the disk."""
    with path.open("r+b") as file:
        at = path.read_bytes().index(packed[:64]) + 20
        file.seek(at)
        file.write(bytes([packed[20] ^ 1]))
        os.fsync(file.fileno())


@pytest.mark.parametrize("element", [1, 2, 4])
@pytest.mark.parametrize("size_bytes", [4, 4096, 96 * 1024])
def test_wrapped_bytes_come_back_as_they_were(element: int, size_bytes: int) -> None:
    numbers = np.random.default_rng(element).standard_normal(size_bytes // 4).astype(np.float32)
    data = memoryview(bytearray(numbers.tobytes()))
    back, copies = memoryview(bytearray(size_bytes)), CopyMeter()
    assert unwrap(memoryview(wrap(data, element=element)), back, element=element, copies=copies)
    assert back == data
    assert copies.passes(UNWRAPPED, size_bytes) == 1
    assert copies.passes(JOINED, size_bytes) == (element > 1)


def test_bytes_of_equal_weight_together_make_numbers_smaller() -> None:
    numbers = (np.random.default_rng(0).standard_normal(1 << 15).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    data = memoryview(numbers.tobytes())
    assert len(wrap(data, element=2)) < 0.9 * data.nbytes < len(wrap(data, element=1))


def test_bytes_that_stand_for_nothing_are_told_apart() -> None:
    packed = wrap(payload(1, 0, 8192), element=2)
    for stored, size_bytes in [(packed, 4096), (packed, 16384), (b"\xff" * 100, 4096)]:
        room = memoryview(bytearray(size_bytes))
        assert not unwrap(memoryview(stored), room, element=2, copies=CopyMeter())


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 300)), max_size=12))
def test_decoder_gives_what_the_library_gives(runs: list[tuple[bytes, int]]) -> None:
    data = b"".join(part * count for part, count in runs) or b"x"
    packed = lz4.block.compress(data, store_size=False)
    room = memoryview(bytearray(len(data)))
    assert unwrap(memoryview(packed), room, element=1, copies=CopyMeter())
    assert room == data == lz4.block.decompress(packed, uncompressed_size=len(data))


@given(st.binary(min_size=1, max_size=200), st.integers(1, 4096))
def test_decoder_never_leaves_its_room(packed: bytes, size_bytes: int) -> None:
    """Whatever the bytes are: the library decides whether they stand for so many."""
    around = bytearray(b"\xaa" * (size_bytes + 128))
    is_whole = unwrap(memoryview(packed), memoryview(around)[64:-64], element=1, copies=CopyMeter())
    assert around[:64] == around[-64:] == b"\xaa" * 64
    try:
        expected = lz4.block.decompress(packed, uncompressed_size=size_bytes)
    except lz4.block.LZ4BlockError:
        expected = b""
    if is_whole:
        assert bytes(around[64:-64]) == expected


def test_element_is_that_of_the_numbers_or_one_byte_of_codes() -> None:
    assert element_bytes(LAYOUT.slab.page) == 4
    assert element_bytes(PageLayout(DType.BF16, 64)) == 2
    assert element_bytes(CODES.slab.page) == 1


@pytest.mark.parametrize("layout", [LAYOUT, CODES], ids=["raw", "k8v4"])
def test_restart_finds_wrapped_segments_whichever_setting_it_has(tmp_path: Path, layout: CacheLayout) -> None:
    segments, plain_place, written, plain_written = (
        [(1, 16), (2, 3), (3, 1)],
        tmp_path / "plain",
        Recorder(),
        Recorder(),
    )
    plain_place.mkdir()
    with contextlib.closing(open_store(plain_place, units=4, layout=layout, telemetry=plain_written)) as store:
        write_segments(store, segments, layout=layout)
    with contextlib.closing(open_store(tmp_path, units=4, layout=layout, telemetry=written, wrap="lz4")) as store:
        handles = write_segments(store, segments, layout=layout)
        assert store.is_wrapped(handles[1][0])
    saved = plain_written.value(names.WRITTEN_BYTES, tier="nvme") - written.value(names.WRITTEN_BYTES, tier="nvme")
    assert saved > 21 * layout.block_bytes / 3
    with contextlib.closing(open_store(tmp_path, units=4, layout=layout)) as store:
        kept = restore(store)
        assert sorted(kept) == [1, 2, 3]
        assert store.is_wrapped(kept[1].handles_L[1])
        plain = write_segments(store, [(4, 16)], layout=layout)[4]
        assert not store.is_wrapped(plain[0])
        assert all(is_intact(store, segment, layout=layout) for segment in kept.values())
        store.check_integrity()
    (report,) = verify_store(tmp_path, lambda files: IoEngine.open(files, depth=4))
    assert report.segments == 4
    assert report.damage == ()


def test_slab_that_does_not_get_smaller_is_stored_as_it_is(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path, wrap="lz4")) as store:
        handles = store.reserve([2, 2])
        noise = np.random.default_rng(5).bytes(LAYOUT.slab.size_bytes(2))
        moves = moves_of(handles, 1, 2, layout=LAYOUT)
        store.submit([Move(moves[0].key, handles[0], memoryview(noise), moves[0].label), moves[1]])
        assert [completion.error for completion in settle(store, 2)] == [None, None]
        assert [store.is_wrapped(handle) for handle in handles] == [False, True]
        (data, error), (other, _) = read_segment(store, SegmentId(1), handles)
        assert error is None
        assert data == noise
        assert other == bytes(payload(1, 1, len(other)))


def test_part_of_a_wrapped_slab_can_be_fetched_and_small_reads_are_our_mistake(tmp_path: Path) -> None:
    piece = LAYOUT.slab.check_bytes
    with contextlib.closing(open_store(tmp_path, wrap="lz4")) as store:
        handles = write_segments(store, [(1, 4)])[1]
        target = memoryview(bytearray(2 * piece))
        store.submit([Fetch(SlabKey(SegmentId(1), 1), handles[1], target, 3 * piece)])
        assert settle(store, 1)[0].error is None
        assert target == payload(1, 1, LAYOUT.slab.size_bytes(4))[3 * piece : 5 * piece]
        with pytest.raises(AssertionError, match="read whole"):
            store.read_units(tuple(handles), np.zeros(1, dtype=UNIT_READ_DTYPE).data)


def test_flipped_byte_of_a_wrapped_slab_is_noticed_before_it_is_unwrapped(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path, wrap="lz4")) as store:
        handles = write_segments(store, [(1, 4)])[1]
        flip_byte(store.path, wrap(payload(1, 1, LAYOUT.slab.size_bytes(4)), element=4))
        results = read_segment(store, SegmentId(1), handles)
        assert results[0][1] is None
        assert isinstance(results[1][1], SlabCorruptError)
        assert store.lookup(SlabKey(SegmentId(1), 0)) is None
        store.check_integrity()


@pytest.mark.parametrize("slabs", [1, 3])
def test_slabs_wait_for_room_to_land_in_and_a_damaged_one_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slabs: int
) -> None:
    size_bytes = LAYOUT.slab.size_bytes(16)
    monkeypatch.setattr(fetches, "LANDING_BYTES", slabs * size_bytes)
    with contextlib.closing(open_store(tmp_path, units=8, wrap="lz4")) as store:
        taken = write_segments(store, [(number, 16) for number in range(1, 7)])
        flip_byte(store.path, wrap(payload(1, 1, size_bytes), element=4))
        wanted = [
            Fetch(SlabKey(SegmentId(number), layer), handle, memoryview(bytearray(size_bytes)))
            for number, handles in taken.items()
            for layer, handle in enumerate(handles)
        ]
        store.submit(wanted)
        errors = {completion.move.key: completion.error for completion in settle(store, len(wanted))}
        for fetch in wanted:
            if fetch.key == SlabKey(SegmentId(1), 1):
                assert isinstance(errors[fetch.key], SlabCorruptError)
            else:
                assert fetch.target == payload(fetch.key.segment, fetch.key.layer, size_bytes)
        assert sum(error is None for error in errors.values()) >= len(wanted) - LAYOUT.layers
        store.check_integrity()


def test_store_closes_while_slabs_wait_for_room_to_land_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = LAYOUT.slab.size_bytes(16)
    monkeypatch.setattr(fetches, "LANDING_BYTES", 1)
    with contextlib.closing(open_store(tmp_path, units=4, wrap="lz4")) as store:
        taken = write_segments(store, [(1, 16), (2, 16)])
        store.submit(
            [
                Fetch(SlabKey(SegmentId(number), layer), handle, memoryview(bytearray(size_bytes)))
                for number, handles in taken.items()
                for layer, handle in enumerate(handles)
            ]
        )


def test_store_closes_while_segments_are_wrapped(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path, units=4, wrap="lz4")) as store:
        handles = store.reserve([16] * 4)
        store.submit([*moves_of(handles[:2], 1, 16, layout=LAYOUT), *moves_of(handles[2:], 2, 16, layout=LAYOUT)])
    with contextlib.closing(open_store(tmp_path, units=4)) as store:
        assert all(is_intact(store, segment) for segment in restore(store).values())


class _Count(Job):
    def __init__(self) -> None:
        self.runs = self.ends = 0

    def run(self) -> None:
        self.runs += 1

    def end(self) -> None:
        self.ends += 1


def test_codec_ends_each_job_once_and_waits_for_no_others() -> None:
    codec = Codec(threads=2)
    codec.wait(3_600_000_000_000)
    jobs = [_Count() for _ in range(100)]
    for job in jobs:
        codec.start(job)
    while codec.in_flight:
        codec.wait(1_000_000_000)
    assert {(job.runs, job.ends) for job in jobs} == {(1, 1)}
    codec.close()
    codec.close()


class _Fails(_Count):
    def run(self) -> None:
        raise ValueError("not today")


def test_job_that_fails_says_so_and_its_thread_goes_on() -> None:
    codec = Codec(threads=1)
    jobs = [_Fails(), _Count(), _Fails(), _Count()]
    for job in jobs:
        codec.start(job)
    while codec.in_flight:
        codec.wait(1_000_000_000)
    assert [type(job.failure) for job in jobs] == [ValueError, type(None), ValueError, type(None)]
    assert all(job.ends == 1 for job in jobs)
    codec.close()


def test_nothing_is_kept_of_slabs_that_could_not_be_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise ValueError("not today")

    with contextlib.closing(open_store(tmp_path, wrap="lz4")) as store:
        kept = write_segments(store, [(1, 4)])[1]
        monkeypatch.setattr(data_writes, "wrap", fail)
        submit_segments(store, [(2, 4)])
        assert all(isinstance(end.error, TierBrokenError) for end in settle(store, LAYOUT.layers))
        assert store.lookup(SlabKey(SegmentId(2), 0)) is None
        assert all(error is None for _, error in read_segment(store, SegmentId(1), kept))
    with contextlib.closing(open_store(tmp_path)) as store:
        assert sorted(restore(store)) == [1]


def test_slab_that_could_not_be_unwrapped_is_not_given_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise ValueError("not today")

    with contextlib.closing(open_store(tmp_path, wrap="lz4")) as store:
        handles = write_segments(store, [(1, 4)])[1]
        monkeypatch.setattr(fetches, "unwrap", fail)
        assert all(isinstance(error, TierBrokenError) for _, error in read_segment(store, SegmentId(1), handles))
        monkeypatch.undo()
        assert all(error is None for _, error in read_segment(store, SegmentId(1), handles))


@pytest.mark.parametrize(("layout", "is_wrapped"), [(LAYOUT, False), (CODES, False), (LAYOUT, True), (CODES, True)])
def test_slab_is_copied_by_the_processor_as_often_as_it_must_be(
    tmp_path: Path, layout: CacheLayout, is_wrapped: bool
) -> None:
    """Stored as it is: never. Wrapped: once, straight into its place, and once more where planes are joined."""
    with contextlib.closing(open_store(tmp_path, layout=layout, wrap="lz4" if is_wrapped else "none")) as store:
        handles = write_segments(store, [(1, 16)], layout=layout)[1]
        assert store.is_wrapped(handles[0]) == is_wrapped
        assert all(error is None for _, error in read_segment(store, SegmentId(1), handles, layout=layout))
        size_bytes = layout.layers * layout.slab.content_bytes(16)
        copies = store.copies
        assert copies.passes(BESIDE_SLOT, size_bytes) == 0
        assert copies.passes(UNWRAPPED, size_bytes) == is_wrapped
        assert copies.passes(JOINED, size_bytes) == (is_wrapped and element_bytes(layout.slab.page) > 1)
        store.check_integrity()
