"""What is believed of how fast prompts are computed and the cold store is read."""

from __future__ import annotations

import pytest

from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.engine.speeds import READS_KEPT_NS, SAMPLES_MAX, Speeds
from h3kv.testing.clock import ManualClock

MIB = 1 << 20


class World:
    """Speeds and their clock."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.speeds = Speeds(self.clock)

    def wait(self, sizes_bytes: list[int], duration_ns: int) -> None:
        """Attention waits, and so much comes."""
        with self.speeds.waiting():
            self.clock.advance(duration_ns)
            for size_bytes in sizes_bytes:
                self.speeds.fetched(size_bytes)

    def wait_in_vain(self, duration_ns: int) -> None:
        """Attention waits, and the store ends it with an error."""
        with self.speeds.waiting():
            self.clock.advance(duration_ns)
            raise OSError("gone")

    def read_ns(self, size_bytes: int) -> float | None:
        """Time of one read."""
        reading = self.speeds.reading()
        return None if reading is None else reading.ns(1, size_bytes)


def test_nothing_is_known_at_first() -> None:
    world = World()
    assert world.speeds.prefill() is None
    assert world.speeds.reading() is None


def test_prefill_grows_with_depth() -> None:
    world = World()
    for chunk in range(8):
        start = 512 * chunk
        world.speeds.prefilled(start, 512, sum(1_000 + 2 * (start + at) for at in range(512)))
    prefill = world.speeds.prefill()
    assert prefill is not None
    assert prefill.ns(16_384, 1_024) == pytest.approx(sum(1_000 + 2 * (16_384 + at) for at in range(1_024)), rel=1e-3)


def test_short_chunks_do_not_count() -> None:
    world = World()
    world.speeds.prefilled(0, 63, NS_PER_S)
    assert world.speeds.prefill() is None


def test_chunks_that_waited_for_the_cold_store_do_not_count() -> None:
    world = World()
    with world.speeds.stepping(chunk := object()):
        world.wait([MIB], NS_PER_S)
    with world.speeds.stepping(chunk):
        world.speeds.prefilled(0, 128, 2 * NS_PER_S)
    assert world.speeds.prefill() is None
    with world.speeds.stepping(object()):
        world.speeds.prefilled(128, 128, NS_PER_MS)
    prefill = world.speeds.prefill()
    assert prefill is not None
    assert prefill.ns(0, 128) == pytest.approx(NS_PER_MS)


def test_waits_of_others_between_the_steps_of_a_chunk_do_not_count_for_it() -> None:
    world = World()
    with world.speeds.stepping(object()):
        # It is taken off before it has ended.
        world.wait([MIB], NS_PER_S)
    with world.speeds.stepping(chunk := object()):
        world.clock.advance(NS_PER_MS)
    world.wait([MIB], NS_PER_S)
    with world.speeds.stepping(chunk):
        world.speeds.prefilled(0, 128, NS_PER_MS)
    prefill = world.speeds.prefill()
    assert prefill is not None
    assert prefill.ns(0, 128) == pytest.approx(NS_PER_MS)


def test_one_slow_chunk_changes_nothing_and_a_new_speed_counts_in_the_end() -> None:
    world = World()
    for chunk in range(9):
        world.speeds.prefilled(128 * chunk, 128, 128_000 if chunk != 4 else NS_PER_S)
    prefill = world.speeds.prefill()
    assert prefill is not None
    assert prefill.ns(0, 128) == pytest.approx(128_000)
    for chunk in range(SAMPLES_MAX):
        world.speeds.prefilled(128 * chunk, 128, 256_000)
    prefill = world.speeds.prefill()
    assert prefill is not None
    assert prefill.ns(0, 128) == pytest.approx(256_000)


def test_what_comes_while_nobody_waits_does_not_count() -> None:
    world = World()
    world.speeds.fetched(MIB)
    world.clock.advance(NS_PER_S)
    assert world.speeds.reading() is None
    world.wait([MIB], 4 * NS_PER_MS)
    assert world.read_ns(MIB) == pytest.approx(4 * NS_PER_MS)


def test_short_waits_are_added_up() -> None:
    world = World()
    for _ in range(3):
        world.wait([MIB // 2], NS_PER_MS // 2)
    assert world.speeds.reading() is None
    world.wait([MIB // 2], NS_PER_MS // 2)
    assert world.read_ns(MIB) == pytest.approx(NS_PER_MS)


def test_a_wait_in_which_nothing_came_makes_the_next_one_longer() -> None:
    world = World()
    world.wait([], NS_PER_S)
    assert world.speeds.reading() is None
    world.wait([MIB], NS_PER_S)
    assert world.read_ns(MIB) == pytest.approx(2 * NS_PER_S)


def test_time_of_a_read_is_told_from_that_of_its_bytes() -> None:
    world = World()
    for reads in (4, 8, 16, 32, 64):
        world.wait([MIB // 16] * reads, reads * NS_PER_MS + reads * NS_PER_MS)
        world.wait([MIB] * reads, reads * NS_PER_MS + 16 * reads * NS_PER_MS)
    assert world.read_ns(MIB // 16) == pytest.approx(2 * NS_PER_MS)
    assert world.read_ns(4 * MIB) == pytest.approx(65 * NS_PER_MS)


def test_a_stall_changes_nothing_and_old_samples_are_forgotten() -> None:
    world = World()
    for wait in range(9):
        world.wait([MIB], 4 * NS_PER_MS if wait != 4 else 20 * NS_PER_S)
    assert world.read_ns(MIB) == pytest.approx(4 * NS_PER_MS)
    world.clock.advance(READS_KEPT_NS + 1)
    assert world.speeds.reading() is None


def test_a_wait_that_ends_with_an_error_counts() -> None:
    world = World()
    with pytest.raises(OSError, match="gone"):
        world.wait_in_vain(NS_PER_S)
    world.wait([MIB], NS_PER_MS)
    assert world.read_ns(MIB) == pytest.approx(NS_PER_S + NS_PER_MS)
