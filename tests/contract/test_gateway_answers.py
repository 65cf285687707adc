"""Answers of the gateway, against a gpu_worker that says what a test wants: choices, calls, errors, clients that go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.contract.scripted_worker import (
    CACHED_TOKENS,
    CONTEXT_TOKENS,
    MODEL,
    PROMPT_TOKENS,
    Front,
    finished,
    fronted,
    saying,
    token,
)
from tests.integration.service_rig import WAIT_S, UnixConnection, wait_for

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import (
    ContextLengthError,
    DocumentNotFoundError,
    H3Error,
    PeerBusyError,
    QuotaError,
    TierFullError,
)
from h3kv.core.types import Tier

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with fronted(tmp_path_factory.mktemp("front")) as both:
        yield both


def post(front: Front, path: str, **fields: object) -> tuple[int, dict[str, Any]]:
    status, _, body = front.ask("POST", path, json.dumps({"model": MODEL, **fields}).encode())
    return status, json.loads(body)


def events(front: Front, path: str, **fields: object) -> list[dict[str, Any]]:
    """Events of a stream, which must end well."""
    status, _, body = front.ask("POST", path, json.dumps({"model": MODEL, "stream": True, **fields}).encode())
    assert status == 200, body
    lines = [line for line in body.decode().split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(found: list[dict[str, Any]], index: int) -> str:
    choices = [choice for event in found for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def test_usage_says_what_happened(front: Front) -> None:
    front.worker.answer(saying("Hel", "lo"))
    _, answer = post(front, CHAT, messages=USER)
    usage = answer["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}
    assert usage["h3"]["cached_tokens"] == {"device": 0, "host": CACHED_TOKENS, "nvme": 0}
    assert (usage["h3"]["attended_fraction"], usage["h3"]["recomputed_tokens"]) == (0.25, 3)
    assert usage["h3"]["time_to_first_token_ms"] == 2.0


def test_further_choices_begin_when_the_first_has_a_token(front: Front) -> None:
    opened = threading.Event()

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.sampling.seed == 40:
            yield pb.GenerateResponse(progress=pb.PrefillProgress(done_tokens=64, prompt_tokens=PROMPT_TOKENS))
            assert opened.wait(WAIT_S)
        yield token(f"seed {request.sampling.seed}")
        yield finished(1)

    front.worker.answer(generate)
    found: dict[str, Any] = {}

    def ask() -> None:
        found["answer"] = post(front, CHAT, messages=USER, n=3, seed=40)[1]

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: bool(front.worker.asked), what="the first choice")
    assert len(front.worker.asked) == 1
    opened.set()
    asking.join()
    choices = found["answer"]["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["seed 40", "seed 41", "seed 42"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    usage = found["answer"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT_TOKENS, 3)


def test_choices_are_admitted_together_with_each_prompt_once(front: Front) -> None:
    front.worker.answer(saying("x"))
    front.worker.admitted.clear()
    assert post(front, COMPLETIONS, prompt=["a", "b"], n=3, max_tokens=5)[0] == 200
    (asked,) = front.worker.admitted
    assert ([prompt.text for prompt in asked.prompts], asked.answers, asked.max_new_tokens) == (["a", "b"], 3, 5)
    assert sorted(request.text for request in front.worker.asked) == ["a"] * 3 + ["b"] * 3
    assert post(front, COMPLETIONS, prompt="a")[0] == 200
    assert len(front.worker.admitted) == 1


def test_choices_that_are_not_admitted_cost_nothing(front: Front) -> None:
    front.worker.answer(saying("x"))
    front.worker.failure = QuotaError("used up: wait", retry_after_s=17)
    status, answer = post(front, CHAT, messages=USER, n=4)
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert front.worker.asked == []


def test_choices_of_several_prompts_are_streamed_by_their_index(front: Front) -> None:
    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for place in range(3):
            yield token(f"{request.text}{request.sampling.seed}.{place} ")
        yield finished(3)

    front.worker.answer(generate)
    found = events(front, COMPLETIONS, prompt=["a", "b"], n=2, seed=5, stream_options={"include_usage": True})
    texts = [text_of(found, index) for index in range(4)]
    assert texts == [f"{name}.0 {name}.1 {name}.2 " for name in ("a5", "a6", "b5", "b6")]
    assert found[-1]["usage"]["completion_tokens"] == 12
    assert found[-1]["usage"]["prompt_tokens"] == 2 * PROMPT_TOKENS
    whole = post(front, COMPLETIONS, prompt=["a", "b"], n=2, seed=5)[1]
    assert [choice["text"] for choice in whole["choices"]] == texts


def test_a_choice_that_fails_ends_the_others(front: Front) -> None:
    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield token("x")
        if request.sampling.seed == 2:
            raise ContextLengthError("too long", needed_tokens=9, limit_tokens=8)
        while context.is_active():
            yield token("x")

    front.worker.answer(generate)
    status, answer = post(front, CHAT, messages=USER, n=2, seed=1)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    for _ in range(2):
        assert front.worker.ended.acquire(timeout=WAIT_S)


def test_all_choices_of_a_request_have_one_deadline(tmp_path: Path) -> None:
    left_s: dict[int, float] = {}

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.sampling.seed == 40:
            wait_for(lambda: context.time_remaining() < 1.5, what="time to pass")
            yield token("x")
            yield finished(1)
            return
        left_s[request.sampling.seed] = context.time_remaining()
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait()

    with fronted(tmp_path, {"REQUEST_SECONDS": 2}) as front:
        front.worker.answer(generate)
        status, answer = post(front, CHAT, messages=USER, n=3, seed=40)
        assert (status, answer["error"]["code"]) == (504, "peer_timeout")
        assert sorted(left_s) == [41, 42]
        assert max(left_s.values()) < 1.5


def test_client_that_goes_ends_all_choices(front: Front) -> None:
    while front.worker.ended.acquire(blocking=False):
        pass

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        while context.is_active():
            yield token("x")

    front.worker.answer(generate)
    connection = UnixConnection(front.socket)
    connection.request("POST", CHAT, json.dumps({"model": MODEL, "messages": USER, "n": 4, "stream": True}), JSON)
    wait_for(lambda: len(front.worker.asked) == 4, what="all choices")
    connection.close()
    for _ in range(4):
        assert front.worker.ended.acquire(timeout=WAIT_S)


def test_a_call_is_an_answer_of_its_own_kind(front: Front) -> None:
    front.worker.answer(saying("<tool_", 'call>{"name": "f", "argu', 'ments": {"a": 1}}</tool_call>'))
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = post(front, CHAT, messages=USER, tools=tools)[1]["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a":1}'}
    found = events(front, CHAT, messages=USER, tools=tools)
    assert text_of(found, 0) == ""
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    without = post(front, CHAT, messages=USER, tools=tools, tool_choice="none")[1]["choices"][0]
    assert without["message"]["content"].startswith("<tool_call>")


def test_logprobs_are_written_as_each_kind_has_them(front: Front) -> None:
    front.worker.answer(saying("Hel", "lo"))
    chat = post(front, CHAT, messages=USER, logprobs=True, top_logprobs=2)[1]["choices"][0]["logprobs"]
    assert [entry["token"] for entry in chat["content"]] == ["Hel", "lo"]
    assert chat["content"][0]["top_logprobs"][1] == {"token": "\\xe2", "logprob": -9999.0, "bytes": [0xE2]}
    plain = post(front, COMPLETIONS, prompt="x", logprobs=1)[1]["choices"][0]["logprobs"]
    assert plain == {
        "tokens": ["Hel", "lo"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"Hel": -0.5}, {"lo": -0.5}],
        "text_offset": [0, 3],
    }
    assert post(front, COMPLETIONS, prompt="x")[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("failure", "status", "code", "retry_after"),
    [
        (QuotaError("used up: wait", retry_after_s=17), 429, "rate_limit_exceeded", "17"),
        (PeerBusyError("full", peer="x"), 429, "peer_busy", "1"),
        (DocumentNotFoundError("no document", document="d"), 404, "document_not_found", None),
        (TierFullError("9 B of KV", tier=Tier.HOST, needed_bytes=9, free_bytes=8), 400, "tier_full", None),
        (ContextLengthError("long", needed_tokens=9, limit_tokens=8), 400, "context_length_exceeded", None),
    ],
)
def test_errors_of_the_worker_reach_the_client_in_its_words(
    front: Front, failure: H3Error, status: int, code: str, retry_after: str | None
) -> None:
    front.worker.answer(saying("x"))
    front.worker.failure = failure
    found, headers, body = front.ask("POST", CHAT, json.dumps({"model": MODEL, "messages": USER}).encode())
    assert (found, json.loads(body)["error"]["code"]) == (status, code)
    assert headers.get("retry-after") == retry_after


def test_an_error_in_a_stream_is_its_last_event(front: Front) -> None:
    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield token("x")
        raise RuntimeError("not for clients")

    front.worker.answer(generate)
    _, _, body = front.ask("POST", CHAT, json.dumps({"model": MODEL, "messages": USER, "stream": True}).encode())
    last = json.loads(body.decode().strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "internal"
    assert b"not for clients" not in body


def test_tokens_are_counted_as_vllm_does(front: Front) -> None:
    front.worker.answer(saying("x"))
    status, _, body = front.ask(
        "POST", "/tokenize", json.dumps({"prompt": "abc", "add_special_tokens": False}).encode()
    )
    fields = json.loads(body)
    assert (status, fields["count"], fields["tokens"]) == (200, 3, list(b"abc"))
    assert fields["max_model_len"] == CONTEXT_TOKENS
    assert front.worker.counted[-1].is_bare
    assert post(front, "/tokenize", messages=USER, document_ids=["doc_1"])[1]["count"] == 1
    assert list(front.worker.counted[-1].chat.document_ids) == ["doc_1"]
    for fields in ({}, {"prompt": "x", "messages": USER}, {"messages": USER, "add_special_tokens": True}):
        assert post(front, "/tokenize", **fields)[0] == 400
    assert front.ask("POST", "/tokenize", b'{"model": "other", "prompt": "x"}')[0] == 404


def test_one_model_is_found_by_its_name(front: Front) -> None:
    status, _, body = front.ask("GET", f"/v1/models/{MODEL}")
    assert (status, json.loads(body)["id"], json.loads(body)["max_model_len"]) == (200, MODEL, CONTEXT_TOKENS)
    status, _, body = front.ask("GET", "/v1/models/other")
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


def test_routes_with_ids_are_counted_under_one_name(front: Front) -> None:
    for path in ("/v1/models/a", "/v1/models/b", "/v1/documents/c"):
        front.ask("GET", path)
    page = front.ask("GET", "/metrics")[2].decode()
    assert 'h3_http_requests_total{route="/v1/models/{id}",status="404"}' in page
    assert 'route="/v1/documents/{id}"' in page
    assert 'route="/v1/models/a"' not in page


def test_an_answer_has_an_id_of_its_own_whatever_its_request_is_called(front: Front) -> None:
    front.worker.answer(saying("x"))
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    answers = [front.ask("POST", COMPLETIONS, body, {"X-Request-Id": "mine"}) for _ in range(2)]
    assert [headers["x-request-id"] for _, headers, _ in answers] == ["mine", "mine"]
    ids = [json.loads(answer)["id"] for _, _, answer in answers]
    assert ids[0] != ids[1]
    assert "mine" not in ids[0]


def test_more_logprobs_than_are_held_are_refused_unless_they_are_streamed(front: Front) -> None:
    front.worker.answer(saying("x"))
    fields: dict[str, Any] = {"prompt": ["x"] * 64, "n": 16, "max_tokens": 900, "logprobs": 20}
    status, answer = post(front, COMPLETIONS, **fields)
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    assert events(front, COMPLETIONS, **{**fields, "prompt": ["x"], "n": 1})


def test_streams_are_held_back_by_no_proxy(front: Front) -> None:
    front.worker.answer(saying("x"))
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
    assert front.ask("POST", COMPLETIONS, body)[1]["x-accel-buffering"] == "no"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_what_no_route_reads_is_refused(front: Front, path: str) -> None:
    status, _, body = front.ask("POST", f"{path}?stream=true", b"{}")
    assert (status, json.loads(body)["error"]["param"]) == (400, "stream")
    status, headers, _ = front.ask("GET", path)
    assert (status, headers["allow"]) == (405, "POST")
    assert front.ask("POST", f"{path}/", b"{}")[0] == 404
    assert front.ask("POST", path, b"{}", {"Content-Type": "text/plain"})[0] == 415
