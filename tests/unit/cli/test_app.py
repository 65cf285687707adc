import subprocess
import sys

import pytest
from typer.testing import CliRunner

import h3kv
from h3kv.cli.app import app

COMMANDS = ("run", "info", "config", "format", "verify", "bench")


def test_help_lists_the_commands_and_no_arguments_are_wrong_usage() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(f"\n  {command}" in shown.output for command in COMMANDS)
    assert CliRunner().invoke(app, []).exit_code == 2


def test_version_is_the_packages() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"h3 {h3kv.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["walk"],
        ["run"],
        ["run", "--document", "a.txt"],
        ["run", "--question", "Who?"],
        ["run", "--document", "a", "--question", "b", "--dtype", "bf17"],
        ["run", "--document", "a", "--question", "b", "--max-new-tokens", "0"],
        ["run", "--document", "a", "--question", "b", "--temperature", "-1"],
        ["run", "--document", "a", "--question", "b", "--fast"],
    ],
)
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.output


def test_config_prints_what_is_in_force() -> None:
    flags = ["--kv-cap", "2GiB", "--rope", "yarn:4", "--threads", "3", "--store", "kv", "--tiering", "off"]
    result = CliRunner().invoke(app, ["config", *flags, "--host-kv", "64tokens", "--window", "128"])
    assert result.exit_code == 0
    assert "kv_bytes: 2GiB" in result.output
    assert "type: yarn" in result.output
    assert "threads: 3" in result.output
    assert "kv_bytes: 64tokens" in result.output
    assert "window_tokens: 128" in result.output
    assert "store: kv" in result.output
    assert "mode: 'off'" in result.output


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("--kv-cap", "4gigs", "a size is a number and a unit"),
        ("--device-kv", "4gigs", "or a number of tokens, such as 2048tokens"),
        ("--host-kv", "x", "--host-kv sets host.kv_bytes"),
        ("--store-capacity", "x", "--store-capacity sets nvme.capacity"),
        ("--window", "100", "multiple of 64"),
        ("--rope", "ntk", "a kind and a factor"),
        ("--threads", "0", "a whole number from 1"),
        ("--config", "nowhere.yaml", "cannot read the settings in nowhere.yaml"),
    ],
)
def test_bad_setting_is_one_line_and_code_1(flag: str, value: str, rule: str) -> None:
    result = CliRunner().invoke(app, ["config", flag, value])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert rule in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from h3kv.cli.app import app; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_spinning_of_idle_threads_is_bounded_unless_the_user_says_otherwise() -> None:
    program = "import os, h3kv; print(os.environ['GOMP_SPINCOUNT'])"
    for given, expected in (({}, "20000"), ({"GOMP_SPINCOUNT": "0"}, "0")):
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, capture_output=True, text=True, check=True, env=given)
        assert result.stdout == f"{expected}\n"
