import re
from pathlib import Path

import pytest
import yaml

from h3kv.config import Settings, load, render
from h3kv.core.errors import ConfigError
from h3kv.core.units import TokenCount
from h3kv.engine.needs import TieringConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _empty_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings file in the current folder; the environment of the test run sets nothing."""
    monkeypatch.chdir(tmp_path)
    assert load() == Settings()


def written(folder: Path, text: str) -> Path:
    file = folder / "settings.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def refused(file: Path | None = None, flags: dict[str, dict[str, object]] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(file=file, flags=flags)
    return caught.value


def test_sizes_are_read_from_text(tmp_path: Path) -> None:
    assert load(file=written(tmp_path, "device: {kv_bytes: 4GiB}")).device.kv_bytes == 4 << 30


def test_caps_are_read_as_sizes_or_tokens(tmp_path: Path) -> None:
    settings = load(file=written(tmp_path, "host: {kv_bytes: 4096tokens}\nnvme: {capacity: 2GiB}"))
    assert (settings.host.kv_bytes, settings.nvme.capacity) == (TokenCount(4096), 2 << 30)


def test_words_that_yaml_takes_for_truth_values_are_modes(tmp_path: Path) -> None:
    for mode in ("on", "off", "auto"):
        assert load(file=written(tmp_path, f"tiering: {{mode: {mode}}}")).tiering.mode == mode


def test_home_folder_of_a_store_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(flags={"nvme": {"store": "~/kv"}}).nvme.store == tmp_path / "kv"


def test_defaults_of_tiering_are_the_engines() -> None:
    settings, engine = Settings(), TieringConfig()
    assert (settings.device.window_tokens, settings.host.staging_bytes) == (engine.window_tokens, engine.staging_bytes)


def test_rope_scaling_is_read_from_text_and_from_keys(tmp_path: Path) -> None:
    from_keys = load(file=written(tmp_path, "model: {rope_scaling: {type: yarn, factor: 2}}"))
    assert from_keys == load(flags={"model": {"rope_scaling": "yarn:2"}})
    assert from_keys.model.rope_scaling is not None
    assert from_keys.model.rope_scaling.factor == 2.0


def test_flag_beats_environment_beats_file_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "engine: {chunk_tokens: 64, max_new_tokens: 1}\nmodel: {source: from-file}")
    monkeypatch.setenv("H3_ENGINE__CHUNK_TOKENS", "128")
    monkeypatch.setenv("H3_MODEL__SOURCE", "from-environment")
    settings = load(file=file, flags={"model": {"source": "from-flag"}})
    assert settings.model.source == "from-flag"
    assert settings.engine.chunk_tokens == 128
    assert settings.engine.max_new_tokens == 1


def test_file_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "h3_config.yaml").write_text("runtime: {threads: 3}", encoding="utf-8")
    assert load().runtime.threads == 3


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("model: {dtype: bf17}", "model.dtype", "input should be 'auto', 'bf16', 'fp32' or 'fp16'"),
        ("device: {kv_bytes: 4 gigs}", "device.kv_bytes", "a size is a number and a unit"),
        ("host: {kv_bytes: 1.5tokens}", "host.kv_bytes", "a whole number of them, such as 2048tokens"),
        ("host: {staging_bytes: auto}", "host.staging_bytes", "a size is a number and a unit"),
        ("nvme: {capacity: auto}", "nvme.capacity", "or a number of tokens, such as 2048tokens"),
        ("nvme: {store: ''}", "nvme.store", "a folder, file or block device"),
        ("nvme: {backend: aio}", "nvme.backend", "input should be 'auto', 'io_uring' or 'threads'"),
        ("nvme: {write_bytes_per_day: 1 a day}", "nvme.write_bytes_per_day", "a size is a number and a unit"),
        ("device: {window_tokens: 100}", "device.window_tokens", "multiple of 64"),
        ("tiering: {mode: maybe}", "tiering.mode", "input should be 'auto', 'on' or 'off'"),
        ("engine: {chunk_tokens: 100}", "engine.chunk_tokens", "multiple of 64"),
        ("engine: {chunk_tokens: true}", "engine.chunk_tokens", "a whole number"),
        ("engine: {max_new_tokens: true}", "engine.max_new_tokens", "a whole number"),
        ("model: {max_context: true}", "model.max_context", "a whole number"),
        ("device: {window_tokens: true}", "device.window_tokens", "a whole number"),
        ("runtime: {threads: 0}", "runtime.threads", "a whole number from 1"),
        ("runtime: {threads: true}", "runtime.threads", "a whole number from 1"),
        ("model: {rope_scaling: ntk}", "model.rope_scaling", "a kind and a factor, such as ntk:2"),
        ("model: {rope_scaling: dynamic:2}", "model.rope_scaling.type", "input should be 'linear', 'ntk' or 'yarn'"),
        ("model: {rope_scaling: ntk:0.5}", "model.rope_scaling.factor", "greater than 1"),
        ("model: {sorce: x}", "model.sorce", "unknown setting; did you mean source?"),
        ("modl: {source: x}", "modl", "unknown setting; did you mean model?"),
        ("engine: 7", "engine", "must be a section"),
        ("engine:", "engine", "must be a section"),
    ],
)
def test_bad_value_is_refused_with_field_value_origin_and_rule(
    tmp_path: Path, text: str, field: str, rule: str
) -> None:
    error = refused(written(tmp_path, text))
    assert error.field == field
    assert str(error).startswith(f"{field} = ")
    assert f"(from {tmp_path / 'settings.yaml'})" in str(error)
    assert rule in str(error)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("H3_MODEL__DTYPE", "bf17", "model.dtype"),
        ("H3_MODEL__SORCE", "x", "model.sorce"),
        ("H3_MODLE__SOURCE", "x", "modle"),
        ("H3_ENGINE", "7", "engine"),
        ("H3_MODEL", "{half", "environment"),
    ],
)
def test_bad_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, field: str) -> None:
    monkeypatch.setenv(name, value)
    assert refused().field == field


def test_variable_of_a_service_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_MIGRATION_CONTROLLER_RULES__TICK", "50ms")
    monkeypatch.setenv("H3_NVME_IO_METRICS__PORT", "0")
    load()


def test_bad_flag_is_told_from_the_same_key_in_the_file(tmp_path: Path) -> None:
    error = refused(written(tmp_path, "model: {dtype: fp32}"), {"model": {"dtype": "double"}})
    assert "model.dtype = 'double' (from a flag)" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is not YAML"), ("- a\n- b", "must hold sections"), ("just words", "must hold sections")],
)
def test_file_that_is_no_tree_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in str(refused(written(tmp_path, text)))


def test_missing_file_and_folder_are_refused_by_name(tmp_path: Path) -> None:
    assert "nowhere.yaml" in str(refused(tmp_path / "nowhere.yaml"))
    assert str(tmp_path) in str(refused(tmp_path))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().model.source = "other"


def test_rendered_settings_read_back_as_themselves(tmp_path: Path) -> None:
    flags = {
        "device": {"kv_bytes": "1536MiB"},
        "host": {"kv_bytes": "2048tokens"},
        "nvme": {"store": "/kv", "capacity": "1GiB", "write_bytes_per_day": "1GB"},
        "tiering": {"mode": "off"},
        "model": {"rope_scaling": "ntk:2"},
        "runtime": {"threads": "2"},
    }
    settings = load(flags=flags)
    assert "kv_bytes: 1536MiB" in render(settings)
    assert "kv_bytes: 2048tokens" in render(settings)
    assert load(file=written(tmp_path, render(settings))) == settings


def test_golden_files_load_and_name_every_setting() -> None:
    golden = sorted((ROOT / "config").glob("*.yaml"))
    assert golden
    for file in golden:
        settings = load(file=file)
        text = file.read_text(encoding="utf-8")
        for section, keys in yaml.safe_load(render(settings)).items():
            for key in keys:
                assert re.search(rf"^  (# )?{key}:", text, re.MULTILINE), f"{file.name} lacks {section}.{key}"


@pytest.mark.parametrize("text", ["model: bf16", "model: [1]", "1: 2", "null: 2", "model: {1: 2}", "engine: null"])
def test_what_is_no_section_is_refused_whatever_the_flags_say(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        load(file=file, flags={"model": {}, "engine": {}})
