"""What the server of the cold store tells of its part in a client's trace: nothing where the client named none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h3kv.core.errors import RequestError
from h3kv.core.types import Move, Tier
from h3kv.telemetry import spans
from h3kv.telemetry.trace_context import PACKED_BYTES, TraceContext, unpack_context
from h3kv.telemetry.tracing import Attributes, Span, Tracer
from h3kv.tiers.remote.records import Record


def read_trace(record: Record) -> TraceContext | None:
    """The trace in a record of it. Raises RequestError."""
    if len(record.body) != PACKED_BYTES:
        raise RequestError(f"a trace of {len(record.body)} bytes: it has {PACKED_BYTES}")
    return unpack_context(record.body)


def begin_write(tracer: Tracer, trace: TraceContext | None, moves: Sequence[Move]) -> Span:
    """Of a segment that is written."""
    attributes: Attributes = {
        spans.SLABS: len(moves),
        spans.TIER_SOURCE: Tier.HOST,
        spans.TIER_TARGET: Tier.NVME,
        spans.SIZE_BYTES: sum(move.source.nbytes for move in moves if move.source is not None),
    }
    return tracer.begin(spans.MOVE_SLABS, parent=trace, attributes=attributes)


def begin_fetch(tracer: Tracer, trace: TraceContext | None) -> Span:
    """Of slabs that are read. How many is set once they are known."""
    ways: Attributes = {spans.TIER_SOURCE: Tier.NVME, spans.TIER_TARGET: Tier.HOST}
    return tracer.begin(spans.MOVE_SLABS, parent=trace, attributes=ways)


def begin_reads(tracer: Tracer, trace: TraceContext | None, reads_N: NDArray[np.void]) -> Span:
    """Of single pages that are read: rows of `UNIT_READ_DTYPE`."""
    sizes_N: NDArray[Any] = reads_N["size"]
    attributes: Attributes = {
        spans.PAGES: reads_N.size,
        spans.TIER_SOURCE: Tier.NVME,
        spans.SIZE_BYTES: int(sizes_N.sum()),
    }
    return tracer.begin(spans.READ_PAGES, parent=trace, attributes=attributes)
