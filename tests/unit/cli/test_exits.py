import pytest
import typer

from h3kv.cli.exits import exits
from h3kv.core.errors import ConfigError


def ended_by(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(typer.Exit) as caught, exits():
        raise error
    return caught.value.exit_code, capsys.readouterr().err


def test_error_of_ours_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ended_by(ConfigError("engine.chunk_tokens = 3:\nmultiple of 64", field="engine"), capsys)
    assert (code, text) == (1, "error: engine.chunk_tokens = 3: multiple of 64\n")


def test_interruption_is_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_by(KeyboardInterrupt(), capsys) == (130, "interrupted\n")


def test_mistake_of_ours_is_one_line_that_says_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ended_by(KeyError("slot"), capsys)
    assert (code, text) == (1, "error: unexpected KeyError: 'slot' (H3_DEBUG=1 shows where)\n")


def test_lack_of_memory_names_what_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ended_by(MemoryError(), capsys)
    assert code == 1
    assert "--device-kv or --host-kv" in text


def test_debug_shows_the_traceback_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_DEBUG", "1")
    _, text = ended_by(ConfigError("wrong", field="x"), capsys)
    assert text.startswith("Traceback")
    assert text.endswith("error: wrong\n")


def test_what_typer_raises_passes() -> None:
    with pytest.raises(typer.Exit) as caught, exits():
        raise typer.Exit(7)
    assert caught.value.exit_code == 7
