import itertools

import pytest

from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType
from h3kv.testing.cold_segments import LAYOUT
from h3kv.tiers.cold.geometry import (
    AREA_BYTES_MAX,
    AREA_BYTES_MIN,
    MIB,
    AreaGeometry,
    VolumeGeometry,
    capacity_for,
    layout_mark,
    plan_volume,
)

LLAMA_8B = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.BF16, head_dim=128), kv_heads=8), layers=32)
SMOLLM2 = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.BF16, head_dim=64), kv_heads=3), layers=30)


@pytest.mark.parametrize("capacity_mib", [2, 40, 200, 1024, 5000, 64 * 1024, 300 * 1024, 8 * 1024 * 1024])
def test_areas_lie_under_the_cap_and_do_not_overlap(capacity_mib: int) -> None:
    geometry = plan_volume(capacity_mib * MIB)
    assert geometry.areas >= 1
    assert geometry.entry_offset(geometry.table_entries) <= geometry.data_offset
    assert geometry.area_offset(geometry.areas) <= geometry.capacity_bytes
    assert geometry.area_bytes <= AREA_BYTES_MAX
    if geometry.areas > 1:
        assert geometry.area_bytes >= AREA_BYTES_MIN
    assert geometry.capacity_bytes - geometry.area_offset(geometry.areas) < max(MIB, geometry.capacity_bytes // 100)


def test_new_store_is_divided_so_that_segments_of_its_first_model_fit() -> None:
    geometry = plan_volume(1024 * MIB, layout=LLAMA_8B)
    assert AreaGeometry(layout_mark(LLAMA_8B), geometry.area_bytes).units >= 1


def test_cap_below_one_area_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nvme\.capacity"):
        plan_volume(MIB)


@pytest.mark.parametrize("layout", [LAYOUT, SMOLLM2, LLAMA_8B])
def test_headers_and_slabs_of_an_area_do_not_overlap(layout: CacheLayout) -> None:
    area = AreaGeometry(layout_mark(layout), 300 * MIB)
    headers = [(area.header_offset(block), area.header_offset(block + 1)) for block in range(area.blocks)]
    slabs = [
        (start, start + area.slab_bytes(4))
        for block in range(0, area.blocks, 4)
        for layer in range(layout.layers)
        for start in [area.slab_offset(block, layer, blocks=4)]
    ]
    spans = [*headers, *slabs]
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    assert spans[-1][1] <= area.area_bytes
    assert all(start % 4096 == 0 for start, _ in spans)


def test_headers_are_a_small_part_of_an_area() -> None:
    assert AreaGeometry(layout_mark(SMOLLM2), 64 * MIB).header_bytes * 300 < SMOLLM2.block_bytes
    assert AreaGeometry(layout_mark(LLAMA_8B), 300 * MIB).header_bytes == 4096


@pytest.mark.parametrize("units", [1, 3])
def test_smallest_cap_for_some_units_holds_exactly_these(units: int) -> None:
    geometry = plan_volume(capacity_for(LAYOUT, units=units), layout=LAYOUT)
    assert geometry.areas == 1
    assert AreaGeometry(layout_mark(LAYOUT), geometry.area_bytes).units == units


def test_lower_cap_drops_areas_and_a_higher_one_adds_them_up_to_the_table() -> None:
    made = plan_volume(1024 * MIB)
    lower = VolumeGeometry(512 * MIB, made.area_bytes, made.table_entries)
    higher = VolumeGeometry(2048 * MIB, made.area_bytes, made.table_entries)
    assert 0 < lower.areas < made.areas < higher.areas <= made.table_entries
    assert lower.area_offset(3) == made.area_offset(3)
