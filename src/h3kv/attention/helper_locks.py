"""Which helpers may still write: each locks one byte of a file, by its number, while its threads run.

    crew.sock.helpers    [ . | 1 | 2 | . | 4 | ... ]      a byte is nowhere written, only locked

The kernel lets go of a lock when its process ends, however it ends, and not while it is stopped; it sees locks across
containers that mount the same folder. So an owner knows whether helpers of its forerunners live, who are connected to
nobody any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from h3kv.core.errors import StoreError

_FLOCK: Final = struct.Struct("hhqqi4x")
"""`struct flock`: kind, whence, first byte, how many, process (0: the lock is the descriptor's)."""


class HelperLocks:
    """The file, open in one process. Not thread-safe.

    Args:
        socket_path: of the crew.
        mode: of a file that is made; None: it is there.

    Raises:
        StoreError: no owner was ever there, or the folder is closed to us.
    """

    def __init__(self, socket_path: Path, *, mode: int | None = None) -> None:
        self.path = socket_path.with_name(f"{socket_path.name}.helpers")
        try:
            self._fd: int | None = os.open(
                self.path, os.O_RDONLY | os.O_CLOEXEC | (0 if mode is None else os.O_CREAT), 0 if mode is None else mode
            )
            if mode is not None:
                # Those that another user made stay as they are.
                with contextlib.suppress(PermissionError):
                    os.fchmod(self._fd, mode)
        except OSError as error:
            raise _refusal(self.path, error) from error

    def hold(self, numbers: Iterable[int]) -> None:
        """Say that these helpers may write, until `close`. StoreError where the system has no more locks."""
        assert self._fd is not None, "the file was closed"
        try:
            for number in numbers:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, number, 1, 0))
        except OSError as error:
            raise _refusal(self.path, error) from error

    def are_held(self, *, below: int) -> bool:
        """Whether a helper with a smaller number than that may still write."""
        assert self._fd is not None, "the file was closed"
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, below, 0)
        (kind, *_) = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))
        return bool(kind != fcntl.F_UNLCK)

    def close(self) -> None:
        """Let go of all locks. Calling it again does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _refusal(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be used ({error.strerror}): make its folder one that owner and helpers can write to",
        path=str(path),
    )
