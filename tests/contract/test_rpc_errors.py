"""Every class of the error tree crosses a real connection and comes back as it was."""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as controller
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.core.errors import (
    H3Error,
    HostMemoryError,
    InternalError,
    PeerBusyError,
    PeerError,
    PeerReasonError,
    PeerVersionError,
    TierError,
    TierFullError,
)
from h3kv.core.types import SegmentId, SlabKey, Tier
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.status import CLASSES, FIELD_BYTES_MAX, MESSAGE_BYTES_MAX, to_status

from .rpc_loopback import Answer, Loopback, connected, controller_stub, nvme_stub

SAMPLES: dict[Any, Any] = {
    str: "/run/h3 store/ü",
    int: 1 << 62,
    int | None: None,
    Tier: Tier.NVME,
    SlabKey: SlabKey(SegmentId(7), 29),
}

Pair = tuple[Loopback, PeerChannel]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with connected(tmp_path_factory.mktemp("rpc")) as both:
        yield both


def sample(kind: type[H3Error]) -> H3Error:
    """An error of a class with every field of its context set."""
    hints = typing.get_type_hints(kind.__init__)
    names = [
        name
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    return kind("it went wrong: mend it - “ü”", **{name: SAMPLES[hints[name]] for name in names})


def raised_by(pair: Pair, error: Exception) -> H3Error:
    """What a caller sees when a handler raises."""

    def script(_: grpc.ServicerContext) -> None:
        raise error

    loopback, channel = pair
    loopback.nvme_io.script = script
    with pytest.raises(H3Error) as caught:
        nvme_stub(channel).GetStatistics(nvme.GetStatisticsRequest())
    return caught.value


@pytest.mark.parametrize("kind", CLASSES.values(), ids=lambda kind: kind.__name__)
def test_every_class_comes_back_with_its_message_and_context(pair: Pair, kind: type[H3Error]) -> None:
    sent = sample(kind)
    received = raised_by(pair, sent)
    assert type(received) is kind
    assert str(received) == str(sent)
    assert vars(received) == vars(sent)
    assert isinstance(received.__cause__, grpc.RpcError)


@pytest.mark.parametrize("kind", CLASSES.values(), ids=lambda kind: kind.__name__)
def test_the_status_says_the_code_of_the_class(kind: type[H3Error]) -> None:
    assert to_status(sample(kind)).code is grpc.StatusCode[kind.code]


def test_an_error_in_the_middle_of_a_stream_comes_after_what_was_sent(pair: Pair) -> None:
    def script(_: grpc.ServicerContext) -> None:
        raise TierFullError("full: demote", tier=Tier.HOST, needed_bytes=2, free_bytes=1)

    loopback, channel = pair
    loopback.nvme_io.script = script
    events = nvme_stub(channel).WatchMoves(nvme.WatchMovesRequest())
    assert next(events).event == 1
    with pytest.raises(TierFullError) as caught:
        next(events)
    assert caught.value.needed_bytes == 2


def test_an_error_after_a_stream_of_requests_comes_back(pair: Pair) -> None:
    def script(_: grpc.ServicerContext) -> None:
        raise HostMemoryError("too little: free some", needed_bytes=5, available_bytes=None)

    loopback, channel = pair
    loopback.controller.script = script
    reports = iter([controller.ReportTelemetryRequest(report=1)])
    with pytest.raises(HostMemoryError) as caught:
        controller_stub(channel).ReportTelemetry(reports)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (5, None)


def test_the_text_of_a_mistake_of_ours_stays_in_the_log(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        received = raised_by(pair, KeyError("s3cret"))
    assert type(received) is InternalError
    assert "s3cret" not in str(received)
    assert "s3cret" not in repr(received.__cause__)
    assert "s3cret" in caplog.text


def test_the_cause_of_an_internal_error_stays_here(pair: Pair) -> None:
    error = InternalError("unexpected ValueError (s3cret)")
    error.__cause__ = ValueError("s3cret")
    assert "s3cret" not in str(raised_by(pair, error))


def test_a_subclass_from_elsewhere_goes_as_its_nearest_class(pair: Pair) -> None:
    class StrangeTierError(TierError):
        reason = "STRANGE"

    received = raised_by(pair, StrangeTierError("odd: look", tier=Tier.HOST))
    assert type(received) is TierError
    assert received.tier is Tier.HOST


def aborting(*, reason: str, domain: str, **metadata: str) -> Answer:
    """A handler that ends a call as some other version would."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata))
    code = code_pb2.Code.Value("FAILED_PRECONDITION")
    status = rpc_status.to_status(status_pb2.Status(code=code, message="it is so", details=[detail]))
    return lambda context: context.abort_with_status(status)


@pytest.mark.parametrize(
    ("reason", "metadata"),
    [
        ("NEWER", {}),
        ("TIER_FULL", {"tier": "host", "needed_bytes": "many", "free_bytes": "0"}),
        ("TIER_FULL", {"tier": "attic", "needed_bytes": "1", "free_bytes": "0"}),
        ("TIER_FULL", {"tier": "host"}),
        ("SLAB_BUSY", {"key": "7"}),
    ],
)
def test_an_unknown_reason_or_context_becomes_a_general_error(
    pair: Pair, reason: str, metadata: dict[str, str]
) -> None:
    loopback, channel = pair
    loopback.nvme_io.script = aborting(reason=reason, domain="h3kv", **metadata)
    with pytest.raises(PeerReasonError, match="it is so") as caught:
        nvme_stub(channel).GetStatistics(nvme.GetStatisticsRequest())
    assert caught.value.remote_reason == reason


def test_reasons_of_others_are_not_ours(pair: Pair) -> None:
    loopback, channel = pair
    loopback.nvme_io.script = aborting(reason="CONFIG", domain="example.com", field="x")
    with pytest.raises(PeerError) as caught:
        nvme_stub(channel).GetStatistics(nvme.GetStatisticsRequest())
    assert type(caught.value) is PeerError


def test_a_status_without_reason_is_read_by_its_code(pair: Pair) -> None:
    def script(context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")

    loopback, channel = pair
    loopback.nvme_io.script = script
    with pytest.raises(PeerBusyError):
        nvme_stub(channel).GetStatistics(nvme.GetStatisticsRequest())


def test_a_call_that_the_peer_does_not_know_is_one_of_another_version(pair: Pair) -> None:
    call = pair[1].grpc.unary_unary("/h3kv.api.nvme_io.v1.NvmeIoService/Fly", lambda _: b"", lambda data: data)
    with pytest.raises(PeerVersionError, match="same version"):
        call(None)


def test_long_texts_are_cut_so_that_they_arrive(pair: Pair) -> None:
    received = raised_by(pair, sample_with_long_texts())
    assert isinstance(received, PeerReasonError)
    assert len(str(received).encode()) <= MESSAGE_BYTES_MAX
    assert str(received).endswith("...")
    assert len(received.remote_reason.encode()) <= FIELD_BYTES_MAX


def sample_with_long_texts() -> PeerReasonError:
    return PeerReasonError("ü" * 100_000, peer="€" * 5_000, remote_reason="\udcff" * 5_000)
