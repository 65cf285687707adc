"""Segments whose slabs hold codes and an index."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType, Encoding
from h3kv.telemetry import names
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.cold_segments import is_intact, open_store, restore, write_segments
from h3kv.tiers.cold.verify import verify_store
from h3kv.tiers.io import IoEngine


@pytest.mark.parametrize("encoding", [Encoding.INT8, Encoding.K8V4, Encoding.INT4])
def test_restart_keeps_segments_of_every_encoding_without_what_fills_their_slabs_up(
    tmp_path: Path, encoding: Encoding
) -> None:
    slab = SlabLayout(page=PageLayout(dtype=DType.BF16, head_dim=32, encoding=encoding), kv_heads=3)
    layout, telemetry = CacheLayout(slab=slab, layers=2), Recorder()
    with contextlib.closing(open_store(tmp_path, units=4, layout=layout, telemetry=telemetry)) as store:
        write_segments(store, [(1, 16), (2, 3), (3, 16)], layout=layout)
    with contextlib.closing(open_store(tmp_path, units=4, layout=layout, telemetry=telemetry)) as store:
        kept = restore(store)
        assert sorted(kept) == [1, 2, 3]
        assert all(is_intact(store, segment, layout=layout) for segment in kept.values())
        content_bytes = 2 * slab.content_bytes(16) * 2 + 2 * slab.content_bytes(4)
        assert telemetry.value(names.READ_BYTES, tier="nvme") == content_bytes
        assert content_bytes <= 36 * layout.block_bytes
        store.check_integrity()
    (report,) = verify_store(tmp_path, lambda files: IoEngine.open(files, depth=4))
    assert report.pieces * slab.check_bytes == content_bytes
    assert report.damage == ()
