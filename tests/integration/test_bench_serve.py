"""The load driver against a node of processes, in small; speed itself is never asserted."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from h3kv.bench import serve_identical, serve_peers, serve_prefill, serve_replay, serve_soak, serve_tiering
from h3kv.bench.results import Results
from h3kv.bench.serve_client import Target
from h3kv.bench.serve_prompts import Prompts
from h3kv.bench.serve_servers import node_server, untiered_server
from h3kv.bench.serve_trace import Scale
from h3kv.bench.whole_node import WholeNode
from h3kv.testing.tiny_models import write_tiny_model

PROMPTS = Prompts(320)
CAPS = ("--dtype", "fp32", "--device-kv", "16MiB", "--host-kv", "24MiB", "--window", "64", "--threads", "1")


def quiet(_: str) -> None:
    """Hears progress."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_position_embeddings=4096)
    return str(folder)


@pytest.fixture(scope="module")
def served(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WholeNode, Target]]:
    store = tmp_path_factory.mktemp("store")
    with node_server(model, [*CAPS, "--store", str(store), "--store-capacity", "64MiB"]) as opened:
        yield opened


@pytest.fixture
def target(served: tuple[WholeNode, Target]) -> Target:
    return served[1]


@pytest.fixture
def results() -> Results:
    return Results()


def finite(results: Results) -> set[str]:
    assert all(math.isfinite(value) for value in results.metrics.values())
    return set(results.metrics)


@pytest.mark.slow
def test_chats_at_once_have_rates_and_latencies(target: Target, results: Results) -> None:
    sizes = serve_peers.ChatSizes(3, 64, 6, 2)
    serve_peers.chats(results, [target], PROMPTS, sizes=sizes, progress=quiet)
    assert {"serve.chat8.h3_tokens_per_s", "serve.chat8.h3.ttft_ms_p50"} <= finite(results)
    assert all(value > 0 for value in results.metrics.values())
    assert "serve.chat8.vs_vllm" not in results.metrics, "nobody to compare with"


@pytest.mark.slow
def test_later_questions_find_the_document(target: Target, results: Results) -> None:
    sizes = serve_peers.DocumentSizes(3, 512, 16, 2, 1)
    serve_peers.document(results, [target], PROMPTS, sizes=sizes, progress=quiet)
    assert {"serve.docqa.ttft_fraction", "serve.docqa.h3_ttft_later_s"} <= finite(results)
    assert results.metrics["serve.docqa.h3.hit_rate"] > 0.5


@pytest.mark.slow
def test_equal_answers_are_counted(target: Target, results: Results) -> None:
    sizes = serve_identical.Sizes(6, (1, 200), (2, 8))
    serve_identical.measure(results, lambda: contextlib.nullcontext(target), PROMPTS, sizes=sizes, progress=quiet)
    assert results.metrics == {"serve.batch_identical": 6, "serve.batch_identical_of": 6}


@pytest.mark.slow
def test_a_prefill_is_timed_beside_running_chats_and_alone(target: Target, results: Results) -> None:
    sizes = serve_prefill.Sizes(2, 32, 3000, 512, 5, ())
    serve_prefill.measure(results, target, PROMPTS, sizes=sizes, progress=quiet)
    assert {"serve.itl_under_prefill", "serve.prefill_kept", "serve.prefill_alone_tokens_per_s"} <= finite(results)
    assert all(value > 0 for value in results.metrics.values())


@pytest.mark.slow
def test_short_requests_leave_no_error_and_memory_is_looked_at(
    served: tuple[WholeNode, Target], results: Results
) -> None:
    node, target = served
    serve_soak.measure(results, target, PROMPTS, sizes=serve_soak.Sizes(120, 4, 8, 2), node=node, progress=quiet)
    assert {"serve.soak.rss_growth", "serve.soak.requests_per_s", "serve.soak.fd_growth"} <= finite(results)
    assert results.metrics["serve.soak.errors"] == 0


@pytest.mark.slow
def test_chats_that_go_on_find_what_was_said_before(target: Target, results: Results) -> None:
    serve_replay.multi_turn(results, target, sizes=serve_replay.TurnSizes(2, 3, 40, 10, 4), progress=quiet)
    assert results.metrics["serve.turns.h3.hit_rate"] > 0
    assert {"serve.turns.h3.ttft_ms_p99", "serve.turns.h3.hit_rate_device"} <= finite(results)


@pytest.mark.slow
def test_a_trace_is_played(target: Target, results: Results, tmp_path: Path) -> None:
    rows = [{"timestamp": n, "input_length": 900, "output_length": 80, "hash_ids": [1, n % 2]} for n in range(6)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = serve_replay.TraceSizes(6, Scale(8, 1.0, 200, 8), 2)
    serve_replay.trace(results, target, path, vocabulary=320, sizes=sizes, progress=quiet)
    assert results.metrics["serve.trace.h3.errors"] == 0
    assert results.metrics["serve.trace.h3.hit_rate"] > 0


@pytest.mark.slow
def test_prompts_that_share_nothing_are_timed_with_tiers_and_without(
    model: str, target: Target, results: Results
) -> None:
    settings = {"MODEL__DTYPE": "fp32", "DEVICE__KV_BYTES": "2048tokens", "RUNTIME__THREADS": "1"}
    sizes = serve_tiering.Sizes(2, 300, 2, 1, (), 2048)
    tiered = Target("on", target.address, target.model, target.key, refused=target.refused)
    with untiered_server(model, settings, name="off") as untiered:
        serve_tiering.measure(results, [tiered, untiered], PROMPTS, sizes=sizes, progress=quiet)
    assert finite(results) == {f"serve.noreuse.{name}" for name in ("on_tokens_per_s", "off_tokens_per_s", "fraction")}
