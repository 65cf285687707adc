"""`h3 bench serve`: everything that is measured of a server over HTTP, part by part."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.bench import (
    serve_identical,
    serve_peers,
    serve_prefill,
    serve_replay,
    serve_soak,
    serve_tiering,
)
from h3kv.bench.contestants import has_module
from h3kv.bench.measure import Progress
from h3kv.bench.results import Results
from h3kv.bench.serve_client import Target, learn
from h3kv.bench.serve_http import parse_address
from h3kv.bench.serve_prompts import Prompts
from h3kv.bench.serve_servers import node_server, untiered_server, vllm_server, vllm_threads
from h3kv.bench.serve_trace import DEFAULT
from h3kv.bench.tiered import TieredSetting, store_folder
from h3kv.core.errors import ConfigError
from h3kv.core.types import DType
from h3kv.models.export import export_folder
from h3kv.models.loader import load_model
from h3kv.testing.tiny_models import SIZES, write_tiny_model

FOREIGN_VOCABULARY: Final = 256
"""Tokens that every model has: single bytes, or more."""
PEER_CAPS: Final = ("--device-kv", "2GiB", "--host-kv", "1GiB")
"""Of the node that runs against vLLM, which has as much on its device."""


class Part(enum.StrEnum):
    """What can be measured by itself."""

    CHAT8 = "chat8"
    """`serve.chat8.*`"""
    DOCQA = "docqa"
    """`serve.docqa.*`"""
    NOREUSE = "noreuse"
    """`serve.noreuse.*`"""
    IDENTICAL = "identical"
    """`serve.batch_identical`"""
    ITL = "itl"
    """`serve.itl_under_prefill`, `serve.prefill_kept`"""
    SOAK = "soak"
    """`serve.soak.*`"""
    TURNS = "turns"
    """`serve.turns.*`"""
    TRACE = "trace"
    """`serve.trace.*`"""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line chose."""

    setting: TieredSetting
    """Model, as the server at `url` calls it if there is one, and where stores are made."""
    peer_python: str | None
    url: str | None
    """Of a server that runs already; None: nodes are started."""
    key: str | None
    """That the server at `url` asks for."""
    trace: Path | None
    soak_requests: int | None
    threads: int | None
    """Of nodes that are started; None: their own default."""
    quick: bool
    parts: Collection[Part]
    """Nothing: all; of a server by its URL those that need no node of ours."""

    @property
    def progress(self) -> Progress:
        """Who hears how far it is."""
        return self.setting.progress

    def flags(self, flags: Collection[str], *, store: Path | None = None) -> list[str]:
        """Those of `h3 up` for one node: caps and the like, its store, its threads."""
        placed = [] if store is None else ["--store", str(store)]
        return [*flags, *placed, *([] if self.threads is None else ["--threads", str(self.threads)])]


OF_NODES: Final = frozenset({Part.NOREUSE})
"""Parts that compare two nodes with different settings."""


def parts_of(names: Collection[str]) -> list[Part]:
    """Parts by their names.

    Raises:
        ConfigError: there is no such part.
    """
    strange = sorted(set(names) - set(Part))
    if strange:
        raise ConfigError(f"part = {strange[0]}: must be one of {', '.join(Part)}", field="part")
    return [Part(name) for name in names]


def run(results: Results, request: Request) -> None:
    """Measure the parts, one after the other.

    Raises:
        ConfigError: something that was chosen does not fit, or `services` is not there.
        RequestError: a server refuses.
        PeerError: a server does not come up, or goes away.
    """
    wanted = [part for part in Part if not request.parts or part in request.parts]
    if request.url is not None:
        if request.parts and OF_NODES & set(wanted):
            raise ConfigError("part = noreuse: compares two nodes: leave --url out", field="part")
        wanted = [part for part in wanted if part not in OF_NODES]
    prompts = Prompts(FOREIGN_VOCABULARY if request.url is not None else _vocabulary(request))
    against_peers = [part for part in wanted if part not in _PARTS]
    if against_peers:
        _against_peers(results, request, prompts, against_peers)
    for part in wanted:
        if part in _PARTS:
            _PARTS[part](results, request, prompts)


def _against_peers(results: Results, request: Request, prompts: Prompts, parts: Collection[Part]) -> None:
    chat_sizes = serve_peers.CHATS_QUICK if request.quick else serve_peers.CHATS
    document_sizes = serve_peers.DOCUMENT_QUICK if request.quick else serve_peers.DOCUMENT
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(_server(request, PEER_CAPS))]
        folder = stack.enter_context(_exported(request))
        python = request.peer_python
        if python is not None and folder is not None:
            targets += [
                stack.enter_context(
                    vllm_server(
                        python, folder, threads, context_tokens=serve_peers.CONTEXT_TOKENS, progress=request.progress
                    )
                )
                for threads in vllm_threads()
            ]
        serve_peers.warm(targets, prompts)
        if Part.CHAT8 in parts:
            serve_peers.chats(results, targets, prompts, sizes=chat_sizes, progress=request.progress)
        if Part.DOCQA in parts:
            serve_peers.document(results, targets, prompts, sizes=document_sizes, progress=request.progress)
        if Part.CHAT8 in parts and python is not None and folder is not None:
            offline = stack.enter_context(serve_peers.offline_vllm(python, folder))
            serve_peers.offline_chats(results, offline, prompts, sizes=chat_sizes, progress=request.progress)


def _noreuse(results: Results, request: Request, prompts: Prompts) -> None:
    sizes = serve_tiering.QUICK if request.quick else serve_tiering.FULL
    model = request.setting.model
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(store_folder(request.setting)).absolute()
        _node, tiered = stack.enter_context(node_server(model, request.flags(sizes.on_caps, store=store), name="on"))
        told = {"DEVICE__KV_BYTES": f"{sizes.off_tokens}tokens"}
        if request.threads is not None:
            told["RUNTIME__THREADS"] = str(request.threads)
        untiered = stack.enter_context(untiered_server(model, told, name="off"))
        serve_tiering.measure(results, [tiered, untiered], prompts, sizes=sizes, progress=request.progress)


def _identical(results: Results, request: Request, prompts: Prompts) -> None:
    sizes = serve_identical.QUICK if request.quick else serve_identical.FULL

    def opened() -> contextlib.AbstractContextManager[Target]:
        return _server(request, serve_identical.CAPS)

    serve_identical.measure(results, opened, prompts, sizes=sizes, progress=request.progress)


def _itl(results: Results, request: Request, prompts: Prompts) -> None:
    sizes = serve_prefill.QUICK if request.quick else serve_prefill.FULL
    with _server(request, sizes.caps) as target:
        serve_prefill.measure(results, target, prompts, sizes=sizes, progress=request.progress)


def _soak(results: Results, request: Request, prompts: Prompts) -> None:
    sizes = serve_soak.QUICK if request.quick else serve_soak.FULL
    if request.soak_requests is not None:
        sizes = serve_soak.Sizes(request.soak_requests, sizes.connections, sizes.prompt_tokens, sizes.answer_tokens)
    if request.url is not None:
        with _server(request, ()) as target:
            serve_soak.measure(results, target, prompts, sizes=sizes, node=None, progress=request.progress)
        return
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(store_folder(request.setting)).absolute()
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="h3-bench-"))) / "tiny"
        write_tiny_model(model, max_position_embeddings=4096)
        node, target = stack.enter_context(node_server(str(model), request.flags(serve_soak.CAPS, store=store)))
        tiny = Prompts(int(str(SIZES["vocab_size"])))
        serve_soak.measure(results, target, tiny, sizes=sizes, node=node, progress=request.progress)


def _turns(results: Results, request: Request, prompts: Prompts) -> None:
    del prompts
    sizes = serve_replay.TURNS_QUICK if request.quick else serve_replay.TURNS
    with _stored_server(request) as target:
        serve_replay.multi_turn(results, target, sizes=sizes, progress=request.progress)


def _trace(results: Results, request: Request, prompts: Prompts) -> None:
    path = request.trace or DEFAULT
    if request.trace is None and not path.exists():
        request.progress(f"there is no trace at {path}: left out; name one with --trace")
        return
    sizes = serve_replay.TRACE_QUICK if request.quick else serve_replay.TRACE
    with _stored_server(request) as target:
        serve_replay.trace(results, target, path, vocabulary=prompts.vocabulary, sizes=sizes, progress=request.progress)


@contextlib.contextmanager
def _stored_server(request: Request) -> Iterator[Target]:
    """A node with all tiers, or the server that was named."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(store_folder(request.setting)).absolute()
        yield stack.enter_context(_server(request, serve_replay.CAPS, store=store))


@contextlib.contextmanager
def _server(request: Request, flags: Collection[str], *, store: Path | None = None) -> Iterator[Target]:
    """A new node with these flags, or the server that was named."""
    if request.url is not None:
        yield asyncio.run(learn(Target("target", parse_address(request.url), request.setting.model, request.key)))
        return
    with node_server(request.setting.model, request.flags(flags, store=store)) as (_node, target):
        yield target


@contextlib.contextmanager
def _exported(request: Request) -> Iterator[Path | None]:
    """The model's folder for vLLM; None: it does not take part, and `progress` hears why."""
    if request.url is not None or request.quick:
        yield None
        return
    if request.peer_python is None or not has_module(request.peer_python, "vllm"):
        request.progress(f"vllm is not installed in {request.peer_python or 'any --peer-python'}: left out")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="h3-bench-") as name:
        folder = Path(name) / "model"
        export_folder(load_model(request.setting.model, dtype=DType.BF16), folder)
        yield folder


def _vocabulary(request: Request) -> int:
    return load_model(request.setting.model).config.vocabulary_size


_PARTS: dict[Part, Callable[[Results, Request, Prompts], None]] = {
    Part.NOREUSE: _noreuse,
    Part.IDENTICAL: _identical,
    Part.ITL: _itl,
    Part.SOAK: _soak,
    Part.TURNS: _turns,
    Part.TRACE: _trace,
}
"""All but those that have the same contestants, whose start takes minutes."""
