"""A whole store on disk, whichever models live in it: opened, made, resized."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from h3kv.core.errors import ConfigError, StoreError, StoreFormatError
from h3kv.core.layout import CacheLayout
from h3kv.core.units import describe_size
from h3kv.tiers.cold.geometry import (
    BUDGET_OFFSET,
    SUPERBLOCK_OFFSET,
    TABLE_OFFSET,
    ColdLayout,
    VolumeGeometry,
    plan_volume,
)
from h3kv.tiers.cold.ops import Op, OpQueue, address_of, aligned_memory, write_of
from h3kv.tiers.cold.place import OpenPlace, new_file, open_place, resolve
from h3kv.tiers.cold.record import FORMAT_VERSION, TWIN_BYTES, Kind, damaged_sectors, unpack_twin, versions
from h3kv.tiers.cold.seam import EngineFactory
from h3kv.tiers.cold.superblock import AreaEntry, Superblock
from h3kv.tiers.io import FLUSH, READ

_CHUNK_BYTES: Final = 4 << 20
"""Of one read or write at start: large enough for a device's full speed, small beside the caps."""


class Volume:
    """An open store. Not thread-safe. `ops` is how all of its bytes are read and written."""

    def __init__(self, place: OpenPlace, ops: OpQueue) -> None:
        """Read the superblock and the area table.

        Raises:
            StoreFormatError: it is no store, or one of another version, damaged, or cut.
            StoreError: reading failed.
        """
        self.place = place
        self.ops = ops
        self.superblock, self._sequence = self._read_superblock()
        geometry = self.superblock.geometry
        table = b"".join(self.read_all(TABLE_OFFSET, geometry.table_entries * TWIN_BYTES))
        twins = [table[at : at + TWIN_BYTES] for at in range(0, len(table), TWIN_BYTES)]
        records = [unpack_twin(Kind.AREA, twin) for twin in twins]
        self._entry_sequences = [0 if record is None else record.sequence for record in records]
        entries = [None if record is None else AreaEntry.unpack(record.payload) for record in records]
        self.areas = entries[: geometry.areas]
        """Whose each area under the cap is; None: nobody's."""
        damaged = [damaged_sectors(Kind.AREA, twin) for twin in twins[: geometry.areas]]
        self.damaged_entries = {area: sectors for area, sectors in enumerate(damaged) if sectors}
        """Areas of whose entry a copy was damaged when it was read, and how many copies."""

    @property
    def geometry(self) -> VolumeGeometry:
        """Sizes of the store."""
        return self.superblock.geometry

    def area_write(self, area: int, entry: AreaEntry) -> Op:
        """The write that gives an area to a model; `areas` says so from now on."""
        self._entry_sequences[area] += 1
        self.areas[area] = entry
        return entry.write(self.geometry.entry_offset(area), self._entry_sequences[area])

    def begin_epoch(self, capacity_bytes: int | None, *, is_ours: Callable[[AreaEntry], bool]) -> None:
        """Count this opening, bring the store to its cap, and note which areas are in use.

        A lower cap drops the areas beyond it. The superblock says so before the file is cut, and a file that is longer
        than its superblock says is cut: a crash in between leaves nothing wrong. A higher cap goes the other way.

        Raises:
            ConfigError: the cap holds no area of this store.
            StoreError: the file cannot be resized, or writing failed.
        """
        geometry = replace(self.geometry, capacity_bytes=self._allowed(capacity_bytes))
        if geometry.areas == 0:
            raise ConfigError(
                f"nvme.capacity of {describe_size(geometry.capacity_bytes)} holds no area of {self.place.path}: its "
                f"areas have {describe_size(geometry.area_bytes)}; raise it, or format the store anew",
                field="nvme.capacity",
            )
        if not self.place.is_device and geometry.capacity_bytes > self.place.size_bytes:
            self.place.resize(geometry.capacity_bytes)
        self.superblock = replace(self.superblock, geometry=geometry, epoch=self.superblock.epoch + 1)
        self._sequence += 1
        self.areas = [*self.areas, *([None] * geometry.areas)][: geometry.areas]
        writes = [self.superblock.write(self._sequence)]
        for area, entry in enumerate(self.areas):
            if entry is not None and is_ours(entry):
                writes.append(self.area_write(area, replace(entry, used=self.superblock.epoch)))
        write_through(self.place, self.ops, [writes])
        if not self.place.is_device and self.place.size_bytes > geometry.capacity_bytes:
            self.place.resize(geometry.capacity_bytes)

    def read_all(self, offset: int, size: int) -> Iterator[bytes]:
        """Bytes of the store in large chunks, whole sectors.

        Raises:
            StoreError: reading failed.
        """
        for at in range(0, size, _CHUNK_BYTES):
            part = min(_CHUNK_BYTES, size - at)
            memory = aligned_memory(part)
            op = Op(kind=READ, offset=offset + at, address=address_of(memory), size=part, keep=memory)
            (outcome,) = self.ops.run([op])
            if not outcome.is_good:
                raise StoreError(
                    f"cannot read {self.place.path} at {op.offset}: {outcome}; check the device",
                    path=str(self.place.path),
                )
            yield memory[:part]

    def close(self) -> None:
        """End what is in flight and give the lock back."""
        self.ops.close()
        self.place.close()

    def _read_superblock(self) -> tuple[Superblock, int]:
        path, size_bytes = self.place.path, self.place.size_bytes
        twin = b"".join(self.read_all(SUPERBLOCK_OFFSET, TWIN_BYTES)) if size_bytes >= TWIN_BYTES else bytes(TWIN_BYTES)
        record = unpack_twin(Kind.SUPERBLOCK, twin)
        if record is None:
            raise _refusal(path, versions(twin))
        superblock = Superblock.unpack(record.payload)
        if size_bytes < superblock.geometry.capacity_bytes:
            raise StoreFormatError(
                f"{path} was cut: it has {size_bytes} of {superblock.geometry.capacity_bytes} bytes; make it anew with "
                "`h3 format`, or delete it",
                path=str(path),
            )
        return superblock, record.sequence

    def _allowed(self, capacity_bytes: int | None) -> int:
        wanted = self.geometry.capacity_bytes if capacity_bytes is None else capacity_bytes
        return min(wanted, self.place.size_bytes) if self.place.is_device else wanted


def open_volume(
    place: Path, make_engine: EngineFactory, *, capacity_bytes: int | None, layout: CacheLayout | ColdLayout
) -> Volume:
    """The store at a place. One that is not there is made, if the place is a folder or a new path.

    Args:
        place: folder, file or block device.
        make_engine: makes the engine that reads and writes it.
        capacity_bytes: cap of a new store.
        layout: of the model for which a new store is divided.

    Raises:
        ConfigError: a new store needs a cap, or has too small a one.
        StoreBusyError: another process uses it.
        StoreFormatError: what is there is no store, one of another version, damaged, or cut.
        StoreError: it cannot be opened or read, or a new one cannot be made.
    """
    path, is_there = resolve(place)
    if not is_there:
        if capacity_bytes is None:
            raise ConfigError(f"{path} does not exist: set nvme.capacity, and it is made", field="nvme.capacity")
        geometry = plan_volume(capacity_bytes, layout=layout)
        with new_file(path, geometry.capacity_bytes) as draft:
            make_store(draft, make_engine, geometry)
    opened = open_place(path)
    with _closed_on_error(opened):
        ops = OpQueue(make_engine([opened.file]))
        with _closed_on_error(ops):
            return Volume(opened, ops)


def make_store(place: OpenPlace, make_engine: EngineFactory, geometry: VolumeGeometry) -> None:
    """Make an empty store of what is open.

    The superblock comes last. Until it is written a new place is no store, and an old store is one still, so that what
    was broken off can be done again.

    Raises:
        StoreError: writing failed.
    """
    tables_bytes = TABLE_OFFSET + geometry.table_entries * TWIN_BYTES
    starts = range(BUDGET_OFFSET, tables_bytes, _CHUNK_BYTES)
    blank = [write_of(at, bytes(min(_CHUNK_BYTES, tables_bytes - at))) for at in starts]
    first = Superblock(uuid.uuid4().bytes, geometry, epoch=0)
    with contextlib.closing(OpQueue(make_engine([place.file]))) as ops:
        write_through(place, ops, [blank, [first.write(0)], [first.write(1)]])


def write_through(place: OpenPlace, ops: OpQueue, steps: Sequence[Sequence[Op]]) -> None:
    """Write step by step, each flushed before the next begins, waiting for it.

    Raises:
        StoreError: it failed.
    """
    for step in steps:
        for part in (step, [Op(kind=FLUSH)]):
            bad = next((outcome for outcome in ops.run(part) if not outcome.is_good), None)
            if bad is not None:
                raise StoreError(f"cannot write {place.path}: {bad}; check the device", path=str(place.path))


def _refusal(path: Path, found: set[int]) -> StoreFormatError:
    """Why a place without a valid superblock is left alone."""
    if not found:
        message = f"{path} is not a cold store, and nothing on it is overwritten: name another place"
    elif FORMAT_VERSION not in found:
        message = (
            f"{path} is a cold store of format {max(found)}, this version reads format {FORMAT_VERSION}: use the "
            "version that made it, or `h3 format` it"
        )
    else:
        message = f"both superblocks of {path} are damaged: `h3 format` it; what it holds is lost"
    return StoreFormatError(message, path=str(path))


class _Closable(Protocol):
    def close(self) -> None: ...


@contextlib.contextmanager
def _closed_on_error(thing: _Closable) -> Iterator[None]:
    try:
        yield
    except BaseException:
        thing.close()
        raise
