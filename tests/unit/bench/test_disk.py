"""Where the device's bandwidth is measured, and what is said of places that are no disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3kv.bench.disk import READ_BYTES, DiskLimit, describe_folder
from h3kv.core.errors import ConfigError

MEMORY = Path("/dev/shm")


def test_only_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with path.open("wb") as file:
        file.write(bytes(2 * READ_BYTES))
        file.truncate(16 * READ_BYTES)
    with DiskLimit(path) as limit:
        assert limit.bytes_per_second(0.01) > 0
    with path.open("r+b") as file:
        file.truncate(READ_BYTES // 2)
    with pytest.raises(ConfigError, match="store more"):
        DiskLimit(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        DiskLimit(tmp_path / "missing")


def test_places_that_are_no_disk_are_named(tmp_path: Path) -> None:
    message = describe_folder(tmp_path, is_direct=False)
    assert message is not None and str(tmp_path) in message
    if not MEMORY.exists():
        pytest.skip("this machine has no tmpfs at /dev/shm")
    message = describe_folder(MEMORY, is_direct=True)
    assert message is not None and "main memory" in message
