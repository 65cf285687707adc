"""How far a model reaches, by which flags, and what is said where no flag would help."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.composition import choose_context
from h3kv.config import ModelSettings
from h3kv.core.errors import ConfigError
from h3kv.models.rope import RopeKind
from h3kv.testing.tiny_models import write_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain` was trained for 1,024 tokens; `scaled` for 128, and its own scaling reaches 1,024."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "plain", max_position_embeddings=1024)
    write_tiny_model(folder / "scaled", max_position_embeddings=1024, rope_parameters=LLAMA3)
    return folder


def settings(**given: object) -> ModelSettings:
    return ModelSettings.model_validate({"source": "given", **given})


def test_context_beyond_a_plain_model_means_ntk(models: Path) -> None:
    context = choose_context(settings(max_context=1200), models / "plain")
    assert context.rope is not None
    assert (context.rope.kind, context.rope.factor, context.trained_tokens) == (RopeKind.NTK, 1.18, 1024)


@pytest.mark.parametrize(
    "given", [{"max_context": 1200}, {"rope_scaling": "ntk:2"}, {"rope_scaling": "yarn:16"}], ids=str
)
def test_model_that_brings_its_own_scaling_is_not_stretched(models: Path, given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="brings its own rope scaling 'llama3' to 1,024 tokens"):
        choose_context(settings(**given), models / "scaled")


def test_model_that_brings_its_own_scaling_may_use_less_of_it(models: Path) -> None:
    context = choose_context(settings(max_context=800), models / "scaled")
    assert (context.rope, context.trained_tokens) == (None, 1024)


@pytest.mark.parametrize(("name", "is_scaled"), [("plain", False), ("scaled", True)])
def test_flags_are_named_only_where_they_would_help(models: Path, tmp_path: Path, name: str, is_scaled: bool) -> None:
    document = tmp_path / "document.txt"
    document.write_text("word " * 300)
    shown = CliRunner().invoke(
        app, ["run", "--model", str(models / name), "--document", str(document), "--question", "Who?"]
    )
    assert shown.exit_code == 1
    assert "but the context holds 1,024" in shown.stderr
    assert ("--rope" in shown.stderr, "--max-context" in shown.stderr) == (not is_scaled, not is_scaled)
    assert ("choose a model that reaches further" in shown.stderr) == is_scaled
