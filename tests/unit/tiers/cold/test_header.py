import numpy as np
import pytest

from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType
from h3kv.testing.cold_segments import FINGERPRINT, LAYOUT, label_of
from h3kv.tiers.cold.geometry import MIB, AreaGeometry, layout_mark
from h3kv.tiers.cold.header import EXTENT_MAGIC, ExtentHeader, pack_header, unpack_header, whole_bytes

GEOMETRY = AreaGeometry(layout_mark(LAYOUT), 4 * MIB)
WIDE = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.FP32, head_dim=16), kv_heads=40), layers=40)


def header(room: int, *, keys: int | None = None, geometry: AreaGeometry = GEOMETRY) -> ExtentHeader:
    layers, pieces = geometry.mark.layers, geometry.slab_pieces(room)
    label = None if keys == 0 else label_of(5, keys or room)
    wrapped_L = np.arange(layers, dtype=np.uint32) * 99
    crcs_LC = (np.arange(layers * pieces, dtype=np.uint32) * 2_654_435_761).reshape(layers, pieces)
    return ExtentHeader(FINGERPRINT, 77, room, pieces, label, wrapped_L, crcs_LC)


@pytest.mark.parametrize("geometry", [GEOMETRY, AreaGeometry(layout_mark(WIDE), 4 * MIB)], ids=["small", "wide"])
@pytest.mark.parametrize(("room", "keys"), [(1, 1), (2, 1), (4, 3), (16, 16), (8, 0)])
def test_header_comes_back_as_it_was(geometry: AreaGeometry, room: int, keys: int) -> None:
    written = header(room, keys=keys, geometry=geometry)
    packed = pack_header(written, geometry)
    assert len(packed) == room * geometry.header_bytes
    assert whole_bytes(packed + b"rest") == len(packed)
    found = unpack_header(packed + b"rest", geometry)
    assert found is not None
    assert found.label == written.label
    assert (found.fingerprint, found.serial, found.room_blocks, found.pieces) == (
        written.fingerprint,
        written.serial,
        written.room_blocks,
        written.pieces,
    )
    assert np.array_equal(found.wrapped_L, written.wrapped_L)
    assert np.array_equal(found.crcs_LC, written.crcs_LC)


@pytest.mark.parametrize("at", [0, 8, 12, 16, 20, 24, 60, 70, 96, 104, 108, 112, 120, 130, 700, 1024, 2000, 8191])
def test_any_changed_byte_makes_a_header_invalid(at: int) -> None:
    packed = bytearray(pack_header(header(2), GEOMETRY))
    packed[at] ^= 0x10
    assert unpack_header(bytes(packed), GEOMETRY) is None


def test_header_that_is_cut_is_invalid() -> None:
    packed = pack_header(header(2), GEOMETRY)
    assert unpack_header(packed[:4096], GEOMETRY) is None
    assert unpack_header(packed[:100], GEOMETRY) is None
    assert whole_bytes(packed[:4096]) is None
    assert packed.startswith(EXTENT_MAGIC)


def test_header_of_another_layout_is_whole_but_not_ours() -> None:
    other = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.FP32, head_dim=32), kv_heads=2), layers=2)
    geometry = AreaGeometry(layout_mark(other), 4 * MIB)
    packed = pack_header(header(2, geometry=geometry), geometry)
    assert unpack_header(packed, GEOMETRY) is None
    assert whole_bytes(packed) == len(packed)
