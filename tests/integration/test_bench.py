"""The benchmarks run and measure what they say, in small; speed itself is never asserted."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from h3kv.bench import kernel
from h3kv.bench.contestants import H3Contestant, PeerContestant, has_module
from h3kv.bench.results import Results
from h3kv.core.errors import ConfigError
from h3kv.core.types import DType, Tier
from h3kv.models import load_model
from h3kv.telemetry import names
from h3kv.testing.engines import one_thread
from h3kv.testing.tiny_models import write_tiny_model

PROMPT = [index * 7 % 60 for index in range(150)]


@pytest.mark.slow
def test_kernel_benchmark_emits_every_metric_of_its_table() -> None:
    results = Results()
    kernel.run(results, repetitions=1, progress=lambda _: None, cycle_bytes=256 << 20)
    names = {
        f"attend.{dtype}.{heads}.{figure}"
        for dtype in ("bf16", "fp32")
        for heads in ("32_8_128", "9_3_64")
        for figure in ("gb_per_s", "read_limit_gb_per_s", "bandwidth_fraction", "vs_sdpa")
    }
    names |= {
        f"attend.{encoding}.{heads}.{figure}"
        for encoding in ("int8", "k8v4", "int4")
        for heads in ("32_8_128", "9_3_64")
        for figure in ("gb_per_s", "read_limit_gb_per_s", "bandwidth_fraction")
    }
    assert set(results.metrics) == names
    assert all(math.isfinite(value) and value > 0 for value in results.metrics.values())


@pytest.mark.slow
def test_our_engine_and_the_peer_give_the_same_greedy_tokens(tmp_path: Path) -> None:
    assert has_module(sys.executable, "transformers")
    write_tiny_model(tmp_path, "llama")
    with one_thread():
        ours = H3Contestant(load_model(tmp_path, dtype=DType.FP32), context_tokens=200)
        theirs = PeerContestant(sys.executable, "transformers.py", tmp_path, dtype=DType.FP32, context_tokens=200)
        answers = []
        for contestant in (ours, theirs):
            for _ in range(2):
                seconds, first = contestant.start(PROMPT)
                step_seconds, tokens = contestant.steps(30)
                assert seconds > 0
                assert len(step_seconds) == len(tokens) == 30
                answers.append([first, *tokens])
            contestant.close()
    assert answers[1:] == answers[:1] * 3


def test_nothing_is_reused_between_two_starts(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    with one_thread():
        ours = H3Contestant(load_model(tmp_path, dtype=DType.FP32), context_tokens=200)
        ours.start(PROMPT)
        ours.start(PROMPT)
        assert ours.node.telemetry.value(names.PREFIX_HIT_TOKENS, tier=Tier.DEVICE) == 0
        ours.close()


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    assert not has_module(sys.executable, "no_such_engine")
    with pytest.raises(ConfigError, match="does not start"):
        has_module(str(tmp_path / "python"), "vllm")
    with pytest.raises(ConfigError, match="No module named 'vllm'"):
        PeerContestant(sys.executable, "vllm.py", tmp_path, dtype=DType.BF16, context_tokens=64)
