"""Between gRPC and the worker."""

from __future__ import annotations

from typing import Final

import grpc

from h3kv.api.ann_offload.v1 import ann_offload_service_pb2 as pb
from h3kv.api.ann_offload.v1 import ann_offload_service_pb2_grpc as pb_grpc
from h3kv.api.common.v1 import statistics_pb2, types_pb2
from h3kv.core.units import NS_PER_S
from h3kv.rpc.reports import ProcessName
from services.ann_offload.worker import OffloadWorker, Phase

_PHASES: Final = {
    Phase.STARTING: pb.PHASE_STARTING,
    Phase.SERVING: pb.PHASE_SERVING,
    Phase.DRAINED: pb.PHASE_DRAINED,
}
_DRAIN_S_MAX: Final = 3_600.0


class AnnOffloadServicer(pb_grpc.AnnOffloadServiceServicer):
    """Thread-safe.

    Args:
        identity: of this process.
        worker: whose state is told.
    """

    def __init__(self, identity: ProcessName, worker: OffloadWorker) -> None:
        self._identity = identity
        self._worker = worker

    def GetStatistics(
        self, request: pb.GetStatisticsRequest, context: grpc.ServicerContext
    ) -> pb.GetStatisticsResponse:
        """See the protocol."""
        del request, context
        statistics = self._worker.statistics()
        depth, depth_max = self._worker.mailbox_depth()
        return pb.GetStatisticsResponse(
            server=types_pb2.ProcessIdentity(name=self._identity.name, boot_token=self._identity.boot_token),
            phase=_PHASES[self._worker.phase],
            threads=self._worker.config.threads,
            units_in_flight=statistics.in_flight,
            units_total=statistics.units,
            units_refused_total=statistics.refused,
            read_bytes_total=statistics.read_bytes,
            busy_ns_total=statistics.busy_ns,
            mailbox=statistics_pb2.MailboxStatistics(depth=depth, depth_max=depth_max, requests_total=statistics.jobs),
        )

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        """See the protocol."""
        del request
        left_s = min(context.time_remaining(), _DRAIN_S_MAX)
        return pb.DrainResponse(units_left=self._worker.drain(timeout_ns=round(left_s * NS_PER_S)))
