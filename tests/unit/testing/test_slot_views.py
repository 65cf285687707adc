from collections.abc import Iterator

import pytest
import torch

from h3kv.core.errors import ShapeError, StaleHandleError
from h3kv.core.layout import PageLayout, SlabLayout
from h3kv.core.types import DType, Encoding, SlotHandle, Tier
from h3kv.memory.copies import SLOT_TO_READER, CopyMeter
from h3kv.memory.leases import LeasedRoom, LeaseTable
from h3kv.memory.region import Region
from h3kv.memory.region_format import RegionGeometry
from h3kv.testing.slot_views import SlotViews

LAYOUT = SlabLayout(PageLayout(dtype=DType.BF16, head_dim=64, encoding=Encoding.K8V4), kv_heads=2)


class Slots:
    def __init__(self) -> None:
        self.region = Region.create(RegionGeometry(LAYOUT.block_bytes, 32))
        leases = LeaseTable(self.region.table)
        self.room = LeasedRoom(Tier.HOST, self.region.table, lambda units: leases.lease(2, units) or [])
        self.copies = CopyMeter()
        self.views = SlotViews(self.region, copies=self.copies)

    def reserve(self, blocks: int) -> SlotHandle:
        (handle,) = self.room.reserve([blocks]) or []
        return handle


@pytest.fixture
def slots() -> Iterator[Slots]:
    made = Slots()
    yield made
    made.room.check_integrity()
    made.region.close()


def test_all_views_show_the_slot_where_it_lies(slots: Slots) -> None:
    slots.reserve(4)
    handle = slots.reserve(16)
    whole = slots.views.bytes(handle)
    assert whole.nbytes == LAYOUT.size_bytes(16)
    whole[:] = bytes(whole.nbytes)
    tensor_NT = slots.views.tensor(handle, torch.bfloat16, (3, 5), offset_bytes=64)
    tensor_NT[2, 4] = 1.0
    assert bytes(whole[64 + 28 : 64 + 30]) == b"\x80\x3f"
    slot_address = slots.region.data.data_ptr() + LAYOUT.size_bytes(handle.slot)
    assert tensor_NT.data_ptr() == slot_address + 64
    index = slots.views.index(handle, LAYOUT)
    assert index.nbytes == LAYOUT.index_bytes(16)
    index[0] = 77
    assert whole[LAYOUT.index_offset(16)] == 77
    assert slots.copies.bytes_copied(SLOT_TO_READER) == 0


def test_views_beyond_the_slot_are_refused(slots: Slots) -> None:
    handle = slots.reserve(1)
    room_bytes = LAYOUT.size_bytes(1)
    assert slots.views.tensor(handle, torch.uint8, (room_bytes,)).numel() == room_bytes
    assert slots.views.tensor(handle, torch.float32, ()).numel() == 1
    for dtype, shape, offset in [
        (torch.uint8, (room_bytes + 1,), 0),
        (torch.uint8, (1,), room_bytes),
        (torch.uint8, (1,), -1),
        (torch.uint8, (-1,), 0),
        (torch.float32, (room_bytes // 4,), 4),
        (torch.float32, (1,), 2),
    ]:
        with pytest.raises(ShapeError):
            slots.views.tensor(handle, dtype, shape, offset_bytes=offset)
    for size_bytes, offset in [(room_bytes + 1, 0), (1, room_bytes), (1, -1)]:
        with pytest.raises(ShapeError):
            slots.views.read(handle, memoryview(bytearray(size_bytes)), offset_bytes=offset)
    other = SlabLayout(PageLayout(dtype=DType.BF16, head_dim=64), kv_heads=2)
    with pytest.raises(ShapeError):
        slots.views.index(handle, other)


def test_views_of_a_slot_that_was_released_are_refused(slots: Slots) -> None:
    handle = slots.reserve(2)
    assert slots.views.is_current(handle)
    slots.room.release([handle])
    assert slots.reserve(2).slot == handle.slot
    assert not slots.views.is_current(handle)
    for view in (
        lambda: slots.views.bytes(handle),
        lambda: slots.views.tensor(handle, torch.uint8, (1,)),
        lambda: slots.views.index(handle, LAYOUT),
        lambda: slots.views.read(handle, memoryview(bytearray(1))),
    ):
        with pytest.raises(StaleHandleError):
            view()


def test_verified_read_copies_once(slots: Slots) -> None:
    handle = slots.reserve(1)
    slots.views.bytes(handle)[4:7] = b"abc"
    target = bytearray(3)
    slots.views.read(handle, memoryview(target), offset_bytes=4)
    assert target == b"abc"
    assert slots.copies.passes(SLOT_TO_READER, 3) == 1.0
