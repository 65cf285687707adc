"""`h3 bench services`: everything that is measured of a node of processes, part by part."""

from __future__ import annotations

import contextlib
import enum
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from h3kv.bench import decisions, mailbox, migration_load, node_growth, seal_share, services
from h3kv.bench.remote_node import RemotePlace
from h3kv.bench.results import Results
from h3kv.bench.texts import NamedText
from h3kv.bench.tiered import TieredSetting, store_folder
from h3kv.core.errors import ConfigError


class Part(enum.StrEnum):
    """What can be measured by itself."""

    MAILBOX = "mailbox"
    """`mailbox.*`"""
    DECODE = "decode"
    """`services.decode_speed_fraction`"""
    DECISIONS = "decisions"
    """`controller.*`"""
    SEALING = "sealing"
    """`services.seal_*`"""
    MIGRATION = "migration"
    """`services.itl_*`, `services.migration_mb_s.*`"""
    GROWTH = "growth"
    """`services.rss_mib`, `services.{rss,fd,region}_growth`"""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line chose."""

    setting: TieredSetting
    """Model, and where stores are made."""
    named: NamedText
    """To read."""
    quick: bool
    parts: Collection[Part]
    """Nothing: all."""


def parts_of(names: Collection[str]) -> list[Part]:
    """Parts by their names.

    Raises:
        ConfigError: there is no such part.
    """
    strange = sorted(set(names) - set(Part))
    if strange:
        raise ConfigError(f"part = {strange[0]}: must be one of {', '.join(Part)}", field="part")
    return [Part(name) for name in names]


def run(results: Results, request: Request) -> None:
    """Measure the parts, one after the other.

    Raises:
        ConfigError: the text is too short, a folder cannot be used, or `services` is not there.
        PeerError: a process does not come up.
    """
    for part in Part:
        if not request.parts or part in request.parts:
            # Paths of sockets are short: not below the current folder.
            with tempfile.TemporaryDirectory(prefix="h3-") as folder:
                _PARTS[part](results, request, Path(folder))


def _mailbox(results: Results, request: Request, folder: Path) -> None:
    del folder
    mailbox.measure(results, sizes=mailbox.QUICK if request.quick else mailbox.FULL)


def _decode(results: Results, request: Request, folder: Path) -> None:
    sizes = services.QUICK if request.quick else services.FULL
    setting = TieredSetting(request.setting.model, folder, repetitions=1, progress=request.setting.progress)
    services.decode_speed(results, setting, sizes, named=request.named)


def _decisions(results: Results, request: Request, folder: Path) -> None:
    sizes = decisions.QUICK if request.quick else decisions.FULL
    decisions.measure(results, folder, sizes=sizes, progress=request.setting.progress)


def _sealing(results: Results, request: Request, folder: Path) -> None:
    sizes = seal_share.QUICK if request.quick else seal_share.FULL
    with _place(request, folder, sizes.store_bytes) as place:
        seal_share.measure(results, place, request.setting, sizes=sizes, named=request.named)


def _migration(results: Results, request: Request, folder: Path) -> None:
    sizes = migration_load.QUICK if request.quick else migration_load.FULL
    with _place(request, folder, sizes.store_bytes) as place:
        migration_load.measure(results, place, request.setting, sizes=sizes, named=request.named)


def _growth(results: Results, request: Request, folder: Path) -> None:
    sizes = node_growth.QUICK if request.quick else node_growth.FULL
    with store_folder(request.setting) as store:
        place = node_growth.NodePlace(folder, store.absolute())
        node_growth.measure(results, place, request.setting, sizes=sizes)


@contextlib.contextmanager
def _place(request: Request, folder: Path, store_bytes: int) -> Iterator[RemotePlace]:
    with store_folder(request.setting) as store:
        yield RemotePlace(folder, store.absolute(), store_bytes)


_PARTS: dict[Part, Callable[[Results, Request, Path], None]] = {
    Part.MAILBOX: _mailbox,
    Part.DECODE: _decode,
    Part.DECISIONS: _decisions,
    Part.SEALING: _sealing,
    Part.MIGRATION: _migration,
    Part.GROWTH: _growth,
}
