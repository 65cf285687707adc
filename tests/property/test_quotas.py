"""A bucket against a list of everything that was taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3kv.core.errors import QuotaError
from h3kv.core.units import NS_PER_S
from h3kv.directory.quotas_memory import MemoryQuotas
from h3kv.telemetry.recorder import Recorder
from h3kv.testing.clock import ManualClock
from services.gpu_worker.quota import TokenQuota

REQUESTS = st.lists(
    st.tuples(st.integers(0, 90 * NS_PER_S), st.integers(1, 400), st.integers(0, 400), st.integers(0, 500)), max_size=40
)


@given(limit=st.integers(1, 500), requests=REQUESTS)
def test_tokens_used_in_any_minute_stay_within_twice_the_quota(
    limit: int, requests: list[tuple[int, int, int, int]]
) -> None:
    """A full bucket and what fills it meanwhile: one quota each. Every refusal tells how long is enough."""
    clock = ManualClock()
    counters = MemoryQuotas(clock)
    quota = TokenQuota(counters, Recorder())
    used: list[tuple[int, int]] = []
    for pause_ns, prompt, answer, generated in requests:
        clock.advance(pause_ns)
        if prompt + answer > limit:
            with pytest.raises(QuotaError) as caught:
                quota.admit("a", limit, prompt_tokens=prompt, answer_tokens_max=answer)
            assert caught.value.retry_after_s is None
            continue
        try:
            admission = quota.admit("a", limit, prompt_tokens=prompt, answer_tokens_max=answer)
        except QuotaError as error:
            clock.advance((error.retry_after_s or 0) * NS_PER_S)
            admission = quota.admit("a", limit, prompt_tokens=prompt, answer_tokens_max=answer)
        used.append((clock.now_ns(), prompt + min(generated, answer)))
        admission.settle(generated)
        counters.check_integrity()
        recent = sum(tokens for at_ns, tokens in used if at_ns > clock.now_ns() - 60 * NS_PER_S)
        assert recent <= 2 * limit
