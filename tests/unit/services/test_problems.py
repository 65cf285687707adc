import json

import pytest
from pydantic import ValidationError

from h3kv.core.error_codes import Code
from h3kv.core.errors import (
    ApiKeyError,
    ConfigError,
    ContextLengthError,
    DocumentNotFoundError,
    H3Error,
    HostMemoryError,
    InternalError,
    MessageSizeError,
    ModelNotFoundError,
    PeerBusyError,
    PeerCancelledError,
    PeerError,
    PeerTimeoutError,
    PeerUnavailableError,
    QuotaError,
    RequestError,
    ShapeError,
    SlabUnavailableError,
    TierFullError,
)
from h3kv.core.types import SegmentId, SlabKey, Tier
from h3kv.rpc.status import CLASSES
from services.gateway.chat import ChatBody
from services.gateway.openai import CompletionBody
from services.gateway.problems import body_error, error_fields, error_response, status_of

ERRORS: list[tuple[H3Error, int, str, str | None]] = [
    (ApiKeyError("x"), 401, "invalid_request_error", None),
    (DocumentNotFoundError("x", document="x"), 404, "not_found_error", None),
    (QuotaError("x", retry_after_s=17), 429, "rate_limit_error", "17"),
    (QuotaError("x", retry_after_s=0), 429, "rate_limit_error", "1"),
    (QuotaError("x", retry_after_s=None), 429, "rate_limit_error", None),
    (RequestError("x"), 400, "invalid_request_error", None),
    (ContextLengthError("x", needed_tokens=9, limit_tokens=8), 400, "invalid_request_error", None),
    (MessageSizeError("x"), 413, "invalid_request_error", None),
    (ModelNotFoundError("x", path="x"), 404, "not_found_error", None),
    (TierFullError("x", tier=Tier.HOST, needed_bytes=9, free_bytes=8), 400, "invalid_request_error", None),
    (PeerBusyError("x", peer="x"), 429, "rate_limit_error", "1"),
    (HostMemoryError("x", needed_bytes=None, available_bytes=None), 503, "server_error", None),
    (PeerUnavailableError("x", peer="x"), 503, "server_error", "1"),
    (SlabUnavailableError("x", key=SlabKey(SegmentId(1), 0)), 503, "server_error", "1"),
    (PeerCancelledError("x", peer="x"), 503, "server_error", None),
    (PeerTimeoutError("x", peer="x"), 504, "server_error", None),
    (InternalError("x"), 500, "server_error", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "retry_after"), ERRORS, ids=lambda value: type(value).__name__)
def test_error_has_its_status_and_says_when_to_retry(
    error: H3Error, status: int, kind: str, retry_after: str | None
) -> None:
    response = error_response(error)
    fields = json.loads(bytes(response.body))["error"]
    assert (response.status_code, fields["type"]) == (status, kind)
    assert response.headers.get("retry-after") == retry_after
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    assert fields == error_fields(error)["error"]


def test_every_code_of_the_tree_has_a_status() -> None:
    for kind in CLASSES.values():
        status = status_of(kind.__new__(kind))
        assert 400 <= status < 600
        is_theirs = kind.code in {Code.NOT_FOUND, Code.UNAUTHENTICATED} or issubclass(
            kind, RequestError | TierFullError
        )
        assert (status < 500) == (is_theirs or status == 429), kind


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextLengthError("x", needed_tokens=9, limit_tokens=8), "context_length_exceeded"),
        (ApiKeyError("x"), "invalid_api_key"),
        (QuotaError("x", retry_after_s=3), "rate_limit_exceeded"),
        (QuotaError("x", retry_after_s=None), "insufficient_quota"),
        (ModelNotFoundError("x", path="x"), "model_not_found"),
        (DocumentNotFoundError("x", document="x"), "document_not_found"),
        (TierFullError("x", tier=Tier.HOST, needed_bytes=9, free_bytes=8), "tier_full"),
    ],
)
def test_errors_have_the_codes_that_clients_look_for(error: H3Error, code: str) -> None:
    assert error_fields(error)["error"]["code"] == code


@pytest.mark.parametrize("kind", [each for each in CLASSES.values() if issubclass(each, PeerError)])
def test_what_libraries_say_about_processes_is_not_for_clients(kind: type[PeerError]) -> None:
    error = kind.__new__(kind)
    Exception.__init__(error, "unix:///run/h3/gpu_worker.sock (UNAVAILABLE: failed to connect to all addresses)")
    message = error_fields(error)["error"]["message"]
    assert "unix:" not in message
    assert "UNAVAILABLE" not in message


@pytest.mark.parametrize("kind", [each for each in CLASSES.values() if not issubclass(each, PeerError | RequestError)])
def test_what_is_no_clients_affair_has_no_words_of_its_own(kind: type[H3Error]) -> None:
    error = kind.__new__(kind)
    if isinstance(error, QuotaError):
        error.retry_after_s = None
    Exception.__init__(error, "in /srv/models/x: nvme.store is full")
    shown = error_fields(error)["error"]["message"]
    told = {ApiKeyError, QuotaError, DocumentNotFoundError, ModelNotFoundError, TierFullError}
    assert ("/srv" in shown) == (kind in told), kind


def test_mistakes_of_ours_are_called_so() -> None:
    for error in (ShapeError("x"), ConfigError("x", field="y")):
        assert status_of(error) == 500


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": 3}] * 4000},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 4000}]},
        {"messages": [], "stop": [1] * 100_000},
        {"messages": [], "logit_bias": {f"x{number}": "y" for number in range(100_000)}},
        {"messages": [], **{f"x{number}": 1 for number in range(100_000)}},
        {"messages": [{"role": "user", **{f"x{number}": 1 for number in range(10_000)}}] * 10},
    ],
    ids=["messages", "parts", "stops", "biases", "names", "names of messages"],
)
def test_a_body_that_is_wrong_everywhere_is_refused_as_one_that_is_wrong_once(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate_json(json.dumps({"model": "m", **body}))
    assert caught.value.error_count() < 50
    assert len(str(body_error(caught.value))) < 300


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("messages[1].role = 'x': must be one of", "messages[1].role"),
        ("response_format: the schema", "response_format"),
        ("prompt is empty", None),
        ("something else: no", None),
    ],
)
def test_fields_that_the_worker_finds_bad_are_named(message: str, param: str | None) -> None:
    assert error_fields(RequestError(message))["error"]["param"] == param


def test_cures_name_fields_as_clients_know_them() -> None:
    error = ContextLengthError("lower max_new_tokens to 5", needed_tokens=9, limit_tokens=8)
    assert error_fields(error)["error"]["message"] == "lower max_tokens to 5"


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (CompletionBody, {"model": "m", "prompt": "x", "best_of": 2}, "best_of", "not supported"),
        (CompletionBody, {"model": "m", "prompt": [1, "a"]}, "prompt[1]", "'a'"),
        (CompletionBody, {"model": "m", "prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
        (CompletionBody, {"model": "m", "prompt": "x" * 9, "stream": "x" * 500}, "stream", "..."),
        (
            CompletionBody,
            {"model": "m", "prompt": "x", "stream_options": {"other": 1}},
            "stream_options.other",
            "not supported",
        ),
        (ChatBody, {"model": "m", "messages": []}, "messages", "at least 1"),
        (ChatBody, {"model": "m", "messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        (ChatBody, {"model": "m", "messages": [{"role": "critic", "content": ""}]}, "messages[0].role", "'critic'"),
        (ChatBody, {"model": "m", "messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
        (ChatBody, {"model": "m", "messages": [], "tools": [{}]}, "messages", "at least 1"),
    ],
)
def test_first_thing_that_is_wrong_is_named(
    kind: type[CompletionBody | ChatBody], body: object, param: str, message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(body))
    error = body_error(caught.value)
    assert error.param == param
    assert message in str(error)
    assert len(str(error)) < 300
