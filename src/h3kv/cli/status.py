"""`h3 status` and `h3 evict`: what a running node says, and what it is asked to give up."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from h3kv.cli.exits import ERROR
from h3kv.cli.node_pages import NodePage, read_node
from h3kv.core.errors import PeerUnavailableError
from h3kv.core.units import describe_size
from h3kv.rpc.addresses import parse_address
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.node_client import evict_cold
from h3kv.supervisor.run_folder import ProcessFacts, read_facts
from h3kv.telemetry import names
from h3kv.telemetry.metric import Service


def show_status(run_folder: Path, *, as_json: bool) -> None:
    """Print which processes answer and how full the tiers are. Fails if one does not answer.

    Raises:
        PeerUnavailableError: no node runs there.
    """
    processes = read_facts(run_folder)
    page = read_node(processes)
    if as_json:
        typer.echo(json.dumps(status_facts(processes, page)))
    else:
        _show(processes, page)
    if not all(page.is_up.values()):
        raise typer.Exit(ERROR)


def status_facts(processes: list[ProcessFacts], page: NodePage) -> dict[str, object]:
    """What `h3 status --json` prints."""
    return {
        "processes": {each.name: {"is_up": page.is_up[each.name], "address": each.address} for each in processes},
        "tiers": {
            tier: {"used_bytes": used, "capacity_bytes": capacity} for tier, (used, capacity) in page.tiers().items()
        },
        "cold_kv_ratio": page.value(names.COLD_KV_RATIO),
        "ssd_retry_count": page.value(names.SSD_RETRIES) or 0.0,
        "requests_in_flight": page.value(names.REQUESTS_IN_FLIGHT),
    }


def evict(run_folder: Path, *, idle_ns: int, size_bytes: int | None) -> None:
    """Make a running node give up what no sequence needs, and say how much that was.

    Raises:
        PeerError: no node runs there, or it does not answer.
    """
    worker = next((each for each in read_facts(run_folder) if each.name == Service.GPU_WORKER.value), None)
    if worker is None or worker.address is None:
        raise PeerUnavailableError(f"the node with {run_folder} has no gpu_worker: start it again", peer="gpu_worker")
    with PeerChannel(parse_address(worker.address, field="gpu_worker")) as channel:
        evicted = evict_cold(channel, idle_ns=idle_ns, size_bytes=size_bytes)
    typer.echo(describe_eviction(evicted.segments, evicted.size_bytes, asked_bytes=size_bytes))


def describe_eviction(segments: int, size_bytes: int, *, asked_bytes: int | None) -> str:
    """What was given up; and where that is nothing, what may be the reason."""
    if segments == 0 and asked_bytes is not None:
        return (
            f"nothing given up: segments go as a whole, and none that may go is as small as "
            f"{describe_size(asked_bytes)}: ask for more"
        )
    return f"{segments} segments given up, {describe_size(size_bytes)}"


def _show(processes: list[ProcessFacts], page: NodePage) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("process", "state", "address"):
        table.add_column(title)
    for each in processes:
        table.add_row(each.name, "up" if page.is_up[each.name] else "down", each.address or "")
    console = Console()
    console.print(table)
    for tier, (used, capacity) in page.tiers().items():
        console.print(f"{tier}: {describe_size(used)} of {describe_size(capacity)}")
    ratio = page.value(names.COLD_KV_RATIO)
    console.print(f"cold_kv_ratio: {'none running' if ratio is None else f'{ratio:.2f}'}")
    console.print(f"ssd_retry_count: {page.value(names.SSD_RETRIES) or 0:.0f}")
