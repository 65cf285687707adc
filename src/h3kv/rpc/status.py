"""The only translator between the error tree and gRPC's status, both ways.

    error        status                                       error
    class   ->   code, message, ErrorInfo(reason)        ->   the class of that reason
    fields  ->   ErrorInfo.metadata, one text for each   ->   the same fields, typed by the class's constructor

A class needs nothing here: its keyword arguments are its context.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Final

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from h3kv.core import errors
from h3kv.core.errors import (
    AccessDeniedError,
    H3Error,
    InternalError,
    MessageSizeError,
    PeerBusyError,
    PeerCancelledError,
    PeerError,
    PeerReasonError,
    PeerTimeoutError,
    PeerUnavailableError,
    PeerVersionError,
)
from h3kv.core.types import SegmentId, SlabKey, Tier

DOMAIN: Final = "h3kv"
"""What tells our reasons from those of others."""

MESSAGE_BYTES_MAX: Final = 1_000
"""A message travels twice, once with up to three bytes for one: all must fit the 8 KiB that gRPC takes of metadata."""

FIELD_BYTES_MAX: Final = 500
"""Of one field of the context: longer ones are cut."""

CLASSES: Final[Mapping[str, type[H3Error]]] = {
    member.reason: member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, H3Error) and member is not H3Error
}
"""The whole tree by reason."""

BARE: Final[Mapping[grpc.StatusCode, type[PeerError]]] = {
    grpc.StatusCode.CANCELLED: PeerCancelledError,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerTimeoutError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PeerBusyError,
    grpc.StatusCode.UNAVAILABLE: PeerUnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: PeerVersionError,
}
"""What gRPC itself says, without a reason of ours."""

CURES: Final[Mapping[type[PeerError], str]] = {
    PeerBusyError: "repeat the call later",
    PeerTimeoutError: "repeat the call if it is idempotent, or give it more time",
    PeerUnavailableError: "start it, or repeat the call when it runs again",
    PeerVersionError: "run the same version on both sides",
}


def to_status(error: Exception) -> grpc.Status:
    """What a call ends with, for `ServicerContext.abort_with_status`.

    A subclass from elsewhere goes as its nearest class in the tree. The text of an error that is not ours stays here.
    """
    if not isinstance(error, H3Error) or (isinstance(error, InternalError) and error.__cause__ is not None):
        error = InternalError("a mistake of ours ended the call: the log of the process that served it says where")
    kind = _nearest(type(error))
    context = {
        name: _cut(_text_of(getattr(error, name)), FIELD_BYTES_MAX)
        for name in _fields(kind)
        if getattr(error, name) is not None
    }
    info = error_details_pb2.ErrorInfo(reason=kind.reason, domain=DOMAIN, metadata=context)
    detail = any_pb2.Any()
    detail.Pack(info)
    code: int = code_pb2.Code.Value(kind.code)
    message = _cut(str(error), MESSAGE_BYTES_MAX)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=message, details=[detail]))
    return status


def from_call(error: grpc.RpcError, *, peer: str) -> H3Error:
    """The error that a call ended with, to be raised from `error`.

    Args:
        error: as a stub raised it; also one of `grpc.aio`.
        peer: address that was called.
    """
    message = error.details() or "no details"
    info = _error_info(error)
    if info is None:
        return _bare(error.code(), message, peer)
    kind = CLASSES.get(info.reason)
    try:
        if kind is not None:
            return kind(message, **_context(kind, info.metadata))
    except ValueError as malformed:
        message = f"{message} ({malformed})"
    return PeerReasonError(f"{peer}: {message}", peer=peer, remote_reason=info.reason)


def _bare(code: grpc.StatusCode, message: str, peer: str) -> H3Error:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return MessageSizeError(f"a message from or to {peer} is too large ({message}): send or ask for less at a time")
    if code in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
        return AccessDeniedError(f"{peer} refuses the caller ({message}): present its token")
    kind = BARE.get(code, PeerError)
    cure = CURES.get(kind, "see its log")
    return kind(f"{peer} did not answer as expected ({code.name}: {message}): {cure}", peer=peer)


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    try:
        status = rpc_status.from_call(error)
        for detail in [] if status is None else status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
    except (ValueError, TypeError, AttributeError, DecodeError):
        # The peer sent details that contradict the code, or that are no message; or the call never left.
        return None
    return None


def _nearest(kind: type[H3Error]) -> type[H3Error]:
    """The class itself or its nearest base in the tree."""
    known = set(CLASSES.values())
    return next((base for base in kind.__mro__ if issubclass(base, H3Error) and base in known), InternalError)


def _fields(kind: type[H3Error]) -> Mapping[str, Callable[[str], object]]:
    """Context of a class: how each of its keyword arguments is read."""
    hints = typing.get_type_hints(kind.__init__)
    parameters = inspect.signature(kind.__init__).parameters.values()
    names = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    return {name: _READERS[hints[name]] for name in names}


def _context(kind: type[H3Error], metadata: Mapping[str, str]) -> dict[str, object]:
    hints = typing.get_type_hints(kind.__init__)
    context: dict[str, object] = {}
    for name, read in _fields(kind).items():
        if name in metadata:
            context[name] = read(metadata[name])
        elif type(None) in typing.get_args(hints[name]):
            context[name] = None
        else:
            raise ValueError(f"{kind.reason} came without {name}")
    return context


def _text_of(value: object) -> str:
    return f"{value.segment}/{value.layer}" if isinstance(value, SlabKey) else str(value)


def _slab_key(text: str) -> SlabKey:
    segment, _, layer = text.partition("/")
    return SlabKey(SegmentId(int(segment)), int(layer))


def _cut(text: str, size_bytes: int) -> str:
    coded = text.encode(errors="backslashreplace")
    if len(coded) <= size_bytes:
        return coded.decode()
    mark = "..."
    return coded[: size_bytes - len(mark)].decode(errors="ignore") + mark


_READERS: Final[Mapping[object, Callable[[str], object]]] = {
    str: str,
    int: int,
    int | None: int,
    str | None: str,
    Tier: Tier,
    SlabKey: _slab_key,
}
"""Types that a context may have."""
