"""Errors as OpenAI's API writes them, each with a status of HTTP.

{"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": "request"}}

error                        status                                   Retry-After
RequestError                 400; 408 too late, 413 too large, 415 no JSON
TierFullError                400: more than ever fits
UNAUTHENTICATED              401, with WWW-Authenticate
NOT_FOUND                    404
QuotaError                   429                                      what it says
RESOURCE_EXHAUSTED           429 where it passes, else 503            1
UNAVAILABLE, ABORTED         503                                      1
CANCELLED                    503
DEADLINE_EXCEEDED            504
all others                   500

Only what is the client's affair goes out in its own words: other messages name files, settings and processes.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from starlette.responses import JSONResponse

from h3kv.core.error_codes import Code, Retry
from h3kv.core.errors import (
    ApiKeyError,
    ContextLengthError,
    DocumentNotFoundError,
    H3Error,
    MessageSizeError,
    ModelNotFoundError,
    PeerBusyError,
    PeerCancelledError,
    PeerError,
    PeerTimeoutError,
    PeerUnavailableError,
    QuotaError,
    RequestError,
    TierFullError,
)
from services.gateway.bodies import Body, UnknownFieldError

RETRY_AFTER_S: Final = 1
"""A process that died is back in a second or two, and room comes with every answer that ends."""
GONE: Final = 499
"""The client went away: nobody reads this, metrics count it."""

_STATUS: Final = {
    Code.UNAUTHENTICATED: 401,
    Code.NOT_FOUND: 404,
    Code.UNAVAILABLE: 503,
    Code.ABORTED: 503,
    Code.CANCELLED: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
_TYPES: Final = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_PEER_MESSAGES: Final[tuple[tuple[type[PeerError], str], ...]] = (
    (PeerUnavailableError, "the model's process is not there, or went away meanwhile: send the request again"),
    (PeerTimeoutError, "the time for an answer is over: ask for less, or raise request_seconds of the gateway"),
    (PeerBusyError, "as many requests are being answered as this node takes: send it again later"),
    (PeerCancelledError, "the node gave the request up as it ends: send it again when it is back"),
    (PeerError, "the model's process did not answer as expected: the gateway's log says how"),
)
"""What clients read about the processes behind: where they serve, and what their libraries say, is for logs."""


_NAMED: Final = re.compile(
    r"((?:document_ids|logit_bias|messages|prompt|response_format|seed|stop|stop_token_ids|temperature|tools|top_k)"
    r"(?:\[\d+\]|\.[a-z_]+)*)(?: = |: )"
)
"""How a message begins that is about one field."""


_OPEN: Final = (RequestError, ApiKeyError, QuotaError, DocumentNotFoundError, ModelNotFoundError, TierFullError)
"""Errors whose messages are for clients."""
_OTHER: Final = "a mistake of ours, or of this machine, ended the request: the gateway's log says more under its id"
_OTHER_AWAY: Final = "the node cannot answer this now: send the request again"
PROBLEMS_MAX: Final = 200
"""Of one body that are looked at."""
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class FieldError(RequestError):
    """A field of a body has a bad value; `param` is its name."""

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class LateBodyError(FieldError):
    """A body takes too long to arrive."""


class MediaTypeError(FieldError):
    """A body is not called what it must be."""


class ClientGoneError(Exception):
    """The client went away before its answer began."""


_SPECIAL: Final[tuple[tuple[type[H3Error], int], ...]] = (
    (MessageSizeError, 413),
    (LateBodyError, 408),
    (MediaTypeError, 415),
    (RequestError, 400),
    (TierFullError, 400),
)


def status_of(error: H3Error) -> int:
    """The status of HTTP."""
    special = next((status for kind, status in _SPECIAL if isinstance(error, kind)), None)
    if special is not None:
        return special
    if error.code is Code.RESOURCE_EXHAUSTED:
        return 429 if error.retry is Retry.LATER else 503
    return _STATUS.get(error.code, 500)


def error_fields(error: H3Error) -> dict[str, Any]:
    """The object that clients get, also in the middle of a stream."""
    return _fields(
        _message_of(error),
        status_of(error),
        param=_param_of(error),
        code=_code_of(error),
    )


def error_response(error: H3Error) -> JSONResponse:
    """An answer that is an error."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if isinstance(error, QuotaError):
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(error.retry_after_s, 1))
    elif status == 429 or error.code in {Code.UNAVAILABLE, Code.ABORTED}:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, ApiKeyError):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_fields(error), status, headers)


def plain_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error that HTTP itself knows: no such path, or no such method there."""
    return JSONResponse(_fields(message, status, param=None, code=None), status, headers)


def body_error(error: ValidationError) -> FieldError:
    """The first thing that is wrong with a body, with the field, the value and the rule."""
    if error.error_count() > PROBLEMS_MAX:
        # All of them would have to be written.
        return FieldError(f"the body is wrong in {error.error_count()} places: see the fields of this path", param=None)
    problems = error.errors(include_url=False)
    field = problems[0]["loc"][:1]
    # Of the members of a union, the one that fits best fails deepest.
    problem = max(
        (each for each in problems if each["loc"][:1] == field),
        key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")),
    )
    path = _path(problem["loc"])
    if problem["type"] == "json_invalid":
        return FieldError(f"the body is not valid JSON ({problem['ctx']['error']}): send an object", param=None)
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, UnknownFieldError):
        path = f"{path}.{cause.field}" if path else cause.field
    if isinstance(cause, UnknownFieldError) or problem["type"] == "extra_forbidden":
        return FieldError(f"{path}: this field is not supported: leave it out", param=path)
    if problem["type"] == "missing":
        return FieldError(f"{path} is missing: give it", param=path)
    shown = _SHORT.repr(problem["input"])
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    return FieldError(
        f"{path or 'the body'} = {shown}: {problem['msg'][:1].lower()}{problem['msg'][1:]}", param=path or None
    )


def _message_of(error: H3Error) -> str:
    if isinstance(error, PeerError):
        return next(message for kind, message in _PEER_MESSAGES if isinstance(error, kind))
    if not isinstance(error, _OPEN):
        return _OTHER_AWAY if status_of(error) == 503 else _OTHER
    # The engine's name of the field.
    return str(error).replace("max_new_tokens", "max_tokens")


def _param_of(error: H3Error) -> str | None:
    """The field that an error is about. What gpu_worker finds is named at the begin of its message."""
    if isinstance(error, FieldError):
        return error.param
    named = _NAMED.match(_message_of(error)) if type(error) is RequestError else None
    return None if named is None else named[1]


def _code_of(error: H3Error) -> str:
    """What clients of OpenAI's API look for, where it has a word for it."""
    match error:
        case ContextLengthError():
            return "context_length_exceeded"
        case ApiKeyError():
            return "invalid_api_key"
        case QuotaError():
            return "insufficient_quota" if error.retry_after_s is None else "rate_limit_exceeded"
        case _:
            return error.reason.lower()


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].role`. What pydantic adds for members of unions is left out."""
    members = {"str", "int", "float", *(kind.__name__ for kind in Body.__subclasses__())}
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in members:
            path += f".{part}" if path else part
    return path


def _fields(message: str, status: int, *, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
