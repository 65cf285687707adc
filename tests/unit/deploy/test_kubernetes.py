"""The manifests against Kubernetes' own schemas, and against what the processes are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_server import DEFAULT_PORTS

K8S = Path(__file__).parents[3] / "k8s"
KUSTOMIZATION = "kustomization.yaml"
PATCH = "node.yaml"
"""In an overlay: a part of a manifest."""
VERSION = "1.32"
PLACES = ["base", *(f"overlays/{each.name}" for each in sorted((K8S / "overlays").iterdir()))]


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def manifests() -> list[Path]:
    return sorted(path for path in K8S.rglob("*.yaml") if path.name != KUSTOMIZATION)


def base(kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        each
        for path in (K8S / "base").glob("*.yaml")
        for each in documents(path)
        if each["kind"] == kind and each["metadata"]["name"] == name
    )
    return found


def pods() -> Iterator[dict[str, Any]]:
    for kind, name in (("DaemonSet", "h3-node"), ("Deployment", "ann-offload")):
        yield base(kind, name)["spec"]["template"]["spec"]


def containers() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for pod in pods() for each in pod["containers"]}


@pytest.mark.parametrize(
    "path", [path for path in manifests() if path.parent.name == "base" or path.name == "redis.yaml"]
)
def test_manifests_are_strictly_valid(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_directory_and_quotas_are_counted_on_one_server() -> None:
    (patch,) = documents(K8S / "overlays/redis" / PATCH)
    told = {
        variable["name"]: variable.get("value")
        for container in patch["spec"]["template"]["spec"]["containers"]
        for variable in container["env"]
    }
    assert told["H3_GPU_WORKER_DIRECTORY"] == told["H3_MIGRATION_CONTROLLER_DIRECTORY"] == "redis://redis:6379/0"


@pytest.mark.parametrize("place", PLACES)
def test_kustomizations_name_files_that_exist(place: str) -> None:
    (kustomization,) = documents(K8S / place / KUSTOMIZATION)
    named = kustomization["resources"] + [patch["path"] for patch in kustomization.get("patches", [])]
    assert all((K8S / place / name).exists() for name in named)
    if place == "base":
        assert sorted(named) == sorted(
            path.name for path in (K8S / "base").glob("*.yaml") if path.name != KUSTOMIZATION
        )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed: it builds the overlays")
@pytest.mark.parametrize("place", PLACES)
def test_what_kustomize_makes_is_strictly_valid(place: str) -> None:
    made = subprocess.run(["kubectl", "kustomize", K8S / place], capture_output=True, text=True, check=True, timeout=60)
    for document in yaml.safe_load_all(made.stdout):
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_each_process_has_a_container_that_prometheus_finds() -> None:
    ports = {
        name: [port["containerPort"] for port in each["ports"] if port["name"].startswith("m")]
        for name, each in containers().items()
    }
    assert ports == {service.value.replace("_", "-"): [DEFAULT_PORTS[service]] for service in Service}


def test_containers_have_limits_probes_and_no_rights() -> None:
    for name, container in containers().items():
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), name
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys(), name
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}, name
        assert context["readOnlyRootFilesystem"], name
        assert not context["allowPrivilegeEscalation"], name
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "Localhost", "localhostProfile": "h3.json"}
        assert pod["automountServiceAccountToken"] is False


def test_settings_belong_to_the_process() -> None:
    for name, container in containers().items():
        prefix = f"H3_{name.replace('-', '_').upper()}_"
        assert all(each["name"].startswith(prefix) for each in container["env"]), name


def test_offload_workers_are_scaled_by_themselves_beside_a_node() -> None:
    spec = base("Deployment", "ann-offload")["spec"]["template"]["spec"]
    (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    labels = base("DaemonSet", "h3-node")["spec"]["template"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    shared = [volume["hostPath"]["path"] for pod in pods() for volume in pod["volumes"] if volume["name"] == "sockets"]
    assert shared == ["/run/h3", "/run/h3"]


def test_processes_of_the_node_share_a_volume_in_memory() -> None:
    (node, _) = pods()
    (volume,) = (each for each in node["volumes"] if each["name"] == "shared-memory")
    assert volume["emptyDir"]["medium"] == "Memory"
    mounted = [
        each["name"]
        for each in node["containers"]
        if {"name": "shared-memory", "mountPath": "/dev/shm"} in each["volumeMounts"]
    ]
    assert mounted == ["nvme-io", "gpu-worker"]


def test_nothing_is_let_in_or_out_that_no_rule_names() -> None:
    policies = documents(K8S / "base/network-policy.yaml")
    (closed,) = (each for each in policies if each["metadata"]["name"] == "h3-closed")
    assert closed["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    rules = [rule for each in policies for key in ("ingress", "egress") for rule in each["spec"].get(key, [])]
    assert all(rule.get("ports") and (rule.get("from") or rule.get("to")) for rule in rules)


def test_the_role_of_the_processes_is_empty() -> None:
    assert base("Role", "h3-node")["rules"] == []
