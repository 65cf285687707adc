"""Reads documents, the oldest first, one at a time: a request like any other, beside which chats go on."""

from __future__ import annotations

import logging
import threading
from typing import Final

from h3kv.core.errors import PeerBusyError, PeerTimeoutError, PeerUnavailableError, RequestError, TierFullError
from h3kv.engine.admission import check_memory
from h3kv.engine.events import PrefillProgress
from h3kv.engine.request import Request, SamplingParameters
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from services.gpu_worker.documents import Documents
from services.gpu_worker.documents_entry import Entry
from services.gpu_worker.documents_keeper import DocumentEngine

BUSY_S: Final = 0.5
"""Until an engine that has no time, or whose memory has to come back, is tried again."""
END_S: Final = 5.0
"""For the thread to end what it is doing."""
OUR_FAULT: Final = "reading it failed: the log of the process that served it says where"

_log = logging.getLogger(__name__)


class DocumentReader:
    """Runs from `start` to `stop`. Thread-safe.

    Args:
        documents: to be read.
        engine: reads them.
    """

    def __init__(self, documents: Documents, engine: DocumentEngine) -> None:
        self._documents = documents
        self._engine = engine
        self._is_ending = threading.Event()
        self._unread = threading.Event()
        # The process may end before it does: what it was doing is done by the next one.
        self._thread = threading.Thread(target=self._run, name="documents-reader", daemon=True)

    def start(self) -> None:
        """Begin. The engine's thread runs already."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread as `end`, and wait for it within a bound. Calling it again does nothing."""
        self.end()
        if self._thread.ident is not None:
            self._thread.join(END_S)

    def end(self) -> None:
        """Read no more; the document that is being read is read again by the next process. Waits for nothing."""
        self._is_ending.set()
        self._unread.set()
        for entry in self._documents.entries():
            entry.stop()

    def note(self) -> None:
        """There is something to be read."""
        self._unread.set()

    def check(self, entry: Entry) -> None:
        """See that the tiers hold a document when nothing else is in them. Raises TierFullError."""
        request = self._request(entry)
        self._engine.call(lambda _, node: check_memory(request, node.pool, held_blocks=0))

    def _request(self, entry: Entry) -> Request:
        sampling = SamplingParameters(max_new_tokens=1)
        prompt = self._documents.reaches.prompt(entry)
        return Request(prompt=prompt, sampling=sampling, tenant=entry.record.salt, is_reading=True)

    def _run(self) -> None:
        while not self._is_ending.is_set():
            self._unread.clear()
            entry = self._documents.next_unread()
            if entry is None:
                self._unread.wait()
                continue
            try:
                self._read(entry)
            except (PeerBusyError, PeerTimeoutError, PeerUnavailableError):
                self._is_ending.wait(BUSY_S)
            except Exception as error:  # noqa: BLE001  (one document must not end the reading of all others)
                self._fail(entry, error)

    def _fail(self, entry: Entry, error: Exception) -> None:
        # Messages of others name files and processes, which are no client's affair.
        is_ours = not isinstance(error, RequestError | TierFullError)
        self._documents.note_failed(entry, OUR_FAULT if is_ours else str(error))
        level = logging.ERROR if is_ours else logging.WARNING
        log_event(_log, "document_failed", {spans.DOCUMENT: entry.record.id}, error=error, level=level)

    def _read(self, entry: Entry) -> None:
        # Open before it is looked up: who deletes it meanwhile waits for this, and erases what it had.
        with self._documents.prompts.opening() as note:
            if self._is_ending.is_set() or not self._documents.has(entry):
                return
            if self._engine.call(lambda kv, _: kv.find(entry.record.keys)) is None:
                note(request := self._request(entry))
                if not self._answer(entry, request):
                    return
        self._documents.note_ready(entry)
        log_event(_log, "document_ready", {spans.DOCUMENT: entry.record.id, spans.TOKENS: entry.record.tokens})

    def _answer(self, entry: Entry, request: Request) -> bool:
        """Read the prompt; whether it was read to its end."""
        answer = self._engine.loop.submit(request, trace=None)
        entry.stop = answer.cancel
        try:
            if self._is_ending.is_set() or not self._documents.has(entry):
                return False
            for event in answer:
                if isinstance(event, PrefillProgress):
                    entry.done_tokens = event.done_tokens
        finally:
            entry.stop = lambda: None
            answer.cancel()
        return self._documents.has(entry) and not self._is_ending.is_set()
