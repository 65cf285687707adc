"""A socket file that one living process serves.

    nvme_io.sock         the socket: mode 0600, or 0660 for a group
    nvme_io.sock.lock    held by flock for as long as the process lives

A dead process leaves both files behind. The lock tells: who gets it may replace the socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from h3kv.core.errors import AddressInUseError, ConfigError
from h3kv.rpc.addresses import UnixAddress

OWNER_MODE: Final = 0o600
GROUP_MODE: Final = 0o660


class SocketClaim:
    """The right to serve at a socket file, until `release`.

    Args:
        address: its folder must exist.

    Raises:
        AddressInUseError: a living process serves there.
        ConfigError: the folder is missing or cannot be written, or something that is no socket lies there.
    """

    def __init__(self, address: UnixAddress) -> None:
        self._address = address
        self._path = address.path
        self._lock = self._take_lock()
        try:
            self._remove_stale()
        except BaseException:
            os.close(self._lock)
            raise

    @contextlib.contextmanager
    def binding(self, *, group: int | None) -> Iterator[None]:
        """While the socket is bound here, nobody else can open it; afterwards its owner can, and `group` if given.

        The process's umask is stricter meanwhile: files that other threads make then are their owner's alone.

        Raises:
            ConfigError: this process may not give files to that group.
        """
        before = os.umask(0o777 & ~OWNER_MODE)
        try:
            yield
        finally:
            os.umask(before)
        if group is None:
            self._path.chmod(OWNER_MODE)
            return
        try:
            os.chown(self._path, -1, group)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be given to group {group} ({error.strerror}): name a group of this user",
                field="socket_group",
            ) from error
        self._path.chmod(GROUP_MODE)

    def release(self) -> None:
        """Remove the socket and let go of it."""
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def _take_lock(self) -> int:
        path = Path(f"{self._path}.lock")
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, OWNER_MODE)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be made ({error.strerror}): make its folder, writable for this user", field="address"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise self._in_use() from error
        return lock

    def _remove_stale(self) -> None:
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"{self._path} is no socket: move it away, or name another path", field="address")
        # A process that holds no lock of ours may serve there all the same.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(os.fspath(self._path)) not in {errno.ECONNREFUSED, errno.ENOENT}:
                raise self._in_use()
        self._path.unlink(missing_ok=True)

    def _in_use(self) -> AddressInUseError:
        return AddressInUseError(
            f"another process serves at {self._address}: end it, or name another path", address=str(self._address)
        )
