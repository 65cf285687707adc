"""What passes through a channel: records of a head and a body. Little-endian.

    head          0      1        2       4       8                16
                  +------+--------+-------+-------+----------------+
                  | kind | flags  | zero  | count | number         |
                  | u8   | u8     |       | u32   | u64            |
                  +------+--------+-------+-------+----------------+

    submission    number                  body
    RESERVE       of the call             count x u8: blocks of each segment
    WRITE         of the move             WRITE_DTYPE | layers x u64: addresses | parent 32 | count x 32: keys
    FETCH         of the first one        count x FETCH_DTYPE
    RELEASE       0                       count x HANDLE_DTYPE
    SLABS         of the list             count x HANDLE_DTYPE: what later reads count their slabs in
    UNITS         of the call             u64: number of the list | count x the 32 bytes of `PersistentStore.read_units`
    WRAPPED       of the call             count x HANDLE_DTYPE
    ERASE         of the call             count x HANDLE_DTYPE
    TRACE         0                       24 bytes: the trace that what follows belongs to, zeros: none

    completion    number                  body
    RESERVED      of the call             count x HANDLE_DTYPE: the first slab of each segment
    WRITTEN       of the move             count x u32: bytes of each slab as it is stored, 0: as it is read
    FETCHED       0                       count x u64: numbers
    READ          of the call             count x u32: which reads of it brought their bytes
    IS_WRAPPED    of the call             count x u8
    ERASED        of the call             nothing: zeros lie where the slabs of this call and of those before it lay
    FAILED        of what failed          JSON: reason, message, needed, free; for UNITS the reads, count of them

A move is one whole segment, all layers. Flag 1 of a completion: the store takes no more moves.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import (
    H3Error,
    RequestError,
    SlabBusyError,
    SlabCorruptError,
    StaleHandleError,
    TierBrokenError,
    TierFullError,
)
from h3kv.core.types import SlabKey, SlotHandle, Tier


class Kind(enum.IntEnum):
    """Of a record."""

    RESERVE = 1
    WRITE = 2
    FETCH = 3
    RELEASE = 4
    SLABS = 5
    UNITS = 6
    WRAPPED = 7
    TRACE = 8
    ERASE = 9
    RESERVED = 16
    WRITTEN = 17
    FETCHED = 18
    READ = 19
    IS_WRAPPED = 20
    FAILED = 21
    ERASED = 22


_KINDS: Final = {kind.value: kind for kind in Kind}
_HEAD: Final = struct.Struct("<BBHIQ")
HEAD_BYTES: Final = _HEAD.size
IS_DEGRADED: Final = 1

HANDLE_DTYPE: Final = np.dtype([("slot", "<u8"), ("generation", "<u8"), ("blocks", "<u4"), ("zero", "<u4")])
"""A slab of the server's store."""
WRITE_DTYPE: Final = np.dtype(
    [("slot", "<u8"), ("generation", "<u8"), ("blocks", "<u4"), ("has_label", "<u4"), ("size", "<u8")]
)
"""The segment's first slab, and the bytes of each."""
FETCH_DTYPE: Final = np.dtype(
    [
        ("slot", "<u8"),
        ("generation", "<u8"),
        ("blocks", "<u4"),
        ("zero", "<u4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("size", "<u8"),
    ]
)
"""Part of a slab, and where it shall lie."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record, its body not looked into."""

    kind: Kind
    number: int
    count: int
    flags: int
    body: memoryview


def pack(kind: Kind, number: int, body: bytes = b"", *, count: int = 0, flags: int = 0) -> bytes:
    """A record as it is pushed."""
    return _HEAD.pack(kind, flags, 0, count, number) + body


def numbered(record: bytes, number: int) -> bytes:
    """The same record under another number."""
    kind, flags, zero, count, _ = _HEAD.unpack_from(record)
    return _HEAD.pack(kind, flags, zero, count, number) + record[HEAD_BYTES:]


def unpack(data: bytes) -> Record:
    """The record in what was popped. Raises RequestError for one without a head, or of no known kind."""
    if len(data) < HEAD_BYTES:
        raise RequestError(f"a record has {len(data)} bytes, fewer than its head of {HEAD_BYTES}")
    number_of_kind, flags, zero, count, number = _HEAD.unpack_from(data)
    kind = _KINDS.get(number_of_kind)
    if kind is None or zero:
        raise RequestError(f"no record is of kind {number_of_kind}")
    return Record(kind, number, count, flags, memoryview(data)[HEAD_BYTES:])


def items(record: Record, dtype: np.dtype[Any], *, offset: int = 0) -> NDArray[Any]:
    """The array of `count` items in a body, to its end: read-only. Raises RequestError for another length."""
    if record.count * dtype.itemsize != len(record.body) - offset:
        raise RequestError(f"a {record.kind.name} of {record.count} has {len(record.body)} bytes behind its head")
    return np.frombuffer(record.body, dtype=dtype, count=record.count, offset=offset)


def handle_rows(handles: Sequence[SlotHandle]) -> bytes:
    """HANDLE_DTYPE of slots."""
    rows = [(handle.slot, handle.generation, handle.blocks, 0) for handle in handles]
    return np.array(rows, dtype=HANDLE_DTYPE).tobytes()


def read_handles(rows: NDArray[Any]) -> list[SlotHandle]:
    """Slots of HANDLE_DTYPE, perhaps made up."""
    return [SlotHandle(Tier.NVME, slot, blocks, generation) for slot, generation, blocks, _ in rows.tolist()]


def are_sound_reads(reads_N: NDArray[np.void], sizes_S: NDArray[np.uint64], *, check_bytes: int, align: int) -> bool:
    """Whether every read is of whole checked units inside its slab, to a place that direct I/O takes.

    Args:
        reads_N: UNIT_READ_DTYPE.
        sizes_S: bytes that were written of each slab.
        check_bytes: of a unit.
        align: of targets.
    """
    slab_N = reads_N["slab"].astype(np.int64)
    if not reads_N.size:
        return True
    if int(slab_N.max()) >= sizes_S.size:
        return False
    offset_N, size_N = reads_N["offset"].astype(np.uint64), reads_N["size"].astype(np.uint64)
    is_sound_N = (
        (size_N > 0)
        & (size_N % check_bytes == 0)
        & (offset_N % check_bytes == 0)
        & (offset_N + size_N <= sizes_S[slab_N])
        & (reads_N["target"] % align == 0)
        & (reads_N["is_ahead"] <= 1)
    )
    return bool(is_sound_N.all())


def pack_failure(number: int, error: H3Error, *, reads: Sequence[int] = (), flags: int = 0) -> bytes:
    """A FAILED record."""
    fields: dict[str, object] = {"reason": error.reason, "message": str(error)[:2000]}
    if isinstance(error, TierFullError):
        fields |= {"needed": error.needed_bytes, "free": error.free_bytes}
    if reads:
        fields["reads"] = list(reads)
    return pack(Kind.FAILED, number, json.dumps(fields).encode(), count=len(reads), flags=flags)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a FAILED record says."""

    reason: str
    message: str
    needed_bytes: int
    free_bytes: int
    reads: tuple[int, ...]

    def error(self, key: SlabKey | None) -> H3Error:
        """The error that it stands for.

        Args:
            key: of the slab that it is about, if it is about one.
        """
        if self.reason == TierFullError.reason:
            return TierFullError(
                self.message, tier=Tier.NVME, needed_bytes=self.needed_bytes, free_bytes=self.free_bytes
            )
        if self.reason == StaleHandleError.reason:
            return StaleHandleError(self.message)
        if key is not None and self.reason in {SlabCorruptError.reason, SlabBusyError.reason}:
            kind = SlabCorruptError if self.reason == SlabCorruptError.reason else SlabBusyError
            return kind(self.message, key=key)
        return TierBrokenError(self.message, tier=Tier.NVME)


def read_failure(record: Record) -> Failure:
    """The failure in a record. Raises RequestError for what is none."""
    try:
        fields = json.loads(bytes(record.body))
        return Failure(
            str(fields["reason"]),
            str(fields["message"]),
            int(fields.get("needed", 0)),
            int(fields.get("free", 0)),
            tuple(int(read) for read in fields.get("reads", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError("a failure came that says nothing") from error
