"""What `h3 up` tells the processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.cli.up import EndSignals, UpRequest, _options
from h3kv.config import load
from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_S
from h3kv.telemetry.metric import Service


def options(folder: Path, **flags: dict[str, object]) -> dict[Service, dict[str, str]]:
    request = UpRequest(folder, 1, "127.0.0.1", 8000, "memory", None, NS_PER_S)
    found = _options(load(file=None, flags=flags), request).settings
    return {service: dict(settings) for service, settings in found.items()}


def test_caps_go_to_who_owns_the_memory(tmp_path: Path) -> None:
    host = {"kv_bytes": "2GiB"}
    told = options(tmp_path, host=host, nvme={"store": tmp_path / "s", "capacity": "8GiB"}, model={"dtype": "fp32"})
    store = told[Service.NVME_IO]
    assert (store["HOST_BYTES"], store["CAPACITY"], store["STORE"]) == ("2GiB", "8GiB", str(tmp_path / "s"))
    worker = told[Service.GPU_WORKER]
    assert json.loads(worker["MODEL"])["dtype"] == "fp32"
    assert not {"HOST", "NVME"} & worker.keys()


def test_what_was_not_said_is_left_to_the_process(tmp_path: Path) -> None:
    assert not {"HOST_BYTES", "CAPACITY", "STORE"} & options(tmp_path)[Service.NVME_IO].keys()


def test_the_file_of_tenants_is_for_the_gateway(tmp_path: Path) -> None:
    request = UpRequest(tmp_path, 1, "127.0.0.1", 8000, "memory", None, NS_PER_S, tmp_path / "t.yaml")
    told = _options(load(file=None, flags={}), request).settings
    assert told[Service.GATEWAY]["TENANTS_FILE"] == str(tmp_path / "t.yaml")
    assert "TENANTS_FILE" not in options(tmp_path)[Service.GATEWAY]


def test_answers_may_run_shorter_than_the_node_takes_to_end(tmp_path: Path) -> None:
    assert options(tmp_path)[Service.GATEWAY]["DRAIN_SECONDS"] == "0.6"


def test_a_length_that_nobody_named_is_the_contexts(tmp_path: Path) -> None:
    assert "max_new_tokens" not in json.loads(options(tmp_path)[Service.GPU_WORKER]["ENGINE"])
    told = options(tmp_path, engine={"max_new_tokens": 256})
    assert json.loads(told[Service.GPU_WORKER]["ENGINE"])["max_new_tokens"] == 256


def test_a_bad_file_of_tenants_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file, folder = tmp_path / "t.yaml", tmp_path / "run"
    file.write_text("tenants: []", encoding="utf-8")
    file.chmod(0o600)
    result = CliRunner().invoke(app, ["up", "--run-folder", str(folder), "--tenants", str(file)])
    assert result.exit_code == 1
    assert "at least 1" in result.output
    assert not folder.exists()


def test_caps_in_tokens_are_refused_since_only_the_model_knows_their_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in bytes, such as 4GiB"):
        options(tmp_path, host={"kv_bytes": "2048tokens"})


def test_the_first_signal_ends_and_the_second_hurries() -> None:
    before = signal.getsignal(signal.SIGINT)
    with EndSignals() as signals:
        assert not signals.is_ending
        signal.raise_signal(signal.SIGINT)
        signals.wait(60 * NS_PER_S)
        assert signals.is_ending
        assert not signals.is_hurried
        signal.raise_signal(signal.SIGTERM)
        assert signals.is_hurried
    assert signal.getsignal(signal.SIGINT) is before


def test_a_folder_that_others_may_open_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    result = CliRunner().invoke(app, ["up", "--run-folder", str(folder)])
    assert result.exit_code == 1
    assert "chmod 700" in result.output
