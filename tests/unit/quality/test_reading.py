"""Bytes per cold token, by hand."""

from __future__ import annotations

import pytest

from h3kv.attention.retrieval import RetrievalMeter
from h3kv.core.layout import CacheLayout, PageLayout, SlabLayout
from h3kv.core.types import DType, Encoding
from h3kv.quality.reading import Reading, exact_token_bytes, plain_token_bytes, read_by_chunk, snapshot

LAYERS = 2


def layout(encoding: Encoding) -> CacheLayout:
    return CacheLayout(SlabLayout(PageLayout(DType.BF16, 64, encoding), kv_heads=3), LAYERS)


@pytest.mark.parametrize(
    ("encoding", "share"),
    # A token's key and value: 64 numbers each, 2 bytes plain; codes, and 8 bytes of scales.
    [
        (Encoding.RAW, 1.0),
        (Encoding.INT8, (128 + 8) / 256),
        (Encoding.K8V4, (64 + 32 + 8) / 256),
        (Encoding.INT4, (32 + 32 + 8) / 256),
    ],
)
def test_exact_attention_reads_codes_and_scales(encoding: Encoding, share: float) -> None:
    assert exact_token_bytes(layout(encoding)) == pytest.approx(share * plain_token_bytes(layout(encoding)))
    found = read_by_chunk(layout(encoding), RetrievalMeter(), RetrievalMeter(), rows=5, tokens=1000, window_tokens=256)
    assert found.plain_bytes == 5 * (1000 - 256 - 64) * 3 * 2 * 64 * 2 * LAYERS
    assert found.share == pytest.approx(share)
    assert found.page_share == pytest.approx(share)


def test_retrieval_reads_what_its_meter_says_and_dense_layers_everything() -> None:
    meter = RetrievalMeter()
    before = snapshot(meter)
    rows, cold = 4, 2000 - 256 - 64
    # One of the two layers retrieves. Of the cold tokens 128 are in no index; the sinks are not cold.
    meter.rows += rows
    meter.exact_tokens += rows * (128 + 64)
    meter.plane_bytes += 1000
    meter.summary_bytes += 200
    meter.cluster_bytes += 30
    meter.page_bytes += 500
    found = read_by_chunk(layout(Encoding.K8V4), before, meter, rows=rows, tokens=2000, window_tokens=256)
    coded = 3 * 104
    exact_bytes = coded * rows * (cold + 128)
    assert found.read_bytes == pytest.approx(exact_bytes + 1230)
    assert found.page_bytes == pytest.approx(exact_bytes + 1700)
    assert found.recall is None


def test_readings_add_up() -> None:
    total = Reading(100, 20, 30, recall_sum=1.5, recall_count=2) + Reading(100, 40, 50, recall_sum=0.5, recall_count=2)
    assert (total.share, total.page_share, total.recall) == (0.3, 0.4, 0.5)
    assert Reading().share is None


def test_what_lies_in_the_window_is_not_cold() -> None:
    found = read_by_chunk(
        layout(Encoding.RAW), RetrievalMeter(), RetrievalMeter(), rows=1, tokens=300, window_tokens=256
    )
    assert found.share is None


def test_bytes_are_shares_of_bf16_whatever_runs() -> None:
    wide = CacheLayout(SlabLayout(PageLayout(DType.FP32, 64, Encoding.K8V4), kv_heads=3), LAYERS)
    narrow = layout(Encoding.K8V4)
    assert exact_token_bytes(wide) == exact_token_bytes(narrow)
    assert plain_token_bytes(wide) == plain_token_bytes(narrow)
