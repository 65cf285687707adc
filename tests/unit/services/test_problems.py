import json

import pytest
from pydantic import ValidationError

from h3kv.core.errors import (
    Code,
    ContextLengthError,
    H3Error,
    HostMemoryError,
    InternalError,
    MessageSizeError,
    ModelNotFoundError,
    PeerBusyError,
    PeerCancelledError,
    PeerTimeoutError,
    PeerUnavailableError,
    RequestError,
    SlabUnavailableError,
    TierFullError,
)
from h3kv.core.types import SegmentId, SlabKey, Tier
from h3kv.rpc.status import CLASSES
from services.gateway.openai import ChatBody, CompletionBody
from services.gateway.problems import body_error, error_fields, error_response, status_of

ERRORS: list[tuple[H3Error, int, str, bool]] = [
    (RequestError("x"), 400, "invalid_request_error", False),
    (ContextLengthError("x", needed_tokens=9, limit_tokens=8), 400, "invalid_request_error", False),
    (MessageSizeError("x"), 413, "invalid_request_error", False),
    (ModelNotFoundError("x", path="x"), 404, "not_found_error", False),
    (TierFullError("x", tier=Tier.HOST, needed_bytes=9, free_bytes=8), 429, "rate_limit_error", True),
    (PeerBusyError("x", peer="x"), 429, "rate_limit_error", True),
    (HostMemoryError("x", needed_bytes=None, available_bytes=None), 503, "server_error", False),
    (PeerUnavailableError("x", peer="x"), 503, "server_error", True),
    (SlabUnavailableError("x", key=SlabKey(SegmentId(1), 0)), 503, "server_error", True),
    (PeerCancelledError("x", peer="x"), 503, "server_error", False),
    (PeerTimeoutError("x", peer="x"), 504, "server_error", False),
    (InternalError("x"), 500, "server_error", False),
]


@pytest.mark.parametrize(("error", "status", "kind", "may_retry"), ERRORS, ids=lambda value: type(value).__name__)
def test_error_has_its_status_and_says_when_to_retry(error: H3Error, status: int, kind: str, may_retry: bool) -> None:
    response = error_response(error)
    fields = json.loads(bytes(response.body))["error"]
    assert (response.status_code, fields["type"]) == (status, kind)
    assert response.headers.get("retry-after") == ("1" if may_retry else None)
    assert fields == error_fields(error)["error"]


def test_every_code_of_the_tree_has_a_status() -> None:
    for kind in CLASSES.values():
        status = status_of(kind.__new__(kind))
        assert 400 <= status < 600
        assert (status < 500) == (kind.code in {Code.INVALID_ARGUMENT, Code.NOT_FOUND} or status == 429), kind


def test_context_that_is_too_long_has_the_code_that_clients_look_for() -> None:
    error = ContextLengthError("x", needed_tokens=9, limit_tokens=8)
    assert error_fields(error)["error"]["code"] == "context_length_exceeded"


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
        (ChatBody, {"model": "m", "messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        (ChatBody, {"model": "m", "messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "'tool'"),
        (ChatBody, {"model": "m", "messages": [{"role": "user", "content": []}]}, "messages[0].content", "string"),
        (ChatBody, {"model": "m", "messages": [], "tools": []}, "messages", "at least 1"),
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
