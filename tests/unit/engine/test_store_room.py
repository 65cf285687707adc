from dataclasses import replace
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType
from h3kv.core.units import parse_size
from h3kv.engine.store_room import (
    cap_for_blocks,
    check_area,
    check_new_store,
    cure_for_blocks,
    grown_cap,
    room_blocks,
)
from h3kv.tiers.cold.geometry import MIB, plan_volume

SMOLLM2 = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.BF16, head_dim=64), kv_heads=3), layers=30)
LLAMA_8B = CacheLayout(slab=SlabLayout(page=PageLayout(dtype=DType.BF16, head_dim=128), kv_heads=8), layers=32)
LAYOUTS = [SMOLLM2, LLAMA_8B]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [1, 16, 17, 80, 200, 1000, 5000, 40_000])
def test_cap_holds_the_blocks_in_a_new_store(layout: CacheLayout, blocks: int) -> None:
    cap = cap_for_blocks(layout, blocks)
    assert room_blocks(plan_volume(cap, layout=layout), layout) >= blocks
    assert cap % MIB == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("made_mib", [600, 1000, 8192])
@pytest.mark.parametrize("blocks", [80, 1000, 3000])
def test_cap_that_the_cure_names_suffices_for_the_store_and_for_a_new_one(
    layout: CacheLayout, made_mib: int, blocks: int
) -> None:
    made = plan_volume(made_mib * MIB, layout=layout)
    cure = cure_for_blocks(layout, blocks, path=Path("kv.h3"), made=made)
    assert cure.startswith("raise nvme.capacity to at least ")
    cap = parse_size(cure.split()[-1])
    assert room_blocks(replace(made, capacity_bytes=cap), layout) >= blocks
    assert room_blocks(plan_volume(cap, layout=layout), layout) >= blocks


def test_store_whose_table_is_too_short_is_told_from_a_cap_that_is_too_small() -> None:
    made = plan_volume(64 * MIB, area_bytes=32 * MIB)
    assert grown_cap(SMOLLM2, 16 * 64, made) is not None
    assert grown_cap(SMOLLM2, 16 * 64 + 1, made) is None
    assert "kv.h3 cannot grow so far" in cure_for_blocks(SMOLLM2, 5000, path=Path("kv.h3"), made=made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cap_without_room_for_a_segment_is_refused_with_one_that_has_it(layout: CacheLayout) -> None:
    enough = cap_for_blocks(layout, 16)
    check_new_store(Path("kv.h3"), layout, enough)
    for cap in (0, MIB, enough - 2 * MIB):
        with pytest.raises(ConfigError, match=rf"raise it to at least {enough // MIB}MiB"):
            check_new_store(Path("kv.h3"), layout, cap)


def test_area_without_room_for_a_segment_is_refused_with_a_format_that_has_it() -> None:
    made = plan_volume(10 * MIB)
    with pytest.raises(ConfigError, match=r"h3 format kv.h3 --capacity 24MiB --area 23MiB"):
        check_area(Path("kv.h3"), SMOLLM2, made)
    anew = plan_volume(24 * MIB, area_bytes=23 * MIB)
    check_area(Path("kv.h3"), SMOLLM2, anew)
    assert room_blocks(anew, SMOLLM2) == 16
