import io

from rich.console import Console

from h3kv.cli.progress import StageProgress

ERASE_LINE = "\x1b[2K"


def test_without_a_terminal_each_quarter_is_a_plain_line() -> None:
    out = io.StringIO()
    with StageProgress(Console(file=out, width=80)) as progress:
        progress.begin("reading")
        for done in range(11):
            progress.update(done, 10)
        progress.say("read [10 tokens]")
        progress.begin("next")
        progress.update(1, 1)
    assert out.getvalue().splitlines() == [
        "reading: 0 %",
        "reading: 30 %",
        "reading: 50 %",
        "reading: 80 %",
        "reading: 100 %",
        "read [10 tokens]",
        "next: 100 %",
    ]


def test_nothing_to_do_is_done() -> None:
    out = io.StringIO()
    with StageProgress(Console(file=out)) as progress:
        progress.begin("reading")
        progress.update(0, 0)
    assert out.getvalue() == "reading: 100 %\n"


def test_on_a_terminal_a_bar_moves_and_goes_away() -> None:
    out = io.StringIO()
    with StageProgress(Console(file=out, force_terminal=True, width=80)) as progress:
        progress.begin("reading")
        progress.update(1, 2)
        progress.say("half-way")
    text = out.getvalue()
    assert "reading" in text
    assert "half-way\n" in text
    assert ERASE_LINE in text[text.index("half-way") :]
