"""Tokens of a minute that a tenant may have: counted before a request begins, settled when it has ended.

    admission = quota.admit(name, tokens_per_minute, prompt_tokens=n, answer_tokens_max=m)    QuotaError: not now
    try:
        ...
    finally:
        admission.settle(generated_tokens)    what was reserved for the answer and not used is given back

A prompt counts as a whole, whether its KV was found or computed. The answer's longest length is reserved with it, so
that requests which start together do not overdraw what they have together.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from h3kv.core.errors import QuotaError
from h3kv.core.ports import Telemetry
from h3kv.directory.quotas import US_PER_S, Charge, QuotaCounters, cost_us
from h3kv.telemetry import names
from h3kv.telemetry.event_log import log_event

TOO_LARGE: Final = "too_large"
USED_UP: Final = "used_up"

_log = logging.getLogger(__name__)


class Admission:
    """What one request has reserved. Made by `TokenQuota`, thread-safe.

    Args:
        quota: where it is given back.
        charge: all of it; None where the tenant may have any number.
        per_minute: of the tenant.
        prompt_tokens: these stay counted.
        answer_tokens_max: these are given back as far as they did not come.
    """

    def __init__(
        self,
        quota: TokenQuota,
        charge: Charge | None,
        per_minute: int,
        *,
        prompt_tokens: int,
        answer_tokens_max: int,
    ) -> None:
        self._quota = quota
        self._charge = charge
        self._per_minute = per_minute
        self._prompt_tokens = prompt_tokens
        self._answer_tokens_max = answer_tokens_max
        self._lock = threading.Lock()

    def settle(self, generated_tokens: int) -> None:
        """Give back what the answer did not need. Calling it again does nothing.

        Args:
            generated_tokens: that came; a request that never ran has 0, and its prompt stays counted.
        """
        used = self._prompt_tokens + min(max(generated_tokens, 0), self._answer_tokens_max)
        charge = self._take()
        if charge is not None:
            self._quota.give_back(charge, charge.cost_us - cost_us(used, self._per_minute))

    def cancel(self) -> None:
        """Give all of it back, for a request that was refused before it began. Calling it again does nothing."""
        charge = self._take()
        if charge is not None:
            self._quota.give_back(charge, charge.cost_us)

    def _take(self) -> Charge | None:
        """The charge, once: answers end at the same time as others, and as what admitted them."""
        with self._lock:
            charge, self._charge = self._charge, None
        return charge


class TokenQuota:
    """Says whether a request may begin. Thread-safe; a call waits for a server of counters as long as that may take.

    Args:
        counters: of all tenants; the caller closes them afterwards.
        telemetry: receives refusals, and requests that were counted by this process alone.
    """

    def __init__(self, counters: QuotaCounters, telemetry: Telemetry) -> None:
        self._counters = counters
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._is_degraded = False

    def admit(
        self, tenant: str, tokens_per_minute: int | None, *, prompt_tokens: int, answer_tokens_max: int
    ) -> Admission:
        """Count a request that is about to begin.

        Args:
            tenant: name that the tokens are counted under.
            tokens_per_minute: that it may have; None: any number.
            prompt_tokens: of the request.
            answer_tokens_max: that the answer may have at most.

        Raises:
            QuotaError: it would be more than the tenant may have now, or ever. Nothing was counted.
        """
        charge = None
        if tokens_per_minute is not None:
            charge = self._take(tenant, tokens_per_minute, prompt_tokens, answer_tokens_max)
        return Admission(
            self, charge, tokens_per_minute or 0, prompt_tokens=prompt_tokens, answer_tokens_max=answer_tokens_max
        )

    def give_back(self, charge: Charge, part_us: int) -> None:
        """Count less of what was charged: for `Admission`."""
        if part_us > 0:
            with self._lock:
                self._counters.give_back(charge, part_us)
                self._notice()

    def _take(self, tenant: str, per_minute: int, prompt_tokens: int, answer_tokens_max: int) -> Charge:
        tokens = prompt_tokens + answer_tokens_max
        if tokens > per_minute:
            self._refused(TOO_LARGE)
            raise QuotaError(
                f"the request may take {tokens} tokens ({prompt_tokens} of the prompt, {answer_tokens_max} of the "
                f"answer) and its tenant has {per_minute} a minute: ask for a shorter answer with max_tokens, shorten "
                "the prompt, or have tokens_per_minute raised",
                retry_after_s=None,
            )
        with self._lock:
            taken = self._counters.take(tenant, cost_us(tokens, per_minute))
            self._notice()
            if isinstance(taken, Charge):
                if taken.is_local:
                    self._telemetry.count(names.QUOTA_LOCAL_REQUESTS)
                return taken
        self._refused(USED_UP)
        retry_after_s = max(-(-taken.wait_us // US_PER_S), 1)
        raise QuotaError(
            f"the tenant's {per_minute} tokens of a minute are used, or reserved by requests that run: the "
            f"{tokens} tokens of this one are there in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )

    def _refused(self, reason: str) -> None:
        with self._lock:
            self._telemetry.count(names.QUOTA_REFUSALS, reason=reason)

    def _notice(self) -> None:
        """Say once that the server of counters went, or came back."""
        is_degraded = self._counters.is_degraded
        if is_degraded != self._is_degraded:
            self._is_degraded = is_degraded
            event = "quotas_counted_alone" if is_degraded else "quotas_shared"
            log_event(_log, event, level=logging.WARNING if is_degraded else logging.INFO)
