"""What `h3 status`, `h3 monitor` and `h3 evict` show of a node."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.cli.monitor import Look, draw
from h3kv.cli.node_pages import NodePage, parse_page, read_node
from h3kv.cli.status import describe_eviction
from h3kv.core.units import NS_PER_S
from h3kv.supervisor.run_folder import ProcessFacts, write_facts
from h3kv.telemetry import names
from h3kv.telemetry.metric import Service
from h3kv.telemetry.metrics_page import MetricsPage
from h3kv.telemetry.metrics_server import MetricsAddress, MetricsServer


@contextlib.contextmanager
def node(folder: Path) -> Iterator[list[ProcessFacts]]:
    """Two processes' pages, served, and one that is down."""
    worker, store = MetricsPage(Service.GPU_WORKER), MetricsPage(Service.NVME_IO)
    worker.gauge(names.TIER_CAPACITY, 4 << 30, tier="device")
    worker.gauge(names.TIER_USED, 1 << 30, tier="device")
    worker.gauge(names.COLD_KV_RATIO, 0.25)
    worker.count(names.MOVES, 3, source="host", target="nvme", reason="room")
    worker.observe(names.ATTEND_RECALL, 0.9)
    worker.observe(names.ATTEND_RECALL, 0.8)
    store.gauge(names.TIER_CAPACITY, 8 << 30, tier="nvme")
    store.gauge(names.TIER_USED, 2 << 30, tier="nvme")
    store.count(names.SSD_RETRIES, 5, tier="nvme")
    store.gauge(names.IO_RING_DEPTH, 17, tier="nvme")
    servers = [MetricsServer(page, MetricsAddress()) for page in (worker, store)]
    for server in servers:
        server.start()
    facts = [
        ProcessFacts("gpu_worker", f"unix://{folder}/gpu_worker.sock", servers[0].url),
        ProcessFacts("nvme_io", f"unix://{folder}/nvme_io.sock", servers[1].url),
    ]
    write_facts(folder, facts)
    try:
        yield facts
    finally:
        for server in servers:
            server.stop()


def test_a_page_is_read_as_numbers() -> None:
    page = NodePage({}, tuple(parse_page('# TYPE a counter\na_total{x="1"} 2.0\na_total{x="2"} 3.0\n')))
    assert page.value("a_total") == 5
    assert page.value("a_total", x="2") == 3
    assert page.value("b") is None
    assert page.by_label("a_total", "x") == {"1": 2, "2": 3}


def test_status_says_who_answers_and_how_full_tiers_are(tmp_path: Path) -> None:
    with node(tmp_path) as facts:
        result = CliRunner().invoke(app, ["status", "--run-folder", str(tmp_path), "--json"])
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        assert shown["tiers"]["device"] == {"used_bytes": 1 << 30, "capacity_bytes": 4 << 30}
        assert (shown["cold_kv_ratio"], shown["ssd_retry_count"]) == (0.25, 5)
        write_facts(tmp_path, [*facts, ProcessFacts("gateway", None, "http://127.0.0.1:9/metrics")])
        result = CliRunner().invoke(app, ["status", "--run-folder", str(tmp_path)])
        assert result.exit_code == 1
        assert "ssd_retry_count: 5" in result.output
        assert "down" in result.output


def test_the_monitor_draws_tiers_moves_and_the_numbers_by_their_names(tmp_path: Path) -> None:
    with node(tmp_path) as facts:
        look = Look(read_node(facts), NS_PER_S)
        console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
        console.print(draw(Look(look.page, 0), look))
        console.file.close()
        text = console.export_text()
    for line in ("cold_kv_ratio", "0.25", "recall", "0.850", "ring depth", "17", "ssd_retry_count", "host -> nvme"):
        assert line in text
    assert "2.00 GiB" in text


def test_the_monitor_ends_after_as_many_looks_as_asked(tmp_path: Path) -> None:
    with node(tmp_path):
        result = CliRunner().invoke(
            app, ["monitor", "--run-folder", str(tmp_path), "--count", "2", "--interval", "0.1"]
        )
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [["status"], ["monitor"], ["evict", "--cold"]])
def test_where_no_node_runs_the_cure_is_named(tmp_path: Path, command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--run-folder", str(tmp_path)])
    assert result.exit_code == 1
    assert "start one with `h3 up`" in result.output


def test_evict_wants_to_know_what_goes(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["evict", "--run-folder", str(tmp_path)])
    assert result.exit_code == 2
    assert "--cold" in result.output


def test_an_eviction_of_nothing_says_why() -> None:
    assert describe_eviction(2, 3 << 20, asked_bytes=4 << 20) == "2 segments given up, 3.00 MiB"
    assert describe_eviction(0, 0, asked_bytes=None) == "0 segments given up, 0 B"
    assert "as small as 1.00 MiB: ask for more" in describe_eviction(0, 0, asked_bytes=1 << 20)


def alarm_line(**gauges: float) -> str:
    """What `h3 monitor` says of the storage alarm; empty where it says nothing."""
    worker, store = MetricsPage(Service.GPU_WORKER), MetricsPage(Service.NVME_IO)
    if "used" in gauges:
        worker.gauge(names.DEVICE_MEMORY_USED, gauges["used"], device="cuda:0")
    if "wait_s" in gauges:
        store.gauge(names.DISK_READ_WAIT, gauges["wait_s"], disk="nvme0n1")
    samples = [sample for page in (worker, store) for sample in parse_page(page.render()[0].decode())]
    look = Look(NodePage({}, tuple(samples)), 0)
    console = Console(width=120)
    with console.capture() as drawn:
        console.print(draw(look, look))
    lines = [line for line in drawn.get().splitlines() if "storage alarm" in line]
    return lines[0].removeprefix("storage alarm").strip() if lines else ""


def test_monitor_shows_the_storage_alarm_once_both_its_measures_are_there() -> None:
    assert alarm_line() == alarm_line(used=0.99) == alarm_line(wait_s=1.0) == ""
    assert alarm_line(used=0.5, wait_s=1e-5) == "none"
    assert alarm_line(used=0.99, wait_s=1e-5).startswith("near")
    assert alarm_line(used=0.5, wait_s=1e-3).startswith("near")
    assert alarm_line(used=0.99, wait_s=1e-3).startswith("RINGS")


def test_a_tier_is_shown_once_by_the_word_of_its_owner() -> None:
    lines = (
        '# TYPE h3_tier_used_bytes gauge\nh3_tier_used_bytes{{tier="host"}} {used}\n'
        '# TYPE h3_tier_capacity_bytes gauge\nh3_tier_capacity_bytes{{tier="host"}} {capacity}\n'
    )
    device = '# TYPE h3_tier_capacity_bytes gauge\nh3_tier_capacity_bytes{tier="device"} 7\n'
    samples = [
        *parse_page(lines.format(used=5, capacity=50), process="nvme_io"),
        *parse_page(lines.format(used=3, capacity=40), process="gpu_worker"),
        *parse_page(device, process="gpu_worker"),
    ]
    assert NodePage({}, tuple(samples)).tiers() == {"host": (5, 50), "device": (0, 7)}
