"""The file or device of a store: found, made, locked, sized."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.core.errors import StoreBusyError, StoreError, StoreFormatError
from h3kv.core.units import NS_PER_S, describe_size
from h3kv.tiers.io import direct_file

STORE_FILE: Final = "store.h3"
"""Name of the file in a folder that was given as a place."""

_PATIENCE_NS: Final = NS_PER_S
"""Tearing down a ring takes milliseconds."""


@dataclass(slots=True)
class OpenPlace:
    """A locked file or device. Closing the descriptor ends the lock."""

    path: Path
    file: int
    is_device: bool
    is_direct: bool
    """Whether it bypasses the page cache. A file system that cannot do that is used through the cache."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file or device now."""
        return os.lseek(self.file, 0, os.SEEK_END)

    def resize(self, size_bytes: int) -> None:
        """Cut the file, or preallocate up to the new size.

        Raises:
            StoreError: no space, or the file system refuses.
        """
        try:
            os.ftruncate(self.file, min(size_bytes, self.size_bytes))
            if size_bytes:
                os.posix_fallocate(self.file, 0, size_bytes)
            os.fsync(self.file)
        except OSError as error:
            raise _store_error(
                f"cannot reserve {describe_size(size_bytes)} for the cold store", self.path, error
            ) from error

    def close(self) -> None:
        """Give the lock and the descriptor back.

        The lock goes first and by name: a ring that is being torn down may hold the file for a moment longer.
        """
        if self.file >= 0:
            fcntl.flock(self.file, fcntl.LOCK_UN)
            os.close(self.file)
            self.file = -1


def resolve(place: Path) -> tuple[Path, bool]:
    """The path of the file or device that a place stands for, and whether anything is there.

    Raises:
        StoreError: this user may not look.
    """
    try:
        path = place / STORE_FILE if place.is_dir() else place
        return path, path.exists()
    except OSError as error:
        raise _store_error("cannot look for the cold store", place, error) from error


def open_place(path: Path) -> OpenPlace:
    """Open and lock a file or device that exists.

    Raises:
        StoreBusyError: another process uses it.
        StoreError: it cannot be opened for reading and writing.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise StoreFormatError(f"{path} is neither a file nor a block device: name another place", path=str(path))
        is_device = stat.S_ISBLK(mode)
        return _patiently(lambda: _open_locked(path, is_device=is_device))
    except FileNotFoundError as error:
        message = f"there is no cold store at {path}: name another place, or make one with `h3 format`"
        raise StoreError(message, path=str(path)) from error
    except OSError as error:
        if error.errno in {errno.EBUSY, errno.EWOULDBLOCK}:
            raise _busy(path) from error
        raise _store_error("cannot open the cold store", path, error) from error


@contextlib.contextmanager
def new_file(path: Path, size_bytes: int) -> Iterator[OpenPlace]:
    """A new, locked, preallocated file under a temporary name, to be made a store in the block.

    When the block ends the file gets its name; after an error nothing of it stays. Before it has its name nobody takes
    it for a store: a crash leaves a draft, which the next start replaces, and never half a store.

    Raises:
        StoreError: the parent folder is missing or read-only, or there is no space.
        StoreBusyError: another process makes the same store.
    """
    draft = _draft(path)
    try:
        file, is_direct = direct_file(draft, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _store_error("cannot make the cold store", path, error) from error
    with contextlib.closing(OpenPlace(path, file, is_device=False, is_direct=is_direct)) as place:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(path) from error
        except OSError as error:
            raise _store_error("cannot lock the new cold store", path, error) from error
        if not _is_draft(draft, file):
            raise _busy(path)  # between open and lock, another process made a store of the same draft
        try:
            place.resize(0)
            place.resize(size_bytes)
            yield place
            _publish(draft, path)
        except BaseException:
            if _is_draft(draft, file):
                draft.unlink()
            raise


def _is_draft(draft: Path, file: int) -> bool:
    """Whether a descriptor's file has the name of a draft."""
    try:
        return os.path.samestat(draft.stat(), os.fstat(file))
    except OSError:
        return False


def _publish(draft: Path, path: Path) -> None:
    """Give a draft its name, unless something has that name."""
    try:
        _name(draft, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError as error:
        raise _busy(path) from error
    except OSError as error:
        raise _store_error("cannot name the new cold store", path, error) from error


def _name(draft: Path, path: Path) -> None:
    try:
        path.hardlink_to(draft)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS} or path.exists():
            raise
        draft.rename(path)  # a file system without hard links
    else:
        draft.unlink()


def _open_locked(path: Path, *, is_device: bool) -> OpenPlace:
    # O_EXCL on a block device without O_CREAT: EBUSY if it is mounted, or held by another who asked so.
    file, is_direct = direct_file(path, os.O_RDWR | (os.O_EXCL if is_device else 0))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return OpenPlace(path, file, is_device, is_direct)


def _patiently(attempt: Callable[[], OpenPlace]) -> OpenPlace:
    """Try until it is not busy, for a moment: a process that was killed holds its files until its ring is torn down."""
    end_ns = time.monotonic_ns() + _PATIENCE_NS
    while True:
        try:
            return attempt()
        except OSError as error:
            if error.errno not in {errno.EBUSY, errno.EWOULDBLOCK} or time.monotonic_ns() > end_ns:
                raise
        threading.Event().wait(_PATIENCE_NS / 50 / NS_PER_S)


def _draft(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _busy(path: Path) -> StoreBusyError:
    return StoreBusyError(
        f"{path} is in use by another process or mounted: end that process, or name another store", path=str(path)
    )


_CURES: Final = {
    errno.ENOENT: "make its folder first, or name another place",
    errno.EACCES: "give this user the right to read and write it, or name another place",
    errno.EPERM: "give this user the right to read and write it, or name another place",
    errno.EROFS: "the file system is read-only: name another place",
    errno.ENOSPC: "the file system is full: free space, or lower nvme.capacity",
    errno.EFBIG: "the file system's limit on the size of a file: lower nvme.capacity",
    errno.EDQUOT: "the quota is used up: free space, or lower nvme.capacity",
    errno.ENOTDIR: "a part of its path is a file: name another place",
}


def _store_error(what: str, path: Path, error: OSError) -> StoreError:
    cure = _CURES.get(error.errno or 0, "check the file system and the device")
    return StoreError(f"{what} {path}: {error.strerror}; {cure}", path=str(path))
