"""Which prompts are being answered, so that a document is called erased only when none of them reads it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

from h3kv.core.hashing import extend_keys, root_key
from h3kv.core.reach import Reach
from h3kv.engine.request import Request

NotePrompt = Callable[[Request], None]


class OpenPrompts:
    """Thread-safe.

    Args:
        fingerprint: of the model.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # None: a prompt that is not known yet, and may have seen any document.
        self._open: dict[int, Request | None] = {}

    @contextlib.contextmanager
    def opening(self) -> Iterator[NotePrompt]:
        """From before its documents are looked up until its request has ended; gives what notes that request."""
        with self._lock:
            number = next(self._numbers)
            self._open[number] = None
        try:
            yield lambda request: self._note(number, request)
        finally:
            with self._lock:
                del self._open[number]

    def reading(self, reach: Reach, salt: bytes) -> frozenset[int]:
        """Numbers of prompts that may hold what a document reaches.

        Args:
            reach: of the document.
            salt: of its tenant.

        Cost: hashes the open prompts of the tenant.
        """
        with self._lock:
            now = dict(self._open)
        return frozenset(
            number for number, request in now.items() if request is None or self._holds(request, reach, salt)
        )

    def are_closed(self, numbers: frozenset[int]) -> bool:
        """Whether none of these is open any more."""
        with self._lock:
            return self._open.keys().isdisjoint(numbers)

    def _note(self, number: int, request: Request) -> None:
        with self._lock:
            self._open[number] = request

    def _holds(self, request: Request, reach: Reach, salt: bytes) -> bool:
        if request.tenant != salt:
            return False
        root = root_key(self._fingerprint, salt)
        keys = [root, *extend_keys(root, request.prompt)]
        # The tokens behind its last block fill one with the answer's first tokens.
        return reach.covers(root, keys[1:], set()) or keys[-1] in reach.ends
