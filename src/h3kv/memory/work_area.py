"""The region through which attention and index search are spread over processes: a mailbox that asks for help, and
room for jobs.

    0           geometry.mailbox.size_bytes, up to 4 KiB         geometry.size_bytes
    +-----------+------------------------------------------------+
    | mailbox   | board: a header, then jobs of job_bytes each   |
    +-----------+------------------------------------------------+

The process that owns the sequences opens it; helpers attach to what lies there.
`native/src/offload_job.hpp` draws a job.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final, Self

from h3kv import _native
from h3kv.core.errors import ConfigError, StoreFormatError
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.memory.mailbox import Mailbox, MailboxGeometry

PURPOSE: Final = "work"
"""Of the region."""

HELPERS_MAX: Final = 64
"""As many as a mailbox has places for workers."""

_MAILBOX: Final = "the work mailbox"
_REQUEST_BYTES: Final = 48
_REPLY_BYTES: Final = 8
_ENTRIES_PER_HELPER: Final = 4
"""One under way, and some that a stopped helper still holds."""


@dataclass(frozen=True, slots=True)
class WorkGeometry:
    """How the region is divided.

    Raises:
        ConfigError: a number is out of its bounds.
    """

    helpers: int = 16
    """Threads of helping processes at once, up to 64. A helper looks at four entries of the mailbox for each."""
    jobs: int = 8
    """One is under way; one more for each helper that is late, up to 64."""
    job_bytes: int = 4 << 20
    """Of one attention: about 56 bytes for each page and KV head, and 4 x rows x (head_dim + 2) for each 1,024 tokens
    and KV head. 128K tokens of 8 KV heads of 128 with 4 query heads each take 3 MiB; what takes more is done alone. A
    scan takes less: 256 bytes for each 1,024 tokens, row and query head."""

    def __post_init__(self) -> None:
        if not 1 <= self.helpers <= HELPERS_MAX or not _native.job_board_bytes(self.jobs, self.job_bytes):
            raise ConfigError(
                f"a work region cannot have {self}: there are 1 to {HELPERS_MAX} helpers, 1 to "
                f"{_native.OFFLOAD_JOBS_MAX} jobs, and job_bytes is a multiple of 64 from 192 bytes to 1 GiB",
                field="work",
            )

    @classmethod
    def fitting(cls, size_bytes: int) -> WorkGeometry:
        """The one with the most helpers that a region of so much data has room for.

        Raises:
            ConfigError: it has room for none.
        """
        fitting = [each for helpers in range(1, HELPERS_MAX + 1) if (each := cls(helpers)).size_bytes <= size_bytes]
        if not fitting:
            message = f"a work region of {size_bytes} bytes is too small: it takes {cls(1).size_bytes} for one helper"
            raise ConfigError(message, field="work")
        return fitting[-1]

    @property
    def mailbox(self) -> MailboxGeometry:
        """Of the mailbox."""
        entries = 1 << (_ENTRIES_PER_HELPER * self.helpers - 1).bit_length()
        return MailboxGeometry(
            entries, request_bytes=_REQUEST_BYTES, reply_bytes=_REPLY_BYTES, callers=4, workers=self.helpers
        )

    @property
    def size_bytes(self) -> int:
        """Of the whole region's data: a multiple of 4 KiB."""
        board = _native.job_board_bytes(self.jobs, self.job_bytes)
        return _whole(_whole(self.mailbox.size_bytes) + board)


class WorkArea:
    """The region's data, as this process sees it. It keeps the memory mapped until `close`."""

    def __init__(self, mailbox: Mailbox, board: _native.JobBoard, memory: object) -> None:
        self.mailbox = mailbox
        self.board = board
        self._memory: object | None = memory

    def close(self) -> None:
        """Let go of the memory. Nothing of this may be used afterwards. Calling it again does nothing."""
        self._memory = None

    @classmethod
    def open(cls, memory: memoryview, geometry: WorkGeometry) -> Self:
        """The area in memory that is zero, or that an earlier owner of the sequences left: of that, the mailbox is
        emptied and its members are buried, and jobs that helpers still hold are left alone.

        Args:
            memory: the data of the region; writable.
            geometry: how it is divided.

        Raises:
            StoreFormatError: the memory is too small, or holds something else.
        """
        held, address = _address(memory)
        if memory.nbytes < geometry.size_bytes:
            raise _malformed(f"{memory.nbytes} bytes, where {geometry.size_bytes} are needed")
        offset = _whole(geometry.mailbox.size_bytes)
        try:
            board = _native.JobBoard.open(address + offset, memory.nbytes - offset, geometry.jobs, geometry.job_bytes)
        except ValueError as error:
            raise _malformed(str(error)) from error
        place = address, geometry.mailbox.size_bytes
        return cls(Mailbox.create(place, geometry.mailbox, name=_MAILBOX), board, held)

    @classmethod
    def attach(cls, memory: memoryview) -> Self:
        """The area that was opened in this memory.

        Raises:
            StoreFormatError: no area lies there, or one of another version.
        """
        held, address = _address(memory)
        mailbox = Mailbox.attach((address, memory.nbytes), name=_MAILBOX)
        offset = _whole(mailbox.geometry.size_bytes)
        if offset >= memory.nbytes:
            raise _malformed("no room behind its mailbox")
        try:
            return cls(mailbox, _native.JobBoard.attach(address + offset, memory.nbytes - offset), held)
        except ValueError as error:
            raise _malformed(str(error)) from error


def _whole(size_bytes: int) -> int:
    return -(-size_bytes // DIRECT_IO_BYTES) * DIRECT_IO_BYTES


def _address(memory: memoryview) -> tuple[object, int]:
    held = (ctypes.c_char * memory.nbytes).from_buffer(memory)
    return held, ctypes.addressof(held)


def _malformed(what: str) -> StoreFormatError:
    return StoreFormatError(f"the work region is not as this version makes it ({what}): make it anew", path=PURPOSE)
