"""What servers and channels promise about any call."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from h3kv.api.migration_controller.v1 import migration_controller_service_pb2 as controller
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.core.errors import (
    AccessDeniedError,
    AddressInUseError,
    ConfigError,
    MessageSizeError,
    PeerBusyError,
    PeerCancelledError,
    PeerError,
    PeerTimeoutError,
    PeerUnavailableError,
    RequestError,
)
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import TcpAddress, UnixAddress
from h3kv.rpc.call_context import CallContext, read_context
from h3kv.rpc.client import ChannelConfig, PeerChannel
from h3kv.rpc.credentials import Credentials
from h3kv.rpc.server import RpcServer, ServerConfig

from .rpc_loopback import Loopback, connected, controller_stub, nvme_stub, serving

TOKEN = "a" * 64
WAIT_S = 60.0
"""A test that waits longer has failed."""
STATISTICS = nvme.GetStatisticsRequest()

Pair = tuple[Loopback, PeerChannel]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with connected(tmp_path) as both:
        yield both


def raw_call(channel: grpc.Channel, data: bytes, *, timeout: float | None) -> bytes:
    """Bytes as they are, without what our channels add."""
    call = channel.unary_unary("/h3kv.api.nvme_io.v1.NvmeIoService/GetStatistics", lambda sent: sent, lambda got: got)
    answer: bytes = call(data, timeout=timeout)
    return answer


def refused(pair: Pair, data: bytes, *, timeout: float | None) -> grpc.RpcError:
    with grpc.insecure_channel(pair[1].address.target) as channel, pytest.raises(grpc.RpcError) as caught:
        raw_call(channel, data, timeout=timeout)
    return caught.value


@pytest.mark.parametrize("timeout", [None, 1e6])
def test_a_call_without_a_deadline_is_refused(pair: Pair, timeout: float | None) -> None:
    error = refused(pair, b"", timeout=timeout)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "without a deadline" in str(error.details())


def test_bytes_that_are_no_message_are_refused_as_the_callers_fault(pair: Pair) -> None:
    error = refused(pair, b"\xff\xff\xff\xff", timeout=WAIT_S)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "malformed" in str(error.details())


def test_a_malformed_message_in_a_stream_ends_it(pair: Pair) -> None:
    call = pair[1].grpc.stream_unary(
        "/h3kv.api.migration_controller.v1.MigrationControllerService/ReportTelemetry",
        lambda sent: sent,
        lambda got: got,
    )
    good = controller.ReportTelemetryRequest(report=1).SerializeToString()
    with pytest.raises(RequestError, match="malformed"):
        call(iter([good, b"\xff\xff"]))


def test_a_message_larger_than_the_bound_is_refused_on_either_side(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "h3.sock")
    small = ChannelConfig(message_bytes_max=1_000)
    request = nvme.ListStoredRequest(page_token="x" * 5_000)
    with serving(ServerConfig(address, message_bytes_max=4_000)) as loopback:
        with PeerChannel(address, config=small) as channel, pytest.raises(MessageSizeError):
            nvme_stub(channel).ListStored(request)
        with PeerChannel(address) as channel, pytest.raises(MessageSizeError):
            nvme_stub(channel).ListStored(request)
        loopback.nvme_io.stored = [nvme.StoredSegment(parent=b"p" * 2_000)]
        with PeerChannel(address, config=small) as channel, pytest.raises(MessageSizeError):
            nvme_stub(channel).ListStored(nvme.ListStoredRequest())


def test_a_call_ends_at_its_deadline(pair: Pair) -> None:
    entered, ended = threading.Event(), threading.Event()

    def script(context: grpc.ServicerContext) -> None:
        entered.set()
        wait_for_the_caller_to_go(context)
        ended.set()

    loopback, channel = pair
    loopback.nvme_io.script = script
    # On a busy machine a call may be over before it reaches its handler.
    for timeout in (0.05, 0.5, 5, 30):
        with pytest.raises(PeerTimeoutError, match=r"h3\.sock"):
            nvme_stub(channel).GetStatistics(STATISTICS, timeout=timeout)
        if entered.is_set():
            break
    assert ended.wait(WAIT_S), "the handler does not learn that its caller has gone"


def test_a_call_without_a_timeout_gets_the_channels_own(tmp_path: Path) -> None:
    seen: list[float] = []
    address = UnixAddress(tmp_path / "h3.sock")
    config = ChannelConfig(timeout_ns=77 * NS_PER_S)
    with serving(ServerConfig(address)) as loopback, PeerChannel(address, config=config) as channel:
        loopback.nvme_io.script = lambda context: seen.append(context.time_remaining())
        nvme_stub(channel).GetStatistics(STATISTICS)
    # The deadline is counted by another clock: a second apart is near enough to tell.
    assert 30 < seen[0] < 78


def test_request_id_and_trace_travel_with_the_call(pair: Pair) -> None:
    seen: list[CallContext] = []
    loopback, channel = pair
    loopback.nvme_io.script = lambda context: seen.append(read_context(context.invocation_metadata()))
    sent = CallContext("request-1", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    nvme_stub(channel).GetStatistics(STATISTICS, metadata=sent.metadata)
    nvme_stub(channel).GetStatistics(STATISTICS)
    assert seen[0] == sent
    assert seen[1].request_id not in {"", "request-1"}
    assert seen[1].traceparent is None


def test_cancelling_a_stream_ends_its_iteration_and_tells_the_handler(pair: Pair) -> None:
    loopback, channel = pair
    loopback.nvme_io.script = wait_for_the_caller_to_go
    events = nvme_stub(channel).WatchMoves(nvme.WatchMovesRequest())
    assert next(events).event == 1
    events.cancel()
    assert list(events) == []
    assert loopback.nvme_io.watch_ended.wait(WAIT_S)


def test_a_caller_that_goes_in_the_middle_of_its_stream_is_no_mistake_of_ours(pair: Pair) -> None:
    loopback, channel = pair
    # The end of its stream may be noticed before the end of the call: then nothing says that more was to come.
    loopback.controller.between = wait_for_the_caller_to_go
    over = threading.Event()

    def reports() -> Iterator[controller.ReportTelemetryRequest]:
        yield controller.ReportTelemetryRequest(report=1)
        over.wait(WAIT_S)

    call = controller_stub(channel).ReportTelemetry.future(reports())
    assert loopback.controller.report_came.wait(WAIT_S)
    call.cancel()
    over.set()
    assert loopback.server.stop(grace_ns=int(WAIT_S) * NS_PER_S)
    assert [type(error) for error in loopback.controller.caught] == [PeerCancelledError]


def test_a_future_gives_errors_of_the_tree(pair: Pair) -> None:
    def script(_: grpc.ServicerContext) -> None:
        raise RequestError("no: ask otherwise")

    loopback, channel = pair
    loopback.nvme_io.script = script
    future = nvme_stub(channel).GetStatistics.future(STATISTICS)
    with pytest.raises(RequestError):
        future.result()
    assert isinstance(future.exception(), RequestError)


def test_calls_beyond_the_bound_are_refused_as_busy(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "h3.sock")
    entered, free = threading.Event(), threading.Event()

    def script(_: grpc.ServicerContext) -> None:
        entered.set()
        assert free.wait(WAIT_S)

    config = ServerConfig(address, threads=1, calls_max=1)
    with serving(config) as loopback, PeerChannel(address) as channel:
        loopback.nvme_io.script = script
        first = nvme_stub(channel).GetStatistics.future(STATISTICS, timeout=WAIT_S)
        assert entered.wait(WAIT_S)
        with pytest.raises(PeerBusyError):
            nvme_stub(channel).GetStatistics(STATISTICS)
        free.set()
        first.result()


@pytest.mark.parametrize("token", [None, "b" * 64, TOKEN[:-1], f"{TOKEN}a"])
def test_a_missing_or_wrong_token_is_refused(tmp_path: Path, token: str | None) -> None:
    address = UnixAddress(tmp_path / "h3.sock")
    with serving(ServerConfig(address, Credentials(token=TOKEN))) as loopback:
        loopback.nvme_io.script = lambda _: pytest.fail("the handler was reached")
        with PeerChannel(address, credentials=Credentials(token=token)) as channel:
            with pytest.raises(AccessDeniedError):
                nvme_stub(channel).GetStatistics(STATISTICS)
            with pytest.raises(AccessDeniedError):
                next(nvme_stub(channel).WatchMoves(nvme.WatchMovesRequest()))
            with pytest.raises(AccessDeniedError):
                controller_stub(channel).ReportTelemetry(iter(()))


def test_a_port_serves_who_has_the_token(tmp_path: Path) -> None:
    credentials = Credentials(token=TOKEN)
    with serving(ServerConfig(TcpAddress("127.0.0.1", 0), credentials)) as loopback:
        with PeerChannel(loopback.server.address, credentials=credentials) as channel:
            channel.wait_until_serving(timeout_ns=int(WAIT_S) * NS_PER_S)
            nvme_stub(channel).GetStatistics(STATISTICS)
        other = ServerConfig(loopback.server.address, credentials)
        with pytest.raises(AddressInUseError):
            RpcServer(other).start()


def test_a_port_without_token_or_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a token or certificates"):
        RpcServer(ServerConfig(TcpAddress("127.0.0.1", 0)))
    with pytest.raises(ConfigError, match="needs a token or certificates"):
        PeerChannel(TcpAddress("127.0.0.1", 7_400))


def test_waiting_until_a_peer_serves_ends_when_it_announces_itself(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "h3.sock")
    with PeerChannel(address) as channel:
        with pytest.raises(PeerTimeoutError, match="cannot be reached"):
            channel.wait_until_serving(timeout_ns=NS_PER_S // 20)
        with serving(ServerConfig(address)) as loopback:
            loopback.server.announce(is_serving=False)
            with pytest.raises(PeerTimeoutError):
                channel.wait_until_serving(timeout_ns=NS_PER_S // 20)
            loopback.server.announce(is_serving=True)
            channel.wait_until_serving(timeout_ns=int(WAIT_S) * NS_PER_S)
            service = "h3kv.api.nvme_io.v1.NvmeIoService"
            channel.wait_until_serving(timeout_ns=int(WAIT_S) * NS_PER_S, service=service)


def test_a_stop_lets_a_running_call_end(pair: Pair) -> None:
    loopback, channel = pair
    entered, free = threading.Event(), threading.Event()

    def script(_: grpc.ServicerContext) -> None:
        entered.set()
        assert free.wait(WAIT_S)

    loopback.nvme_io.script = script
    running = nvme_stub(channel).GetStatistics.future(STATISTICS, timeout=WAIT_S)
    assert entered.wait(WAIT_S)
    stopper = threading.Thread(target=loopback.server.stop, kwargs={"grace_ns": int(WAIT_S) * NS_PER_S})
    stopper.start()
    free.set()
    assert running.result() == nvme.GetStatisticsResponse()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    with pytest.raises(PeerUnavailableError):
        nvme_stub(channel).GetStatistics(STATISTICS)


def test_a_stop_ends_calls_that_outlast_its_bound(pair: Pair) -> None:
    loopback, channel = pair
    loopback.nvme_io.script = wait_for_the_caller_to_go
    events = nvme_stub(channel).WatchMoves(nvme.WatchMovesRequest(), timeout=WAIT_S)
    assert next(events).event == 1
    assert loopback.server.stop(grace_ns=NS_PER_S // 20)
    with pytest.raises(PeerError):
        next(events)


def test_a_stop_says_that_a_handler_hangs(pair: Pair) -> None:
    loopback, channel = pair
    entered, free = threading.Event(), threading.Event()

    def script(_: grpc.ServicerContext) -> None:
        entered.set()
        assert free.wait(WAIT_S)

    loopback.nvme_io.script = script
    running = nvme_stub(channel).GetStatistics.future(STATISTICS, timeout=WAIT_S)
    assert entered.wait(WAIT_S)
    assert not loopback.server.stop(grace_ns=0)
    with pytest.raises(PeerError):
        running.result()
    free.set()
    assert loopback.server.stop(grace_ns=0)


def wait_for_the_caller_to_go(context: grpc.ServicerContext) -> None:
    gone = threading.Event()
    if context.add_callback(gone.set):
        assert gone.wait(WAIT_S)


def test_a_killed_server_ends_the_call_and_its_successor_takes_the_socket(tmp_path: Path) -> None:
    address = UnixAddress(tmp_path / "h3.sock")
    program = Path(__file__).with_name("rpc_process.py")
    with (
        subprocess.Popen([sys.executable, program, address.path], stdout=subprocess.PIPE, text=True) as process,
        PeerChannel(address) as channel,
    ):
        channel.wait_until_serving(timeout_ns=int(WAIT_S) * NS_PER_S)
        with pytest.raises(AddressInUseError, match="another process serves"):
            RpcServer(ServerConfig(address)).start()
        events = nvme_stub(channel).WatchMoves(nvme.WatchMovesRequest(), timeout=WAIT_S)
        assert next(events).event == 1
        process.kill()
        with pytest.raises(PeerUnavailableError):
            next(events)
        process.wait(WAIT_S)
        assert address.path.is_socket(), "the dead process leaves its socket behind"
        with serving(ServerConfig(address)):
            channel.wait_until_serving(timeout_ns=int(WAIT_S) * NS_PER_S)
            nvme_stub(channel).GetStatistics(STATISTICS)
    assert not address.path.exists()
