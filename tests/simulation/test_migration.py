"""The migration rules over touches made from a public trace, on a virtual clock."""

from dataclasses import replace

import pytest

from h3kv.core.units import NS_PER_S
from h3kv.policy.migration_config import MigrationConfig

from .conversation_trace import TRACE, Request, read_requests
from .migration_run import run_lru, run_rules, shortest_return_ns

CONFIG = MigrationConfig()
SECONDS = 900
CONVERSATIONS_ONE_IN = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRACE.exists(), reason=f"the trace {TRACE.name} is not there"),
]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return read_requests(TRACE, seconds=SECONDS, one_in=CONVERSATIONS_ONE_IN)


@pytest.mark.parametrize("share", [12, 4], ids=["a_twelfth_fits", "a_quarter_fits"])
def test_requests_find_at_least_as_many_segments_in_host_as_with_lru(requests: list[Request], share: int) -> None:
    host_segments = len({block for request in requests for block in request.blocks}) // share
    rules = run_rules(requests, CONFIG, host_segments=host_segments)
    lru = run_lru(requests, host_segments=host_segments)
    assert rules.lookups.touches == lru.lookups.touches
    assert rules.lookups.hits >= lru.lookups.hits
    returned_ns = shortest_return_ns(rules.commands)
    assert returned_ns is not None, "nothing came back at all"
    assert returned_ns >= 10 * NS_PER_S


def test_unsteady_memory_and_a_small_tier_make_nothing_come_back_early(requests: list[Request]) -> None:
    busy = run_rules(requests[:150], replace(CONFIG, displace_margin=1.0), host_segments=100, jitter_ns=100.0)
    returned_ns = shortest_return_ns(busy.commands)
    assert returned_ns is not None
    assert returned_ns >= 10 * NS_PER_S
    assert {"jitter", "displaced", "earned"} <= set(busy.reasons)


def test_the_same_trace_gives_the_same_commands(requests: list[Request]) -> None:
    first, second = (run_rules(requests[:60], CONFIG, host_segments=100) for _ in range(2))
    assert first.commands == second.commands
    assert first.commands
