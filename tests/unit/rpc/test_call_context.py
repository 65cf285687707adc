import pytest

from h3kv.rpc.call_context import CallContext, new_context, read_context, read_token_of

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_what_is_sent_is_read_again() -> None:
    for context in (CallContext("a"), CallContext("request-1_x.Y", TRACE), new_context()):
        assert read_context(context.metadata) == context


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 65, "a\nb", "ü", b"bytes"])
def test_a_malformed_request_id_is_replaced(request_id: str | bytes) -> None:
    context = read_context((("x-request-id", request_id), ("traceparent", TRACE)))
    assert context.request_id
    assert context.request_id != request_id
    assert context.traceparent == TRACE


@pytest.mark.parametrize(
    "trace",
    [
        "",
        TRACE.upper(),
        TRACE + "-00",
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
    ],
)
def test_a_malformed_trace_is_left_out(trace: str) -> None:
    assert read_context((("traceparent", trace),)).traceparent is None


def test_a_token_is_what_follows_bearer() -> None:
    assert read_token_of((("authorization", "Bearer abc"),)) == "abc"
    assert read_token_of((("authorization", "Basic abc"),)) is None
    assert read_token_of(()) is None
