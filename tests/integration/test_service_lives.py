"""How gateway and gpu_worker end, and what happens to answers meanwhile; the trace of one answer."""

from __future__ import annotations

import concurrent.futures
import signal
from pathlib import Path

import pytest
from tests.integration.service_rig import PROMPT, Rig, running, text_of, wait_for

from h3kv.core.units import NS_PER_S
from h3kv.telemetry import spans
from h3kv.telemetry.spans import SPANS
from h3kv.testing.otlp_receiver import OtlpReceiver, edges, parent_of
from h3kv.testing.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, max_position_embeddings=2048)
    return folder


def test_worker_that_is_told_to_end_finishes_what_it_began(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, model) as rig:
        stream = rig.stream(prompt=PROMPT, max_tokens=600)
        events = stream.events()
        first = next(events)
        rig.worker.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in rig.worker.text(), what="the worker to drain")
        refused = rig.complete(prompt=PROMPT, max_tokens=4)
        assert refused.status == 503
        assert refused.fields["error"]["code"] == "peer_unavailable"
        assert refused.headers["retry-after"] == "1"
        rest = list(events)
        assert stream.ended
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert rig.worker.end() == 0, rig.worker.text()
        assert "stopped" in rig.worker.text()
        rig.start_worker()
        rig.wait_until_serving()
        again = rig.complete(prompt=PROMPT, max_tokens=600).fields["choices"][0]["text"]
        assert text_of([first, *rest]) == again


def test_answers_that_last_longer_than_the_drain_end_with_an_error_to_retry(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, model, worker={"DRAIN_SECONDS": 0.05}) as rig:
        stream = rig.stream(prompt=PROMPT, max_tokens=1600)
        events = stream.events()
        next(events)
        assert rig.worker.end() == 0, rig.worker.text()
        last = list(events)[-1]
        assert last["error"]["code"] == "peer_unavailable"
        assert not stream.ended


def test_worker_that_is_told_to_end_while_grammars_are_compiled_ends_well(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, model) as rig, concurrent.futures.ThreadPoolExecutor(3) as clients:
        for number in range(3):
            # Each takes a second or two of a process of its own, and waits for those before it.
            schema = {"allOf": [{"type": "string", "pattern": f"[a-z]{{{number},{each}}}"} for each in range(400, 420)]}
            wanted = {"type": "json_schema", "json_schema": {"name": "slow", "schema": schema}}
            asked = {"model": rig.model.name, "messages": [{"role": "user", "content": "x"}], "response_format": wanted}
            clients.submit(rig.post, "/v1/chat/completions", asked)
        wait_for(lambda: probes(rig) > 0, what="a grammar to be compiled")
        assert rig.worker.end() == 0, rig.worker.text()
        assert "Traceback" not in rig.worker.text()


def probes(rig: Rig) -> int:
    """Grammars that are being compiled."""
    tasks = Path(f"/proc/{rig.worker.process.pid}/task").glob("*/children")
    return sum(len(task.read_text().split()) for task in tasks)


def test_gateway_that_is_told_to_end_finishes_what_it_began(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, model) as rig:
        stream = rig.stream(prompt=PROMPT, max_tokens=600)
        events = stream.events()
        next(events)
        rig.gateway.process.send_signal(signal.SIGTERM)
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        assert stream.ended
        assert rig.gateway.end() == 0, rig.gateway.text()
        assert not rig.http_socket.exists()


def test_killed_worker_ends_the_stream_with_an_error_and_the_next_one_serves(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, model) as rig:
        before = rig.complete(prompt=PROMPT, max_tokens=16).fields["choices"]
        for _ in range(2):
            stream = rig.stream(prompt=PROMPT, max_tokens=1600)
            events = stream.events()
            next(events)
            assert rig.worker.end(with_signal=signal.SIGKILL) == -signal.SIGKILL
            error = list(events)[-1]["error"]
            assert (error["code"], error["type"]) == ("peer_unavailable", "server_error")
            assert not stream.ended
            wait_for(lambda: rig.get("/health").status == 503, what="the health to be looked at again")
            health = rig.get("/health")
            assert (health.status, health.headers["retry-after"]) == (503, "1")
            rig.start_worker()
            rig.wait_until_serving()
            assert rig.complete(prompt=PROMPT, max_tokens=16).fields["choices"] == before


def test_killed_gateway_leaves_the_worker_idle(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, model) as rig:
        stream = rig.stream(prompt=PROMPT, max_tokens=1600)
        next(stream.events())
        assert rig.gateway.end(with_signal=signal.SIGKILL) == -signal.SIGKILL
        stream.close()
        wait_for(rig.is_idle, what="the request to end")
        rig.start_gateway()
        rig.wait_until_serving()
        assert rig.complete(prompt=PROMPT, max_tokens=4).status == 200


def test_one_answer_is_one_trace(model: Path, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        traced = {"TRACING__ENDPOINT": receiver.endpoint}
        worker = {**traced, "ENGINE__CHUNK_TOKENS": 128, "TRACING__STEPS_PER_SPAN": 4}
        with running(tmp_path, model, worker=worker, gateway=traced) as rig:
            answer = trace_of_one(rig)
        names = (spans.COMPLETE, spans.GENERATE, spans.PREFILL, spans.DECODE_STEP)
        found = receiver.wait_for(*names, timeout_ns=60 * NS_PER_S)
    assert edges(found) == {
        (spans.COMPLETE, spans.GENERATE),
        (spans.GENERATE, spans.PREFILL),
        (spans.GENERATE, spans.DECODE_STEP),
    }
    assert len({span.trace_id for span in found}) == 1
    for span in found:
        parent = parent_of(span, found)
        assert SPANS[span.name].begins_trace if parent is None else parent.name in SPANS[span.name].parents
        assert set(SPANS[span.name].attributes) <= set(span.attributes), span
        assert span.service == SPANS[span.name].service
        assert not span.has_failed
    prompt_tokens = answer["usage"]["prompt_tokens"]
    by_name = {span.name: span for span in found}
    for name in (spans.COMPLETE, spans.GENERATE):
        assert by_name[name].attributes[spans.REQUEST_ID] == "traced-1"
        assert by_name[name].attributes[spans.PROMPT_TOKENS] == prompt_tokens
        assert by_name[name].attributes[spans.GENERATED_TOKENS] == 12
    chunks = [span.attributes[spans.TOKENS] for span in found if span.name == spans.PREFILL]
    assert sum(int(tokens) for tokens in chunks) == prompt_tokens
    assert max(chunks) == 128
    # The first token comes with the last chunk: eleven steps follow, of which every fourth has a span.
    steps = sorted(int(span.attributes[spans.STEP]) for span in found if span.name == spans.DECODE_STEP)
    assert steps == [0, 4, 8]


def trace_of_one(rig: Rig) -> dict[str, object]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    fields = rig.post("/v1/completions", body, headers={"X-Request-Id": "traced-1"}).fields
    wait_for(rig.is_idle, what="the request to end")
    return fields
