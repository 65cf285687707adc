"""One completion through gateway and gpu_worker: real processes, a tiny random model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.service_rig import PROMPT, Rig, Stream, UnixConnection, metric_names, running, text_of, wait_for

from h3kv.core.types import DType
from h3kv.engine.events import TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.models.loader import load_model
from h3kv.node import Node
from h3kv.telemetry.metric import Service
from h3kv.telemetry.names import METRICS
from h3kv.testing.engines import one_thread
from h3kv.testing.tiny_models import write_tiny_model
from h3kv.tiers.device import DeviceStoreConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, max_position_embeddings=2048)
    return folder


@pytest.fixture(scope="module")
def rig(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("node"), model) as both:
        yield both


def embedded(model: Path, prompt: str, *, tokens: int) -> str:
    """What the node answers in one process."""
    with one_thread(), Node.open(load_model(model, dtype=DType.FP32), store=DeviceStoreConfig(32 << 20)) as node:
        request = Request(
            prompt=tuple(node.tokenizer.encode(prompt, add_special_tokens=True)),
            sampling=SamplingParameters(max_new_tokens=tokens),
        )
        answer = "".join(event.text for event in node.engine.generate(request) if isinstance(event, TokenGenerated))
        node.check_integrity()
        return answer


def test_streamed_text_is_that_of_the_embedded_node(rig: Rig, model: Path) -> None:
    stream = rig.stream(prompt=PROMPT, max_tokens=24, stream_options={"include_usage": True})
    events = list(stream.events())
    assert stream.ended
    assert text_of(events) == embedded(model, PROMPT, tokens=24)
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    (id,) = {event["id"] for event in events}
    assert id.startswith("cmpl-")
    assert stream.response.headers["x-request-id"] not in id


def test_whole_answer_is_the_streamed_one_and_says_where_its_prompt_was_found(rig: Rig) -> None:
    prompt = f"{PROMPT}Once more."
    first = rig.complete(prompt=prompt, max_tokens=8).fields
    again = rig.complete(prompt=prompt, max_tokens=8).fields
    assert again["choices"] == first["choices"]
    assert again["choices"][0]["text"] == text_of(list(rig.stream(prompt=prompt, max_tokens=8).events()))
    cached = again["usage"]["h3"]["cached_tokens"]
    assert cached["device"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert cached["host"] == cached["nvme"] == 0
    assert again["usage"]["h3"]["time_to_first_token_ms"] > 0


def test_chat_has_the_template_of_the_model(rig: Rig) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    answer = rig.post("/v1/chat/completions", chat).fields
    plain = rig.complete(prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", max_tokens=8).fields
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": plain["choices"][0]["text"],
        "refusal": None,
    }
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_equal_seeds_give_equal_answers_and_none_gives_another(rig: Rig) -> None:
    texts = [
        rig.complete(prompt=PROMPT, max_tokens=16, temperature=1.5, **seed).fields["choices"][0]["text"]
        for seed in ({"seed": 5}, {"seed": 5}, {}, {})
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_two_requests_at_a_time_answer_as_each_alone(rig: Rig) -> None:
    prompts = [f"{name} {PROMPT}" for name in ("Jack", "Jill")]
    alone = [rig.complete(prompt=prompt, max_tokens=48).fields["choices"][0]["text"] for prompt in prompts]
    streams = [rig.stream(prompt=prompt, max_tokens=48) for prompt in prompts]
    found: dict[int, list[dict[str, Any]]] = {}

    def read(place: int, stream: Stream) -> None:
        found[place] = list(stream.events())

    readers = [threading.Thread(target=read, args=each) for each in enumerate(streams)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [text_of(found[place]) for place in range(2)] == alone
    assert all(stream.ended for stream in streams)


def test_client_that_goes_ends_its_request(rig: Rig) -> None:
    before = rig.statistics().decode_tokens_total
    stream = rig.stream(prompt=PROMPT, max_tokens=1500)
    next(stream.events())
    assert rig.statistics().requests_running == 1
    stream.close()
    wait_for(rig.is_idle, what="the request to end")
    assert rig.statistics().decode_tokens_total - before < 1500
    assert rig.complete(prompt=PROMPT, max_tokens=4).status == 200


def test_client_that_goes_before_the_first_token_ends_its_request(rig: Rig) -> None:
    connection = rig.stream(prompt=PROMPT, max_tokens=1500, stream=True).connection
    connection.close()
    wait_for(rig.is_idle, what="the request to end")
    assert rig.complete(prompt=PROMPT, max_tokens=4).status == 200


def test_requests_leave_no_descriptors_and_no_threads(rig: Rig) -> None:
    def held() -> list[int]:
        folders = [Path(f"/proc/{each.process.pid}") for each in (rig.worker, rig.gateway)]
        return [len(list((folder / kind).iterdir())) for folder in folders for kind in ("fd", "task")]

    def is_back() -> bool:
        return all(now <= then for now, then in zip(held(), before, strict=True))

    def load() -> None:
        for _ in range(20):
            stream = rig.stream(prompt=PROMPT, max_tokens=1500)
            next(stream.events())
            stream.close()
            assert rig.complete(prompt=PROMPT, max_tokens=2).status == 200
            assert rig.complete(prompt=PROMPT, max_tokens=5000).status == 400
        wait_for(rig.is_idle, what="the node to be idle")

    load()
    before = held()
    load()
    wait_for(is_back, what=f"descriptors and threads to be back at {before}")


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        (b"", 400, None, "not valid JSON"),
        (b'{"model": "tiny", "prompt":', 400, None, "not valid JSON"),
        (b"[1, 2]", 400, None, "should be an object"),
        (b'{"model": "tiny"}', 400, "prompt", "missing"),
        (b'{"prompt": "x"}', 400, "model", "missing"),
        (b'{"model": "tiny", "prompt": "x", "best_of": 2}', 400, "best_of", "not supported"),
        (b'{"model": "tiny", "prompt": "x", "echo": true}', 400, "echo", "not supported"),
        (b'{"model": "tiny", "prompt": "x", "logprobs": 21}', 400, "logprobs", "20"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": "8"}', 400, "max_tokens", "integer"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": 0}', 400, "max_tokens", "greater"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "temperature", "finite"),
        (b'{"model": "tiny", "prompt": "x", "top_p": 0}', 400, "top_p", "greater than 0"),
        (b'{"model": "tiny", "prompt": "x", "seed": -1}', 400, "seed", "greater"),
        (b'{"model": "tiny", "prompt": "x", "stream": "yes"}', 400, "stream", "boolean"),
        (b'{"model": "tiny", "prompt": "x", "stop": [""]}', 400, "stop[0]", "character"),
        (b'{"model": "tiny", "prompt": [1, "b"]}', 400, "prompt[1]", "integer"),
        (b'{"model": "tiny", "prompt": [-1]}', 400, "prompt[0]", "greater"),
        (b'{"model": "tiny", "prompt": [4000]}', 400, "prompt[0]", "vocabulary|token number"),
        (b'{"model": "tiny", "prompt": ""}', 400, "prompt", "empty"),
        (b'{"model": "other", "prompt": "x"}', 404, None, "serves 'tiny'"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": 5000}', 400, None, "context holds 2048"),
        (b'{"model": "tiny", "prompt": "' + b"x" * (5 << 20) + b'"}', 413, None, "larger than 4.00 MiB"),
    ],
)
def test_bad_request_is_refused_by_name(rig: Rig, body: bytes, status: int, param: str | None, message: str) -> None:
    answer = rig.post("/v1/completions", body)
    error = answer.fields["error"]
    assert (answer.status, error["param"]) == (status, param), error
    assert any(word in error["message"] for word in message.split("|")), error
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert answer.headers["x-request-id"]


def test_body_without_an_announced_length_is_bounded_too(rig: Rig) -> None:
    piece = b"x" * (64 << 10)
    with contextlib.closing(UnixConnection(rig.http_socket)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        for _ in range((4 << 20) // len(piece) + 1):
            connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        response = connection.getresponse()
        assert response.status == 413, response.read()


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/", 404)]
)
def test_unknown_paths_and_methods_are_refused_in_the_same_shape(rig: Rig, method: str, path: str, status: int) -> None:
    answer = rig.get(path)
    assert answer.status == status
    assert "/v1/completions" in answer.fields["error"]["message"]


def test_request_id_of_the_client_is_kept_where_it_is_harmless(rig: Rig) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    kept = rig.post("/v1/completions", body, headers={"X-Request-Id": "order-66"})
    assert kept.headers["x-request-id"] == "order-66"
    assert "order-66" not in kept.fields["id"]
    wait_for(lambda: "answer_ended h3.request.id=order-66" in rig.worker.text(), what="the log of gpu_worker")
    assert "request_ended h3.request.id=order-66" in rig.gateway.text()
    replaced = rig.post("/v1/completions", body, headers={"X-Request-Id": "two words"})
    assert replaced.headers["x-request-id"] != "two words"


def test_model_is_listed(rig: Rig) -> None:
    listed = rig.get("/v1/models").fields
    assert [entry["id"] for entry in listed["data"]] == ["tiny"]
    assert rig.get("/health").fields == {"status": "serving", "model": "tiny"}


def test_every_metric_of_the_gateway_is_on_its_page_and_no_other(rig: Rig) -> None:
    rig.complete(prompt="x", max_tokens=1)
    page = rig.get("/metrics").body.decode()
    declared = {metric.name for metric in METRICS.values() if Service.GATEWAY in metric.services}
    assert metric_names(page) == declared
    assert 'h3_http_requests_total{route="/v1/completions",status="200"}' in page
