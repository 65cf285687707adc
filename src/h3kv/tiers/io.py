"""Asynchronous file I/O: typed entry to the native engine, and files opened for it.

Shapes: N ops or results.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from h3kv import _native
from h3kv.core.errors import ConfigError, TierBrokenError, TierClosedError
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS, describe_size
from h3kv.machine import memlock_limit_bytes

OP_DTYPE: Final = np.dtype(
    [
        ("tag", "<u8"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("size", "<u8"),
        ("crcs", "<u8"),
        ("page_bytes", "<u4"),
        ("kind", "<u4"),
        ("file", "<u4"),
        ("deadline_ms", "<u4"),
    ]
)
"""One op, the same 56 bytes as `h3::io::Op`.

`tag` comes back with the result. `offset` is the place in the file, `size` the bytes to move, both as aligned as the
file asks for. `crcs` is 0 or the address of u32[size / page_bytes]: a read is compared with them, a write fills them in
before it starts. `deadline_ms` counts from `submit`; 0 is the engine's own.
"""

RESULT_DTYPE: Final = np.dtype(
    [
        ("tag", "<u8"),
        ("status", "<u4"),
        ("error", "<u4"),
        ("page", "<u4"),
        ("reserved", "<u4"),
        ("duration_ns", "<u8"),
    ]
)
"""The end of one op, the same 32 bytes as `h3::io::Result`. `error` is the errno of `ERROR`, `page` the first page that
does not match after `CHECKSUM_MISMATCH`. `duration_ns` counts from the moment that the kernel was given the op."""

READ: Final = 0
WRITE: Final = 1
FLUSH: Final = 2
"""Kinds. A flush is fdatasync; it covers the writes whose results were polled before it was submitted."""

OK: Final = 0
ERROR: Final = 1
END_OF_FILE: Final = 2
CHECKSUM_MISMATCH: Final = 3
DEADLINE: Final = 4
CANCELLED: Final = 5
"""Statuses. An op that ended whole is OK, though it ended late or was to be cancelled."""

DEPTH_MAX: Final = 4096
"""Ops in flight. The ring has two entries for each and the kernel grants 32,768."""

DEADLINE_MS: Final = 30_000
"""An op that took so long is stuck: the slowest sound devices answer within seconds."""

WAIT_SLICE_NS: Final = 100 * NS_PER_MS
"""Longest wait that a signal cannot end: Ctrl-C is heard between two of them."""

Backend = Literal["auto", "io_uring", "threads"]

assert OP_DTYPE.itemsize == 56
assert RESULT_DTYPE.itemsize == 32


@dataclass(frozen=True, slots=True)
class IoStatistics:
    """Totals since the engine was opened; `pending` and `in_flight` are of this moment."""

    reads: int
    writes: int
    flushes: int
    bytes_read: int
    bytes_written: int
    failed: int
    """Ops that ended with any status but OK."""
    checksum_mismatches: int
    deadlines: int
    cancelled: int
    short_transfers: int
    """Transfers of which the kernel moved only a part, so that the remainder was asked for."""
    retries: int
    """Transfers tried again after EINTR or EAGAIN."""
    stale_completions: int
    """Completions of requests that had ended already. They were ignored."""
    kernel_calls: int
    pending: int
    in_flight: int


class IoEngine:
    """Reads, writes and flushes on a thread of its own that never runs Python: io_uring, else threads.

    The memory of an op, its checksums included, belongs to the engine from `submit` until its result was polled or
    `close` has returned. Files stay the caller's, who closes them after the engine. Any thread may call any method.
    """

    def __init__(self, native: _native.IoEngine, *, buffers_bytes: int = 0) -> None:
        self._native = native
        self._buffers_bytes = buffers_bytes

    @classmethod
    def open(
        cls,
        files: Sequence[int],
        *,
        depth: int,
        buffers: Sequence[tuple[int, int]] = (),
        backend: Backend = "auto",
        threads: int = 4,
        deadline_ms: int = DEADLINE_MS,
        bell: int | None = None,
    ) -> Self:
        """An engine over these descriptors.

        Args:
            files: descriptors; an op names one by its index.
            depth: ops that the kernel is given at a time; further ones wait in order.
            buffers: (address, bytes) of memory to be registered, so that the kernel pins it once instead of in each op.
                Memory that it refuses is used unregistered, see `fixed_buffers`. Never give memory of a CMA heap:
                registering it does not return.
            backend: `auto` takes threads where io_uring is refused, see `fallback_reason`.
            threads: of the threads backend.
            deadline_ms: of ops that state none.
            bell: address of a `memory.bell.Bell` that is rung whenever results were added, valid until `close`.

        Raises:
            ConfigError: the depth is out of range, or io_uring was asked for by name and is refused.
            TierBrokenError: no thread can be started.
        """
        if not 1 <= depth <= DEPTH_MAX:
            raise ConfigError(f"an I/O depth is from 1 to {DEPTH_MAX}, not {depth}", field="depth")
        try:
            native = _native.IoEngine(files, depth, buffers, backend, threads, deadline_ms, ())
            if bell is not None:
                native.set_bell(bell)
            return cls(native, buffers_bytes=sum(size_bytes for _, size_bytes in buffers))
        except OSError as error:
            message = (
                f"the I/O engine cannot start its threads ({error.strerror}): raise the limit on processes "
                "(`ulimit -u`), or end other programs"
            )
            raise TierBrokenError(message, tier=Tier.NVME) from error
        except RuntimeError as error:
            message = f"io_uring is not available here ({error}); choose the backend auto or threads"
            raise ConfigError(message, field="nvme.backend") from error

    @property
    def backend(self) -> str:
        """`io_uring` or `threads`."""
        return self._native.backend

    @property
    def fallback_reason(self) -> str | None:
        """Why threads are used; None with io_uring."""
        return self._native.reason or None

    @property
    def fixed_buffers(self) -> bool:
        """Whether the buffers are registered."""
        return self._native.fixed_buffers

    @property
    def buffers_reason(self) -> str | None:
        """Why buffers that were given are not registered, and what to do about it."""
        reason = self._native.buffers_reason or None
        limit_bytes = memlock_limit_bytes()
        if reason is None or self.fixed_buffers or limit_bytes is None or limit_bytes >= self._buffers_bytes:
            return reason
        return (
            f"{reason}: {describe_size(self._buffers_bytes)} are to be locked and the memlock limit is "
            f"{describe_size(limit_bytes)}; raise it (`ulimit -l`)"
        )

    def submit(self, ops_N: NDArray[np.void]) -> None:
        """Start ops; never waits. What exceeds the depth is pending, in order.

        Args:
            ops_N: OP_DTYPE, contiguous. Copied.

        Raises:
            TierClosedError: after `close`.
        """
        assert ops_N.dtype == OP_DTYPE and ops_N.flags.c_contiguous
        if not self._native.submit(ops_N.ctypes.data, ops_N.size):
            raise TierClosedError("the I/O engine is closed; open another", tier=Tier.NVME)

    def poll(self) -> NDArray[np.void]:
        """Results since the last call, in the order in which the ops ended: RESULT_DTYPE [N], N may be 0."""
        results_N = np.empty(self._native.ready(), dtype=RESULT_DTYPE)
        count = self._native.poll(results_N.ctypes.data, results_N.size) if results_N.size else 0
        return results_N[:count]

    def wait(self, timeout_ns: int, *, results: int = 1) -> None:
        """Return when so many results can be polled, or all that are still to come, or the time is over.

        The GIL is released. Waiting for many results at once costs fewer wake-ups than waiting for each.
        """
        end_ns = time.monotonic_ns() + timeout_ns
        left_ns = timeout_ns
        while True:
            self._native.wait(max(0, min(left_ns, WAIT_SLICE_NS)), results)
            left_ns = end_ns - time.monotonic_ns()
            if left_ns <= 0 or self._has(results):
                return

    def _has(self, results: int) -> bool:
        return self._native.ready() >= results or self._native.outstanding() == 0

    def cancel_all(self) -> None:
        """End what can be ended. Each op still gets its result: CANCELLED, or OK when it was done anyway."""
        self._native.cancel_all()

    def close(self) -> None:
        """Drop what is pending and wait for what is in flight: afterwards no memory is touched and no file is held.

        Results can still be polled. Calling it again does nothing.
        """
        self._native.close()

    def statistics(self) -> IoStatistics:
        """Totals so far."""
        return IoStatistics(**self._native.statistics())


def describe(result: np.void) -> str:
    """What happened to an op, from one element of RESULT_DTYPE: "No space left on device (ENOSPC)"."""
    status = int(result["status"])
    if status == ERROR:
        error = int(result["error"])
        return f"{os.strerror(error)} ({errno.errorcode.get(error, error)})"
    if status == CHECKSUM_MISMATCH:
        return f"the checksum of page {int(result['page'])} does not match"
    return {OK: "done", END_OF_FILE: "the file ends too early", DEADLINE: "not done by its deadline"}.get(
        status, "cancelled"
    )


def direct_file(path: Path, flags: int) -> tuple[int, bool]:
    """A descriptor of the file, and whether its I/O is direct: past the page cache.

    Where the file system refuses O_DIRECT (tmpfs on older kernels), I/O is buffered.

    Args:
        path: file or block device.
        flags: as of `os.open`, without O_DIRECT. Files are made with mode 0600.

    Raises:
        OSError: as of `os.open`.
    """
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags | os.O_CLOEXEC, 0o600), False
