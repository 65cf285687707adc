"""The cold store on a raw NVMe namespace. Runs in the virtual test machine only: `make test-vm VM=FOLDER`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.vm.machine import DEVICE, FACTS, SERIAL, in_machine_only, sectors_read

from h3kv.core.errors import StoreBusyError, StoreError, StoreFormatError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType
from h3kv.testing.cold_segments import is_intact, open_store, payload, restore, write_segments
from h3kv.tiers.cold.device import inspect
from h3kv.tiers.cold.format import format_store
from h3kv.tiers.cold.place import open_place
from h3kv.tiers.cold.verify import verify_store
from h3kv.tiers.io import IoEngine

LAYOUT = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.BF16, head_dim=64), kv_heads=3), layers=6)
REREAD_PARTITIONS = 0x125F
"""BLKRRPART of linux/fs.h."""


pytestmark = in_machine_only


def engine(files: Sequence[int]) -> IoEngine:
    return IoEngine.open(files, depth=32)


def make(yes: str | None) -> None:
    format_store(DEVICE, engine, capacity_bytes=None, area_bytes=None, yes=yes)


@pytest.fixture(autouse=True)
def blank_disk() -> None:
    """No test sees what another left: the first and last MiB are zeros, and the kernel knows no partitions."""
    with DEVICE.open("r+b", buffering=0) as disk:
        size = disk.seek(0, os.SEEK_END)
        for offset in (0, size - (1 << 20)):
            disk.seek(offset)
            disk.write(bytes(1 << 20))
        os.fsync(disk.fileno())
        reread_partitions(disk.fileno())


def reread_partitions(disk: int) -> None:
    """A ring that is being torn down claims the disk for a moment longer."""
    deadline = time.monotonic() + 10
    while True:
        try:
            fcntl.ioctl(disk, REREAD_PARTITIONS)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        else:
            return


def test_disk_is_known_by_its_serial_and_size() -> None:
    with contextlib.closing(open_place(DEVICE)) as place:
        facts = inspect(place)
    assert facts.name == "nvme0n1"
    assert facts.serial == SERIAL
    assert facts.size_bytes == int((FACTS / "size").read_text()) * 512
    assert (facts.mounts, facts.partitions, facts.holders, facts.is_read_only) == ((), (), (), False)


def test_segments_survive_a_restart_and_bypass_the_page_cache() -> None:
    with pytest.raises(StoreError, match=f"--yes={SERIAL}"):
        make("yes")
    make(SERIAL)
    capacity = int((FACTS / "size").read_text()) * 512
    numbers = list(range(1, 9))
    with contextlib.closing(open_store(DEVICE, capacity_bytes=capacity, layout=LAYOUT)) as store:
        assert store.is_direct
        write_segments(store, [(number, 16) for number in numbers], layout=LAYOUT)
        with pytest.raises(StoreBusyError):
            open_store(DEVICE, capacity_bytes=capacity, layout=LAYOUT)
    with contextlib.closing(open_store(DEVICE, capacity_bytes=capacity, layout=LAYOUT)) as store:
        before = sectors_read()
        kept = restore(store)
        assert sorted(kept) == numbers
        assert all(is_intact(store, segment, layout=LAYOUT) for segment in kept.values())
        assert (sectors_read() - before) * 512 >= len(numbers) * 16 * LAYOUT.block_bytes
        store.check_integrity()
    reports = list(verify_store(DEVICE, engine))
    assert sum(report.segments for report in reports) == len(numbers)
    assert all(report.damage == () for report in reports)


def test_flipped_bit_on_the_disk_is_found_by_verify() -> None:
    make(SERIAL)
    capacity = int((FACTS / "size").read_text()) * 512
    with contextlib.closing(open_store(DEVICE, capacity_bytes=capacity, layout=LAYOUT)) as store:
        write_segments(store, [(1, 16)], layout=LAYOUT)
    with DEVICE.open("r+b", buffering=0) as disk:
        at = disk.read(64 << 20).index(bytes(payload(1, 0, 4096)))
        disk.seek(at)
        sector = bytearray(disk.read(512))
        sector[100] ^= 1
        disk.seek(at)
        disk.write(sector)
        os.fsync(disk.fileno())
    (report,) = verify_store(DEVICE, engine)
    assert len(report.damage) == 1


def test_partitioned_disk_is_refused() -> None:
    # One partition of type Linux, from sector 2048, 100,000 sectors long.
    entry = struct.pack("<B3sB3sII", 0, bytes(3), 0x83, bytes(3), 2048, 100_000)
    with DEVICE.open("r+b", buffering=0) as disk:
        disk.write(bytes(446) + entry + bytes(48) + b"\x55\xaa")
        os.fsync(disk.fileno())
        reread_partitions(disk.fileno())
    with pytest.raises(StoreError, match="partition"):
        make(SERIAL)


def test_disk_with_a_file_system_is_refused_mounted_or_not(tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", str(DEVICE)], check=True)
    with pytest.raises(StoreFormatError, match="ext"):
        make(SERIAL)
    subprocess.run(["mount", str(DEVICE), str(tmp_path)], check=True)
    try:
        with pytest.raises(StoreError, match=r"in use|mounted"):
            make(SERIAL)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
