"""What caps come to: the tiny layout has 2 layers and 2 KV heads of 64, so 1 KiB a token in bf16 and 64 KiB a block."""

from pathlib import Path
from typing import Any

import pytest

from h3kv.config import Settings, load
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType
from h3kv.core.units import TokenCount
from h3kv.engine.tiers import TierConfig
from h3kv.policy.window import SEQUENCES_MAX, plan_device
from h3kv.sizing import (
    NEW_STORE_BYTES,
    Surroundings,
    cap_bytes,
    cold_place,
    device_store,
    is_tiered,
    tiers_behind,
)

GIB = 1 << 30
CPU = Surroundings("cpu", device_bytes=8 * GIB, host_bytes=8 * GIB)
CUDA = Surroundings("cuda:0", device_bytes=16 * GIB, host_bytes=8 * GIB)


def layout(dtype: DType = DType.BF16) -> CacheLayout:
    return CacheLayout(SlabLayout(PageLayout(dtype=dtype, head_dim=64), 2), 2)


def settings(**sections: dict[str, Any]) -> Settings:
    return load(flags=sections)


def behind(chosen: Settings, surroundings: Surroundings = CPU) -> TierConfig | None:
    device = device_store(chosen, layout(), surroundings)
    return tiers_behind(chosen, layout(), surroundings, device=device, context_tokens=8192)


@pytest.mark.parametrize("dtype", list(DType))
def test_caps_in_tokens_are_bf16_bytes_whatever_the_element_type(dtype: DType) -> None:
    assert cap_bytes(TokenCount(2048), layout(dtype)) == 2048 * 1024
    assert cap_bytes(5 * GIB, layout(dtype)) == 5 * GIB


def test_tiering_begins_where_a_tier_is_asked_for() -> None:
    assert not is_tiered(settings(), CPU)
    assert is_tiered(settings(), CUDA)
    assert is_tiered(settings(host={"kv_bytes": "1GiB"}), CPU)
    assert is_tiered(settings(nvme={"store": "kv"}), CPU)
    assert is_tiered(settings(tiering={"mode": "on"}), CPU)
    assert not is_tiered(settings(tiering={"mode": "off"}, nvme={"store": "kv"}), CUDA)


def test_without_tiering_the_device_takes_half_and_nothing_is_behind_it() -> None:
    assert device_store(settings(), layout(), CPU).capacity_bytes == 4 * GIB
    assert behind(settings()) is None
    assert behind(settings(tiering={"mode": "off"}, host={"kv_bytes": "1GiB"})) is None


def test_with_tiering_the_device_gets_what_windows_and_the_longest_chunk_need() -> None:
    chosen = settings(tiering={"mode": "on"})
    blocks, rest = divmod(device_store(chosen, layout(), CPU).capacity_bytes, layout().block_bytes)
    assert rest == 0
    plan = plan_device(blocks, 16, 16, block_bytes=4096)
    assert (plan.sequences, plan.chunk_blocks) == (SEQUENCES_MAX, 128)


def test_small_machines_share_half_of_what_they_have() -> None:
    small = Surroundings("cpu", device_bytes=8 << 20, host_bytes=8 << 20)
    chosen = settings(tiering={"mode": "on"})
    assert device_store(chosen, layout(), small).capacity_bytes == 4 << 20
    found = behind(chosen, small)
    assert found is not None
    assert found.host.capacity_bytes == 2 << 20


def test_main_memory_is_not_given_away_twice() -> None:
    chosen = settings(tiering={"mode": "on"}, device={"kv_bytes": "6GiB"})
    on_cpu, on_cuda = behind(chosen, CPU), behind(chosen, CUDA)
    assert on_cpu is not None
    assert on_cuda is not None
    assert on_cpu.host.capacity_bytes == 1 * GIB
    assert on_cuda.host.capacity_bytes == 4 * GIB


def test_sizes_windows_and_staging_reach_the_engine() -> None:
    found = behind(
        settings(
            host={"kv_bytes": "4096tokens", "staging_bytes": "1MiB"},
            device={"window_tokens": 128},
            engine={"chunk_tokens": 256},
        )
    )
    assert found is not None
    assert found.host.capacity_bytes == 4096 * 1024
    tiering = found.tiering
    assert (tiering.window_tokens, tiering.staging_bytes, tiering.chunk_tokens) == (128, 1 << 20, 256)
    assert found.cold is None


def test_only_a_new_store_gets_a_cap_by_default(tmp_path: Path) -> None:
    chosen = settings(nvme={"store": str(tmp_path), "write_bytes_per_day": "1GB", "backend": "threads"})
    place = cold_place(chosen, layout())
    assert place is not None
    assert place.config.capacity_bytes == NEW_STORE_BYTES
    assert (place.backend, place.config.write_bytes_per_day) == ("threads", 10**9)
    (tmp_path / "store.h3").touch()
    place = cold_place(chosen, layout())
    assert place is not None
    assert place.config.capacity_bytes is None
