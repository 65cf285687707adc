"""gpu_worker, as the gateway sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as pb_grpc
from h3kv.core.errors import ModelNotFoundError, PeerUnavailableError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.async_client import AsyncPeerChannel
from h3kv.rpc.call_context import CallContext

TEXT_NS: Final = 60 * NS_PER_S
"""To make tokens of a text: the longest one takes a few seconds."""

ADMITTED_NS: Final = NS_PER_S
"""How long an admission outlasts its answers, so that each of them ends by its own deadline."""


class Worker:
    """Calls over one channel.

    Args:
        channel: closed by its owner.
        answer_ns: how long one request may take, with all of its answers.
    """

    def __init__(self, channel: AsyncPeerChannel, *, answer_ns: int) -> None:
        self._channel = channel
        self._answer_ns = answer_ns
        self._stub: Any = channel.stub(pb_grpc.GpuWorkerServiceStub)

    def deadline_ns(self) -> int:
        """When a request that comes now must be answered, by the monotonic clock."""
        return time.monotonic_ns() + self._answer_ns

    async def model(self, context: CallContext) -> pb.GetModelResponse:
        """Which model is served now. Raises a PeerError where nobody answers."""
        found: pb.GetModelResponse = await self._channel.call(
            self._stub.GetModel, pb.GetModelRequest(), context=context
        )
        return found

    async def require_model(self, name: str, context: CallContext) -> pb.GetModelResponse:
        """The model that is served, which must have this name.

        Raises:
            ModelNotFoundError: it has another.
            PeerError: nobody answers.
        """
        model = await self.model(context)
        if name != model.name:
            shown = name[:100]
            message = f"no model is called {shown!r} here: this node serves {model.name!r}"
            raise ModelNotFoundError(message, path=shown)
        return model

    async def tokenize(self, request: pb.TokenizeRequest, context: CallContext) -> list[int]:
        """Token numbers of a prompt. Raises H3Error."""
        found: pb.TokenizeResponse = await self._channel.call(
            self._stub.Tokenize, request, context=context, timeout_ns=min(self._answer_ns, TEXT_NS)
        )
        return list(found.ids)

    async def create_document(self, request: pb.CreateDocumentRequest, context: CallContext) -> pb.Document:
        """A new document, of which nothing was read yet. Raises H3Error."""
        found: pb.CreateDocumentResponse = await self._channel.call(
            self._stub.CreateDocument, request, context=context, timeout_ns=min(self._answer_ns, TEXT_NS)
        )
        return found.document

    async def document(self, request: pb.GetDocumentRequest, context: CallContext) -> pb.Document:
        """A document as it is now. Raises H3Error."""
        found: pb.GetDocumentResponse = await self._channel.call(self._stub.GetDocument, request, context=context)
        return found.document

    async def documents(self, request: pb.ListDocumentsRequest, context: CallContext) -> list[pb.Document]:
        """All documents of a tenant. Raises H3Error."""
        found: pb.ListDocumentsResponse = await self._channel.call(self._stub.ListDocuments, request, context=context)
        return list(found.documents)

    async def update_document(self, request: pb.UpdateDocumentRequest, context: CallContext) -> pb.Document:
        """A document after a change. Raises H3Error."""
        found: pb.UpdateDocumentResponse = await self._channel.call(self._stub.UpdateDocument, request, context=context)
        return found.document

    async def delete_document(self, request: pb.DeleteDocumentRequest, context: CallContext) -> bool:
        """Whether what a forgotten document left is erased already. Raises H3Error."""
        found: pb.DeleteDocumentResponse = await self._channel.call(self._stub.DeleteDocument, request, context=context)
        return found.is_erased

    @contextlib.asynccontextmanager
    async def admitted(
        self, request: pb.AdmitRequest, context: CallContext, *, deadline_ns: int
    ) -> AsyncIterator[pb.AdmitResponse]:
        """Prompts and room for their answers, which gpu_worker holds until this is left. Raises H3Error."""
        left_ns = deadline_ns - time.monotonic_ns() + ADMITTED_NS
        stream = self._channel.stream(self._stub.Admit, request, context=context, timeout_ns=left_ns)
        try:
            yield await anext(stream)
        finally:
            await stream.aclose()

    async def generate(
        self, request: pb.GenerateRequest, context: CallContext, *, deadline_ns: int
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Events of one answer to the last, `finished`. Closing the generator cancels it.

        Raises:
            PeerTimeoutError: the deadline came before.
            H3Error: as gpu_worker raised it, or because it went away; then the request may be sent again.
        """
        left_ns = deadline_ns - time.monotonic_ns()
        stream = self._channel.stream(self._stub.Generate, request, context=context, timeout_ns=left_ns)
        try:
            async for event in stream:
                yield event
                if event.HasField("finished"):
                    return
        finally:
            await stream.aclose()
        peer = str(self._channel.address)
        raise PeerUnavailableError(f"{peer} ended the answer before its end: send the request again", peer=peer)
