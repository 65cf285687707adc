import pytest

from h3kv import _native
from h3kv.telemetry.access_probe import BATCHES, AccessProbe, summarize


def test_mean_and_jitter_leave_out_a_twentieth_at_either_end() -> None:
    found = summarize([1000.0, 0.0, *[10.0] * 9, *[12.0] * 9])
    assert (found.mean_ns, found.jitter_ns, found.batches) == (11.0, 1.0, 20)


def test_few_batches_all_count() -> None:
    found = summarize([10.0, 14.0])
    assert (found.mean_ns, found.jitter_ns, found.batches) == (12.0, 2.0, 2)


def test_window_keeps_the_last_samples() -> None:
    probe = AccessProbe(memoryview(bytearray(1 << 16)), window_samples=2)
    assert probe.statistics() is None
    for _ in range(3):
        probe.sample()
    found = probe.statistics()
    assert found is not None
    assert found.batches == 2 * BATCHES
    assert found.mean_ns > 0
    assert found.jitter_ns >= 0


@pytest.mark.parametrize("size_bytes", [71, 128, 1000])
def test_memory_of_any_size_and_place_is_only_read(size_bytes: int) -> None:
    memory = bytearray(b"\x5a" * (size_bytes + 3))
    AccessProbe(memoryview(memory)[3:]).sample()
    assert memory == b"\x5a" * (size_bytes + 3)


def test_there_is_one_mean_for_each_batch() -> None:
    probe = AccessProbe(memoryview(bytearray(1 << 16)))
    means = _native.probe_access(probe._address, probe._size_bytes, 7, 1)
    assert len(means) == 7
    assert all(mean > 0 for mean in means)
