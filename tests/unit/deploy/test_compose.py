"""The Compose files against what the processes are, and against Compose itself where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from h3kv.telemetry.metric import Service

ROOT = Path(__file__).parents[3]
LAYERS = ("docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.grafana.yml")
SERVICES = [service.value for service in Service]
LIGHT = {"nvme_io", "ann_offload", "migration_controller", "gateway"}
"""Whose images have no torch."""


def loaded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return found


BASE = loaded(LAYERS[0])


def test_every_process_is_a_service_and_shares_only_the_folder_of_sockets() -> None:
    assert set(SERVICES) < set(BASE["services"])
    for name in SERVICES:
        volumes = BASE["services"][name]["volumes"]
        assert "run:/run/h3" in volumes, name
        assert all(volume.startswith(("run:", "store:", "documents:")) for volume in volumes), name
        assert ("store:/var/lib/h3" in volumes) == (name == "nvme_io")
        assert ("documents:/var/lib/h3-documents" in volumes) == (name == "gpu_worker")
    assert "mode=0700" in BASE["volumes"]["run"]["driver_opts"]["o"]


@pytest.mark.parametrize("name", SERVICES)
def test_processes_run_with_as_little_as_they_need(name: str) -> None:
    service = BASE["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"]
    assert "seccomp:deploy/seccomp/h3.json" in service["security_opt"]
    assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert "container_name" not in service, "a service with a fixed name cannot be scaled"


def test_only_the_gateway_and_the_viewers_have_ports_and_on_this_machine_alone() -> None:
    with_ports = {name: each["ports"] for name, each in BASE["services"].items() if "ports" in each}
    assert set(with_ports) == {"gateway", "jaeger", "prometheus"}
    assert all(port.startswith("127.0.0.1:") for ports in with_ports.values() for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_settings_belong_to_the_process_and_metrics_reach_prometheus(name: str) -> None:
    environment = BASE["services"][name]["environment"]
    prefix = f"H3_{name.upper()}_"
    assert all(key.startswith(prefix) for key in environment), name
    assert environment[f"{prefix}METRICS__IS_REMOTE_ALLOWED"] == "true"
    assert "telemetry" in BASE["services"][name]["networks"]
    assert BASE["networks"]["telemetry"] == {"internal": True}, "metrics have no password"


def test_directory_and_quotas_are_counted_on_the_server_that_both_reach() -> None:
    for name in ("migration_controller", "gpu_worker"):
        service = BASE["services"][name]
        assert service["environment"][f"H3_{name.upper()}_DIRECTORY"] == "redis://redis:6379/0"
        assert set(BASE["services"]["redis"]["networks"]) <= set(service["networks"])


def test_named_volumes_networks_and_dependencies_exist() -> None:
    for layer in LAYERS:
        file = loaded(layer)
        volumes = {**BASE["volumes"], **file.get("volumes", {})}
        services = {**BASE["services"], **file["services"]}
        for name, service in file["services"].items():
            named = [volume.partition(":")[0] for volume in service.get("volumes", [])]
            assert all(each in volumes or (ROOT / each).is_dir() for each in named), (layer, name)
            assert set(service.get("networks", [])) <= set(BASE["networks"]), (layer, name)
            assert set(service.get("depends_on", [])) <= set(services), (layer, name)


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_built_in_two_stages_from_a_pinned_base_for_a_plain_user(name: str) -> None:
    text = (ROOT / f"services/{name}/Dockerfile").read_text(encoding="utf-8")
    assert "ARG BASE=python:3.11-slim-bookworm" in text
    assert re.findall(r"^FROM (.*)$", text, re.MULTILINE) == ["${BASE} AS build", "${BASE}"]
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)
    commands = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert ("torch" in re.findall(r"[\w-]+", commands)) != (name in LIGHT)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    assert all((ROOT / path).exists() for line in copied for path in line.split())


def test_steps_that_images_share_are_written_alike_so_that_they_run_once() -> None:
    texts = [(ROOT / f"services/{name}/Dockerfile").read_text(encoding="utf-8") for name in SERVICES]
    builds = [text.partition("\nFROM ")[2] for text in texts]
    assert len({build.partition("--requirement common.txt")[0] for build in builds}) == 1
    compiled = [build.partition("RUN ./packages.sh /opt/own")[0] for build in builds if "core.sh" in build]
    assert len(compiled) > 1
    assert len(set(compiled)) == 1


@pytest.mark.parametrize("name", SERVICES)
def test_packages_in_images_have_exact_versions(name: str) -> None:
    text = (ROOT / f"services/{name}/Dockerfile").read_text(encoding="utf-8")
    (own,) = re.findall(r"^RUN ./packages.sh /opt/own (.+)$", text, re.MULTILINE)
    common = (ROOT / "deploy/image/common.txt").read_text(encoding="utf-8").splitlines()
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    for package in [*own.split(), *(line for line in common if not line.startswith("#"))]:
        assert re.search(rf"^{package}==", pinned, re.MULTILINE), package


def test_the_profile_admits_io_uring_and_nothing_that_leads_out_of_a_container() -> None:
    profile = json.loads((ROOT / "deploy/seccomp/h3.json").read_text(encoding="utf-8"))
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    free = {name for each in profile["syscalls"] if each["action"] == "SCMP_ACT_ALLOW" for name in each["names"]}
    bare = {name for each in profile["syscalls"] if "args" not in each for name in each["names"]} & free
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_create", "sendmsg", "recvmsg"} <= bare
    forbidden = {"mount", "umount2", "ptrace", "bpf", "unshare", "setns", "init_module", "kexec_load", "keyctl"}
    forbidden |= {"perf_event_open", "userfaultfd", "pivot_root", "reboot", "swapon", "process_vm_writev", "add_key"}
    assert not forbidden & free
    assert not {"clone", "clone3", "socket", "personality"} & bare
    names = [name for each in profile["syscalls"] if "args" not in each for name in each["names"]]
    assert len(names) == len(set(names))


def test_the_script_that_tests_compose_is_one_that_bash_reads() -> None:
    subprocess.run(["bash", "-n", ROOT / "tools/test_compose.sh"], check=True)


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compose() and shutil.which("docker-compose") is None, reason="Compose is not installed: docker compose"
)
@pytest.mark.parametrize("layers", [LAYERS[:1], LAYERS[:2], (LAYERS[0], LAYERS[2])])
def test_compose_itself_takes_the_files(layers: tuple[str, ...]) -> None:
    command = ["docker", "compose"] if has_compose() else ["docker-compose"]
    files = [argument for layer in layers for argument in ("-f", layer)]
    result = subprocess.run(
        [*command, *files, "config", "--quiet"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
