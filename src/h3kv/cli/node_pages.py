"""Metrics of the processes of a running node, read over HTTP."""

from __future__ import annotations

import http.client
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from h3kv.supervisor.run_folder import ProcessFacts
from h3kv.telemetry import names
from h3kv.telemetry.metric import Service

PATIENCE_S: Final = 1.0


OWNERS: Final = {Service.NVME_IO.value}
"""Of tiers that other processes use too."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of a page."""

    name: str
    labels: Mapping[str, str]
    value: float
    process: str = ""
    """Whose page it is on."""


@dataclass(frozen=True, slots=True)
class NodePage:
    """Pages of all processes that answered, as one."""

    is_up: Mapping[str, bool]
    """By the name of the process: whether its page could be read."""
    samples: tuple[Sample, ...] = field(default=(), repr=False)

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples of that name which have these labels; None where there is none, or no number."""
        found = [
            each.value
            for each in self.samples
            if each.name == name and labels.items() <= each.labels.items() and not math.isnan(each.value)
        ]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name, summed for each value of a label."""
        sums: dict[str, float] = {}
        for each in self.samples:
            if each.name == name and label in each.labels and not math.isnan(each.value):
                sums[each.labels[label]] = sums.get(each.labels[label], 0.0) + each.value
        return sums

    def tiers(self) -> dict[str, tuple[int, int]]:
        """Bytes used and capacity of each tier, by the word of its owner: others have a part of it, and count that."""
        found: dict[str, tuple[int, int]] = {}
        for process in sorted({each.process for each in self.samples}, key=OWNERS.__contains__):
            own = NodePage(self.is_up, tuple(each for each in self.samples if each.process == process))
            used = own.by_label(names.TIER_USED, "tier")
            for tier, capacity in own.by_label(names.TIER_CAPACITY, "tier").items():
                found[tier] = round(used.get(tier, 0.0)), round(capacity)
        return found

    def mean(self, histogram: str) -> float | None:
        """Mean of all that a histogram saw."""
        count, total = self.value(f"{histogram}_count"), self.value(f"{histogram}_sum")
        return total / count if count and total is not None else None


def read_node(processes: Iterable[ProcessFacts]) -> NodePage:
    """The pages of these processes now. One that does not answer in a second is down."""
    is_up: dict[str, bool] = {}
    samples: list[Sample] = []
    for process in processes:
        text = None if process.metrics_url is None else _read(process.metrics_url)
        is_up[process.name] = text is not None
        samples += [] if text is None else parse_page(text, process=process.name)
    return NodePage(is_up, tuple(samples))


def parse_page(text: str, *, process: str = "") -> list[Sample]:
    """The samples of one page."""
    return [
        Sample(sample.name, sample.labels, sample.value, process)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def _read(url: str) -> str | None:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", place.path, headers={"Accept": "text/plain; version=0.0.4"})
        answer = connection.getresponse()
        return answer.read().decode() if answer.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
