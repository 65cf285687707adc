"""What happens to documents beside calls: deleted when their time is over, erased, held, counted.

The engine's thread does what touches KV, between two steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from h3kv.core.errors import H3Error, StoreError
from h3kv.core.ports import Telemetry
from h3kv.core.reach import Reach
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
HELD_AT_A_TIME: Final = 16
"""Documents that one look begins to hold: it goes through their blocks between two steps."""
END_S: Final = 5.0
"""For the thread to end what it is doing."""

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

    def mark(self, reaches: Mapping[str, Reach]) -> None:
        """See `DocumentKv.mark`. Waits for nothing; it is done before any request that comes after it."""
        self.loop.post(lambda _: self.kv.mark(reaches))


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
        self._is_behind = False
        # The last one that a look tried to hold.
        self._tried = ""
        # The process may end before it does: what it was doing is done by the next one.
        self._thread = threading.Thread(target=self._run, name="documents-keeper", daemon=True)

    def start(self) -> None:
        """Begin. The engine's thread runs already."""
        if self._documents.erasures():
            self._engine.call(lambda kv, _: kv.await_earlier())
        self._thread.start()

    def stop(self) -> None:
        """End the thread as `end`, and wait for it within a bound. Calling it again does nothing."""
        self.end()
        if self._thread.ident is not None:
            self._thread.join(END_S)

    def end(self) -> None:
        """Keep no more. What is not erased yet is by the next process. Waits for nothing."""
        self._is_ending.set()
        self._documents.changed.set()

    def erase(self, erasure: Erasure, *, timeout_ns: int) -> bool:
        """Erase a document, and wait for the disk.

        Returns:
            Whether it is erased. Otherwise a running request reads it, or the time is over: then it is later.
        """
        deadline_ns = time.monotonic_ns() + timeout_ns
        while True:
            is_gone = self._attempt(self.advance, erasure)
            if is_gone:
                return True
            are_closed = self._documents.prompts.are_closed(erasure.readers)
            if not are_closed or self._is_ending.is_set() or time.monotonic_ns() >= deadline_ns:
                return False
            if is_gone is None or not self._is_behind:
                # It failed, or it is the disk's turn.
                self._is_ending.wait(ERASING_S)

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
                is_gone, self._is_behind = self._engine.call(lambda kv, _: (kv.go_on(), kv.is_behind))
            else:
                is_gone, self._is_behind = self._look_for(erasure, is_last=are_closed)
                erasure.is_begun, erasure.is_last = True, are_closed
            if is_gone and are_closed:
                self._documents.end_erasure(erasure)
                log_event(_log, "document_erased", {spans.DOCUMENT: erasure.record.id})
        return is_gone and are_closed

    def _look_for(self, erasure: Erasure, *, is_last: bool) -> tuple[bool, bool]:
        document = erasure.record.id
        spared = self._documents.reaches.spared(self._documents.entries(), erasure.record.salt)
        reach = erasure.reach(spared)

        def erase(kv: DocumentKv, _: Node) -> tuple[bool, bool]:
            kv.let_go(document)
            is_gone = kv.erase(reach)
            if is_last:
                kv.unmark(document)
            return is_gone, kv.is_behind

        return self._engine.call(erase)

    def look(self) -> None:
        """Do what is to be done now. What cannot be done says so in the log, and is tried again with the next look."""
        for entry in self._documents.over():
            if not self._is_ending.is_set():
                self._attempt(self._documents.forget, entry)
        self._is_behind = False
        for erasure in self._documents.erasures():
            if not self._is_ending.is_set():
                self._attempt(self.advance, erasure)
        ready = [entry for entry in self._documents.entries() if entry.record.state is State.READY]
        held = [entry for entry in ready if entry.record.is_pinned or entry.is_held]
        if held and not self._is_ending.is_set():
            self._attempt(self._hold, held)
        self.report()

    def _attempt(self, act: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT | None:
        """What an act gives back; None where it failed."""
        try:
            return act(argument)
        except Exception as error:  # noqa: BLE001  (all other documents are kept, and this one is tried again)
            is_passing = isinstance(error, H3Error) and not isinstance(error, StoreError)
            level = logging.WARNING if is_passing else logging.ERROR
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

    def _hold(self, entries: list[Entry]) -> None:
        """Have pinned documents stay, as far as running requests leave room; read again what is nowhere."""

        def look(kv: DocumentKv, _: Node) -> list[Entry]:
            for entry in entries:
                entry.is_held = entry.record.is_pinned and kv.holds(entry.record.id)
                if not entry.record.is_pinned:
                    kv.let_go(entry.record.id)
            return [entry for entry in entries if entry.record.is_pinned and not entry.is_held]

        tried = self._next_tried(self._engine.call(look))
        if tried and not self._is_ending.is_set():
            self._hold_more(tried)

    def _next_tried(self, entries: list[Entry]) -> list[Entry]:
        """A few of those that are not held, from where the look before ended."""
        ids = [entry.record.id for entry in entries]
        start = ids.index(self._tried) + 1 if self._tried in ids else 0
        tried = [*entries[start:], *entries[:start]][:HELD_AT_A_TIME]
        self._tried = tried[-1].record.id if tried else ""
        return tried

    def _hold_more(self, entries: list[Entry]) -> None:
        def hold(kv: DocumentKv, _: Node) -> list[Entry]:
            places = kv.places()
            for entry in entries:
                entry.is_held = kv.hold(entry.record.id, entry.record.keys, places=places)
            left = [entry for entry in entries if not entry.is_held]
            return [entry for entry in left if kv.find(entry.record.keys, places=places) is None]

        lost = self._engine.call(hold)
        for entry in lost:
            self._documents.read_again(entry)
        if lost:
            self._on_unread()

    def _run(self) -> None:
        while not self._is_ending.is_set():
            self._documents.changed.clear()
            self.look()
            self._documents.changed.wait(ERASING_S if self._is_behind else LOOK_S)
