"""Pauses between an end and the next start."""

from __future__ import annotations

from h3kv.supervisor.restarts import RestartConfig, Restarts

CONFIG = RestartConfig(first_ns=10, longest_ns=70, steady_ns=1_000)


def test_pauses_double_up_to_the_longest() -> None:
    restarts = Restarts(CONFIG)
    assert [restarts.pause_ns(0) for _ in range(5)] == [10, 20, 40, 70, 70]
    assert restarts.count == 5


def test_one_that_served_long_enough_begins_with_the_first_pause_again() -> None:
    restarts = Restarts(CONFIG)
    for _ in range(4):
        restarts.pause_ns(999)
    assert restarts.pause_ns(1_000) == 10
    assert restarts.pause_ns(0) == 20
