"""Making and checking cold stores."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from h3kv.cli.exits import ERROR
from h3kv.cli.store_facts import make_engine, store_contents
from h3kv.core.errors import ConfigError
from h3kv.core.units import TOKENS_UNIT, describe_size, parse_size
from h3kv.tiers.cold.format import format_store
from h3kv.tiers.cold.place import resolve
from h3kv.tiers.cold.verify import AreaReport, verify_store


def make_store(place: Path, *, capacity: str | None, area: str | None, yes: str | None) -> None:
    """Format a place and say what became of it."""
    path, geometry = format_store(
        place,
        make_engine,
        capacity_bytes=_size(capacity, "capacity"),
        area_bytes=_size(area, "area"),
        yes=yes,
    )
    typer.echo(
        f"{path}: an empty cold store of {describe_size(geometry.capacity_bytes)}, {geometry.areas} areas of "
        f"{describe_size(geometry.area_bytes)}"
    )


def check_store(place: Path, *, as_json: bool) -> None:
    """Verify a place, print what was found, and fail if something is damaged."""
    reports = []
    for report in verify_store(place, make_engine):
        reports.append(report)
        if not as_json:
            _show(report)
    damage = sum(len(report.damage) for report in reports)
    if as_json:
        typer.echo(json.dumps({"damage": damage, "areas": [_facts(report) for report in reports]}))
    else:
        held = store_contents(resolve(place)[0])
        typer.echo(
            f"{sum(report.segments for report in reports)} segments in {len(reports)} areas, {held.tokens:,} tokens, "
            f"{describe_size(held.kv_bytes)}: {f'{damage} damaged' if damage else 'all intact'}"
        )
    if damage:
        raise typer.Exit(ERROR)


def _show(report: AreaReport) -> None:
    model = "unknown" if report.fingerprint is None else report.fingerprint.hex()[:12]
    typer.echo(f"area {report.area}, model {model}: {report.segments} segments, {report.pieces} checksums")
    for line in report.damage:
        typer.echo(f"  damaged: {line}")


def _facts(report: AreaReport) -> dict[str, object]:
    return {
        "area": report.area,
        "fingerprint": None if report.fingerprint is None else report.fingerprint.hex(),
        "segments": report.segments,
        "checksums": report.pieces,
        "damage": list(report.damage),
    }


def _size(text: str | None, name: str) -> int | None:
    if text is not None and text.strip().endswith(TOKENS_UNIT):
        rule = "a store is made for any model, and how many bytes a token takes depends on the model; give bytes"
        raise ConfigError(f"--{name} {text}: {rule}, such as 64GiB", field=name)
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--{name} {text}: {error}", field=name) from error
