"""gpu_worker, as the gateway sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as pb_grpc
from h3kv.core.errors import PeerUnavailableError
from h3kv.rpc.async_client import AsyncPeerChannel
from h3kv.rpc.call_context import CallContext


class Worker:
    """Calls over one channel.

    Args:
        channel: closed by its owner.
        answer_ns: how long one answer may take.
    """

    def __init__(self, channel: AsyncPeerChannel, *, answer_ns: int) -> None:
        self._channel = channel
        self._answer_ns = answer_ns
        self._stub: Any = channel.stub(pb_grpc.GpuWorkerServiceStub)

    async def model(self, context: CallContext) -> pb.GetModelResponse:
        """Which model is served now. Raises a PeerError where nobody answers."""
        found: pb.GetModelResponse = await self._channel.call(
            self._stub.GetModel, pb.GetModelRequest(), context=context
        )
        return found

    async def generate(self, request: pb.GenerateRequest, context: CallContext) -> AsyncGenerator[pb.GenerateResponse]:
        """Events of one answer to the last, `finished`. Closing the generator cancels it.

        Raises:
            H3Error: as gpu_worker raised it, or because it went away; then the request may be sent again.
        """
        stream = self._channel.stream(self._stub.Generate, request, context=context, timeout_ns=self._answer_ns)
        try:
            async for event in stream:
                yield event
                if event.HasField("finished"):
                    return
        finally:
            await stream.aclose()
        peer = str(self._channel.address)
        raise PeerUnavailableError(f"{peer} ended the answer before its end: send the request again", peer=peer)
