"""Reads, writes and flushes (ops) of one file: who asked, and what came of it."""

from __future__ import annotations

import functools
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from h3kv.core.units import NS_PER_S
from h3kv.tiers.cold.record import SECTOR_BYTES
from h3kv.tiers.cold.seam import Engine
from h3kv.tiers.io import OK, OP_DTYPE, WRITE, describe

_WAIT_NS: Final = NS_PER_S
"""How long `run` waits before it looks again. The engine's own deadline bounds the whole."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an op ended."""

    status: int
    """One of `tiers.io`'s."""
    what: str
    """In words."""

    @property
    def is_good(self) -> bool:
        """Whether all of it was done."""
        return self.status == OK

    def __str__(self) -> str:
        return self.what


WRITE_BEHIND_BYTES: Final = 8 << 20
"""Writes that the engine holds at a time: it takes ops in order, so that a read that is waited for stands behind so
many bytes at most, some milliseconds of a disk. Further ones are held back here."""

_ARRAY_TAG: Final = 1 << 63
"""Set in the tags of ops that come as arrays: then the number of the array, and that of the op in it."""

_INDEX_BITS: Final = 24
ARRAY_OPS_MAX: Final = 1 << _INDEX_BITS

ArrayEnd = Callable[[NDArray[np.int64], NDArray[np.void]], None]

_DONE: Final = Outcome(OK, "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One read, write or flush. Its memory must live until the outcome: `keep` holds what nobody else does."""

    kind: int
    """READ, WRITE or FLUSH of `tiers.io`."""
    offset: int = 0
    address: int = 0
    size: int = 0
    crcs: int = 0
    """Address of one u32 for each piece, or 0: a read is checked against them, a write fills them in."""
    page_bytes: int = 0
    """Of one piece."""
    keep: object = None


def aligned_memory(size_bytes: int) -> mmap.mmap:
    """Zeroed memory that O_DIRECT takes. Given back with the last reference."""
    return mmap.mmap(-1, -(-size_bytes // SECTOR_BYTES) * SECTOR_BYTES)


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Address of the first byte of memory that is not empty."""
    address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    return address


def write_of(offset: int, data: bytes) -> Op:
    """A write of a copy of `data`, whole sectors."""
    memory = aligned_memory(len(data))
    memory[: len(data)] = data
    return Op(kind=WRITE, offset=offset, address=address_of(memory), size=len(data), keep=memory)


def array_of(ops: Sequence[Op], *, first_tag: int = 0) -> NDArray[np.void]:
    """Ops as the engine takes them: OP_DTYPE, tags one after the other. Their memory is kept by `ops`."""
    rows = [
        (tag, it.offset, it.address, it.size, it.crcs, it.page_bytes, it.kind, 0, 0)
        for tag, it in enumerate(ops, start=first_tag)
    ]
    return np.array(rows, dtype=OP_DTYPE)


@dataclass(slots=True, eq=False)
class _Array:
    end: ArrayEnd
    left: int
    keep: object


class OpQueue:
    """Hands ops to an engine and each outcome to whom asked. Not thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._open_engine: Engine | None = engine
        self.backend = engine.backend
        """Which kind of engine runs."""
        self._next_tag = 1
        self._open: dict[int, tuple[Op, Callable[[Outcome], None]]] = {}
        self._arrays: dict[int, _Array] = {}
        self._next_array = 0
        self._in_arrays = 0
        self._behind: deque[NDArray[np.void]] = deque()
        self._behind_count = 0
        # Bytes of each write that the engine has, by its tag.
        self._writing: dict[int, int] = {}
        self._writing_bytes = 0

    @property
    def in_flight(self) -> int:
        """Ops without an outcome."""
        return len(self._open) + self._in_arrays

    def submit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        """Start ops; `done` is called once for each, from `poll`."""
        self.submit_each([(op, done) for op in ops])

    def submit_each(self, wanted: Sequence[tuple[Op, Callable[[Outcome], None]]]) -> None:
        """Start ops, each with a function of its own that is called once, from `poll`."""
        if not wanted:
            return
        first = self._next_tag
        self._next_tag += len(wanted)
        self._open.update(enumerate(wanted, start=first))
        self._start(array_of([op for op, _ in wanted], first_tag=first))

    def open_array(self, count: int, end: ArrayEnd, *, keep: object = None) -> int:
        """The first tag of so many ops that come as arrays; the others follow it.

        Args:
            count: ops, all of which are to be submitted.
            end: called from `poll` with the numbers of ops, counted from 0, and their results, RESULT_DTYPE.
            keep: what must live until all have ended.
        """
        number = self._next_array
        self._next_array += 1
        self._arrays[number] = _Array(end, count, keep)
        return _ARRAY_TAG | number << _INDEX_BITS

    def submit_array(self, ops_N: NDArray[np.void]) -> None:
        """Start ops of `tiers.io.OP_DTYPE` with tags of `open_array`."""
        self._in_arrays += ops_N.size
        self._start(ops_N)

    def poll(self) -> None:
        """Deliver the outcomes there are. A tag that is not open is a repetition and ignored."""
        results_N = self._engine.poll()
        if self._writing and results_N.size:
            for tag in results_N["tag"].tolist():
                self._writing_bytes -= self._writing.pop(tag, 0)
        self._top_up()
        if self._arrays and results_N.size:
            of_array_N = results_N["tag"] >= _ARRAY_TAG
            if of_array_N.all():
                self._end_arrays(results_N)
                return
            if of_array_N.any():
                self._end_arrays(results_N[of_array_N])
                results_N = results_N[~of_array_N]
        for result in results_N:
            opened = self._open.pop(int(result["tag"]), None)
            if opened is not None:
                status = int(result["status"])
                opened[1](_DONE if status == OK else Outcome(status, describe(result)))

    def _end_arrays(self, results_N: NDArray[np.void]) -> None:
        tags_N = results_N["tag"] ^ np.uint64(_ARRAY_TAG)
        number_N = tags_N >> np.uint64(_INDEX_BITS)
        index_N = (tags_N & np.uint64(ARRAY_OPS_MAX - 1)).astype(np.int64)
        number = int(number_N[0])
        if (number_N == number).all():
            self._end_array(number, index_N, results_N)
            return
        for number in np.unique(number_N).tolist():
            mine_N = number_N == number
            self._end_array(number, index_N[mine_N], results_N[mine_N])

    def _end_array(self, number: int, ended_N: NDArray[np.int64], results_N: NDArray[np.void]) -> None:
        array = self._arrays[number]
        self._in_arrays -= ended_N.size
        array.left -= ended_N.size
        if array.left == 0:
            del self._arrays[number]
        array.end(ended_N, results_N)

    def wait(self, timeout_ns: int, *, results: int = 1) -> None:
        """Wait for so many outcomes.

        Where writes are held back, for half of what the engine has at most, so that they follow before it has none.
        """
        if self._behind:
            results = max(1, min(results, (self.in_flight - self._behind_count) // 2))
        self._engine.wait(timeout_ns, results=results)

    def run(self, ops: Sequence[Op]) -> list[Outcome]:
        """Start ops and wait for all of them. Outcomes come in the order of the ops."""
        outcomes: dict[int, Outcome] = {}
        for index, op in enumerate(ops):
            self.submit([op], functools.partial(outcomes.__setitem__, index))
        while len(outcomes) < len(ops):
            self.wait(_WAIT_NS)
            self.poll()
        return [outcomes[index] for index in range(len(ops))]

    def close(self) -> None:
        """End everything in flight; no memory is touched after that. Calling it again does nothing."""
        if self._open_engine is not None:
            self._engine.cancel_all()
            self._engine.close()
            self._open_engine = None
            self._open.clear()
            self._arrays.clear()
            self._behind.clear()
            self._writing.clear()

    def _start(self, ops_N: NDArray[np.void]) -> None:
        """Give ops to the engine; writes behind those that it has, as far as there is room for them."""
        is_write_N = ops_N["kind"] == WRITE
        if not is_write_N.any():
            self._engine.submit(ops_N)
            return
        if not is_write_N.all():
            self._engine.submit(ops_N[~is_write_N])
            ops_N = ops_N[is_write_N]
        self._behind.append(ops_N)
        self._behind_count += ops_N.size
        self._top_up()

    def _top_up(self) -> None:
        while self._behind and self._writing_bytes < WRITE_BEHIND_BYTES:
            ops_N = self._behind.popleft()
            sizes = ops_N["size"].tolist()
            room, count = WRITE_BEHIND_BYTES - self._writing_bytes, 0
            while count < len(sizes) and room > 0:
                room -= sizes[count]
                count += 1
            if count < len(sizes):
                self._behind.appendleft(ops_N[count:])
            self._writing.update(zip(ops_N["tag"][:count].tolist(), sizes[:count], strict=True))
            self._writing_bytes += sum(sizes[:count])
            self._behind_count -= count
            self._engine.submit(np.ascontiguousarray(ops_N[:count]))

    @property
    def _engine(self) -> Engine:
        assert self._open_engine is not None, "closed"
        return self._open_engine
