"""Between gRPC and the loop: parses, asks, answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import grpc

from h3kv.api.common.v1 import commands_pb2, statistics_pb2, types_pb2
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as pb
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as pb_grpc
from h3kv.core.errors import RequestError
from h3kv.core.limits import SEGMENT_BLOCKS_MAX
from h3kv.core.types import StoredSegment
from h3kv.core.units import NS_PER_S
from h3kv.memory.leases import HOLDER_MAX, OWNER
from h3kv.memory.region import Region, RegionKind
from h3kv.rpc.call_context import read_context
from h3kv.rpc.convert import PAGE_MAX, read_boot_token, read_name, slot_message, statistics_message
from h3kv.rpc.nvme_io_client import layout_message, read_layout, unit_runs
from h3kv.telemetry import spans
from h3kv.telemetry.trace_context import parse_traceparent
from h3kv.telemetry.tracing import Tracer
from h3kv.tiers.remote.channel import RING_BYTES
from h3kv.tiers.remote.link import HOST
from services.nvme_io.metrics import pins_of, tier_statistics, waiting_records
from services.nvme_io.node_loop import NodeLoop
from services.nvme_io.relay import Relay

UNITS_MAX: Final = 1 << 20
"""Named in one call."""
NVME: Final = types_pb2.TIER_NVME
HOST_TIER: Final = types_pb2.TIER_HOST

Answer = TypeVar("Answer")

_KINDS: Final = {
    RegionKind.DMA_HEAP: types_pb2.REGION_KIND_DMA_HEAP,
    RegionKind.HUGETLB: types_pb2.REGION_KIND_HUGETLB,
    RegionKind.MEMFD: types_pb2.REGION_KIND_MEMFD,
}


class NvmeIoServicer(pb_grpc.NvmeIoServiceServicer):
    """Thread-safe.

    Args:
        loop: answers.
        relay: of commands.
        identity: of this process.
        tracer: receives which commands were passed on.
    """

    def __init__(self, loop: NodeLoop, relay: Relay, identity: types_pb2.ProcessIdentity, tracer: Tracer) -> None:
        self._loop = loop
        self._relay = relay
        self._identity = identity
        self._tracer = tracer

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterResponse:
        """See the protocol."""
        read_name(request.client.name, field="client.name")
        token = read_boot_token(request.client.boot_token, field="client.boot_token")
        holder = _holder(request.client_id)
        layout = read_layout(request.layout) if request.HasField("layout") else None

        def act() -> pb.RegisterResponse:
            self._loop.register(holder, token, layout)
            return self._registration()

        return self._ask(context, act)

    def LeaseUnits(self, request: pb.LeaseUnitsRequest, context: grpc.ServicerContext) -> pb.LeaseUnitsResponse:
        """See the protocol."""
        holder = _holder(request.client_id)

        def act() -> pb.LeaseUnitsResponse:
            units = self._loop.lease(holder, request.lease_id, request.count)
            free = self._loop.regions.leases[HOST].free_units
            return pb.LeaseUnitsResponse(units=unit_runs(units), free_units=free)

        return self._ask(context, act)

    def ReturnUnits(self, request: pb.ReturnUnitsRequest, context: grpc.ServicerContext) -> pb.ReturnUnitsResponse:
        """See the protocol."""
        holder = _holder(request.client_id)
        if any(run.count < 1 for run in request.units) or sum(run.count for run in request.units) > UNITS_MAX:
            raise RequestError(f"a call returns 1 to {UNITS_MAX} units, in runs of at least one")
        units = [unit for run in request.units for unit in range(run.first_unit, run.first_unit + run.count)]
        return self._ask(context, lambda: pb.ReturnUnitsResponse(count=self._loop.give_back(holder, units)))

    def ListStored(self, request: pb.ListStoredRequest, context: grpc.ServicerContext) -> pb.ListStoredResponse:
        """See the protocol."""
        holder = _holder(request.client_id)
        first = self._first_of_page(request.page_token)
        size = min(request.page_size or PAGE_MAX, PAGE_MAX)
        found = self._ask(context, lambda: self._loop.list_stored(holder))
        page = found[first : first + size]
        token = f"{self._identity.boot_token.hex()}-{first + size}" if first + size < len(found) else ""
        return pb.ListStoredResponse(segments=[self._stored(each) for each in page], next_page_token=token)

    def GetStatistics(
        self, request: pb.GetStatisticsRequest, context: grpc.ServicerContext
    ) -> pb.GetStatisticsResponse:
        """See the protocol."""
        del request
        return self._ask(context, self._statistics)

    def Promote(self, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.PromoteResponse:
        """See the protocol."""
        return pb.PromoteResponse(outcomes=self._pass_on(list(request.commands), (NVME, HOST_TIER), context))

    def Demote(self, request: pb.DemoteRequest, context: grpc.ServicerContext) -> pb.DemoteResponse:
        """See the protocol."""
        return pb.DemoteResponse(outcomes=self._pass_on(list(request.commands), (HOST_TIER, NVME), context))

    def EvictCold(self, request: pb.EvictColdRequest, context: grpc.ServicerContext) -> pb.EvictColdResponse:
        """See the protocol."""
        size_bytes = request.size_bytes if request.HasField("size_bytes") else None
        segments, given = self._ask(context, lambda: self._loop.evict_cold(request.idle_ns, size_bytes))
        return pb.EvictColdResponse(segments=segments, size_bytes=given)

    def WatchMoves(
        self, request: pb.WatchMovesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchMovesResponse]:
        """See the protocol."""
        holder = _holder(request.client_id) if request.HasField("client_id") else None
        if holder is not None:
            number = holder
            self._ask(context, lambda: self._loop.known(number))
        after = request.after_event if request.HasField("after_event") else None
        return self._relay.watch(
            holder,
            after,
            is_over=lambda: not context.is_active(),
            deadline_ns=time.monotonic_ns() + _time_left_ns(context),
        )

    def ReportOutcome(
        self, request: pb.ReportOutcomeRequest, context: grpc.ServicerContext
    ) -> pb.ReportOutcomeResponse:
        """See the protocol."""
        holder = _holder(request.client_id)
        self._ask(context, lambda: self._loop.known(holder))
        self._relay.report(list(request.moves))
        return pb.ReportOutcomeResponse()

    def _ask(self, context: grpc.ServicerContext, act: Callable[[], Answer]) -> Answer:
        return self._loop.call(act, timeout_ns=_time_left_ns(context))

    def _pass_on(
        self,
        commands: list[commands_pb2.Command],
        way: tuple[types_pb2.Tier, types_pb2.Tier],
        context: grpc.ServicerContext,
    ) -> list[commands_pb2.CommandOutcome]:
        parent = parse_traceparent(read_context(context.invocation_metadata()).traceparent)
        with self._tracer.begin(spans.RELAY, parent=parent, attributes={spans.COMMANDS: len(commands)}):
            return self._relay.pass_on(commands, *way)

    def _registration(self) -> pb.RegisterResponse:
        loop = self._loop
        response = pb.RegisterResponse(
            server=self._identity,
            regions=[_region_message(region) for region in loop.regions.by_purpose.values()],
            host_units=loop.regions.host_units,
        )
        if loop.layout is not None:
            response.layout.CopyFrom(layout_message(loop.layout))
            index = loop.regions.by_purpose.get("index")
            response.index_slots = 0 if index is None else index.geometry.blocks // loop.layout.layers
        if loop.server is not None:
            response.cold_capacity_bytes = loop.server.store.statistics().capacity_bytes
        return response

    def _statistics(self) -> pb.GetStatisticsResponse:
        loop = self._loop
        leases = loop.regions.leases.get(HOST)
        response = pb.GetStatisticsResponse(
            server=self._identity,
            tiers=[statistics_message(each, pinned_bytes=0) for each in tier_statistics(loop)],
            regions=[_region_message(region) for region in loop.regions.by_purpose.values()],
            clients=[
                pb.ClientStatistics(
                    client_id=client.holder,
                    name=client.name,
                    leased_units=0 if leases is None else len(leases.units_of(client.holder)),
                    pins=pins_of(loop, client.holder),
                )
                for client in loop.clients.values()
            ],
            mailbox=statistics_pb2.MailboxStatistics(
                depth=waiting_records(loop),
                depth_max=RING_BYTES,
                requests_total=0 if loop.server is None else sum(map(loop.server.taken, loop.clients)),
            ),
        )
        io, engine = loop.io_statistics(), loop.engine
        if io is not None and engine is not None and loop.server is not None:
            response.io.CopyFrom(
                statistics_pb2.IoStatistics(
                    backend=engine.backend,
                    fallback_reason=engine.fallback_reason or "",
                    ring_depth=io.in_flight,
                    read_bytes_total=io.bytes_read,
                    written_bytes_total=io.bytes_written,
                    errors_total=io.failed,
                    retries_total=io.retries + io.short_transfers,
                    is_degraded=loop.server.store.is_degraded,
                )
            )
        return response

    def _stored(self, kept: StoredSegment) -> pb.StoredSegment:
        return pb.StoredSegment(
            segment=types_pb2.SegmentRef(
                key=kept.label.keys[0], segment=kept.segment, owner_boot_token=self._identity.boot_token
            ),
            keys=kept.label.keys[:SEGMENT_BLOCKS_MAX],
            parent=kept.label.parent,
            slots=[slot_message(handle) for handle in kept.handles_L],
        )

    def _first_of_page(self, token: str) -> int:
        if not token:
            return 0
        boot, _, first = token.partition("-")
        if boot != self._identity.boot_token.hex() or not (first.isascii() and first.isdigit() and len(first) <= 9):
            raise RequestError("the page token is of another start of nvme_io: list from the beginning")
        return int(first)


def _holder(client_id: int) -> int:
    if not OWNER < client_id <= HOLDER_MAX:
        raise RequestError(f"client_id = {client_id}: must be 2 to {HOLDER_MAX}, as the region socket gave it")
    return client_id


def _time_left_ns(context: grpc.ServicerContext) -> int:
    left_s = context.time_remaining()
    if left_s is None:
        raise RequestError("every call needs a deadline")
    return max(int(left_s * NS_PER_S), 0)


def _region_message(region: Region) -> types_pb2.RegionDescription:
    assert region.identity is not None
    return types_pb2.RegionDescription(
        region_id=region.identity.id,
        purpose=region.identity.purpose,
        kind=_KINDS[region.kind],
        address=region.address,
        size_bytes=region.size_bytes,
        boot_token=region.identity.boot_token,
    )
