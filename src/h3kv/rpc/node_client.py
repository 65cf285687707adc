"""What people ask a running node: how it is, and to give up what is cold."""

from __future__ import annotations

from dataclasses import dataclass

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as gpu
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as gpu_grpc
from h3kv.core.units import NS_PER_S
from h3kv.rpc.client import PeerChannel


@dataclass(frozen=True, slots=True)
class Evicted:
    """What was given up."""

    segments: int
    size_bytes: int


def evict_cold(
    channel: PeerChannel, *, idle_ns: int = 0, size_bytes: int | None = None, timeout_ns: int = 60 * NS_PER_S
) -> Evicted:
    """Make `gpu_worker` give up room in DEVICE and HOST that no running sequence needs, longest unused first.

    Args:
        channel: to it.
        idle_ns: only what was not used for so long.
        size_bytes: at most so many; None: all.
        timeout_ns: for the answer: what the cold store lacks is written first.

    Raises:
        PeerError: it cannot be reached, or did not answer in time.
    """
    request = gpu.EvictColdRequest(idle_ns=idle_ns, size_bytes=size_bytes)
    response = gpu_grpc.GpuWorkerServiceStub(channel.grpc).EvictCold(request, timeout=timeout_ns / NS_PER_S)
    return Evicted(response.segments, response.size_bytes)
