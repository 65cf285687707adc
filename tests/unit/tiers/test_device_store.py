import pytest

from h3kv.core.errors import ConfigError, TierClosedError, TierFullError
from h3kv.core.layout import PageLayout, SlabLayout
from h3kv.core.types import DType, Tier
from h3kv.tiers.device import DeviceStore, DeviceStoreConfig

LAYOUT = SlabLayout(PageLayout(dtype=DType.BF16, head_dim=64), kv_heads=3)
UNIT_BYTES = 16 * 3 * 16_384


def test_capacity_is_rounded_down_to_whole_units() -> None:
    for capacity_bytes in (UNIT_BYTES, 2 * UNIT_BYTES - 1):
        store = DeviceStore(LAYOUT, DeviceStoreConfig(capacity_bytes))
        assert store.statistics().capacity_bytes == UNIT_BYTES
        assert store.arena.numel() == UNIT_BYTES
        store.check_integrity()


@pytest.mark.parametrize("capacity_bytes", [0, -1, UNIT_BYTES - 1])
def test_cap_below_one_unit_is_refused_with_the_sum(capacity_bytes: int) -> None:
    with pytest.raises(ConfigError) as caught:
        DeviceStore(LAYOUT, DeviceStoreConfig(capacity_bytes))
    assert caught.value.field == "device.kv_bytes"
    assert f"16 blocks x 49152 bytes = {UNIT_BYTES} bytes" in str(caught.value)


def test_full_store_says_how_much_is_missing_and_which_cap_to_raise() -> None:
    store = DeviceStore(LAYOUT, DeviceStoreConfig(UNIT_BYTES))
    store.reserve([8])
    with pytest.raises(TierFullError) as caught:
        store.reserve([3, 9])
    assert caught.value.tier is Tier.DEVICE
    assert caught.value.needed_bytes == LAYOUT.size_bytes(4 + 16)
    assert caught.value.free_bytes == LAYOUT.size_bytes(8)
    assert "device.kv_bytes" in str(caught.value)
    store.check_integrity()


def test_slots_lie_in_the_arena_at_their_offset_in_blocks() -> None:
    store = DeviceStore(LAYOUT, DeviceStoreConfig(UNIT_BYTES))
    _, handle = store.reserve([4, 2])
    assert store.address(handle) - store.arena.data_ptr() == LAYOUT.size_bytes(handle.slot)
    assert store.address(handle) % 4096 == 0
    store.check_integrity()


def test_closed_store_has_no_arena() -> None:
    store = DeviceStore(LAYOUT, DeviceStoreConfig(UNIT_BYTES))
    store.close()
    with pytest.raises(TierClosedError, match="open a new node"):
        _ = store.arena
