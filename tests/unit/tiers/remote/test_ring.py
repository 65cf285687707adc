"""Records of any length pass through a ring in order, and what is none is not delivered."""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3kv.core.errors import RegionError
from h3kv.memory.bell import Bell
from h3kv.tiers.cold.ops import address_of
from h3kv.tiers.remote.ring import RecordRing

CAPACITY = 1024
LONGEST = 300


class Pair:
    """Both sides of a ring in memory of this process."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 4096)
        self.address = address_of(self.memory)
        self.writer, self.reader = (
            RecordRing(self.address, capacity=CAPACITY, record_bytes_max=LONGEST) for _ in range(2)
        )


@given(st.lists(st.one_of(st.none(), st.binary(max_size=LONGEST)), max_size=200))
def test_records_come_in_order_whatever_their_sizes(steps: list[bytes | None]) -> None:
    """None takes one; bytes push one, unless the ring is full."""
    pair, waiting = Pair(), []
    for step in steps:
        if step is None:
            assert pair.reader.pop() == (waiting.pop(0) if waiting else None)
        elif pair.writer.push(step):
            waiting.append(step)
        else:
            assert sum(16 + len(each) for each in waiting) + 16 + len(step) > CAPACITY - 16
    for each in waiting:
        assert pair.reader.pop() == each
    assert pair.reader.pop() is None


def test_record_that_is_too_long_is_not_taken() -> None:
    assert not Pair().writer.push(bytes(LONGEST + 1))


@pytest.mark.parametrize("at", [0, 4, 8, 20])
def test_record_of_which_a_bit_changed_is_not_delivered(at: int) -> None:
    pair = Pair()
    assert pair.writer.push(b"bytes that matter")
    pair.memory[128 + at] ^= 1
    with pytest.raises(RegionError):
        pair.reader.pop()


@pytest.mark.parametrize("tail", [CAPACITY + 8, 1, 1 << 63])
def test_position_that_cannot_be_is_noticed(tail: int) -> None:
    pair = Pair()
    ctypes.c_uint64.from_address(pair.address + 64).value = tail
    with pytest.raises(RegionError):
        pair.reader.pop()
    ctypes.c_uint64.from_address(pair.address).value = CAPACITY
    with pytest.raises(RegionError):
        pair.writer.push(b"x")


def test_bell_wakes_whoever_waits_and_is_heard_when_it_rang_before() -> None:
    memory = np.zeros(2, dtype=np.uint32)
    bell = Bell(memory.ctypes.data)
    seen = bell.signal
    bell.ring()
    bell.wait(seen, 10**12)
    woken = threading.Event()

    def wait() -> None:
        seen = bell.signal
        while bell.signal == seen:
            bell.wait(seen, 10**12)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not woken.wait(0.001):
        bell.ring()
    thread.join()
    assert memory[1] == 0, "a waiter did not count itself out"
