"""Settings of the controller, from the environment to the rules."""

from __future__ import annotations

import pytest

from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_S
from h3kv.policy.migration_config import DEVICE_HOST, HOST_NVME, MigrationConfig
from h3kv.service_settings import read_settings
from services.migration_controller.settings import NODE_NAME_MAX, Settings, machine_name

PREFIX = "H3_MIGRATION_CONTROLLER_"


def test_without_settings_the_rules_are_those_of_the_policy() -> None:
    assert read_settings(Settings).rules.config() == MigrationConfig()


def test_thresholds_have_their_names_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"EVICTION_THRESHOLD": "30s", "JITTER_NS_MAX": "40", "PROMOTE_BYTES_PER_TICK": "8MiB", "HAS_DEVICE": "true"}
    for name, value in told.items():
        monkeypatch.setenv(f"{PREFIX}RULES__{name}", value)
    rules = read_settings(Settings).rules.config()
    assert rules.eviction_threshold_ns == 30 * NS_PER_S
    assert rules.jitter_ns_max == 40.0
    assert rules.promote_bytes_per_tick == 8 << 20
    assert rules.pairs == (DEVICE_HOST, HOST_NVME)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("RULES__TICK", "soon", "RULES__TICK = 'soon'"),
        ("RULES__TOCK", "1s", "RULES__TOCK: unknown setting; did you mean .*RULES__TICK"),
        ("DIRECTORI", "memory", "did you mean H3_MIGRATION_CONTROLLER_DIRECTORY"),
        ("NVME_IO", "nowhere", "NVME_IO"),
        ("NODE", "(none)", "NODE"),
    ],
)
def test_a_bad_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str, named: str) -> None:
    monkeypatch.setenv(f"{PREFIX}{name}", value)
    with pytest.raises(ConfigError, match=named):
        read_settings(Settings)


def test_values_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}RULES__WATERMARK_LOW", "0.99")
    with pytest.raises(ConfigError, match="watermark_low"):
        read_settings(Settings).rules.config()


@pytest.mark.parametrize(
    ("host", "name"),
    [("w-3.example.org", "w-3.example.org"), ("(none)", "none"), ("", "node"), ("rëd", "r-d")],
)
def test_whatever_a_machine_calls_itself_the_directory_takes_a_name(host: str, name: str) -> None:
    assert machine_name(host) == name


def test_long_names_of_machines_stay_apart() -> None:
    names = {machine_name(f"{'h3-node-of-a-large-cluster' * 2}-{number}") for number in range(3)}
    assert len(names) == 3
    assert {len(name) for name in names} == {NODE_NAME_MAX}
