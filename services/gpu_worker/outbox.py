"""Events of one request, on their way from the engine's thread to the thread that answers."""

from __future__ import annotations

import threading
from collections import deque

from h3kv.core.errors import H3Error, PeerUnavailableError, StaleHandleError
from h3kv.engine.events import Event, Failed, Finished, PrefillProgress


class Outbox:
    """One writer, which never waits; one reader, which does.

    It holds what its request can say at most: the newest progress, one event a token, one end. So a reader that is slow
    costs memory up to the length of its answer, and nothing else.

    Args:
        tokens_max: length of the longest answer.
    """

    def __init__(self, tokens_max: int) -> None:
        self._bound = tokens_max + 2
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._error: H3Error | None = None
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Add an event. A closed outbox forgets it."""
        with self._changed:
            if self._is_closed:
                return
            if isinstance(event, Failed):
                self._error, self._is_closed = _for_caller(event.error), True
            elif isinstance(event, PrefillProgress) and self._events and isinstance(self._events[-1], PrefillProgress):
                self._events[-1] = event
            else:
                self._events.append(event)
                self._is_closed = isinstance(event, Finished)
            assert len(self._events) <= self._bound, "a request says more than its length allows"
            self._changed.notify()

    def fail(self, error: H3Error) -> None:
        """Nothing more comes, and this is why. Nothing changes when it has ended already."""
        with self._changed:
            if not self._is_closed:
                self._error, self._is_closed = error, True
                self._changed.notify()

    def close(self) -> None:
        """The reader wants no more."""
        with self._changed:
            self._events.clear()
            self._is_closed = True
            self._changed.notify()

    def take(self) -> Event | None:
        """The next event, as soon as there is one; None after the last.

        Raises:
            H3Error: the request failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._is_closed)
            if self._events:
                return self._events.popleft()
            if self._error is not None:
                raise self._error
            return None


def _for_caller(error: H3Error) -> H3Error:
    """A caller has no handles: one of ours is stale where the owner of the memory began anew under the request."""
    if not isinstance(error, StaleHandleError):
        return error
    gone = PeerUnavailableError(
        "what the request had read is gone with the memory in which it lay: send it again", peer="nvme_io"
    )
    gone.__cause__ = error
    return gone
