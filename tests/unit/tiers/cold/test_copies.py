"""How often the processor copies a slab's bytes on its way from the disk into a slot of the host tier."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from h3kv.core.types import Completion, Fetch, Move, SegmentId, SlabKey, SlotHandle, Tier
from h3kv.memory.copies import INTO_SLOT, OUT_OF_SLOT
from h3kv.testing.cold_segments import LAYOUT, open_store, payload, restore, settle, write_segments
from h3kv.tiers.cold.seam import Engine
from h3kv.tiers.host import HostStore, HostStoreConfig
from h3kv.tiers.io import READ, IoEngine


class Watched:
    """An engine that notes into which memory it was told to read."""

    def __init__(self, files: Sequence[int], reads: list[tuple[int, int]]) -> None:
        self._engine = IoEngine.open(files, depth=16)
        self._reads = reads

    @property
    def backend(self) -> str:
        return self._engine.backend

    def submit(self, ops_N: NDArray[np.void]) -> None:
        self._reads += [(int(op["address"]), int(op["size"])) for op in ops_N if op["kind"] == READ]
        self._engine.submit(ops_N)

    def poll(self) -> NDArray[np.void]:
        return self._engine.poll()

    def wait(self, timeout_ns: int, *, results: int = 1) -> None:
        self._engine.wait(timeout_ns, results=results)

    def cancel_all(self) -> None:
        self._engine.cancel_all()

    def close(self) -> None:
        self._engine.close()


def into_slots(
    place: Path, host: HostStore, reads: list[tuple[int, int]], *, wrap: bool
) -> tuple[list[SlotHandle], list[Completion]]:
    """Write a segment, open the store anew, and fetch each slab into a slot. Notes the reads of these fetches."""

    def engine(files: Sequence[int]) -> Engine:
        return Watched(files, reads)

    with contextlib.closing(open_store(place, wrap="lz4" if wrap else "none")) as store:
        write_segments(store, [(1, 16)])
    with contextlib.closing(open_store(place, engine=engine)) as store:
        (kept,) = restore(store).values()
        targets = host.reserve([16] * LAYOUT.layers)
        reads.clear()
        store.submit(
            [
                Fetch(SlabKey(kept.segment, layer), source, host.view(target))
                for layer, (source, target) in enumerate(zip(kept.handles_L, targets, strict=True))
            ]
        )
        return targets, settle(store, LAYOUT.layers)


@pytest.fixture
def host() -> HostStore:
    return HostStore(LAYOUT.slab, HostStoreConfig(LAYOUT.layers * LAYOUT.slab.size_bytes(16)))


def test_disk_to_slot_takes_no_copy(tmp_path: Path, host: HostStore) -> None:
    reads: list[tuple[int, int]] = []
    targets, ended = into_slots(tmp_path / "store", host, reads, wrap=False)
    assert [each.error for each in ended] == [None] * LAYOUT.layers
    # The device, or the kernel for it, wrote every byte where attention reads it.
    assert sorted(address for address, _ in reads) == sorted(host.address(target) for target in targets)
    content_bytes = LAYOUT.slab.content_bytes(16)
    assert {size for _, size in reads} == {content_bytes}
    for layer, target in enumerate(targets):
        assert bytes(host.view(target)[:content_bytes]) == bytes(payload(1, layer, content_bytes))
    assert (host.copies.bytes_copied(INTO_SLOT), host.copies.bytes_copied(OUT_OF_SLOT)) == (0, 0)
    host.release(targets)
    host.check_integrity()
    host.close()


def test_wrapped_slab_is_read_in_fewer_bytes_and_lands_unwrapped_in_its_slot(tmp_path: Path, host: HostStore) -> None:
    reads: list[tuple[int, int]] = []
    targets, ended = into_slots(tmp_path / "store", host, reads, wrap=True)
    assert [each.error for each in ended] == [None] * LAYOUT.layers
    content_bytes = LAYOUT.slab.content_bytes(16)
    assert all(size < content_bytes for _, size in reads)
    for layer, target in enumerate(targets):
        assert bytes(host.view(target)[:content_bytes]) == bytes(payload(1, layer, content_bytes))
    host.release(targets)
    host.check_integrity()
    host.close()


def test_slab_that_was_written_in_place_is_never_copied_and_any_other_once(host: HostStore) -> None:
    size_bytes = LAYOUT.slab.size_bytes(16)
    in_place, from_elsewhere = host.reserve([16, 16])
    host.view(in_place)[:4] = b"abcd"
    host.submit([Move(SlabKey(SegmentId(1), 0), in_place, None)])
    host.poll()
    assert host.copies.bytes_copied(INTO_SLOT) == 0
    host.submit([Move(SlabKey(SegmentId(1), 1), from_elsewhere, payload(1, 1, size_bytes))])
    host.poll()
    assert host.copies.passes(INTO_SLOT, size_bytes) == 1.0
    target = memoryview(bytearray(size_bytes))
    host.submit([Fetch(SlabKey(SegmentId(1), 1), from_elsewhere, target)])
    host.poll()
    assert host.copies.passes(OUT_OF_SLOT, size_bytes) == 1.0
    # Attention reads a slab where it lies: the address is in the region itself.
    assert host.address(in_place) == host.region.address + host.region.geometry.data_offset
    assert (in_place.tier, in_place.slot) == (Tier.HOST, 0)
    host.release([in_place, from_elsewhere])
    host.check_integrity()
    host.close()
