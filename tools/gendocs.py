"""Writes docs/reference from the code; with --check it only says which pages are stale."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from h3kv.config import ENV_DELIMITER, ENV_PREFIX, ModelSettings, RopeSettings, Settings
from h3kv.core.units import format_size
from h3kv.telemetry.metric import EVERY_SERVICE, Metric
from h3kv.telemetry.names import METRICS
from h3kv.telemetry.spans import ATTRIBUTES, SPANS, SpanKind

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

CONFIG_HEAD = f"""# Settings

<!-- Written by tools/gendocs.py from src/h3kv/config.py. Do not edit: run `make docs`. -->

Each setting can stand in `h3_config.yaml` (`section: {{key: value}}`), in the environment
(`{ENV_PREFIX}SECTION{ENV_DELIMITER}KEY`) or, where there is one, in a flag of the command; the later beats the earlier.
Sizes are a number and a unit, such as `512MiB` or `4GiB`. Caps may be given in tokens too, `2048tokens`: the bytes that
they take of the model in bf16, whatever its element type. An unknown key is an error. `h3 config` prints the settings
that are in force. A file with every key and its trade-off:
[config/laptop_cpu.yaml](../../config/laptop_cpu.yaml).
"""

METRICS_HEAD = """# Metrics

<!-- Written by tools/gendocs.py from src/h3kv/telemetry/names.py. Do not edit: run `make docs`. -->

Each process serves the metrics of its own service at `/metrics`; an embedded node keeps those of all its parts.

| name | kind | unit | labels | services | meaning |
|---|---|---|---|---|---|
"""

BUCKETS_HEAD = """
## Buckets of histograms

| name | upper bounds |
|---|---|
"""

SPANS_HEAD = """# Spans

<!-- Written by tools/gendocs.py from src/h3kv/telemetry/spans.py. Do not edit: run `make docs`. -->

One trace for each request, through all processes. Where nobody traces a request, none of them records anything of it.

| name | below, or first | attributes | meaning |
|---|---|---|---|
"""

ATTRIBUTES_HEAD = """
## Attributes

Of spans, and of log lines, which have `event`, `trace_id` and `span_id` besides.

| name | meaning |
|---|---|
"""


def config_page() -> str:
    """Every setting with its default and meaning."""
    parts = [CONFIG_HEAD]
    for name, field in Settings.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        parts.append(f"\n## {name}\n\n{section.__doc__}\n\n| key | values | default | meaning |\n|---|---|---|---|\n")
        parts += [config_row(key, item) for key, item in section.model_fields.items()]
        if section is ModelSettings:
            parts.append("\n`rope_scaling` has two keys of its own, or is text such as `ntk:2`:\n\n")
            parts.append("| key | values | default | meaning |\n|---|---|---|---|\n")
            parts += [config_row(key, item) for key, item in RopeSettings.model_fields.items()]
    return "".join(parts)


def config_row(key: str, field: FieldInfo) -> str:
    """One line of a table."""
    return f"| `{key}` | {values(field)} | {default(field)} | {' '.join((field.description or '').split())} |\n"


def default(field: FieldInfo) -> str:
    """What holds when nothing is written."""
    if field.is_required():
        return "must be given"
    if field.default is None:
        return "nothing"
    is_size = isinstance(field.default, int) and "size" in repr(field.metadata)
    return f"`{format_size(field.default) if is_size else field.default}`"


def values(field: FieldInfo) -> str:
    """What may be written, in words."""
    text = str(field.annotation)
    limits = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in (("ge", "from"), ("gt", "above"), ("le", "to"), ("multiple_of", "in steps of"))
        if hasattr(rule, name)
    ]
    if "RopeSettings" in text:
        return "kind and factor"
    kinds = [
        word for kind, word in (("int", "whole number"), ("float", "number"), ("str", "text")) if is_kind(text, kind)
    ]
    rules = repr(field.metadata)
    if "_cap" in rules:
        kinds = ["size or tokens"]
    elif "_size" in rules:
        kinds = ["size"]
    elif "Path" in text:
        kinds = ["path"]
    choices = [f"`{choice}`" for choice in literals(field.annotation)]
    return ", ".join([" ".join([*kinds, *limits])] * bool(kinds) + choices)


def is_kind(text: str, kind: str) -> bool:
    """Whether a type's text is this plain type, alone or in a union."""
    return text == f"<class '{kind}'>" or re.search(rf"\b{kind}\b(?! ?')", text.partition("Literal")[0]) is not None


def literals(annotation: object) -> list[str]:
    """Choices of a literal, also inside a union."""
    found = [value for value in getattr(annotation, "__args__", ()) if isinstance(value, str)]
    for part in getattr(annotation, "__args__", ()):
        found += literals(part)
    return found


def metrics_page() -> str:
    """Every metric that may be emitted."""
    bounds = [
        f"| `{metric.name}` | {', '.join(map(str, metric.buckets))} |\n"
        for metric in METRICS.values()
        if metric.buckets
    ]
    return "".join([METRICS_HEAD, *map(metric_row, METRICS.values()), BUCKETS_HEAD, *bounds])


def metric_row(metric: Metric) -> str:
    """One line of the table."""
    services = "all" if metric.services == EVERY_SERVICE else ", ".join(metric.services)
    labels = ", ".join(metric.labels) or "-"
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {services} | {metric.sentence} |\n"


def spans_page() -> str:
    """Every span that may be recorded."""
    meanings = [f"| `{name}` | {sentence} |\n" for name, sentence in ATTRIBUTES.items()]
    return "".join([SPANS_HEAD, *map(span_row, SPANS.values()), ATTRIBUTES_HEAD, *meanings])


def span_row(span: SpanKind) -> str:
    """One line of the table."""
    places = [*(["begins a trace"] * span.begins_trace), *(f"`{parent}`" for parent in span.parents)]
    attributes = ", ".join(f"`{name}`" for name in span.attributes)
    return f"| `{span.name}` | {', '.join(places)} | {attributes} | {span.sentence} |\n"


PAGES: dict[str, Callable[[], str]] = {"config.md": config_page, "metrics.md": metrics_page, "spans.md": spans_page}


def main() -> None:
    """Write or check all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a page is stale")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        file, text = FOLDER / name, page()
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file.relative_to(FOLDER.parents[1])}")
    if check and stale:
        sys.exit(f"error: docs/reference is stale ({', '.join(stale)}): run `make docs`")


if __name__ == "__main__":
    main()
