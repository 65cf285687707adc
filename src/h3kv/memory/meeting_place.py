"""The folder in which the owner of regions and their holders meet, and the locks that say who is there.

    NAME            the socket, 0600, or 0660 where a group shares it
    NAME.owner      locked alone by the process that owns the regions, while it lives: there is never a second
    NAME.holders    locked together by all that have regions mapped, until they have let go of them
    NAME.regions    the marker: which regions there are and who holds them, for the owner's successor

The kernel lets go of a lock when its process ends, however it ends, and sees it across containers that mount the same
folder. So a new owner knows whether anybody still has its forerunner's regions, also those that never speak. Lock files
stay: to remove one while another process opens it would make two of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import Final

from h3kv.core.errors import AddressInUseError, ConfigError, StoreError
from h3kv.memory.messages import Marker, decode_marker, encode_marker

PATH_BYTES_MAX: Final = 100
"""The kernel takes 107 bytes for the path of a socket; one that is being made has a longer name."""


class MeetingPlace:
    """The files around one socket.

    Args:
        socket_path: of the socket.
        mode: of the files: 0600, or 0660.

    Raises:
        ConfigError: the path is too long for a socket.
    """

    def __init__(self, socket_path: Path, *, mode: int = 0o600) -> None:
        if len(os.fsencode(socket_path)) > PATH_BYTES_MAX:
            message = f"{socket_path} is too long for a socket: choose a folder with a path of at most 80 bytes"
            raise ConfigError(message, field="socket_folder")
        self.socket_path = socket_path
        self._mode = mode

    def lock_owner(self) -> int:
        """A descriptor that holds the owner's lock.

        Raises:
            AddressInUseError: another process has it.
            StoreError: the folder is missing or closed to us.
        """
        fd = self._open(".owner")
        if not _locked(fd, fcntl.LOCK_EX):
            os.close(fd)
            raise AddressInUseError(
                f"another process owns the regions of {self.socket_path}: end it, or choose another socket folder",
                address=str(self.socket_path),
            )
        return fd

    def lock_holder(self) -> int:
        """A descriptor that says: this process has regions mapped. It waits while an owner looks, which is a moment.

        Raises:
            StoreError: the folder is missing or closed to us.
        """
        fd = self._open(".holders")
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def has_holders(self) -> bool:
        """Whether any process has regions mapped, the owner itself apart."""
        fd = self._open(".holders")
        try:
            return not _locked(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)

    def listen(self) -> socket.socket:
        """A socket at the path. Only the holder of the owner's lock may call it: what lies there is a dead one.

        Raises:
            StoreError: the folder does not let us.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        fresh = self._path(".new")
        try:
            fresh.unlink(missing_ok=True)
            listener.bind(str(fresh))
            # It has its rights before anybody can find it.
            fresh.chmod(self._mode)
            listener.listen(64)
            fresh.rename(self.socket_path)
        except OSError as error:
            listener.close()
            raise self._refusal(error) from error
        return listener

    def read_marker(self) -> Marker | None:
        """What the forerunner left; None where there is nothing that can be understood."""
        try:
            return decode_marker(self._path(".regions").read_bytes())
        except (OSError, ValueError):
            return None

    def write_marker(self, marker: Marker) -> None:
        """Replace the marker: at any moment there is the old one or the new one.

        Raises:
            StoreError: the folder does not let us.
        """
        fresh = self._path(".regions-new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(encode_marker(marker))
            fresh.rename(self._path(".regions"))
        except OSError as error:
            raise self._refusal(error) from error

    def remove_marker(self) -> None:
        """There is nothing to be adopted."""
        with contextlib.suppress(OSError):
            self._path(".regions").unlink()

    def remove_socket(self) -> None:
        """Nobody listens any more."""
        with contextlib.suppress(OSError):
            self.socket_path.unlink()

    def _path(self, ending: str) -> Path:
        return self.socket_path.with_name(self.socket_path.name + ending)

    def _open(self, ending: str) -> int:
        path = self._path(ending)
        try:
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, self._mode)
                os.fchmod(fd, self._mode)
                return fd
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> StoreError:
        return StoreError(
            f"the socket folder {self.socket_path.parent} cannot be used ({error.strerror}): make it, writable for "
            "this user and its group",
            path=str(self.socket_path),
        )


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
