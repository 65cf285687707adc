"""Puts gpu_worker together, serves until it is told to end, and takes it apart again.

start   settings -> telemetry -> socket -> model -> node -> crew -> engine's thread -> health says SERVING
end     NOT_SERVING -> no new requests -> answers end, within a bound -> socket -> crew -> node -> telemetry
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import replace
from typing import Final

from h3kv.api.common.v1 import types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as pb_grpc
from h3kv.attention.native import DTYPES
from h3kv.composition import load, open_node
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.units import NS_PER_S
from h3kv.directory.quotas_factory import open_quotas
from h3kv.engine.clock import MonotonicClock
from h3kv.memory.work_area import PURPOSE as WORK
from h3kv.models.loader import LoadedModel
from h3kv.node import Node
from h3kv.rpc.convert import BOOT_TOKEN_BYTES
from h3kv.rpc.reports import ProcessName
from h3kv.rpc.server import RpcServer
from h3kv.rpc.telemetry_reporter import open_reporter
from h3kv.service_process import StopSignal, open_process
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from h3kv.telemetry.metric import Service
from h3kv.telemetry.process_telemetry import ProcessTelemetry
from services.gpu_worker.admissions import RequestShares
from services.gpu_worker.control import Control
from services.gpu_worker.crew import Crew, open_crew
from services.gpu_worker.documents_calls import KeptDocuments
from services.gpu_worker.documents_opening import open_documents
from services.gpu_worker.loop import EngineLoop
from services.gpu_worker.messages import PromptReader
from services.gpu_worker.metrics import Observer, WorkerRecorder, prepare
from services.gpu_worker.quota import TokenQuota
from services.gpu_worker.servicer import GpuWorkerServicer, Served
from services.gpu_worker.settings import Settings
from services.gpu_worker.tiers import RemoteTierOpener

CALLS_BESIDE_ANSWERS: Final = 16
"""Short calls that find a thread while every request has one."""

CALLS_END_NS: Final = NS_PER_S
"""For calls to end whose answers have ended."""

_log = logging.getLogger(__name__)


def serve() -> None:
    """Run the process to its end.

    Raises:
        H3Error: it cannot start; the message says what to do.
        BaseException: what broke the engine.
    """
    with open_process(Service.GPU_WORKER, Settings) as process, contextlib.ExitStack() as stack:
        settings, telemetry = process.settings, process.telemetry
        log_event(_log, "metrics", {spans.PEER: settings.instance, spans.ADDRESS: telemetry.server.url})
        prepare(telemetry.metrics)
        _run(settings, process.stop, telemetry, stack)
    if process.stop.failure is not None:
        raise process.stop.failure


def _run(settings: Settings, stop: StopSignal, telemetry: ProcessTelemetry, stack: contextlib.ExitStack) -> None:
    server = _server(settings)
    recorder, clock = WorkerRecorder(telemetry.metrics), MonotonicClock()
    log_event(_log, "loading", {spans.PEER: settings.instance})
    model = load(settings.node, on_progress=lambda *_: stop.check()).model
    stop.check()
    boot_token = secrets.token_bytes(BOOT_TOKEN_BYTES)
    remote = _remote_tiers(settings, model, boot_token, stack)
    node = stack.enter_context(open_node(model, settings.node, clock, telemetry=recorder, open_stores=remote))
    crew = _crew(settings, remote, stop, stack)
    if crew is not None:
        node.pool.attend_with(crew.spread)
    observer = Observer(recorder, node)
    control = _control(settings, node, remote, telemetry=telemetry, boot_token=boot_token, stop=stop, stack=stack)

    def after_step(held: Node) -> None:
        observer.look(held, clock.now_ns())
        if control is not None:
            control.look(observer.snapshot)
        if crew is not None:
            crew.look(recorder, clock.now_ns())
        if remote is not None:
            remote.tick()

    def trace(context: bytes) -> None:
        if crew is not None:
            crew.spread.trace(context)
        if remote is not None:
            remote.trace(context)

    loop = EngineLoop(
        node,
        tracer=telemetry.tracer,
        requests_max=settings.requests_max,
        name=settings.instance,
        on_failure=stop.stop,
        on_step=after_step,
        on_trace=trace,
    )
    documents = open_documents(settings.document_config, node, loop, telemetry.metrics)
    counters = open_quotas(settings.directory, clock)
    stack.callback(counters.close)
    served = Served(
        identity=types_pb2.ProcessIdentity(name=settings.instance, boot_token=boot_token),
        model=describe_model(settings, model, node),
        prompts=_prompt_reader(settings, node, documents),
        documents=documents,
        quota=TokenQuota(counters, telemetry.metrics),
        shares=RequestShares(settings.requests_max, name=settings.instance),
        loop=loop,
        observer=observer,
        tracer=telemetry.tracer,
        device=str(model.weights.embedding_VI.device),
        clock=clock,
    )
    _start(server, served, node, stop=stop, stack=stack)
    if control is not None:
        control.start(loop.post)
        stack.callback(control.stop)
    _answer(settings, server, served, stop)


def _server(settings: Settings) -> RpcServer:
    """With a thread for each request, and for what holds the room of two or more that are admitted together."""
    threads = settings.requests_max * 3 // 2 + CALLS_BESIDE_ANSWERS
    return RpcServer(replace(settings.server(), threads=threads, calls_max=threads + CALLS_BESIDE_ANSWERS))


def _prompt_reader(settings: Settings, node: Node, documents: KeptDocuments) -> PromptReader:
    """Answers whose requests name no length end with the context, unless settings say otherwise.

    Under retrieval room for all of an answer is reserved at its begin: then the default of the settings holds.
    """
    is_told = "max_new_tokens" in settings.engine.model_fields_set or settings.attention.mode == "retrieval"
    room_tokens = min(node.config.max_context, node.pool.capacity.blocks * BLOCK_TOKENS)
    length = settings.engine.max_new_tokens if is_told else None
    return PromptReader(node.tokenizer, length, documents.documents, room_tokens=room_tokens)


def _start(server: RpcServer, served: Served, node: Node, *, stop: StopSignal, stack: contextlib.ExitStack) -> None:
    """Begin; the stack ends all of it the other way round, and checks what is left behind."""

    def end_calls() -> None:
        # One that cuts a long text into tokens, or compiles a grammar, has its share until it comes to its end.
        if server.stop(grace_ns=CALLS_END_NS) and stop.failure is None:
            served.shares.check_integrity()

    def check() -> None:
        if stop.failure is None:
            node.check_integrity()
            served.documents.check_integrity()

    server.add(pb_grpc.add_GpuWorkerServiceServicer_to_server, GpuWorkerServicer(served), pb.DESCRIPTOR)
    server.start()
    stack.callback(end_calls)
    stack.callback(check)
    served.loop.start()
    stack.callback(served.loop.stop)
    served.documents.start()
    stack.callback(served.documents.stop)


def _answer(settings: Settings, server: RpcServer, served: Served, stop: StopSignal) -> None:
    """Take requests until this process is told to end, then no more, and wait within a bound for those that run."""
    server.announce(is_serving=True)
    log_event(_log, "serving", {spans.PEER: settings.instance, spans.ADDRESS: str(server.address)})
    stop.wait()
    server.announce(is_serving=False)
    log_event(_log, "draining", {spans.PEER: settings.instance})
    # What is being read is read again by the next process: no answer waits for that.
    served.documents.end()
    served.loop.drain(settings.drain_ns)
    server.stop(grace_ns=CALLS_END_NS)


def _remote_tiers(
    settings: Settings, model: LoadedModel, boot_token: bytes, stack: contextlib.ExitStack
) -> RemoteTierOpener | None:
    """What opens the tiers of `nvme_io`; None where they are this process's own."""
    owner = settings.owner
    if owner is None:
        return None
    return RemoteTierOpener(
        settings.node,
        owner,
        name=settings.instance,
        boot_token=boot_token,
        device=model.weights.embedding_VI.device,
        closing=stack,
    )


def _crew(
    settings: Settings, remote: RemoteTierOpener | None, stop: StopSignal, stack: contextlib.ExitStack
) -> Crew | None:
    """Who helps with attention; None where nobody may."""
    path = settings.crew_path
    region = None if remote is None else remote.region(WORK)
    if path is None or region is None:
        return None
    opened = open_crew(
        region, path, group=settings.socket_group, on_failure=stop.stop, is_sound=lambda: stop.failure is None
    )
    crew = stack.enter_context(opened)
    log_event(_log, "helpers_awaited", {spans.PEER: settings.instance, spans.ADDRESS: str(path)})
    return crew


def _control(
    settings: Settings,
    node: Node,
    remote: RemoteTierOpener | None,
    *,
    telemetry: ProcessTelemetry,
    boot_token: bytes,
    stop: StopSignal,
    stack: contextlib.ExitStack,
) -> Control | None:
    """What others may command; None where the tiers are this process's own."""
    if remote is None:
        return None
    opened = open_reporter(
        settings.controller,
        ProcessName(settings.instance, boot_token),
        credentials=settings.credentials.read(),
        telemetry=telemetry.metrics,
    )
    return Control(
        node.pool,
        remote.link,
        reporter=stack.enter_context(opened),
        boot_token=boot_token,
        clock=MonotonicClock(),
        on_failure=stop.stop,
    )


def describe_model(settings: Settings, model: LoadedModel, node: Node) -> pb.GetModelResponse:
    """What `GetModel` answers for the life of the process."""
    config, layout = model.config, node.pool.layout
    return pb.GetModelResponse(
        name=settings.public_model_name,
        fingerprint=node.fingerprint,
        context_tokens=config.max_context,
        vocabulary_size=config.vocabulary_size,
        layers=config.layers,
        query_heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=DTYPES[model.weights.embedding_VI.dtype].value,
        encoding=settings.attention.encoding,
        attention=settings.attention.mode,
        token_bytes=layout.token_bytes,
        has_chat_template=model.tokenizer.chat_template is not None,
    )
