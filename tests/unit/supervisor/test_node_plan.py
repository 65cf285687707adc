"""Which processes a node has, and what each is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3kv.core.errors import ConfigError
from h3kv.supervisor.node_plan import NodeOptions, facts_of, plan_node
from h3kv.telemetry.metric import Service


def test_the_store_comes_first_and_the_gateway_last(tmp_path: Path) -> None:
    plan = plan_node(NodeOptions(run_folder=tmp_path, offload_workers=2), services_folder=tmp_path)
    by_stage = sorted((spec.stage, spec.name) for spec in plan)
    assert by_stage == [
        (0, "nvme_io"),
        (1, "ann_offload-0"),
        (1, "ann_offload-1"),
        (1, "migration_controller"),
        (2, "gpu_worker"),
        (3, "gateway"),
    ]


def test_each_process_has_its_own_socket_and_metrics_port(tmp_path: Path) -> None:
    facts = facts_of(plan_node(NodeOptions(run_folder=tmp_path, offload_workers=3), services_folder=tmp_path))
    assert len({each.address for each in facts}) == len(facts)
    assert len({each.metrics_url for each in facts}) == len(facts)


def test_what_is_chosen_reaches_its_process_alone(tmp_path: Path) -> None:
    options = NodeOptions(run_folder=tmp_path, settings={Service.GPU_WORKER: {"MODEL": '{"source": "x"}'}})
    told = {spec.name: spec.environment for spec in plan_node(options, services_folder=tmp_path)}
    assert told["gpu_worker"]["H3_GPU_WORKER_MODEL"] == '{"source": "x"}'
    assert told["gateway"]["H3_GATEWAY_WORKER"] == f"unix://{tmp_path}/gpu_worker.sock"
    assert all(
        name.startswith(f"H3_{process.rpartition('-')[0].upper() or process.upper()}_")
        for process, environment in told.items()
        for name in environment
    )


def test_helpers_find_the_crew_where_it_comes_together_and_have_places(tmp_path: Path) -> None:
    options = NodeOptions(run_folder=tmp_path, offload_workers=40)
    told = {spec.name: spec.environment for spec in plan_node(options, services_folder=tmp_path)}
    crew = told["gpu_worker"]["H3_GPU_WORKER_CREW"]
    assert all(told[f"ann_offload-{n}"]["H3_ANN_OFFLOAD_CREW"] == crew for n in range(40))
    assert told["nvme_io"]["H3_NVME_IO_OFFLOAD_THREADS"] == "40"
    few = plan_node(NodeOptions(run_folder=tmp_path, offload_workers=2), services_folder=tmp_path)
    assert all("H3_NVME_IO_OFFLOAD_THREADS" not in spec.environment for spec in few), "people may set it"


def test_directory_and_quotas_are_counted_in_the_same_place(tmp_path: Path) -> None:
    options = NodeOptions(run_folder=tmp_path, directory="redis://host:6379/0")
    told = {spec.name: spec.environment for spec in plan_node(options, services_folder=tmp_path)}
    assert told["migration_controller"]["H3_MIGRATION_CONTROLLER_DIRECTORY"] == "redis://host:6379/0"
    assert told["gpu_worker"]["H3_GPU_WORKER_DIRECTORY"] == "redis://host:6379/0"


def test_documents_are_kept_beside_the_cold_store(tmp_path: Path) -> None:
    def told(store: Path | None) -> str | None:
        settings = {} if store is None else {Service.NVME_IO: {"STORE": str(store)}}
        plan = plan_node(NodeOptions(run_folder=tmp_path, settings=settings), services_folder=tmp_path)
        return next(spec for spec in plan if spec.name == "gpu_worker").environment.get("H3_GPU_WORKER_DOCUMENTS")

    assert told(None) is None
    assert told(tmp_path) == f"{tmp_path}/documents"
    assert told(tmp_path / "kv.h3") == f"{tmp_path}/kv.h3.documents"


def test_too_many_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="offload_workers = 65"):
        plan_node(NodeOptions(run_folder=tmp_path, offload_workers=65), services_folder=tmp_path)
