import ctypes

from h3kv.tiers.cold.budget import WriteBudget
from h3kv.tiers.cold.geometry import BUDGET_OFFSET
from h3kv.tiers.cold.ops import Op
from h3kv.tiers.cold.record import TWIN_BYTES


class Calendar:
    day = 10

    def __call__(self) -> int:
        return self.day


def store(twin: bytearray, op: Op) -> None:
    at = op.offset - BUDGET_OFFSET
    twin[at : at + op.size] = ctypes.string_at(op.address, op.size)


def test_budget_survives_a_restart_and_ends_with_the_day() -> None:
    today, twin = Calendar(), bytearray(TWIN_BYTES)
    budget = WriteBudget(1000, bytes(twin), today)
    store(twin, budget.spend(300))
    store(twin, budget.spend(400))
    again = WriteBudget(1000, bytes(twin), today)
    assert again.left_bytes == 300
    today.day = 11
    assert again.left_bytes == 1000


def test_clock_that_goes_back_forgets_nothing() -> None:
    today, twin = Calendar(), bytearray(TWIN_BYTES)
    budget = WriteBudget(1000, bytes(twin), today)
    store(twin, budget.spend(700))
    today.day = 3
    assert budget.left_bytes == 300
    assert WriteBudget(1000, bytes(twin), today).left_bytes == 300


def test_clock_that_was_far_ahead_does_not_stop_writing_for_ever() -> None:
    today, twin = Calendar(), bytearray(TWIN_BYTES)
    today.day = 5000
    budget = WriteBudget(1000, bytes(twin), today)
    store(twin, budget.spend(700))
    today.day = 10
    assert budget.left_bytes == 300
    today.day = 11
    assert budget.left_bytes == 1000


def test_promises_count_and_no_limit_is_no_limit() -> None:
    budget = WriteBudget(1000, bytes(TWIN_BYTES), Calendar())
    budget.promised_bytes = 600
    assert budget.left_bytes == 400
    assert WriteBudget(None, bytes(TWIN_BYTES), Calendar()).left_bytes is None
