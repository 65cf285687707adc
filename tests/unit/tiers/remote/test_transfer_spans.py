"""The server of the cold store tells its part in the trace that a client named."""

from __future__ import annotations

import pytest

from h3kv.core.errors import RequestError
from h3kv.telemetry.trace_context import UNTRACED, TraceContext, pack_context
from h3kv.tiers.remote import records
from h3kv.tiers.remote.records import Kind
from h3kv.tiers.remote.transfer_spans import read_trace


def test_a_record_names_a_trace_or_none() -> None:
    context = TraceContext(b"t" * 16, b"p" * 8)
    assert read_trace(records.unpack(records.pack(Kind.TRACE, 0, pack_context(context)))) == context
    assert read_trace(records.unpack(records.pack(Kind.TRACE, 0, UNTRACED))) is None


def test_a_trace_of_another_length_is_refused() -> None:
    with pytest.raises(RequestError, match="a trace of 3 bytes"):
        read_trace(records.unpack(records.pack(Kind.TRACE, 0, b"abc")))
