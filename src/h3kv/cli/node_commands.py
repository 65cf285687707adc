"""Commands about a node that runs as separate processes: what they do lies in modules of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h3kv.cli.exits import exits
from h3kv.cli.interrupts import Interrupts

node_commands = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def _folder(text: str) -> Path:
    """A folder's path. An empty one, as an unset variable of a shell gives it, would mean this folder."""
    if not text:
        raise typer.BadParameter("the path is empty: name a folder")
    return Path(text)


RunFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", parser=_folder, help="Folder of the node's sockets. Default: one for each user."),
]


@node_commands.command()
def status(
    *,
    run_folder: RunFolder = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show which processes of a running node answer, and how full its tiers are. Fails if one does not answer."""
    with exits():
        from h3kv.cli.status import show_status
        from h3kv.supervisor.run_folder import default_folder

        show_status(run_folder or default_folder(), as_json=json)


@node_commands.command()
def monitor(
    *,
    run_folder: RunFolder = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many looks. Default: at Ctrl-C.")] = None,
) -> None:
    """Watch a running node: tiers, moves, cold_kv_ratio, ring depth, recall."""
    with exits(), Interrupts() as interrupts:
        from h3kv.cli.monitor import watch_node
        from h3kv.supervisor.run_folder import default_folder

        watch_node(run_folder or default_folder(), interval_s=interval, count=count, interrupts=interrupts)


@node_commands.command()
def evict(
    *,
    cold: Annotated[bool, typer.Option("--cold", help="What no running sequence needs.")] = False,
    idle: Annotated[str, typer.Option(metavar="TIME", help="Only what was not used for so long.")] = "0s",
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="At most so much. Default: all.")] = None,
    run_folder: RunFolder = None,
) -> None:
    """Make a running node give up room that segments take though no sequence needs them."""
    from h3kv.core.units import parse_duration, parse_size

    if not cold:
        raise typer.BadParameter("say what goes: --cold")
    try:
        idle_ns, size_bytes = parse_duration(idle), None if size is None else parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with exits():
        from h3kv.cli.status import evict as evict_now
        from h3kv.supervisor.run_folder import default_folder

        evict_now(run_folder or default_folder(), idle_ns=idle_ns, size_bytes=size_bytes)
