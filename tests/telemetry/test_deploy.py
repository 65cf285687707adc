"""What `deploy` asks of Prometheus and shows in Grafana is declared in `telemetry.names`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from h3kv.policy.alarm import AlarmConfig
from h3kv.policy.migration_config import MigrationConfig
from h3kv.telemetry.metric import Kind, Metric
from h3kv.telemetry.metrics_server import DEFAULT_PORTS
from h3kv.telemetry.names import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/h3.json"
PROMETHEUS_OWN = {"up"}
TARGET_LABELS = {"job", "instance", "node", "le"}
"""Which Prometheus gives, and buckets have."""
WORDS = {
    *("sum", "max", "min", "rate", "increase", "changes", "absent", "histogram_quantile"),
    *("by", "on", "and", "or"),
}
SERIES = re.compile(r"(?<![\w:\"])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPING = re.compile(r"\b(by|on)\s*\(([^)]*)\)")


def loaded(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in loaded("prometheus/alerts.yml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and what it says."""
    yield from ((rule["alert"], rule["expr"]) for rule in rules())
    yield from ((panel["title"], target["expr"]) for panel in panels() for target in panel.get("targets", ()))


def metric_of(series: str) -> Metric | None:
    """The declared metric that a series belongs to."""
    if series in METRICS:
        return METRICS[series]
    base = METRICS.get(re.sub(r"_(?:bucket|sum|count)$", "", series))
    return base if base is not None and base.kind is Kind.HISTOGRAM else None


def series_of(expression: str) -> list[tuple[str, set[str]]]:
    """Names of series in an expression, each with the labels that its braces name."""
    bare = re.sub(r"\[[^\]]*\]", "", GROUPING.sub(r"\1", expression))
    return [
        (name, set(LABEL.findall(braces or "")))
        for name, braces in SERIES.findall(re.sub(r"\b\d[\w.]*(?:-\d+)?", "", bare))
        if name not in WORDS
    ]


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_expressions_use_declared_metrics_and_their_labels(place: str, expression: str) -> None:
    found = series_of(expression)
    assert found, f"{place} asks for nothing"
    for name, labels in found:
        metric = metric_of(name)
        assert metric is not None or name in PROMETHEUS_OWN, f"{place}: {name} is not declared"
        known = TARGET_LABELS | set(metric.labels if metric is not None else ())
        assert labels <= known, f"{place}: {name} has no labels {labels - known}"
    grouped = {label.strip() for _, labels in GROUPING.findall(expression) for label in labels.split(",")}
    known = TARGET_LABELS.union(*(metric.labels for name, _ in found if (metric := metric_of(name)) is not None))
    assert grouped <= known, f"{place}: nothing has the labels {grouped - known}"


def test_counters_are_asked_for_their_rate() -> None:
    for place, expression in expressions():
        for name, _ in series_of(expression):
            metric = metric_of(name)
            if metric is not None and metric.kind is not Kind.GAUGE:
                assert re.search(rf"(?:rate|increase)\({name}\[", expression), f"{place}: {name} only grows"


def test_reading_an_expression_finds_its_series() -> None:
    found = series_of(
        'sum by (le, tier) (rate(h3_a_bucket{tier=~"x|y", job="z"}[5m])) / max(h3_b) > 1.5e-6 or up{q="u"}'
    )
    assert found == [("h3_a_bucket", {"tier", "job"}), ("h3_b", set()), ("up", {"q"})]


def test_the_alarm_about_storage_has_the_bounds_of_the_policy() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "H3StorageSlowWhileDeviceFull")
    slow, full = re.findall(r"> ([\d.e-]+)", rule["expr"])
    assert float(slow) == pytest.approx(AlarmConfig().r_await_us_max * 1e-6)
    assert float(full) == AlarmConfig().hbm_used_fraction_max


def test_the_alert_about_jitter_has_the_bound_of_the_policy() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "H3HostJitter")
    assert float(rule["expr"].partition("> ")[2]) == pytest.approx(MigrationConfig().jitter_ns_max * 1e-9)


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert re.fullmatch(r"H3[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert all(text.endswith(".") for text in rule["annotations"].values()), rule["alert"]


def test_every_service_is_asked_where_it_serves_by_default() -> None:
    config = loaded("prometheus/prometheus.yml")
    asked = {job["job_name"]: job["dns_sd_configs"] for job in config["scrape_configs"]}
    assert {name: [place["port"] for place in places] for name, places in asked.items()} == {
        service.value: [port] for service, port in DEFAULT_PORTS.items()
    }
    assert all(places[0]["names"] == [name] for name, places in asked.items())
    read_me = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert all(f"{service} {port}" in read_me for service, port in DEFAULT_PORTS.items())
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])


def test_panels_ask_the_source_that_is_provided_and_do_not_overlap() -> None:
    sources = {source["uid"] for source in loaded("grafana/provisioning/datasources/h3.yml")["datasources"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] in sources, panel["title"]
            assert panel["description"], panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: it comes with Prometheus")
@pytest.mark.parametrize("command", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")])
def test_prometheus_itself_takes_the_files_and_the_alerts_ring_when_they_should(command: tuple[str, ...]) -> None:
    result = subprocess.run(
        ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
