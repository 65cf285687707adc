"""How running answers and prompts that are being read share the processor.

step   | token of all answers | prompt A, some layers | token of all answers | prompt A, some layers | ...
                              |<-------- turn ------->|
"""

from __future__ import annotations

from typing import Final

from h3kv.core.units import NS_PER_MS

TURN_SHARE: Final = 2
"""A turn takes up to so many times what the answers' tokens take, once for each prompt that is to be read: beside one,
answers come at a third of their speed, and two thirds of the time go to reading. Where many wait for their first token,
most of the time is theirs."""

TURN_NS_MAX: Final = 250 * NS_PER_MS
"""A turn takes no longer, whoever waits: so soon an answer goes on, and a cancelled request ends."""


def turn_ns(token_ns: int | None, *, prompts: int) -> int:
    """How long a prompt may be read before the answers get their next token.

    Args:
        token_ns: what a token of all answers took last; None: there are none.
        prompts: that are to be read.
    """
    return TURN_NS_MAX if token_ns is None else min(TURN_SHARE * prompts * token_ns, TURN_NS_MAX)


def goes_on(spent_ns: int, step_ns: int, limit_ns: int) -> bool:
    """Whether one more step of reading fits the turn.

    Args:
        spent_ns: in this turn so far.
        step_ns: what the last step took: the next one will take as much.
        limit_ns: of the turn.
    """
    return spent_ns + step_ns <= limit_ns
