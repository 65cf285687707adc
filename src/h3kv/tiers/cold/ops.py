"""Reads, writes and flushes (ops) of one file: who asked, and what came of it."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

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
    """Address of one u32 for each page, or 0: a read is checked against them, a write fills them in."""
    page_bytes: int = 0
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


class OpQueue:
    """Hands ops to an engine and each outcome to whom asked. Not thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._open_engine: Engine | None = engine
        self.backend = engine.backend
        """Which kind of engine runs."""
        self._next_tag = 1
        self._open: dict[int, tuple[Op, Callable[[Outcome], None]]] = {}

    @property
    def in_flight(self) -> int:
        """Ops without an outcome."""
        return len(self._open)

    def submit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        """Start ops; `done` is called once for each, from `poll`."""
        self.submit_each([(op, done) for op in ops])

    def submit_each(self, wanted: Sequence[tuple[Op, Callable[[Outcome], None]]]) -> None:
        """Start ops, each with a function of its own that is called once, from `poll`."""
        first = self._next_tag
        self._next_tag += len(wanted)
        ops = [
            (tag, it.offset, it.address, it.size, it.crcs, it.page_bytes, it.kind, 0, 0)
            for tag, (it, _) in enumerate(wanted, start=first)
        ]
        self._open.update(enumerate(wanted, start=first))
        self._engine.submit(np.array(ops, dtype=OP_DTYPE))

    def poll(self) -> None:
        """Deliver the outcomes there are. A tag that is not open is a repetition and ignored."""
        for result in self._engine.poll():
            opened = self._open.pop(int(result["tag"]), None)
            if opened is not None:
                status = int(result["status"])
                opened[1](_DONE if status == OK else Outcome(status, describe(result)))

    def wait(self, timeout_ns: int) -> None:
        """Wait for an outcome."""
        self._engine.wait(timeout_ns)

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

    @property
    def _engine(self) -> Engine:
        assert self._open_engine is not None, "closed"
        return self._open_engine
