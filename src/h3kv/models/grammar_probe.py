"""Compiles a grammar that comes on stdin, only to see that it ends: a program of its own, which imports none of ours.

There are schemas of a few hundred bytes for which the library's compiler runs for hours, and nothing stops a thread of
it. A process ends by the limits that it sets itself.
"""

from __future__ import annotations

import resource
import sys
from typing import Final

import llguidance

CPU_S_MAX: Final = 1
"""For compiling. Most schemas of 64 KiB take a fraction of it; those of nothing but formats take nearly all."""

MEMORY_BYTES_MAX: Final = 1 << 30
"""Of addresses."""

ROW_ITEMS_MAX: Final = 1000
"""Ways to go on that a grammar may have at one place: enough for objects with 250 properties that may be left out. The
work of a step grows with their square, to 0.1 s, and other requests wait for it."""

LEXER_STATES_MAX: Final = 50_000
"""Of one answer, 2 KB each."""


def limits() -> llguidance.LLParserLimits:
    """What a grammar may take of the library."""
    return llguidance.LLParserLimits(
        max_items_in_row=ROW_ITEMS_MAX, max_lexer_states=LEXER_STATES_MAX, verbose_errors=False
    )


def main() -> None:
    """Read a grammar and compile it. Whether it is valid does not matter; a limit ends the process by a signal."""
    grammar = sys.stdin.buffer.read().decode()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(usage.ru_utime + usage.ru_stime) + 1 + CPU_S_MAX
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    llguidance.LLMatcher.validate_grammar(grammar, limits=limits())


if __name__ == "__main__":
    main()
