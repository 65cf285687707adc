import pytest

from h3kv.api.common.v1 import statistics_pb2, types_pb2
from h3kv.core.errors import RequestError
from h3kv.core.types import SlotHandle, StoreStatistics, Tier
from h3kv.rpc.convert import (
    read_boot_token,
    read_key,
    read_label,
    read_name,
    read_slot,
    read_statistics,
    read_tier,
    slot_message,
    statistics_message,
    tier_message,
)


@pytest.mark.parametrize("tier", Tier)
def test_every_tier_is_read_as_it_was_written(tier: Tier) -> None:
    assert read_tier(tier_message(tier), field="tier") is tier
    assert types_pb2.Tier.Name(tier_message(tier)) == f"TIER_{tier.name}"


@pytest.mark.parametrize("number", [0, 99, -1])
def test_an_unknown_tier_is_refused(number: types_pb2.Tier) -> None:
    with pytest.raises(RequestError, match="source = "):
        read_tier(number, field="source")


def test_keys_and_tokens_have_one_length() -> None:
    assert read_key(bytes(32), field="key") == bytes(32)
    assert read_boot_token(bytes(16), field="boot_token") == bytes(16)
    for size_bytes in (0, 15, 31, 33):
        with pytest.raises(RequestError, match=f"key has {size_bytes} bytes"):
            read_key(bytes(size_bytes), field="key")
        with pytest.raises(RequestError, match="boot_token has"):
            read_boot_token(bytes(size_bytes), field="boot_token")


@pytest.mark.parametrize("text", ["", "A", "a b", "a\n", "a" * 64, "../a", "ä"])
def test_labels_and_names_of_other_characters_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="reason = "):
        read_label(text, field="reason")
    with pytest.raises(RequestError, match="name = "):
        read_name(text, field="name")


def test_labels_and_names_are_read() -> None:
    assert read_label("earned_place", field="reason") == "earned_place"
    assert read_name("ann_offload-2", field="name") == "ann_offload-2"


def test_a_slot_is_read_as_it_was_written() -> None:
    handle = SlotHandle(Tier.NVME, 48, 16, 7)
    assert read_slot(slot_message(handle), Tier.NVME, field="slot") == handle


@pytest.mark.parametrize(("offset_blocks", "blocks"), [(0, 0), (0, 3), (0, 32), (1, 2), (8, 16)])
def test_a_slot_that_no_store_hands_out_is_refused(offset_blocks: int, blocks: int) -> None:
    with pytest.raises(RequestError, match="no slot of"):
        read_slot(types_pb2.Slot(offset_blocks=offset_blocks, blocks=blocks), Tier.NVME, field="slot")


def test_statistics_are_read_as_they_were_written() -> None:
    statistics = StoreStatistics(Tier.HOST, 100, 60, 3, 7, 500)
    message = statistics_message(statistics, pinned_bytes=20)
    assert message.pinned_bytes == 20
    assert read_statistics(message, field="tiers[0]") == statistics


def test_a_tier_that_uses_more_than_it_has_is_refused() -> None:
    message = statistics_pb2.TierStatistics(tier=types_pb2.TIER_HOST, capacity_bytes=1, used_bytes=2)
    with pytest.raises(RequestError, match=r"tiers\[0\]"):
        read_statistics(message, field="tiers[0]")
