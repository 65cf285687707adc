"""gpu_worker's contract over a real socket, with answers that a test writes; and the gateway as a process before it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tests.integration.service_rig import Process, UnixConnection, wait_for

from h3kv.api.common.v1 import types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as pb_grpc
from h3kv.core.errors import DocumentNotFoundError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.server import RpcServer, ServerConfig

MODEL = "org/scripted"
CONTEXT_TOKENS = 1000
PROMPT_TOKENS = 70
CACHED_TOKENS = 64

Generation = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


def token(text: str, *, id: int = 1, likely: pb.Sampling | None = None) -> pb.GenerateResponse:
    """One more token; with logprobs where they were asked for."""
    logprobs = None
    if likely is not None and likely.HasField("logprobs"):
        entry = pb.TokenLogprob(id=id, logprob=-0.5, text=text.encode())
        other = pb.TokenLogprob(id=0, logprob=-math.inf, text=b"\xe2")
        logprobs = pb.TokenLogprobs(chosen=entry, top=[entry, other][: likely.logprobs])
    return pb.GenerateResponse(token=pb.TokenGenerated(id=id, text=text, logprobs=logprobs))


def finished(generated: int, *, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> pb.GenerateResponse:
    usage = pb.Usage(
        prompt_tokens=PROMPT_TOKENS,
        cached_tokens=[pb.TierTokens(tier=types_pb2.TIER_HOST, tokens=CACHED_TOKENS)],
        generated_tokens=generated,
        time_to_first_token_ns=2_000_000,
        attended_fraction=0.25,
        recomputed_tokens=3,
    )
    return pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=usage))


def saying(*texts: str, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> Generation:
    """Answers with these texts, a token each."""

    def generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        progress = pb.PrefillProgress(done_tokens=PROMPT_TOKENS, prompt_tokens=PROMPT_TOKENS)
        yield pb.GenerateResponse(progress=progress)
        for place, text in enumerate(texts):
            yield token(text, id=place, likely=request.sampling)
        yield finished(len(texts), reason=reason)

    return generate


@dataclass
class ScriptedWorker(pb_grpc.GpuWorkerServiceServicer):
    """Answers as it is told, keeps documents in a dictionary, and remembers what it was asked."""

    generate: Generation = field(default_factory=lambda: saying("Hel", "lo"))
    asked: list[pb.GenerateRequest] = field(default_factory=list)
    counted: list[pb.TokenizeRequest] = field(default_factory=list)
    documents: dict[tuple[str, str], pb.Document] = field(default_factory=dict)
    models_asked: int = 0
    model_failure: Exception | None = None
    """What GetModel raises."""
    admitted: list[pb.AdmitRequest] = field(default_factory=list)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    failure: Exception | None = None
    """What all calls but GetModel raise."""

    def answer(self, generation: Generation) -> None:
        self.generate, self.failure = generation, None
        self.asked.clear()

    def Admit(self, request: pb.AdmitRequest, context: grpc.ServicerContext) -> Iterator[pb.AdmitResponse]:
        self._fail()
        self.admitted.append(request)
        ended = threading.Event()
        if context.add_callback(ended.set):
            yield pb.AdmitResponse(id=b"%d" % (len(self.admitted) - 1), answers_at_a_time=16)
            ended.wait()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.HasField("admitted"):
            request.text = self.admitted[int(request.admitted.id)].prompts[request.admitted.prompt].text
        self.asked.append(request)
        self._fail()
        try:
            yield from self.generate(request, context)
        finally:
            self.ended.release()

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        self.counted.append(request)
        self._fail()
        return pb.TokenizeResponse(ids=list(request.text.encode()) or [7] * len(request.chat.messages))

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
        self.models_asked += 1
        if self.model_failure is not None:
            raise self.model_failure
        return pb.GetModelResponse(name=MODEL, context_tokens=CONTEXT_TOKENS)

    def CreateDocument(
        self, request: pb.CreateDocumentRequest, context: grpc.ServicerContext
    ) -> pb.CreateDocumentResponse:
        self._fail()
        made = pb.Document(
            id=f"doc_{len(self.documents):032x}",
            name=request.name,
            state=pb.DOCUMENT_STATE_READING,
            tokens=len(request.text),
            created_s=1_000,
            expires_s=1_000 + request.ttl_s if request.HasField("ttl_s") else None,
            is_pinned=request.is_pinned,
        )
        self.documents[request.tenant.name, made.id] = made
        return pb.CreateDocumentResponse(document=made)

    def GetDocument(self, request: pb.GetDocumentRequest, context: grpc.ServicerContext) -> pb.GetDocumentResponse:
        return pb.GetDocumentResponse(document=self._find(request.tenant.name, request.id))

    def ListDocuments(
        self, request: pb.ListDocumentsRequest, context: grpc.ServicerContext
    ) -> pb.ListDocumentsResponse:
        own = [document for (tenant, _), document in self.documents.items() if tenant == request.tenant.name]
        return pb.ListDocumentsResponse(documents=own)

    def UpdateDocument(
        self, request: pb.UpdateDocumentRequest, context: grpc.ServicerContext
    ) -> pb.UpdateDocumentResponse:
        found = self._find(request.tenant.name, request.id)
        if request.HasField("ttl_s"):
            found.expires_s = 2_000 + request.ttl_s
        if request.HasField("is_pinned"):
            found.is_pinned = request.is_pinned
        return pb.UpdateDocumentResponse(document=found)

    def DeleteDocument(
        self, request: pb.DeleteDocumentRequest, context: grpc.ServicerContext
    ) -> pb.DeleteDocumentResponse:
        del self.documents[request.tenant.name, self._find(request.tenant.name, request.id).id]
        return pb.DeleteDocumentResponse(is_erased=True)

    def _find(self, tenant: str, id: str) -> pb.Document:
        if (tenant, id) not in self.documents:
            raise DocumentNotFoundError(f"there is no document {id!r}: correct the id", document=id)
        return self.documents[tenant, id]

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass
class Front:
    """A gateway that serves, and the worker behind it."""

    worker: ScriptedWorker
    server: RpcServer
    gateway: Process
    socket: Path

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        with contextlib.closing(UnixConnection(self.socket)) as connection:
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, {**kind, **(headers or {})})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


@contextlib.contextmanager
def fronted(folder: Path, settings: Mapping[str, object] | None = None, *, threads: int = 16) -> Iterator[Front]:
    """A scripted worker and a gateway before it. The gateway is told to end at the end, and must end well."""
    address, door = UnixAddress(folder / "worker.sock"), folder / "http.sock"
    worker, server = ScriptedWorker(), RpcServer(ServerConfig(address, threads=threads))
    server.add(pb_grpc.add_GpuWorkerServiceServicer_to_server, worker, pb.DESCRIPTOR)
    server.start()
    server.announce(is_serving=True)
    told = {"WORKER": address, "HTTP__SOCKET": door, "METRICS__PORT": 0, **(settings or {})}
    gateway = Process("gateway", folder, told)
    front = Front(worker, server, gateway, door)

    def serves() -> bool:
        assert gateway.process.poll() is None, gateway.text()
        with contextlib.suppress(OSError):
            return front.ask("GET", "/health")[0] == 200
        return False

    try:
        wait_for(serves, what="the gateway to serve")
        yield front
        assert gateway.end() == 0, gateway.text()
    finally:
        gateway.process.kill()
        gateway.process.wait()
        assert server.stop(grace_ns=5 * NS_PER_S), "a handler hangs"
