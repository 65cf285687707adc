"""Errors as OpenAI's API writes them, each with a status of HTTP.

{"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": "request"}}

code of the error       status                                        Retry-After
INVALID_ARGUMENT        400; 413 where something is too large
NOT_FOUND               404
RESOURCE_EXHAUSTED      429 where it passes, else 503                 1
UNAVAILABLE, ABORTED    503                                           1
CANCELLED               503
DEADLINE_EXCEEDED       504
all others              500
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError
from starlette.responses import JSONResponse

from h3kv.core.error_codes import Code, Retry
from h3kv.core.errors import ContextLengthError, H3Error, MessageSizeError, RequestError

RETRY_AFTER_S: Final = 1
"""A process that died is back in a second or two, and room comes with every answer that ends."""
GONE: Final = 499
"""The client went away: nobody reads this, metrics count it."""

_STATUS: Final = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.UNAVAILABLE: 503,
    Code.ABORTED: 503,
    Code.CANCELLED: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_CONTEXT_CODE: Final = "context_length_exceeded"
"""What clients of OpenAI's API look for."""


class FieldError(RequestError):
    """A field of a body has a bad value; `param` is its name."""

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class ClientGoneError(Exception):
    """The client went away before its answer began."""


def status_of(error: H3Error) -> int:
    """The status of HTTP."""
    if isinstance(error, MessageSizeError):
        return 413
    if error.code is Code.RESOURCE_EXHAUSTED:
        return 429 if error.retry is Retry.LATER else 503
    return _STATUS.get(error.code, 500)


def error_fields(error: H3Error) -> dict[str, Any]:
    """The object that clients get, also in the middle of a stream."""
    return _fields(
        str(error),
        status_of(error),
        param=error.param if isinstance(error, FieldError) else None,
        code=_CONTEXT_CODE if isinstance(error, ContextLengthError) else error.reason.lower(),
    )


def error_response(error: H3Error) -> JSONResponse:
    """An answer that is an error."""
    status = status_of(error)
    is_transient = status == 429 or error.code in {Code.UNAVAILABLE, Code.ABORTED}
    headers = {"Retry-After": str(RETRY_AFTER_S)} if is_transient else None
    return JSONResponse(error_fields(error), status, headers)


def plain_response(status: int, message: str) -> JSONResponse:
    """An error that HTTP itself knows: no such path, or no such method there."""
    return JSONResponse(_fields(message, status, param=None, code=None), status)


def body_error(error: ValidationError) -> FieldError:
    """The first thing that is wrong with a body, with the field, the value and the rule."""
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
    if problem["type"] == "extra_forbidden":
        return FieldError(f"{path}: this field is not supported: leave it out", param=path)
    if problem["type"] == "missing":
        return FieldError(f"{path} is missing: give it", param=path)
    value = repr(problem["input"])
    shown = value if len(value) <= 100 else f"{value[:100]}..."
    return FieldError(
        f"{path or 'the body'} = {shown}: {problem['msg'][:1].lower()}{problem['msg'][1:]}", param=path or None
    )


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].role`. What pydantic adds for members of unions is left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in {"str", "int", "float"}:
            path += f".{part}" if path else part
    return path


def _fields(message: str, status: int, *, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
