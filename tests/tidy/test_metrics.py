import ast

from h3kv.telemetry import names

from .sources import ROOT, dotted, parsed, shipped


def constants() -> dict[str, str]:
    """Metric names by the constants that hold them."""
    return {name: value for name, value in vars(names).items() if isinstance(value, str) and value.startswith("h3_")}


def test_every_name_is_declared_and_every_declared_metric_has_a_name() -> None:
    assert set(constants().values()) == set(names.METRICS)


def test_every_metric_is_emitted() -> None:
    used = {
        dotted(node).removeprefix("names.")
        for file in shipped(".py")
        if file.name != "names.py"
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute)
    }
    assert set(constants()) - used == set()


def test_metrics_are_named_by_their_unit_and_kind() -> None:
    for metric in names.METRICS.values():
        assert metric.name.endswith("_total") == (metric.kind is names.Kind.COUNTER), metric.name
        if metric.unit in {"bytes", "seconds"}:
            assert metric.unit in metric.name, metric.name


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert [name for name in names.METRICS if f"`{name}`" not in page] == []
