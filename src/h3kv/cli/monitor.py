"""`h3 monitor`: a running node at work, in the terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from h3kv.cli.interrupts import Interrupts
from h3kv.cli.node_pages import NodePage, read_node
from h3kv.core.units import NS_PER_S, describe_size
from h3kv.policy.alarm import AlarmConfig, AlarmReading, judge
from h3kv.supervisor.run_folder import read_facts
from h3kv.telemetry import names

LOOK_S: Final = 0.1
"""Between two looks for Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Look:
    """The node at one moment."""

    page: NodePage
    at_ns: int


def watch_node(run_folder: Path, *, interval_s: float, count: int | None, interrupts: Interrupts) -> None:
    """Draw the node again and again, until Ctrl-C or so many times.

    Raises:
        PeerUnavailableError: no node runs there.
    """
    processes = read_facts(run_folder)
    before = now = Look(read_node(processes), time.monotonic_ns())
    drawn = 1
    with Live(draw(before, now), console=Console(), auto_refresh=False) as live:
        live.refresh()
        while not interrupts.came and (count is None or drawn < count):
            _pause(interval_s, lambda: interrupts.came)
            before, now = now, Look(read_node(processes), time.monotonic_ns())
            live.update(draw(before, now), refresh=True)
            drawn += 1


def draw(before: Look, now: Look) -> RenderableType:
    """The view of a moment. Rates are since the one before."""
    return Group(_processes(now.page), Text(), _tiers(now.page), Text(), _numbers(before, now))


def _processes(page: NodePage) -> Text:
    text = Text()
    for name, is_up in page.is_up.items():
        text.append(f"{name} {'up' if is_up else 'DOWN'}   ", style="green" if is_up else "bold red")
    return text


def _tiers(page: NodePage) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("tier", "used", "of", ""):
        table.add_column(title)
    for tier, (used, capacity) in page.tiers().items():
        bar = ProgressBar(total=max(capacity, 1), completed=used, width=30)
        table.add_row(tier, describe_size(used), describe_size(capacity), bar)
    return table


def _numbers(before: Look, now: Look) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    page, seconds = now.page, max((now.at_ns - before.at_ns) / NS_PER_S, 1e-9)

    def rate(name: str) -> float | None:
        new, old = page.value(name), before.page.value(name)
        return None if new is None or old is None else max(0.0, new - old) / seconds

    for source, target, moves in _moves(page):
        table.add_row(f"moves {source} -> {target}", f"{moves:.0f}")
    moved = rate(names.MOVED_BYTES)
    table.add_row("moving", "-" if moved is None else f"{describe_size(round(moved))}/s")
    table.add_row("tokens", _shown(rate(names.DECODE_TOKENS), ".1f", "/s"))
    table.add_row("cold_kv_ratio", _shown(page.value(names.COLD_KV_RATIO), ".2f"))
    table.add_row("recall", _shown(page.mean(names.ATTEND_RECALL), ".3f"))
    table.add_row("ring depth", _shown(page.value(names.IO_RING_DEPTH), ".0f"))
    table.add_row("ssd_retry_count", _shown(page.value(names.SSD_RETRIES), ".0f"))
    jitter = page.value(names.HOST_ACCESS_JITTER)
    table.add_row("HOST jitter", _shown(None if jitter is None else jitter * NS_PER_S, ".1f", " ns"))
    alarm = _alarm(page)
    if alarm is not None:
        table.add_row("storage alarm", alarm)
    for direction, decided in page.by_label(names.DECISIONS, "direction").items():
        table.add_row(f"decided to {direction}", f"{decided:.0f}")
    return table


def _moves(page: NodePage) -> list[tuple[str, str, float]]:
    sums: dict[tuple[str, str], float] = {}
    for sample in page.samples:
        if sample.name == names.MOVES:
            pair = (sample.labels["source"], sample.labels["target"])
            sums[pair] = sums.get(pair, 0.0) + sample.value
    return [(*pair, moves) for pair, moves in sorted(sums.items())]


def _alarm(page: NodePage) -> Text | None:
    """How the alarm about storage stands; None where reads or the device's memory are not measured."""
    waits_s = page.by_label(names.DISK_READ_WAIT, "disk").values()
    used = page.by_label(names.DEVICE_MEMORY_USED, "device").values()
    if not waits_s or not used:
        return None
    alarm = judge(AlarmReading(r_await_us=max(waits_s) * 1e6, hbm_used_fraction=max(used)), AlarmConfig())
    if alarm.rings:
        return Text("RINGS: reads of the disk are slow, and the device's memory is full", style="bold red")
    if alarm.is_storage_slow:
        return Text("near: reads of the disk are slow")
    return Text("near: the device's memory is full" if alarm.is_device_full else "none")


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _pause(seconds: float, is_over: Callable[[], bool]) -> None:
    end_ns = time.monotonic_ns() + round(seconds * NS_PER_S)
    pause = threading.Event()
    while not is_over() and (left_ns := end_ns - time.monotonic_ns()) > 0:
        pause.wait(min(LOOK_S, left_ns / NS_PER_S))
