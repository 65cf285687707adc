"""Making and checking stores; nothing that may hold data is overwritten."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from h3kv.core.errors import ConfigError, StoreBusyError, StoreError, StoreFormatError
from h3kv.core.layout import CacheLayout, SlabLayout
from h3kv.core.units import format_size
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import (
    FINGERPRINT,
    LAYOUT,
    is_intact,
    open_store,
    payload,
    restore,
    write_segments,
)
from h3kv.testing.faulty_files import CrashError, FaultPlan, FaultyFiles
from h3kv.tiers.cold.format import format_store
from h3kv.tiers.cold.geometry import EXTENT_FIXED_BYTES, MIB, TABLE_OFFSET, VolumeGeometry, capacity_for
from h3kv.tiers.cold.record import SECTOR_BYTES
from h3kv.tiers.cold.signatures import find_signature
from h3kv.tiers.cold.verify import verify_store
from h3kv.tiers.io import FLUSH, WRITE, IoEngine

DEVICE_BYTES = 24 * MIB


def engine(files: Sequence[int]) -> IoEngine:
    return IoEngine.open(files, depth=8)


def make(
    place: Path, *, yes: str | None = None, capacity: int | None = None, area: int | None = None
) -> VolumeGeometry:
    return format_store(place, engine, capacity_bytes=capacity, area_bytes=area, yes=yes)[1]


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A loop device, where this user may make one. Always detached."""
    disk = tmp_path / "disk"
    disk.touch()
    os.truncate(disk, DEVICE_BYTES)
    command = ["losetup", "--find", "--show", str(disk)]
    result = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("losetup") else None
    if result is None or result.returncode:
        pytest.skip("loop devices cannot be made here")
    name = result.stdout.strip()
    yield Path(name)
    subprocess.run(["losetup", "--detach", name], check=True)


def test_new_file_needs_a_cap_and_no_yes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--capacity"):
        make(tmp_path)
    geometry = make(tmp_path, capacity=40 * MIB, area=8 * MIB)
    assert geometry.areas == 4
    assert (tmp_path / "store.h3").stat().st_size == 40 * MIB
    with contextlib.closing(open_store(tmp_path, capacity_bytes=40 * MIB)) as store:
        write_segments(store, [(1, 16)])


def test_old_store_is_formatted_only_when_its_size_is_repeated(tmp_path: Path) -> None:
    make(tmp_path, capacity=20 * MIB)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=20 * MIB)) as store:
        write_segments(store, [(1, 16)])
        with pytest.raises(StoreBusyError):
            make(tmp_path, yes="20MiB")
    for yes in (None, "", "yes", "21MiB", "20"):
        with pytest.raises(StoreError, match="--yes=20MiB"):
            make(tmp_path, yes=yes)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=20 * MIB)) as store:
        assert sorted(restore(store)) == [1]
    make(tmp_path, yes="20MiB", capacity=30 * MIB)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=30 * MIB)) as store:
        assert restore(store) == {}


def test_other_files_are_refused_whatever_is_repeated(tmp_path: Path) -> None:
    place = tmp_path / "photos.tar"
    place.write_bytes(b"x" * 4 * MIB)
    with pytest.raises(StoreFormatError, match="no cold store"):
        make(place, yes="4MiB", capacity=20 * MIB)
    assert place.read_bytes() == b"x" * 4 * MIB


def test_block_device_is_formatted_when_its_size_is_repeated(device: Path) -> None:
    with pytest.raises(StoreError, match="--yes=24MiB"):
        make(device)
    with pytest.raises(StoreFormatError, match="not a cold store"):
        open_store(device)
    with pytest.raises(ConfigError, match="more than"):
        make(device, yes="24MiB", capacity=25 * MIB)
    make(device, yes="24MiB")
    with contextlib.closing(open_store(device, capacity_bytes=DEVICE_BYTES)) as store:
        assert store.is_direct
        write_segments(store, [(number, 16) for number in range(1, 9)])
        with pytest.raises(StoreBusyError):
            open_store(device)
    with contextlib.closing(open_store(device, capacity_bytes=DEVICE_BYTES)) as store:
        kept = restore(store)
        assert sorted(kept) == list(range(1, 9))
        assert all(is_intact(store, segment) for segment in kept.values())
    with pytest.raises(StoreError, match="--yes"):
        make(device)


def test_mounted_device_is_refused(device: Path, tmp_path: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
    folder = tmp_path / "mounted"
    folder.mkdir()
    if subprocess.run(["mount", str(device), str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        with pytest.raises(StoreError, match=r"in use|mounted"):
            make(device, yes="24MiB")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    with pytest.raises(StoreFormatError, match="ext"):
        make(device, yes="24MiB")


@pytest.mark.parametrize(
    ("command", "name"),
    [(["mkfs.ext4", "-q"], "ext"), (["mkswap", "-q"], "swap"), (["mkfs.xfs", "-q"], "XFS"), (["mkfs.vfat"], "FAT|MBR")],
)
def test_device_with_a_file_system_is_refused_and_left_alone(device: Path, command: list[str], name: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    if subprocess.run([*command, str(device)], capture_output=True, check=False).returncode:
        pytest.skip(f"{command[0]} wants a larger device")
    before = device.read_bytes()
    with pytest.raises(StoreFormatError, match=name):
        make(device, yes=format_size(DEVICE_BYTES))
    assert device.read_bytes() == before


@pytest.mark.parametrize(
    ("offset", "magic", "name"),
    [
        (510, b"\x55\xaa", "MBR"),
        (512, b"EFI PART", "GPT"),
        (-512, b"EFI PART", "GPT"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (0, b"XFSB", "XFS"),
        (512, b"LABELONE", "LVM"),
        (1080, b"\x53\xef", "ext"),
        (3, b"NTFS    ", "NTFS"),
        (65600, b"_BHRfS_M", "Btrfs"),
        (4086, b"SWAPSPACE2", "swap"),
        (4096, b"\xfc\x4e\x2b\xa9", "MD"),
        (-65536, b"\xfc\x4e\x2b\xa9", "MD"),
        (-8192, b"\xfc\x4e\x2b\xa9", "MD"),
        ((128 << 10) + 5 * 1024, b"\x0c\xb1\xba\x00\x00\x00\x00\x00", "ZFS"),
    ],
)
def test_signatures_are_recognised(tmp_path: Path, offset: int, magic: bytes, name: str) -> None:
    size = 4 * MIB
    content = bytearray(size)
    at = offset % size
    content[at : at + len(magic)] = magic
    disk = tmp_path / "disk"
    disk.write_bytes(content)
    with disk.open("rb") as file:
        found = find_signature(file.fileno(), size, path=str(disk))
    assert found is not None
    assert name in found


def test_empty_disk_has_no_signature(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(4 * MIB))
    with disk.open("rb") as file:
        assert find_signature(file.fileno(), 4 * MIB, path=str(disk)) is None


def test_verify_finds_nothing_wrong_with_a_store_in_order(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        handles = write_segments(store, [(1, 16), (2, 4), (3, 4)])
        store.release(handles[2])
        with pytest.raises(StoreBusyError):
            list(verify_store(tmp_path, engine))
    before = (tmp_path / "store.h3").read_bytes()
    (report,) = verify_store(tmp_path, engine)
    assert (report.segments, report.damage) == (2, ())
    assert report.pieces == (16 + 4) * 4
    assert (tmp_path / "store.h3").read_bytes() == before


def test_verify_names_the_damaged_slab_and_the_damaged_header(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(1, 16), (2, 4)])
    place = tmp_path / "store.h3"
    content = bytearray(place.read_bytes())
    content[content.index(bytes(payload(1, 1, 4096))) + 100] ^= 1
    content[content.index(b"H3EXTENT", content.index(b"H3EXTENT") + 1) + 200] ^= 1
    place.write_bytes(content)
    (report,) = verify_store(tmp_path, engine)
    assert report.segments == 1
    assert len(report.damage) == 2
    assert any("header at block 16" in line for line in report.damage)
    assert any("block 0, layer 1" in line and "checksum" in line for line in report.damage)


@pytest.mark.parametrize(
    "damage", [b"X3EXTENT", bytes(range(1, 200))], ids=["one byte of the magic", "all of its start"]
)
def test_header_that_does_not_begin_like_one_is_damage_and_is_counted_at_start(tmp_path: Path, damage: bytes) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(1, 16), (2, 4)])
    place = tmp_path / "store.h3"
    overwrite(place, place.read_bytes().index(b"H3EXTENT"), damage)
    (report,) = verify_store(tmp_path, engine)
    assert report.segments == 1
    assert report.damage == ("the header at block 0: not as it was written",)
    telemetry = Recorder()
    with contextlib.closing(open_store(tmp_path, telemetry=telemetry)) as store:
        assert telemetry.value(names.CORRUPT_SLABS, tier="nvme") == 1
        assert sorted(restore(store)) == [2]
        write_segments(store, [(3, 1)])
    (report,) = verify_store(tmp_path, engine)
    assert (report.segments, report.damage) == (2, ())


@pytest.mark.parametrize("copies", [1, 2])
def test_damaged_entry_of_an_area_is_damage_and_is_counted_at_start(tmp_path: Path, copies: int) -> None:
    for number in (1, 2):
        with contextlib.closing(open_store(tmp_path)) as store:
            write_segments(store, [(number, 1)])
    for copy in range(copies):
        overwrite(tmp_path / "store.h3", TABLE_OFFSET + copy * SECTOR_BYTES + 50, b"\xff\xfe")
    (report,) = verify_store(tmp_path, engine)
    assert len(report.damage) == 1
    assert "entry" in report.damage[0]
    assert (report.segments, report.fingerprint) == ((2, FINGERPRINT) if copies == 1 else (0, None))
    telemetry = Recorder()
    with contextlib.closing(open_store(tmp_path, telemetry=telemetry)) as store:
        assert telemetry.value(names.CORRUPT_SLABS, tier="nvme") == 1
        assert sorted(restore(store)) == ([1, 2] if copies == 1 else [])
        write_segments(store, [(3, 1)])
    open_store(tmp_path).close()
    (report,) = verify_store(tmp_path, engine)
    assert report.damage == (), "both copies were written anew"


def test_headers_of_several_cells_leave_nothing_behind_when_they_are_given_back(tmp_path: Path) -> None:
    slab = SlabLayout(page=LAYOUT.slab.page, kv_heads=8)
    layout = CacheLayout(slab=slab, layers=8)
    assert EXTENT_FIXED_BYTES + 16 * 8 * 8 * 4 > SECTOR_BYTES, "checksums of 16 blocks take more than one cell"
    capacity = capacity_for(layout, units=2)
    with contextlib.closing(open_store(tmp_path, capacity_bytes=capacity, layout=layout)) as store:
        handles = write_segments(store, [(1, 16), (2, 16)], layout=layout)
        store.release(handles[1])
        write_segments(store, [(3, 1)], layout=layout)
    (report,) = verify_store(tmp_path, engine)
    assert (report.segments, report.damage) == (2, ())
    place = tmp_path / "store.h3"
    overwrite(place, place.read_bytes().rindex(b"H3EXTENT"), b"?")
    (report,) = verify_store(tmp_path, engine)
    assert (report.segments, report.damage) == (1, ("the header at block 16: not as it was written",))


@pytest.mark.parametrize("capacity", [20 * MIB, 10 * MIB, 30 * MIB])
@pytest.mark.parametrize("mode", ["error", "torn", "crash"])
def test_store_whose_formatting_broke_off_can_be_formatted_again(
    tmp_path: Path, capacity: int, mode: Literal["error", "torn", "crash"]
) -> None:
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder, capacity=20 * MIB)
        plan = FaultPlan(number, mode, kinds=frozenset({WRITE, FLUSH}))
        with contextlib.suppress(StoreError, CrashError):
            format_store(
                folder,
                functools.partial(FaultyFiles, plan=plan),
                capacity_bytes=capacity,
                area_bytes=None,
                yes="20MiB",
            )
        size = (folder / "store.h3").stat().st_size
        make(folder, capacity=20 * MIB, yes=format_size(size))
        with contextlib.closing(open_store(folder, capacity_bytes=20 * MIB)) as store:
            write_segments(store, [(1, 16)])
        shutil.rmtree(folder)
        if plan.done < number:
            return


@pytest.mark.parametrize("is_there", [False, True])
def test_file_that_could_not_be_made_a_store_leaves_nothing_behind(tmp_path: Path, is_there: bool) -> None:
    place = tmp_path / "store"
    if is_there:
        place.touch()
    modes: tuple[Literal["error"], Literal["crash"]] = ("error", "crash")
    for mode in modes:
        plan = FaultPlan(2, mode, kinds=frozenset({WRITE}))
        with pytest.raises((StoreError, CrashError)):
            format_store(
                place,
                functools.partial(FaultyFiles, plan=plan),
                capacity_bytes=20 * MIB,
                area_bytes=None,
                yes=None,
            )
        assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == ([("store", 0)] if is_there else [])
    make(place, capacity=20 * MIB)


def test_file_that_another_process_makes_meanwhile_is_left_alone(tmp_path: Path) -> None:
    def make_engine_and_a_rival(files: Sequence[int]) -> IoEngine:
        (tmp_path / "store.h3").write_bytes(b"another's")
        return engine(files)

    with pytest.raises(StoreBusyError):
        format_store(tmp_path, make_engine_and_a_rival, capacity_bytes=20 * MIB, area_bytes=None, yes=None)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("store.h3", b"another's")]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
