"""What nvme_io answers over gRPC and tells over HTTP, with a client over its regions."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.cold_load import LAYOUT as LOAD_LAYOUT
from tests.integration.nvme_io_rig import NvmeIo, eventually, linked, nvme_io, settings_for
from tests.integration.test_nvme_io_faults import load

from h3kv.api.common.v1 import commands_pb2, types_pb2
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as pb_grpc
from h3kv.core.errors import AccessDeniedError, RequestError
from h3kv.core.units import NS_PER_S
from h3kv.memory.region_client import RegionClient
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.nvme_io_client import NvmeIoClient
from h3kv.telemetry.metric import Service
from h3kv.telemetry.names import METRICS
from h3kv.tiers.remote.link import NodeLink

pytestmark = pytest.mark.slow

SENDER = b"s" * 16


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[tuple[NvmeIo, pb_grpc.NvmeIoServiceStub]]:
    with nvme_io(tmp_path, **settings_for()) as server, PeerChannel(server.address) as channel:
        yield server, pb_grpc.NvmeIoServiceStub(channel.grpc)


def command(number: int, link: NodeLink) -> commands_pb2.Command:
    owner = link.calls._identity.boot_token
    return commands_pb2.Command(
        id=commands_pb2.CommandId(sender_boot_token=SENDER, number=number),
        segment=types_pb2.SegmentRef(key=bytes(32), segment=5, owner_boot_token=owner, generation=1),
        timeout_ns=10**9,
        reason="hot",
    )


def test_command_goes_to_its_holder_and_its_end_to_everyone(
    calls: tuple[NvmeIo, pb_grpc.NvmeIoServiceStub],
) -> None:
    server, stub = calls
    with linked(server) as link:
        everyone = stub.WatchMoves(pb.WatchMovesRequest(after_event=0), timeout=60)
        holder = stub.WatchMoves(pb.WatchMovesRequest(client_id=link.holder, after_event=0), timeout=60)
        sent = pb.PromoteRequest(commands=[command(1, link)])
        assert stub.Promote(sent).outcomes == stub.Promote(sent).outcomes
        event = next(holder)
        assert event.command.source == types_pb2.TIER_NVME
        done = commands_pb2.CommandOutcome(id=event.command.command.id, outcome=commands_pb2.OUTCOME_DONE)
        report = pb.ReportOutcomeRequest(client_id=link.holder, moves=[pb.MoveEnded(outcome=done, reason="hot")])
        stub.ReportOutcome(report)
        stub.ReportOutcome(report)
        assert next(everyone).move.outcome == next(holder).move.outcome == done
        assert stub.Promote(sent).outcomes == [done]
        for stream in (everyone, holder):
            stream.cancel()
    with pytest.raises(RequestError):
        stub.Demote(pb.DemoteRequest(commands=[commands_pb2.Command()]))
    assert server.end() == 0
    assert "Traceback" not in server.log


def stored_bytes(stub: pb_grpc.NvmeIoServiceStub) -> int:
    tiers = stub.GetStatistics(pb.GetStatisticsRequest()).tiers
    return sum(each.used_bytes for each in tiers if each.tier == types_pb2.TIER_NVME)


def test_what_was_kept_belongs_to_one_client_and_goes_when_it_is_nobodys(tmp_path: Path) -> None:
    with nvme_io(tmp_path, **settings_for(LOAD_LAYOUT, host_blocks=128, units=4)) as server:
        with PeerChannel(server.address) as channel, contextlib.ExitStack() as stack:
            stub = pb_grpc.NvmeIoServiceStub(channel.grpc)
            client = stack.enter_context(load(server.folder, 1))
            client.rounds(10)
            (first,) = stub.GetStatistics(pb.GetStatisticsRequest()).clients
            regions = RegionClient(server.regions, name="reader", boot_token=b"r" * 16)
            stack.callback(regions.close)
            regions.connect(20 * NS_PER_S)
            assert regions.holder is not None
            NvmeIoClient(channel, name="reader", boot_token=b"r" * 16).register(regions.holder, None)
            with pytest.raises(AccessDeniedError):
                stub.ListStored(pb.ListStoredRequest(client_id=regions.holder, page_size=1))
            page = stub.ListStored(pb.ListStoredRequest(client_id=first.client_id))
            assert not page.next_page_token
            with pytest.raises(RequestError):
                stub.ListStored(pb.ListStoredRequest(client_id=first.client_id, page_token="ab-1"))
        with PeerChannel(server.address) as channel:
            stub = pb_grpc.NvmeIoServiceStub(channel.grpc)
            eventually(lambda: not stub.GetStatistics(pb.GetStatisticsRequest()).clients, "a client is still there")
            for number in itertools.count(2):
                if stored_bytes(stub) > 0:
                    break
                # It was killed between two segments.
                with load(server.folder, number) as client:
                    client.rounds(number)
                eventually(lambda: not stub.GetStatistics(pb.GetStatisticsRequest()).clients, "a client is still there")
            given = stub.EvictCold(pb.EvictColdRequest())
            assert given.segments > 0
            assert given.size_bytes % LOAD_LAYOUT.block_bytes == 0
            assert stub.EvictCold(pb.EvictColdRequest()).segments == 0
            used = {each.tier: each.used_bytes for each in stub.GetStatistics(pb.GetStatisticsRequest()).tiers}
            assert used == {types_pb2.TIER_HOST: 0, types_pb2.TIER_NVME: 0}
        assert server.end() == 0
        assert "Traceback" not in server.log


def test_it_stands_back_from_those_who_compute(tmp_path: Path) -> None:
    with nvme_io(tmp_path, **settings_for(), NICE="7") as server:
        threads = [int(each.name) for each in Path(f"/proc/{server.process.pid}/task").iterdir()]
        assert os.getpriority(os.PRIO_PROCESS, server.process.pid) == 7
        assert 7 in {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads if thread != server.process.pid}


def test_every_metric_of_the_store_is_on_its_page(tmp_path: Path) -> None:
    port = free_port()

    def names_on_page() -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return {line.split("{")[0].split(" ")[0] for line in lines if line and not line.startswith("#")}

    wanted = {name for name, metric in METRICS.items() if Service.NVME_IO in metric.services}
    # What a machine may lack, and what happens only with tracing.
    wanted -= {"h3_disk_read_wait_seconds", "h3_trace_spans_total"}
    with nvme_io(tmp_path, **settings_for(), METRICS__PORT=str(port)) as server, linked(server):
        eventually(lambda: wanted <= names_on_page(), f"lacking: {sorted(wanted - names_on_page())}")
