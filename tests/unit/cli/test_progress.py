import io

import pytest
from rich.console import Console

from h3kv.cli.progress import StageProgress

ERASE_LINE = "\x1b[2K"
SHOW_CURSOR = "\x1b[?25h"


def test_without_a_terminal_each_stage_is_one_plain_line() -> None:
    out = io.StringIO()
    with StageProgress(Console(file=out, width=80)) as progress:
        progress.begin("reading")
        for done in range(11):
            progress.update(done, 10)
        progress.say("read [10 tokens]")
        progress.begin("next")
        progress.update(0, 0)
    assert out.getvalue().splitlines() == [
        "reading: 0 % 30 % 50 % 80 % 100 %",
        "read [10 tokens]",
        "next: 100 %",
    ]


def test_on_a_terminal_the_bar_is_gone_before_other_text_comes() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with StageProgress(console) as progress:
        progress.begin("reading")
        progress.update(1, 2)
        progress.end()
        bar = out.getvalue()
        console.print("The answer", end="")
        progress.end()
    assert "reading" in bar
    assert SHOW_CURSOR in bar[bar.rindex("reading") :]
    assert ERASE_LINE in bar[bar.rindex("reading") :]
    assert out.getvalue() == f"{bar}The answer"


def test_an_error_takes_the_bar_away() -> None:
    out = io.StringIO()
    progress = StageProgress(Console(file=out, force_terminal=True, width=80))
    progress.begin("reading")
    with pytest.raises(KeyboardInterrupt), progress:
        raise KeyboardInterrupt
    assert SHOW_CURSOR in out.getvalue()
