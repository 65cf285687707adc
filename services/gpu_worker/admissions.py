"""Requests that may run: how many of each tenant, and several answers that are admitted together.

One tenant has at most a share of all, so that others always find room. An admission of several answers holds as much of
it as they may run together, with their prompts, until it is closed and the last of them has ended.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from h3kv.core.client_limits import ANSWERS_AT_A_TIME_MAX
from h3kv.core.errors import PeerBusyError, QuotaError, RequestError
from services.gpu_worker.quota import Admission

ID_BYTES: Final = 16
RETRY_AFTER_S: Final = 1
"""Answers end all the time."""


class RequestShares:
    """Counts requests that run or wait. Thread-safe.

    Args:
        requests_max: of all tenants together. One that has a name gets at most half of them.
        name: of this process, for messages.
    """

    def __init__(self, requests_max: int, *, name: str) -> None:
        self._requests_max = requests_max
        self.tenant_max = max(requests_max // 2, 1)
        self._name = name
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def taking(self, tenant: str, count: int = 1) -> Iterator[None]:
        """So many requests of a tenant.

        Raises:
            QuotaError: the tenant has as many as it may.
            PeerBusyError: all have as many as there may be.
        """
        with self._lock:
            if tenant and self._taken[tenant] + count > self.tenant_max:
                raise QuotaError(
                    f"the tenant has {self._taken[tenant]} requests that run or wait, and may have {self.tenant_max}: "
                    "send it again when one has ended",
                    retry_after_s=RETRY_AFTER_S,
                )
            if self._taken.total() + count > self._requests_max:
                raise PeerBusyError(
                    f"{self._requests_max} requests run or wait: repeat it later, or raise requests_max",
                    peer=self._name,
                )
            self._taken[tenant] += count
        try:
            yield
        finally:
            with self._lock:
                self._taken[tenant] -= count
                if not self._taken[tenant]:
                    del self._taken[tenant]

    def answers_at_a_time(self, answers: int) -> int:
        """How many of the answers of one request run together."""
        return min(answers, ANSWERS_AT_A_TIME_MAX, self.tenant_max)

    def check_integrity(self) -> None:
        """Assert, when all have ended, that none is counted."""
        assert not self._taken, self._taken


@dataclass(slots=True)
class Counted:
    """What an answer has taken so far."""

    has_begun: bool = False
    tokens: int = 0


class Together:
    """Answers that were admitted together. Thread-safe.

    Args:
        tenant: name and salt of who asks.
        prompts: token numbers of each.
        answers: to all of them.
        length: the longest one.
        admission: what was counted for all; it is settled when the last answer has ended.
    """

    def __init__(
        self,
        tenant: tuple[str, bytes],
        prompts: Sequence[tuple[int, ...]],
        *,
        answers: int,
        length: int,
        admission: Admission,
    ) -> None:
        self.tenant = tenant
        self.length = length
        self._prompts = prompts
        self._left = answers
        self._admission = admission
        self._lock = threading.Lock()
        self._counted = Counted()
        self._running = 0
        self._is_closed = False

    def prompt(self, place: int) -> tuple[int, ...]:
        """One of them. Raises RequestError where there is none."""
        if place >= len(self._prompts):
            raise RequestError(f"prompt = {place}: {len(self._prompts)} were admitted")
        return self._prompts[place]

    @contextlib.contextmanager
    def answering(self) -> Iterator[Counted]:
        """While one of the answers runs. Raises RequestError for more of them than were admitted."""
        with self._lock:
            if self._is_closed or not self._left:
                raise RequestError("prompt: all answers that were admitted have run: admit them anew")
            self._left -= 1
            self._running += 1
        counted = Counted()
        try:
            yield counted
        finally:
            with self._lock:
                self._running -= 1
                self._counted.has_begun |= counted.has_begun
                self._counted.tokens += counted.tokens
            self._settle()

    def close(self) -> None:
        """No further answer begins."""
        with self._lock:
            self._is_closed = True
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            if not self._is_closed or self._running:
                return
        if self._counted.has_begun:
            self._admission.settle(self._counted.tokens)
        else:
            self._admission.cancel()


class OpenAdmissions:
    """Admissions by their ids. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[bytes, Together] = {}

    @contextlib.contextmanager
    def opening(self, together: Together) -> Iterator[bytes]:
        """While answers may run; gives the id."""
        name = secrets.token_bytes(ID_BYTES)
        with self._lock:
            self._open[name] = together
        try:
            yield name
        finally:
            with self._lock:
                del self._open[name]
            together.close()

    def find(self, name: bytes, tenant: tuple[str, bytes]) -> Together:
        """What was admitted for a tenant. Raises RequestError where nothing is, or no longer."""
        with self._lock:
            found = self._open.get(name)
        if found is None or found.tenant != tenant:
            raise RequestError("prompt: nothing is admitted under this id: admit it anew")
        return found
