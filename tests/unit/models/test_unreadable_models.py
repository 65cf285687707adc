"""Model files that are there, but cannot be read or do not hold what they should, end with a named cure."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from h3kv.core.errors import ModelCorruptError, ModelNotFoundError
from h3kv.models import load_model
from h3kv.models.gguf_file import GgufFile
from h3kv.models.gguf_loader import config_from_gguf
from h3kv.testing.tiny_gguf import write_tiny_gguf
from h3kv.testing.tiny_models import write_tiny_model

INDEX = "model.safetensors.index.json"
FOLDER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX)
REFUSING_FILE = Path("/proc/self/mem")
"""A regular file that no one may read from the start, whatever the user's rights."""

needs_refusing_file = pytest.mark.skipif(not REFUSING_FILE.is_file(), reason="this system has no such file")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("written") / "model"
    return write_tiny_model(folder), folder


@pytest.fixture
def folder(oracle: tuple[torch.nn.Module, Path], tmp_path: Path) -> Path:
    """A model folder of one's own."""
    return Path(shutil.copytree(oracle[1], tmp_path / "model"))


@pytest.fixture
def gguf(oracle: tuple[torch.nn.Module, Path], tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, oracle[0])
    return path


@needs_refusing_file
@pytest.mark.parametrize("name", FOLDER_FILES)
def test_files_of_a_folder_that_fail_to_read_are_named(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(REFUSING_FILE)
    with pytest.raises(ModelNotFoundError, match=r"cannot be read .* or give another path"):
        load_model(folder)


@needs_refusing_file
def test_gguf_that_fails_to_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to(REFUSING_FILE)
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf cannot be read .* or give another path"):
        load_model(path)


def test_weights_that_are_a_folder_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ModelNotFoundError, match=r"cannot be read .*directory.* or give another path") as caught:
        load_model(folder)
    assert caught.value.path == str(weights)


def forbid(path: Path) -> None:
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("permissions do not bind the superuser")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_files_of_a_folder_without_permission_are_named(folder: Path, name: str) -> None:
    forbid(folder / name)
    with pytest.raises(ModelNotFoundError, match=r"cannot be read \(Permission denied\)") as caught:
        load_model(folder)
    assert caught.value.path == str(folder / name)


def test_gguf_without_permission_is_named(gguf: Path) -> None:
    forbid(gguf)
    with pytest.raises(ModelNotFoundError, match=r"cannot be read \(Permission denied\)"):
        load_model(gguf)


def template_in_another_encoding(folder: Path) -> Path:
    path = folder / "chat_template.jinja"
    path.write_bytes("caf\u00e9".encode("latin-1"))
    return path


def map_with_numbers(folder: Path) -> Path:
    path = folder / INDEX
    path.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": 3}}))
    return path


def map_with_lists(folder: Path) -> Path:
    path = folder / INDEX
    path.write_text(json.dumps({"weight_map": {"a": ["model.safetensors"]}}))
    return path


def config_in_another_encoding(folder: Path) -> Path:
    path = folder / "config.json"
    path.write_bytes(b'{"model_type": "caf\xe9"}')
    return path


@pytest.mark.parametrize(
    "damage", [template_in_another_encoding, map_with_numbers, map_with_lists, config_in_another_encoding]
)
def test_content_that_makes_no_sense_is_refused(folder: Path, damage: Callable[[Path], Path]) -> None:
    path = damage(folder)
    with pytest.raises(ModelCorruptError, match="fetch it again") as caught:
        load_model(folder)
    assert caught.value.path == str(path)


def test_gguf_without_an_embedding_is_refused(gguf: Path) -> None:
    gguf.write_bytes(gguf.read_bytes().replace(b"token_embd.weight", b"other_embd.weight"))
    with pytest.raises(ModelCorruptError, match=r"lacks the tensor 'token_embd\.weight'; fetch the file again"):
        config_from_gguf(GgufFile(gguf))
