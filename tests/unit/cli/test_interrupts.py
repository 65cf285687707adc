import signal

import pytest

from h3kv.cli.interrupts import Interrupts


def test_first_interrupt_is_remembered() -> None:
    with Interrupts() as interrupts:
        assert not interrupts.came
        signal.raise_signal(signal.SIGINT)
        assert interrupts.came


def test_second_interrupt_does_not_wait() -> None:
    with Interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handler_from_before_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
