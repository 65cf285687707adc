"""Where in which trace something happens, as it passes from process to process.

Over gRPC it is the text of W3C Trace Context, in `CallContext.traceparent`. In records of a mailbox it takes 24 bytes:

    0                      16             24
    +----------------------+--------------+
    | trace id             | span id      |     all zero: the request is not traced
    +----------------------+--------------+
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

PACKED_BYTES: Final = 24
UNTRACED: Final = bytes(PACKED_BYTES)

_TRACE_BYTES: Final = 16
_SAMPLED: Final = 1
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, known by its numbers alone."""

    trace_id: bytes
    """16 bytes, not all zero."""
    span_id: bytes
    """8 bytes, not all zero."""
    is_sampled: bool = True
    """Whether spans of this trace are recorded. Decided once, where the trace begins."""

    @property
    def traceparent(self) -> str:
        """As W3C Trace Context writes it."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{_SAMPLED if self.is_sampled else 0:02x}"


def parse_traceparent(text: str | None) -> TraceContext | None:
    """What a caller sent; None when that is nothing, or malformed."""
    found = _TRACEPARENT.fullmatch(text) if text is not None else None
    if found is None:
        return None
    trace_id, span_id, flags = found.groups()
    return TraceContext(bytes.fromhex(trace_id), bytes.fromhex(span_id), bool(int(flags, 16) & _SAMPLED))


def pack_context(context: TraceContext | None) -> bytes:
    """24 bytes for a record."""
    if context is None or not context.is_sampled:
        return UNTRACED
    return context.trace_id + context.span_id


def unpack_context(data: bytes | memoryview) -> TraceContext | None:
    """The context in 24 bytes of a record."""
    assert len(data) == PACKED_BYTES, f"{len(data)} bytes are no context"
    trace_id, span_id = bytes(data[:_TRACE_BYTES]), bytes(data[_TRACE_BYTES:])
    return TraceContext(trace_id, span_id) if any(trace_id) and any(span_id) else None
