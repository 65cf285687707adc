"""Documents over a tiny engine whose thread runs. A test owns the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.types import BlockKey
from h3kv.core.units import NS_PER_S
from h3kv.engine.documents import DocumentKv
from h3kv.engine.request import Request, SamplingParameters
from h3kv.models.document_prompt import prefix_tokens
from h3kv.models.tokenizer import Tokenizer
from h3kv.node import Node
from h3kv.telemetry.recorder import Recorder
from h3kv.telemetry.tracing import NullTracer
from h3kv.testing.engines import CONFIG, FINGERPRINT, LAYOUT, make_rig, tiny_decoder
from h3kv.testing.hooked_model import HookedModel
from h3kv.testing.tiny_models import CHAT_TEMPLATE, byte_tokenizer
from services.gpu_worker.documents import Documents
from services.gpu_worker.documents_entry import DocumentLimits, DocumentModel, Entry
from services.gpu_worker.documents_files import DocumentFiles, MemoryFiles
from services.gpu_worker.documents_keeper import DocumentEngine, DocumentKeeper
from services.gpu_worker.documents_prompts import OpenPrompts
from services.gpu_worker.documents_reader import DocumentReader
from services.gpu_worker.documents_record import Owner, State
from services.gpu_worker.loop import EngineLoop
from services.gpu_worker.messages import PromptReader

WAIT_S = 30.0
WAIT_NS = 30 * NS_PER_S
BYTES = Tokenizer(
    byte_tokenizer(), eos_ids=frozenset({260}), special_tokens={}, chat_template=CHAT_TEMPLATE, path="tiny"
)
MINE = Owner("mine", b"mine")
THEIRS = Owner("theirs", b"theirs")
TEXT = "The hat of Jack is grey. " * 12
OTHER = "Bees make honey in June. " * 12


class World:
    """Documents and the engine's thread. The keeper's looks are a test's."""

    def __init__(
        self, files: DocumentFiles | None = None, *, limits: DocumentLimits | None = None, tokenizer: Tokenizer = BYTES
    ) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        config = replace(CONFIG, vocabulary_size=300, max_context=2048)
        model = HookedModel(tiny_decoder(config=config), before=lambda *_: self._wait())
        self.rig = make_rig(model=model)
        self.telemetry = Recorder()
        self.tokenizer = tokenizer
        self.now_s = 1000
        self.loop = EngineLoop(
            cast(Node, self.rig),
            tracer=NullTracer(),
            requests_max=4,
            name="gpu_worker",
            on_failure=lambda error: None,
            on_step=lambda _: None,
        )
        self.kv = DocumentKv(self.rig.pool)
        engine = DocumentEngine(self.loop, self.kv)
        self.documents = Documents(
            files or MemoryFiles(),
            DocumentModel(tokenizer, FINGERPRINT, 2048, LAYOUT.token_bytes),
            limits=limits or DocumentLimits(pinned_blocks_max=12),
            now_s=lambda: self.now_s,
            prompts=OpenPrompts(FINGERPRINT),
            mark=engine.mark,
        )
        self.kv.mark(self.documents.marks())
        self.reader = DocumentReader(self.documents, engine)
        self.keeper = DocumentKeeper(self.documents, engine, self.telemetry, on_unread=self.reader.note)
        self.loop.start()
        self.reader.start()

    def _wait(self) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)

    def create(self, text: str = TEXT, owner: Owner = MINE, **fields: Any) -> Entry:
        wanted = {"name": "", "ttl_s": None, "is_pinned": False, "check": self.reader.check} | fields
        entry = self.documents.create(owner, text, **wanted)
        self.reader.note()
        return entry

    def ready(self, text: str = TEXT, owner: Owner = MINE, **fields: Any) -> Entry:
        entry = self.create(text, owner, **fields)
        self.wait_for(lambda: entry.record.state is not State.READING)
        assert entry.record.state is State.READY, entry.record.failure
        return entry

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s
            threading.Event().wait(0.002)

    def cached(self, *texts: str, owner: Owner = MINE) -> int:
        """Tokens that a chat about texts finds."""
        prompt = [*prefix_tokens(BYTES, texts), *range(100)]
        answer = self.loop.submit(self.request(prompt, owner), trace=None)
        *_, finished = answer
        return sum(cast(Any, finished).statistics.cached_tokens.values())

    def note(self, *entries: Entry) -> None:
        """A chat about documents is about to be computed."""
        ids = [entry.record.id for entry in entries]
        texts = self.documents.texts(MINE.name, ids)
        self.documents.note_prompt(MINE.name, ids, [*prefix_tokens(self.tokenizer, texts), 1])

    def answer(self, chat: pb.Chat) -> int:
        """Answer a chat as a client's; the tokens that it found."""
        reader = PromptReader(self.tokenizer, 2, self.documents)
        message = pb.GenerateRequest(chat=chat, tenant=pb.Tenant(name=MINE.name, salt=MINE.salt))
        with self.documents.prompts.opening() as note:
            note(request := reader.read_request(message))
            *_, finished = self.loop.submit(request, trace=None)
        return sum(cast(Any, finished).statistics.cached_tokens.values())

    def request(self, prompt: list[int], owner: Owner = MINE) -> Request:
        sampling = SamplingParameters(max_new_tokens=2, ignore_eos=True)
        return Request(prompt=tuple(prompt), sampling=sampling, tenant=owner.salt)

    def found(self, keys: tuple[BlockKey, ...]) -> bool:
        return self.loop.call(lambda _: self.kv.find(keys) is not None, timeout_ns=WAIT_NS)

    def close(self) -> None:
        self.gate.set()
        self.reader.stop()
        self.keeper.stop()
        self.loop.stop()
        self.kv.check_integrity()
        self.rig.engine.check_integrity()
        self.rig.engine.close()
