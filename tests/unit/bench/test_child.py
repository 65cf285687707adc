"""Work in a process of its own: its result, its errors, and its end without either."""

from __future__ import annotations

import os

import pytest

from h3kv.bench.child import in_child
from h3kv.core.errors import InternalError, TierFullError
from h3kv.core.types import Tier


def double(number: int) -> int:
    return 2 * number


def fill(needed_bytes: int) -> None:
    raise TierFullError("HOST is full: raise its cap", tier=Tier.HOST, needed_bytes=needed_bytes, free_bytes=7)


def vanish(status: int) -> None:
    os._exit(status)


def test_a_result_comes_back() -> None:
    assert in_child(double, 21) == 42


def test_an_error_keeps_its_class_its_message_and_its_context() -> None:
    with pytest.raises(TierFullError, match=r"^HOST is full: raise its cap$") as caught:
        in_child(fill, 4096)
    assert (caught.value.tier, caught.value.needed_bytes, caught.value.free_bytes) == (Tier.HOST, 4096, 7)


def test_a_process_that_vanishes_is_told_with_its_exit_code() -> None:
    with pytest.raises(InternalError, match="exit code 3"):
        in_child(vanish, 3)
