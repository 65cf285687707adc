"""What happens to documents beside calls: deleted when their time is over, erased, held, counted.

The engine's thread does what touches KV, between two steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from h3kv.core.errors import H3Error, StoreError
from h3kv.core.ports import Telemetry
from h3kv.core.units import NS_PER_S
from h3kv.engine.documents import DocumentKv
from h3kv.node import Node
from h3kv.telemetry import names, spans
from h3kv.telemetry.event_log import log_event
from services.gpu_worker.documents import Documents
from services.gpu_worker.documents_entry import Entry, Erasure
from services.gpu_worker.documents_record import State
from services.gpu_worker.loop import EngineLoop

LOOK_S: Final = 1.0
"""Between two looks, while no call gives reason for one."""
ERASING_S: Final = 0.02
"""The same for a call that waits for its document to be erased."""
CALL_NS: Final = 60 * NS_PER_S
"""For the engine's thread to come to it: longer than any step."""

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DocumentEngine:
    """Where the KV of documents is. Thread-safe."""

    loop: EngineLoop
    kv: DocumentKv
    """Touched by the engine's thread alone."""

    def call(self, function: Callable[[DocumentKv, Node], ResultT]) -> ResultT:
        """What a function gives back that the engine's thread runs. Raises as `EngineLoop.call`."""
        return self.loop.call(lambda node: function(self.kv, node), timeout_ns=CALL_NS)


class DocumentKeeper:
    """Runs from `start` to `stop`. Thread-safe.

    Args:
        documents: that are kept.
        engine: where their KV is.
        telemetry: receives how many there are, from any thread.
        on_unread: called when a document has to be read again.
    """

    def __init__(
        self, documents: Documents, engine: DocumentEngine, telemetry: Telemetry, *, on_unread: Callable[[], None]
    ) -> None:
        self._documents = documents
        self._engine = engine
        self._telemetry = telemetry
        self._on_unread = on_unread
        self._is_ending = threading.Event()
        # One at a time: what has begun to go is the same for all of them.
        self._erasing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="documents-keeper")

    def start(self) -> None:
        """Begin. The engine's thread runs already."""
        if self._documents.erasures():
            self._engine.call(lambda kv, _: kv.await_earlier())
        self._thread.start()

    def stop(self) -> None:
        """End the thread. What is not erased yet is by the next process. Calling it again does nothing."""
        self._is_ending.set()
        self._documents.changed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def erase(self, erasure: Erasure, *, timeout_ns: int) -> bool:
        """Erase a document, and wait for the disk.

        Returns:
            Whether it is erased. Otherwise a running request reads it, or the time is over: then it is later.
        """
        for _ in range(max(int(timeout_ns / NS_PER_S / ERASING_S), 1)):
            if self._attempt(self.advance, erasure):
                return True
            if not self._documents.prompts.are_closed(erasure.readers) or self._is_ending.wait(ERASING_S):
                break
        return False

    def advance(self, erasure: Erasure) -> bool:
        """Erase what there is now. Whether nothing is left.

        Raises:
            PeerUnavailableError, PeerTimeoutError: the engine did not come to it.
            StoreError: that it is over cannot be kept.
        """
        with self._erasing:
            # Before: what prompts had is given back when they are closed, and found after that.
            are_closed = self._documents.prompts.are_closed(erasure.readers)
            if erasure.is_begun and erasure.is_last == are_closed:
                is_gone = self._engine.call(lambda kv, _: kv.go_on())
            else:
                is_gone = self._look_for(erasure)
                erasure.is_begun, erasure.is_last = True, are_closed
            if is_gone and are_closed:
                self._documents.end_erasure(erasure)
                log_event(_log, "document_erased", {spans.DOCUMENT: erasure.record.id})
        return is_gone and are_closed

    def _look_for(self, erasure: Erasure) -> bool:
        document, reach = erasure.record.id, erasure.reach(self._documents.spared(erasure.record))

        def erase(kv: DocumentKv, _: Node) -> bool:
            kv.let_go(document)
            return kv.erase(reach)

        return self._engine.call(erase)

    def look(self) -> None:
        """Do what is to be done now. What cannot be done says so in the log, and is tried again with the next look."""
        for entry in self._documents.over():
            self._attempt(self._documents.forget, entry)
        for erasure in self._documents.erasures():
            self._attempt(self.advance, erasure)
        ready = [entry for entry in self._documents.entries() if entry.record.state is State.READY]
        if any(entry.record.is_pinned or entry.is_held for entry in ready):
            self._attempt(self._hold, ready)
        self.report()

    def _attempt(self, act: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT | None:
        """What an act gives back; None where it failed."""
        try:
            return act(argument)
        except H3Error as error:
            level = logging.ERROR if isinstance(error, StoreError) else logging.WARNING
            log_event(_log, "documents_not_kept", error=error, level=level)
            return None

    def report(self) -> None:
        """Say how many there are."""
        states = [entry.record.state for entry in self._documents.entries()]
        for state in State:
            self._telemetry.gauge(names.DOCUMENTS, states.count(state), state=state)
        self._telemetry.gauge(names.DOCUMENT_ERASURES, len(self._documents.erasures()))

    def check_integrity(self) -> None:
        """Assert, when the engine's thread has ended, that KV is held for documents alone."""
        self._engine.kv.check_integrity()

    def _hold(self, ready: list[Entry]) -> None:
        """Have pinned documents stay, as far as running requests leave room; read again what is nowhere."""
        keys = {entry: self._documents.keys(entry) for entry in ready if entry.record.is_pinned}

        def hold(kv: DocumentKv, _: Node) -> list[Entry]:
            for entry in ready:
                if entry in keys:
                    entry.is_held = kv.hold(entry.record.id, keys[entry])
                else:
                    entry.is_held = False
                    kv.let_go(entry.record.id)
            return [entry for entry in keys if not entry.is_held and kv.find(keys[entry]) is None]

        lost = self._engine.call(hold)
        for entry in lost:
            self._documents.read_again(entry)
        if lost:
            self._on_unread()

    def _run(self) -> None:
        while not self._is_ending.is_set():
            self._documents.changed.clear()
            self.look()
            self._documents.changed.wait(LOOK_S)
