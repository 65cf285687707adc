"""How one answer is shown while it comes: a bar or plain lines, or the tiers at work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, Protocol

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from h3kv.cli.progress import StageProgress
from h3kv.cli.tier_report import TierSnapshot, take_snapshot, tier_table
from h3kv.core.ports import Clock
from h3kv.core.units import NS_PER_MS
from h3kv.node import Node

REDRAW_NS: Final = 200 * NS_PER_MS
"""Shortest time between two drawings: eyes follow no more, and each costs a few milliseconds."""

TAIL_CHARACTERS: Final = 800
"""Newest part of a growing answer that is drawn: ten lines, which fit below the table on the smallest terminal."""


class Display(Protocol):
    """Shows one answer. `close` comes last, whatever happened."""

    def read(self, done_tokens: int, prompt_tokens: int) -> None:
        """So much of the prompt was read."""
        ...

    def write(self, text: str) -> None:
        """The answer grew."""
        ...

    def close(self) -> None:
        """Nothing more comes. Calling it again does nothing."""
        ...


class PlainDisplay:
    """Progress on stderr, then the text on stdout as it comes.

    Args:
        progress: shows reading.
        streams: whether the text goes to stdout.
    """

    def __init__(self, progress: StageProgress, *, streams: bool) -> None:
        self._progress = progress
        self._streams = streams
        progress.begin("reading")

    def read(self, done_tokens: int, prompt_tokens: int) -> None:
        """See `Display.read`."""
        self._progress.update(done_tokens, prompt_tokens)

    def write(self, text: str) -> None:
        """See `Display.write`."""
        self._progress.end()
        if self._streams:
            typer.echo(text, nl=False)

    def close(self) -> None:
        """See `Display.close`."""
        self._progress.end()


class TierScreen:
    """On a terminal: the tiers, how far reading is, and the answer, redrawn in place between two events.

    Where stdout is a terminal too, the answer stands in the drawing while it grows, and is printed when that is gone:
    two writers would wipe out each other's lines.

    Args:
        console: of stderr.
        node: whose tiers are shown.
        clock: tells when to draw again, and the speeds.
        streams: whether the text goes to stdout.
    """

    def __init__(self, console: Console, node: Node, clock: Clock, *, streams: bool) -> None:
        self._node = node
        self._clock = clock
        self._holds = streams and sys.stdout.isatty()
        self._say: Callable[[str], None] = (lambda text: typer.echo(text, nl=False)) if streams else (lambda _: None)
        self._stage = "reading"
        self._text = ""
        self._before = take_snapshot(node, clock.now_ns())
        # Text for stdout must not pass through the console of stderr.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()
        self._draw(self._before)

    def read(self, done_tokens: int, prompt_tokens: int) -> None:
        """See `Display.read`."""
        self._stage = f"reading: {done_tokens:,} of {prompt_tokens:,} tokens"
        self._refresh()

    def write(self, text: str) -> None:
        """See `Display.write`."""
        self._stage = "answering"
        self._text += text
        if not self._holds:
            self._say(text)
        self._refresh()

    def close(self) -> None:
        """See `Display.close`."""
        if self._live.is_started:
            self._live.stop()
            if self._holds:
                self._say(self._text)

    def _refresh(self) -> None:
        now_ns = self._clock.now_ns()
        if now_ns - self._before.at_ns >= REDRAW_NS:
            now = take_snapshot(self._node, now_ns)
            self._draw(now)
            self._before = now

    def _draw(self, now: TierSnapshot) -> None:
        lines: list[Table | Text] = [tier_table(now, self._before), Text(self._stage, style="dim")]
        if self._holds and self._text:
            lines.append(Text(self._text[-TAIL_CHARACTERS:]))
        self._live.update(Group(*lines), refresh=True)
