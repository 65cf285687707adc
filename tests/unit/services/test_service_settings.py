import os
from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import UnixAddress
from h3kv.service_settings import describe_settings, read_settings
from services.gateway.settings import Settings as GatewaySettings
from services.gpu_worker.settings import Settings as WorkerSettings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("H3_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("H3_GPU_WORKER_ADDRESS", "unix:///run/h3/gpu_worker.sock")
    monkeypatch.setenv("H3_GATEWAY_WORKER", "unix:///run/h3/gpu_worker.sock")


def test_worker_reads_sections_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MODEL__SOURCE": "/models/tiny/",
        "HOST__KV_BYTES": "4GiB",
        "NVME": '{"store": "/data/h3", "capacity": "8GiB"}',
        "ATTENTION__DENSE_LAYERS": "[0, 1]",
        "DRAIN_SECONDS": "1.5",
        "METRICS__PORT": "0",
    }.items():
        monkeypatch.setenv(f"H3_GPU_WORKER_{name}", value)
    settings = read_settings(WorkerSettings)
    node = settings.node
    assert settings.address == UnixAddress(Path("/run/h3/gpu_worker.sock"))
    assert (settings.public_model_name, node.model.source) == ("tiny", "/models/tiny/")
    assert (node.host.kv_bytes, node.nvme.store, node.nvme.capacity) == (4 << 30, Path("/data/h3"), 8 << 30)
    assert node.attention.dense_layers == (0, 1)
    assert settings.drain_ns == 1.5 * NS_PER_S
    assert settings.telemetry(default_port=9402).metrics.port == 0


def test_metrics_have_the_port_that_prometheus_asks_for_where_none_is_named() -> None:
    assert read_settings(GatewaySettings).telemetry(default_port=9401).metrics.port == 9401


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("H3_GPU_WORKER_ADRESS", "x", "did you mean H3_GPU_WORKER_ADDRESS"),
        (
            "H3_GPU_WORKER_MODEL__SORCE",
            "x",
            "H3_GPU_WORKER_MODEL__SORCE: unknown setting; did you mean H3_GPU_WORKER_MODEL__SOURCE?",
        ),
        ("H3_GPU_WORKER_MODEL", '{"sorce": "x"}', "did you mean H3_GPU_WORKER_MODEL__SOURCE?"),
        ("H3_GPU_WORKER_TRACING__X9", "1", "H3_GPU_WORKER_TRACING__X9: unknown setting; known are endpoint, sampled"),
        ("H3_GPU_WORKER_CREDENTIALS__TLS__KEI", "k", "did you mean H3_GPU_WORKER_CREDENTIALS__TLS__KEY?"),
        ("H3_GPU_WORKER_ADDRESS__PORT", "1", "H3_GPU_WORKER_ADDRESS has no parts"),
        ("H3_GPU_WORKER_MODEL__DTYPE", "fp8", "H3_GPU_WORKER_MODEL__DTYPE = 'fp8'"),
        ("H3_GPU_WORKER_ADDRESS", "unix://relative", "absolute path"),
        ("H3_GPU_WORKER_REQUESTS_MAX", "0", "H3_GPU_WORKER_REQUESTS_MAX = '0'"),
        ("H3_GPU_WORKER_INSTANCE", "two words", "H3_GPU_WORKER_INSTANCE"),
        ("H3_GPU_WORKER_LOGS__LEVEL", "loud", "H3_GPU_WORKER_LOGS__LEVEL"),
        ("H3_GPU_WORKER_MODEL", "not json", "a section is JSON"),
    ],
)
def test_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        read_settings(WorkerSettings)


def test_setting_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("H3_GATEWAY_WORKER")
    with pytest.raises(ConfigError, match="H3_GATEWAY_WORKER is not set"):
        read_settings(GatewaySettings)


def test_token_is_read_from_its_file_and_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = "0123456789abcdef" * 2
    file = tmp_path / "token"
    file.write_text(f"{token}\n", encoding="ascii")
    monkeypatch.setenv("H3_GATEWAY_CREDENTIALS__TOKEN_FILE", str(file))
    settings = read_settings(GatewaySettings)
    assert settings.credentials.read().token == token
    assert token not in describe_settings(settings)
    assert "unix:///run/h3/gpu_worker.sock" in describe_settings(settings)


def test_metrics_for_other_machines_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H3_GATEWAY_METRICS__HOST", "0.0.0.0")
    with pytest.raises(ConfigError, match="without a password"):
        read_settings(GatewaySettings).telemetry(default_port=9401)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "/run/h3/crew.sock"),
        ({"CREW": "/tmp/other.sock"}, "/tmp/other.sock"),
        ({"ADDRESS": "127.0.0.1:7402"}, "/run/nvme/crew.sock"),
        ({"OFFLOAD": "off"}, None),
        ({"TIERS": "embedded"}, None),
    ],
)
def test_helpers_come_where_the_worker_serves(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], expected: str | None
) -> None:
    for name, value in {"TIERS": "services", "NVME_IO": "unix:///run/nvme/nvme_io.sock", **changes}.items():
        monkeypatch.setenv(f"H3_GPU_WORKER_{name}", value)
    found = read_settings(WorkerSettings).crew_path
    assert (None if found is None else str(found)) == expected
