import pytest

from h3kv.rpc.call_context import CallContext, read_context
from h3kv.telemetry.trace_context import (
    PACKED_BYTES,
    UNTRACED,
    TraceContext,
    pack_context,
    parse_traceparent,
    unpack_context,
)

TEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CONTEXT = TraceContext(bytes.fromhex("4bf92f3577b34da6a3ce929d0e0e4736"), bytes.fromhex("00f067aa0ba902b7"))


def test_a_context_is_written_as_w3c_does_and_read_back() -> None:
    assert CONTEXT.traceparent == TEXT
    assert parse_traceparent(TEXT) == CONTEXT
    unsampled = TraceContext(CONTEXT.trace_id, CONTEXT.span_id, is_sampled=False)
    assert unsampled.traceparent == TEXT[:-1] + "0"
    assert parse_traceparent(unsampled.traceparent) == unsampled


def test_calls_carry_what_we_write() -> None:
    sent = CallContext("request-1", CONTEXT.traceparent)
    assert parse_traceparent(read_context(sent.metadata).traceparent) == CONTEXT


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "01" + TEXT[2:],
        TEXT.upper(),
        TEXT + "\n",
        TEXT[:-1],
    ],
)
def test_malformed_text_is_no_context(text: str | None) -> None:
    assert parse_traceparent(text) is None


def test_other_flags_do_not_count() -> None:
    assert parse_traceparent(TEXT[:-2] + "03") == CONTEXT
    later = parse_traceparent(TEXT[:-2] + "02")
    assert later is not None
    assert not later.is_sampled


def test_a_context_passes_through_24_bytes() -> None:
    packed = pack_context(CONTEXT)
    assert len(packed) == PACKED_BYTES
    assert unpack_context(packed) == CONTEXT
    assert unpack_context(memoryview(packed)) == CONTEXT


def test_what_is_not_traced_packs_to_zeros() -> None:
    assert pack_context(None) == UNTRACED
    assert pack_context(TraceContext(CONTEXT.trace_id, CONTEXT.span_id, is_sampled=False)) == UNTRACED
    assert unpack_context(UNTRACED) is None


def test_bytes_of_half_a_context_are_none() -> None:
    assert unpack_context(CONTEXT.trace_id + bytes(8)) is None
    assert unpack_context(bytes(16) + CONTEXT.span_id) is None
    with pytest.raises(AssertionError, match="are no context"):
        unpack_context(bytes(23))
