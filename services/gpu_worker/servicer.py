"""GpuWorkerService: messages in, messages out; what happens between lies in the loop."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from h3kv.api.common.v1 import types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as pb_grpc
from h3kv.core.errors import H3Error, RequestError
from h3kv.core.ports import Clock
from h3kv.core.types import Tier
from h3kv.core.units import NS_PER_MS, NS_PER_S
from h3kv.engine.events import Finished, TokenGenerated
from h3kv.engine.request import Request
from h3kv.engine.stopping import FinishReason
from h3kv.node import Node
from h3kv.rpc.call_context import CallContext, read_context
from h3kv.rpc.convert import statistics_message
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.trace_context import parse_traceparent
from h3kv.telemetry.tracing import Attributes, Span, Tracer
from services.gpu_worker.admissions import Counted, OpenAdmissions, RequestShares, Together
from services.gpu_worker.documents_calls import DocumentCalls, KeptDocuments
from services.gpu_worker.eviction import Evicted, EvictionBounds, evict_cold
from services.gpu_worker.loop import Answer, EngineLoop
from services.gpu_worker.messages import PromptReader, check_admit, event_message, tier_tokens, tokens_per_minute
from services.gpu_worker.metrics import Observer
from services.gpu_worker.quota import TokenQuota

MARGIN_NS: Final = 50 * NS_PER_MS
"""Left of a call's time for its answer to travel."""

WRITING_NS_MAX: Final = 2 * NS_PER_S
"""How long eviction may keep requests waiting while it writes, and as long again for a store that does not answer."""

CACHED: Final = {
    Tier.DEVICE: spans.CACHED_DEVICE_TOKENS,
    Tier.HOST: spans.CACHED_HOST_TOKENS,
    Tier.NVME: spans.CACHED_NVME_TOKENS,
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What the calls are answered from."""

    identity: types_pb2.ProcessIdentity
    model: pb.GetModelResponse
    prompts: PromptReader
    documents: KeptDocuments
    quota: TokenQuota
    shares: RequestShares
    loop: EngineLoop
    observer: Observer
    tracer: Tracer
    device: str
    """As torch names it."""
    clock: Clock
    """Of the node."""
    admissions: OpenAdmissions = field(default_factory=OpenAdmissions)


class GpuWorkerServicer(pb_grpc.GpuWorkerServiceServicer):
    """Thread-safe, as its parts are."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._documents = DocumentCalls(served.documents, served.quota)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        """See the protocol."""
        call = read_context(context.invocation_metadata())
        named = {spans.REQUEST_ID: call.request_id}
        parent = parse_traceparent(call.traceparent)
        with (
            self._served.tracer.begin(spans.GENERATE, parent=parent, attributes=named) as span,
            # Open before its documents are looked up: one that is deleted meanwhile is erased when this has ended.
            self._served.documents.prompts.opening() as note,
            self._admitted(request) as (asked, admitted),
        ):
            note(asked)
            span.set({spans.PROMPT_TOKENS: len(asked.prompt), spans.GENERATED_TOKENS: 0})
            answer = self._served.loop.submit(asked, trace=span.context)
            try:
                if not context.add_callback(answer.cancel):
                    return  # The caller had gone before.
                yield from self._events(answer, span, call, admitted)
            finally:
                answer.cancel()

    def Admit(self, request: pb.AdmitRequest, context: grpc.ServicerContext) -> Iterator[pb.AdmitResponse]:
        """See the protocol."""
        check_admit(request)
        count = len(request.prompts) * request.answers
        at_a_time = self._served.shares.answers_at_a_time(count)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._served.shares.taking(request.tenant.name, at_a_time))
            self._check_quota(request.tenant, request.prompts)
            notes = [stack.enter_context(self._served.documents.prompts.opening()) for _ in request.prompts]
            prompts = [tuple(self._served.prompts.read_prompt(prompt)) for prompt in request.prompts]
            for note, prompt in zip(notes, prompts, strict=True):
                note(Request(prompt=prompt, tenant=request.tenant.salt))
            together = self._together(request, prompts, count)
            name = stack.enter_context(self._served.admissions.opening(together))
            ended = threading.Event()
            if context.add_callback(ended.set):
                yield pb.AdmitResponse(id=name, answers_at_a_time=at_a_time)
                ended.wait()

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        """See the protocol."""
        del context
        return pb.TokenizeResponse(ids=self._served.prompts.read_prompt(request))

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
        """See the protocol."""
        del request, context
        return self._served.model

    def GetStatistics(
        self, request: pb.GetStatisticsRequest, context: grpc.ServicerContext
    ) -> pb.GetStatisticsResponse:
        """See the protocol."""
        del request, context
        now = self._served.observer.snapshot
        return pb.GetStatisticsResponse(
            server=self._served.identity,
            tiers=[
                statistics_message(statistics, pinned_bytes=now.pinned_bytes.get(tier, 0))
                for tier, statistics in now.tiers.items()
            ],
            requests_running=now.requests_running,
            requests_waiting=now.requests_waiting,
            requests_total=now.requests_total,
            prefill_tokens_total=now.prefill_tokens_total,
            cached_tokens_total=tier_tokens(now.cached_tokens_total),
            decode_tokens_total=now.decode_tokens_total,
            segments_cached=now.segments_cached,
            cold_kv_ratio=now.cold_kv_ratio,
            recall=now.recall,
            units_taken_back_total=now.units_taken_back_total,
        )

    def Promote(self, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.PromoteResponse:
        """See the protocol. No device holds whole segments in this version."""
        del request, context
        raise self._no_device_segments("Promote")

    def Demote(self, request: pb.DemoteRequest, context: grpc.ServicerContext) -> pb.DemoteResponse:
        """See the protocol. No device holds whole segments in this version."""
        del request, context
        raise self._no_device_segments("Demote")

    def EvictCold(self, request: pb.EvictColdRequest, context: grpc.ServicerContext) -> pb.EvictColdResponse:
        """See the protocol."""
        size_bytes = request.size_bytes if request.HasField("size_bytes") else None
        timeout_ns = max(round(context.time_remaining() * NS_PER_S) - MARGIN_NS, MARGIN_NS)

        def evict(node: Node) -> Evicted:
            bounds = EvictionBounds(self._served.clock.now_ns(), request.idle_ns, size_bytes)
            return evict_cold(node.pool, bounds, timeout_ns=min(timeout_ns // 2, WRITING_NS_MAX))

        evicted = self._served.loop.call(evict, timeout_ns=timeout_ns)
        return pb.EvictColdResponse(segments=evicted.segments, size_bytes=evicted.size_bytes)

    def CreateDocument(
        self, request: pb.CreateDocumentRequest, context: grpc.ServicerContext
    ) -> pb.CreateDocumentResponse:
        """See the protocol."""
        del context
        return self._documents.create(request)

    def GetDocument(self, request: pb.GetDocumentRequest, context: grpc.ServicerContext) -> pb.GetDocumentResponse:
        """See the protocol."""
        del context
        return self._documents.get(request)

    def ListDocuments(
        self, request: pb.ListDocumentsRequest, context: grpc.ServicerContext
    ) -> pb.ListDocumentsResponse:
        """See the protocol."""
        del context
        return self._documents.list_all(request)

    def UpdateDocument(
        self, request: pb.UpdateDocumentRequest, context: grpc.ServicerContext
    ) -> pb.UpdateDocumentResponse:
        """See the protocol."""
        del context
        return self._documents.update(request)

    def DeleteDocument(
        self, request: pb.DeleteDocumentRequest, context: grpc.ServicerContext
    ) -> pb.DeleteDocumentResponse:
        """See the protocol."""
        return self._documents.delete(request, time_s=context.time_remaining())

    @contextlib.contextmanager
    def _admitted(self, message: pb.GenerateRequest) -> Iterator[tuple[Request, Counted]]:
        """A request that may run, and what counts its tokens.

        Those that did not come are given back in the end, or all where it never began.
        """
        tenant, prompts = message.tenant, self._served.prompts
        if message.WhichOneof("prompt") == "admitted":
            together = self._served.admissions.find(message.admitted.id, (tenant.name, tenant.salt))
            prompt = together.prompt(message.admitted.prompt)
            with together.answering() as counted:
                yield prompts.read_request(message, prompt=prompt, length_max=together.length), counted
            return
        with self._served.shares.taking(tenant.name):
            self._check_quota(tenant, [message])
            asked = prompts.read_request(message)
            admission = self._served.quota.admit(
                tenant.name,
                tokens_per_minute(tenant),
                prompt_tokens=len(asked.prompt),
                answer_tokens_max=asked.sampling.max_new_tokens,
            )
            counted = Counted()
            try:
                yield asked, counted
            finally:
                if counted.has_begun:
                    admission.settle(counted.tokens)
                else:
                    admission.cancel()

    def _check_quota(self, tenant: pb.Tenant, prompts: Sequence[pb.GenerateRequest]) -> None:
        """Refuse long prompts that their tenant has no tokens for, before they are cut. Raises QuotaError."""
        least = sum(map(self._served.prompts.least_tokens, prompts))
        if least:
            per_minute = tokens_per_minute(tenant)
            self._served.quota.admit(tenant.name, per_minute, prompt_tokens=least, answer_tokens_max=1).cancel()

    def _together(self, request: pb.AdmitRequest, prompts: list[tuple[int, ...]], count: int) -> Together:
        """Count several answers. Raises QuotaError."""
        tenant, tokens = request.tenant, sum(map(len, prompts))
        length = (
            request.max_new_tokens
            if request.HasField("max_new_tokens")
            else self._served.prompts.default_length(tokens, tenant, answers=count)
        )
        admission = self._served.quota.admit(
            tenant.name, tokens_per_minute(tenant), prompt_tokens=tokens, answer_tokens_max=length * count
        )
        named = (tenant.name, tenant.salt)
        return Together(named, prompts, answers=count, length=length, admission=admission)

    def _events(self, answer: Answer, span: Span, call: CallContext, counted: Counted) -> Iterator[pb.GenerateResponse]:
        outcome: Attributes = {spans.REASON: FinishReason.CANCELLED.value}
        try:
            for event in answer:
                counted.has_begun = True
                counted.tokens += isinstance(event, TokenGenerated)
                if isinstance(event, Finished):
                    outcome = outcome_of(event)
                yield event_message(event, self._served.prompts.tokenizer.token_bytes)
        except H3Error as error:
            outcome = {spans.REASON: error.reason}
            raise
        finally:
            span.set(outcome)
            log_event(_log, "answer_ended", {spans.REQUEST_ID: call.request_id, **outcome}, trace=span.context)

    def _no_device_segments(self, method: str) -> RequestError:
        return RequestError(
            f"{method}: the device of this node is {self._served.device}, which holds no whole segments beside HOST: "
            "turn moves between HOST and DEVICE off in the controller"
        )


def outcome_of(event: Finished) -> Attributes:
    """How an answer ended, for its span and its log line."""
    statistics = event.statistics
    found = {CACHED[tier]: tokens for tier, tokens in statistics.cached_tokens.items()}
    return {
        spans.PROMPT_TOKENS: statistics.prompt_tokens,
        spans.GENERATED_TOKENS: statistics.generated_tokens,
        spans.REASON: event.reason.value,
        **found,
    }
