"""How running answers and prompts that are being read share the processor.

    step   | token of all answers | prompt A, some layers | token of all answers | prompt A, some layers | ...
                                  |<-------- turn ------->|
"""

from __future__ import annotations

from typing import Final

from h3kv.core.units import NS_PER_MS

TURN_SHARE: Final = 2
"""A turn takes up to so many times what the answers' tokens take: they come at a third of their speed then, and two
thirds of the time go to reading."""

ALONE_NS: Final = 250 * NS_PER_MS
"""A turn that no answer waits for: so soon, a cancelled request ends."""


def turn_ns(token_ns: int | None) -> int:
    """How long a prompt may be read before the answers get their next token.

    Args:
        token_ns: what a token of all answers took last; None: there are none.
    """
    return ALONE_NS if token_ns is None else TURN_SHARE * token_ns


def goes_on(spent_ns: int, step_ns: int, limit_ns: int) -> bool:
    """Whether one more step of reading fits the turn.

    Args:
        spent_ns: in this turn so far.
        step_ns: what the last step took: the next one will take as much.
        limit_ns: of the turn.
    """
    return spent_ns + step_ns <= limit_ns
