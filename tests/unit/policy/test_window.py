import pytest

from h3kv.core.errors import ConfigError
from h3kv.policy.window import CHUNK_BLOCKS_MAX, SEQUENCES_MAX, plan_device, window_room


def test_sequence_holds_sinks_window_and_the_block_that_is_being_filled() -> None:
    assert window_room(16) == 18


@pytest.mark.parametrize("capacity", [19, 32, 50, 100, 1000, 10_000])
@pytest.mark.parametrize("window", [1, 16])
def test_all_windows_and_one_chunk_fit_the_cap(capacity: int, window: int) -> None:
    plan = plan_device(capacity, window, 16, block_bytes=4096)
    assert 1 <= plan.sequences <= SEQUENCES_MAX
    assert 1 <= plan.chunk_blocks <= CHUNK_BLOCKS_MAX
    assert plan.sequences * window_room(window) + plan.chunk_blocks <= capacity


def test_small_cap_shortens_the_chunk_and_a_large_one_lengthens_it() -> None:
    assert plan_device(32, 16, 16, block_bytes=4096).chunk_blocks == 14
    assert plan_device(32, 16, 16, block_bytes=4096).sequences == 1
    assert plan_device(1000, 16, 16, block_bytes=4096).chunk_blocks == CHUNK_BLOCKS_MAX


def test_cap_below_one_sequence_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"needs 19 blocks of 64: 1 of sinks, 16 of window") as caught:
        plan_device(18, 16, 16, block_bytes=4096)
    assert caught.value.field == "device.kv_bytes"
