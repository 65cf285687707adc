"""Places that cannot be a store, or not now: each ends with an error that names the place and the cure."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError, StoreBusyError, StoreError, StoreFormatError, TierBrokenError
from h3kv.core.types import Completion, SegmentId
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import (
    FINGERPRINT,
    LAYOUT,
    is_intact,
    open_store,
    read_segment,
    restore,
    settle,
    submit_segments,
    write_segments,
)
from h3kv.tiers.cold import ColdStore, ColdStoreConfig
from h3kv.tiers.cold.geometry import MIB
from h3kv.tiers.cold.record import FORMAT_VERSION

Mount = Callable[..., Path]

HOLDER = """
import sys
import time
from pathlib import Path
from h3kv.testing.cold_segments import open_store
store = open_store(Path(sys.argv[1]))
sys.stdout.write("open\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts small file systems in memory, where this user may."""
    mounted: list[Path] = []

    def mount_tmpfs(options: str) -> Path:
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "h3-test", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"file systems cannot be mounted here: {result.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount_tmpfs
    for folder in mounted:
        patiently("umount", str(folder))


def patiently(*command: str) -> None:
    """Run a command until it succeeds: a ring that is being torn down holds its files for a moment."""
    deadline = time.monotonic() + 10
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"{' '.join(command)} does not succeed"


@contextlib.contextmanager
def holder(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the store open."""
    command = [sys.executable, "-c", HOLDER, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        try:
            yield process
        finally:
            process.kill()


def test_missing_folder_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="make its folder first"):
        open_store(tmp_path / "missing" / "store.h3")


def test_new_path_in_a_folder_becomes_a_file_of_its_own(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path / "mine")) as store:
        assert store.path == tmp_path / "mine"
        assert store.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_new_store_needs_a_cap(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nvme\.capacity"):
        ColdStore.open(tmp_path, LAYOUT, fingerprint=FINGERPRINT, config=ColdStoreConfig(None), telemetry=Recorder())
    assert list(tmp_path.iterdir()) == []


def test_part_of_the_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StoreError, match="name another place"):
        open_store(tmp_path / "file" / "store.h3")


@pytest.mark.parametrize("size", [0, 100, 3 * MIB])
def test_file_that_is_no_store_is_never_overwritten(tmp_path: Path, size: int) -> None:
    place = tmp_path / "thesis.pdf"
    place.write_bytes(b"%" * size)
    with pytest.raises(StoreFormatError, match=r"not a cold store.*name another place"):
        open_store(place)
    assert place.read_bytes() == b"%" * size


def test_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreFormatError, match="neither a file nor a block device"):
        open_store(tmp_path / "pipe")


def test_store_of_another_version_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        place = store.path
    with place.open("r+b") as file:
        for at in (0, 4096):
            file.seek(at + 12)
            file.write((FORMAT_VERSION + 1).to_bytes(4, "little"))
    told = f"format {FORMAT_VERSION + 1}, this version reads format {FORMAT_VERSION}"
    with pytest.raises(StoreFormatError, match=told):
        open_store(tmp_path)


def test_damaged_superblock_is_mended_by_its_twin_and_two_are_refused(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(1, 1)])
        place = store.path
    for at, is_found in ((0, True), (4096, False)):
        with place.open("r+b") as file:
            file.seek(at + 40)
            file.write(b"\xff" * 8)
        if is_found:
            with contextlib.closing(open_store(tmp_path)) as store:
                assert sorted(restore(store)) == [1]
            # Opening wrote the damaged copy anew. Damage it again, so that both are.
            with place.open("r+b") as file:
                file.seek(at + 40)
                file.write(b"\xff" * 8)
    with pytest.raises(StoreFormatError, match="damaged"):
        open_store(tmp_path)


def test_cut_file_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        place = store.path
    os.truncate(place, place.stat().st_size - 4096)
    with pytest.raises(StoreFormatError, match="was cut"):
        open_store(tmp_path)
    os.truncate(place, 5000)
    with pytest.raises(StoreError):
        open_store(tmp_path)


@pytest.mark.slow
def test_store_in_use_by_another_process_is_busy_until_that_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(StoreBusyError, match=r"store\.h3 is in use"):
            open_store(tmp_path)
        process.kill()
        process.wait()
        with contextlib.closing(open_store(tmp_path)) as store:
            write_segments(store, [(1, 1)])


def test_store_in_use_by_this_process_is_busy(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)), pytest.raises(StoreBusyError):
        open_store(tmp_path)


def test_read_only_file_system_is_an_error_at_start(mount: Mount) -> None:
    folder = mount("size=16m")
    with contextlib.closing(open_store(folder)):
        pass
    patiently("mount", "-o", "remount,ro", str(folder))
    with pytest.raises(StoreError, match="read-only"):
        open_store(folder)
    with pytest.raises(StoreError, match="read-only"):
        open_store(folder / "new")


def test_full_file_system_is_an_error_at_start_and_leaves_nothing(mount: Mount) -> None:
    folder = mount("size=1m")
    with pytest.raises(StoreError, match=r"full.*lower nvme\.capacity"):
        open_store(folder)
    assert list(folder.iterdir()) == []


def test_draft_of_a_process_that_died_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "store.h3.new").write_bytes(b"half" * 10_000)
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(1, 1)])
    assert [path.name for path in tmp_path.iterdir()] == ["store.h3"]


def test_file_system_that_fills_up_under_the_store_degrades_it_and_it_is_read_on(mount: Mount) -> None:
    folder = mount("size=6m")
    telemetry = Recorder()
    with contextlib.closing(open_store(folder, units=4, telemetry=telemetry)) as store:
        first = write_segments(store, [(1, 4)])[1]
        take_room_away(store.path, start=store.path.stat().st_size // 2)
        ended = write_until_it_fails(store)
        assert all(isinstance(completion.error, TierBrokenError) for completion in ended)
        assert store.is_degraded
        assert telemetry.value(names.STORE_DEGRADED, tier="nvme") == 1
        assert [error for _, error in read_segment(store, SegmentId(1), first)] == [None, None]
        with pytest.raises(TierBrokenError, match="open the store again"):
            store.reserve([1, 1])
        store.check_integrity()
    (folder / "other").unlink()
    with contextlib.closing(open_store(folder, units=4)) as store:
        found = restore(store)
        assert 1 in found
        assert all(is_intact(store, segment) for segment in found.values())
        write_segments(store, [(99, 16)])


def take_room_away(path: Path, *, start: int) -> None:
    """Give back the room of the file's end, as on a thin disk, and fill the file system with something else."""
    command = ["fallocate", "--punch-hole", "--offset", str(start), "--length", str(1 << 30), str(path)]
    subprocess.run(command, check=True)
    with (path.parent / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while other.write(bytes(4096)):
            pass


def write_until_it_fails(store: ColdStore) -> list[Completion]:
    """Completions of the first segment that could not be written."""
    for number in range(2, 9):
        submit_segments(store, [(number, 16)])
        ended = settle(store, 2)
        if any(completion.error is not None for completion in ended):
            return ended
    pytest.fail("nothing failed")
