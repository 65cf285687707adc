"""Making a cold store of a new file, of an old store, or of a device that nobody uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from h3kv.core.errors import ConfigError, StoreError, StoreFormatError
from h3kv.core.units import format_size, parse_size
from h3kv.tiers.cold.device import DeviceFacts, check_device, inspect
from h3kv.tiers.cold.geometry import VolumeGeometry, plan_volume
from h3kv.tiers.cold.ops import aligned_memory
from h3kv.tiers.cold.place import OpenPlace, new_file, open_place, resolve
from h3kv.tiers.cold.record import TWIN_BYTES, versions
from h3kv.tiers.cold.seam import EngineFactory
from h3kv.tiers.cold.volume import make_store


def format_store(
    place: Path, make_engine: EngineFactory, *, capacity_bytes: int | None, area_bytes: int | None, yes: str | None
) -> tuple[Path, VolumeGeometry]:
    """Make an empty store. Its path and geometry.

    Args:
        place: folder, file or block device.
        make_engine: makes the engine that writes it.
        capacity_bytes: cap. None: all of a device, or as large as the old store's file.
        area_bytes: size of an area. None: a sixteenth within [64 MiB, 4 GiB].
        yes: the size or serial of what is overwritten, repeated by the user.

    Raises:
        ConfigError: the cap is missing or too small, or larger than the device.
        StoreBusyError: a process uses it, or it is mounted.
        StoreError: it cannot be written, is in use otherwise, or `yes` does not repeat its size or serial.
        StoreFormatError: something else lies there.
    """
    path, is_there = resolve(place)
    if not is_there:
        geometry = plan_volume(_needed(capacity_bytes, path), area_bytes=area_bytes)
        with new_file(path, geometry.capacity_bytes) as draft:
            make_store(draft, make_engine, geometry)
        return path, geometry
    with contextlib.closing(open_place(path)) as opened:
        geometry = plan_volume(_checked_capacity(opened, capacity_bytes, yes), area_bytes=area_bytes)
        with _emptied_on_error(opened) if opened.size_bytes == 0 else contextlib.nullcontext():
            if not opened.is_device:
                opened.resize(geometry.capacity_bytes)
            make_store(opened, make_engine, geometry)
    return path, geometry


@contextlib.contextmanager
def _emptied_on_error(opened: OpenPlace) -> Iterator[None]:
    """Leave a file as empty as it was: one with bytes that are no store would be refused the next time."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(StoreError):
            opened.resize(0)
        raise


def _checked_capacity(opened: OpenPlace, capacity_bytes: int | None, yes: str | None) -> int:
    """The cap of a store on what exists, if all that stands against it was answered."""
    size_bytes, is_ours = opened.size_bytes, _is_ours(opened)
    if opened.is_device:
        facts = inspect(opened)
        check_device(opened, facts, is_ours=is_ours)
        _check_yes(opened.path, size_bytes, facts, yes)
        if capacity_bytes is not None and capacity_bytes > size_bytes:
            raise ConfigError(
                f"--capacity {format_size(capacity_bytes)} is more than {opened.path} has, {format_size(size_bytes)}",
                field="capacity",
            )
        return size_bytes if capacity_bytes is None else capacity_bytes
    if size_bytes and not is_ours:
        raise StoreFormatError(
            f"{opened.path} is a file of {size_bytes} bytes and no cold store; nothing in it is overwritten: name "
            "another place, or delete it",
            path=str(opened.path),
        )
    if is_ours:
        _check_yes(opened.path, size_bytes, None, yes)
    return _needed(capacity_bytes or size_bytes or None, opened.path)


def _is_ours(opened: OpenPlace) -> bool:
    if opened.size_bytes < TWIN_BYTES:
        return False
    memory = aligned_memory(TWIN_BYTES)
    try:
        os.preadv(opened.file, [memory], 0)
    except OSError as error:
        raise StoreError(
            f"cannot read {opened.path}: {error.strerror}; check the device", path=str(opened.path)
        ) from error
    return bool(versions(memory[:TWIN_BYTES]))


def _check_yes(path: Path, size_bytes: int, facts: DeviceFacts | None, yes: str | None) -> None:
    """See that the user repeated what is about to be lost."""
    serial = None if facts is None else facts.serial
    try:
        is_size = yes is not None and parse_size(int(yes) if yes.isdecimal() else yes) == size_bytes
    except ValueError:
        is_size = False
    if is_size or (yes is not None and yes == serial):
        return
    names = [format_size(size_bytes), *([serial] if serial else [])]
    raise StoreError(
        f"all that is on {path} will be lost: repeat its size{' or serial' if serial else ''} to go on, "
        f"{' or '.join(f'--yes={name}' for name in names)}",
        path=str(path),
    )


def _needed(capacity_bytes: int | None, path: Path) -> int:
    if capacity_bytes is None:
        raise ConfigError(f"{path} is new: say how large it may become, such as --capacity 64GiB", field="capacity")
    return capacity_bytes
