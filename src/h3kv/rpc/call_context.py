"""What travels beside every message: who called, for which request, in which trace."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

AUTHORIZATION: Final = "authorization"
BEARER: Final = "Bearer "
REQUEST_ID: Final = "x-request-id"
TRACEPARENT: Final = "traceparent"

Metadata = tuple[tuple[str, str | bytes], ...]

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class CallContext:
    """Passed on from call to call, so that logs and traces of all processes meet."""

    request_id: str
    """1 to 64 letters, digits, "_", "." or "-"."""
    traceparent: str | None = None
    """As W3C Trace Context writes it."""

    @property
    def metadata(self) -> Metadata:
        """For the `metadata` of a stub's call."""
        traced = () if self.traceparent is None else ((TRACEPARENT, self.traceparent),)
        return ((REQUEST_ID, self.request_id), *traced)


def new_context() -> CallContext:
    """Of a request that begins here."""
    return CallContext(secrets.token_hex(8))


def read_context(metadata: Iterable[tuple[str, str | bytes]]) -> CallContext:
    """What a caller sent, for example `context.invocation_metadata()`. A malformed request id is replaced by a new one,
    a malformed trace left out: both end in logs.
    """
    request_id = text_of(metadata, REQUEST_ID)
    traceparent = text_of(metadata, TRACEPARENT)
    is_named = request_id is not None and _REQUEST_ID.fullmatch(request_id)
    is_traced = traceparent is not None and _TRACEPARENT.fullmatch(traceparent)
    return CallContext(
        request_id if request_id is not None and is_named else new_context().request_id,
        traceparent if is_traced else None,
    )


def read_token_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The token that a caller presented."""
    value = text_of(metadata, AUTHORIZATION)
    return value.removeprefix(BEARER) if value is not None and value.startswith(BEARER) else None


def text_of(metadata: Iterable[tuple[str, str | bytes]], key: str) -> str | None:
    """Value of the first entry of that name, where it is text."""
    for name, value in metadata:
        if name == key:
            return value if isinstance(value, str) else None
    return None
