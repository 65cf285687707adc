import re

import pytest

from h3kv.telemetry import names
from h3kv.telemetry.metric import Kind
from h3kv.telemetry.names import METRICS
from h3kv.telemetry.recorder import Recorder


def test_counters_add_up_per_label() -> None:
    recorder = Recorder()
    recorder.count(names.PREFIX_HIT_TOKENS, 64, tier="device")
    recorder.count(names.PREFIX_HIT_TOKENS, 128, tier="device")
    recorder.count(names.PREFIX_HIT_TOKENS, 1, tier="host")
    assert recorder.value(names.PREFIX_HIT_TOKENS, tier="device") == 192
    assert recorder.value(names.PREFIX_HIT_TOKENS, tier="host") == 1
    assert recorder.value(names.DECODE_TOKENS) == 0


def test_gauges_keep_the_last_value() -> None:
    recorder = Recorder()
    recorder.gauge(names.TIER_USED, 10, tier="device")
    recorder.gauge(names.TIER_USED, 4, tier="device")
    assert recorder.value(names.TIER_USED, tier="device") == 4


def test_histograms_keep_count_mean_and_largest() -> None:
    recorder = Recorder()
    assert recorder.distribution(names.TTFT) is None
    for seconds in (0.5, 1.5, 1.0):
        recorder.observe(names.TTFT, seconds)
    seen = recorder.distribution(names.TTFT)
    assert seen is not None
    assert (seen.count, seen.mean, seen.largest) == (3, 1.0, 1.5)


def test_undeclared_names_labels_and_kinds_are_refused() -> None:
    recorder = Recorder()
    with pytest.raises(AssertionError, match="not declared"):
        recorder.count("h3_surprise_total")
    with pytest.raises(AssertionError, match="labels"):
        recorder.count(names.PREFIX_HIT_TOKENS)
    with pytest.raises(AssertionError, match="labels"):
        recorder.count(names.DECODE_TOKENS, tier="device")
    with pytest.raises(AssertionError, match="is a gauge"):
        recorder.count(names.TIER_USED, tier="device")
    with pytest.raises(AssertionError, match="cannot go down"):
        recorder.count(names.DECODE_TOKENS, -1)


def test_names_follow_the_conventions() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"h3_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER), name
        assert metric.sentence.endswith("."), name
        if metric.unit in {"bytes", "seconds"}:
            assert name.removesuffix("_total").endswith(f"_{metric.unit}"), name
