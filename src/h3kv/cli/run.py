"""`h3 run`: questions about a document, answered one after another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from h3kv.cli.display import Display, PlainDisplay, TierScreen
from h3kv.cli.document import check_question, prompt_tokens, read_document
from h3kv.cli.interrupts import Interrupts
from h3kv.cli.progress import StageProgress
from h3kv.cli.report import Answer, Usage, answer_fields, table
from h3kv.cli.session import Session, open_session
from h3kv.cli.tier_report import take_snapshot, tier_fields
from h3kv.cli.tier_summary import LEGEND, Peaks, dropped_segments, summary_table, warnings
from h3kv.config import Settings
from h3kv.core.errors import ContextLengthError, RequestError
from h3kv.core.types import Tier
from h3kv.engine.clock import MonotonicClock
from h3kv.engine.events import Finished, PrefillProgress, TokenGenerated
from h3kv.engine.pool import SETTLE_NS
from h3kv.engine.request import Request, SamplingParameters
from h3kv.machine import peak_rss_bytes
from h3kv.node import Node


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What to ask about which document, and how to choose the words of an answer."""

    document: Path
    questions: Sequence[str]
    temperature: float
    top_p: float
    seed: int


def answer_questions(
    settings: Settings, inquiry: Inquiry, interrupts: Interrupts, *, as_json: bool, report: Path | None
) -> None:
    """Answer all questions: text to stdout as it comes, or one JSON object at the end; the rest to stderr.

    Args:
        settings: in force.
        inquiry: what to answer.
        interrupts: looked at between steps.
        as_json: the object goes to stdout instead of the text.
        report: the object goes to this file too.

    Raises:
        H3Error: the first thing that stands in the way.
        KeyboardInterrupt: Ctrl-C; everything has been given back.
    """
    # Everything that can be wrong with the request is found before the model is loaded.
    document = read_document(inquiry.document)
    questions = [check_question(question) for question in inquiry.questions]
    if report is not None:
        write_report(report, "")
    sampling = SamplingParameters(
        temperature=inquiry.temperature,
        top_p=inquiry.top_p,
        seed=inquiry.seed,
        max_new_tokens=settings.engine.max_new_tokens,
    )
    console = Console(stderr=True)
    with StageProgress(console) as progress, open_session(settings, progress, interrupts) as session:
        speaker = Speaker(console, progress, interrupts, streams=not as_json)
        began, peaks = take_snapshot(session.node, 0).traffic, Peaks(session.node)
        prompts = [prompt(session, document, question, sampling) for question in questions]
        answers = []
        for question, request in zip(questions, prompts, strict=True):
            speaker.ask(question, is_only=len(questions) == 1)
            answers.append(speaker.answer(session.node, question, request, peaks))
        # Closing would write what is left; the report is to have it.
        session.node.pool.placer.settle(SETTLE_NS)
        peaks.look()
        tiers = summary_table(session.node, peaks, answers, before=began)
        lost = warnings(session.node)
        usage = memory_usage(session.node)
        found = session.fields() | memory_fields(usage) | tier_fields(session.node)
        found["peak_kv_bytes"] = {tier.value: size for tier, size in peaks.used_bytes.items()}
        found["dropped_segments"] = {tier.value: count for tier, count in dropped_segments(session.node).items()}
    found["answers"] = [answer_fields(one) for one in answers]
    if report is not None:
        write_report(report, f"{json.dumps(found)}\n")
    if as_json:
        typer.echo(json.dumps(found))
    else:
        console.print(table(answers, usage, load_s=session.load_s))
        console.print()
        console.print(tiers)
        console.print(LEGEND, style="dim", highlight=False)
    for line in lost:
        console.print(f"warning: {line}", highlight=False, markup=False, soft_wrap=True)


def memory_usage(node: Node) -> Usage:
    """What the tiers in memory hold, and the whole process at its largest."""
    in_memory = [statistics for tier, statistics in node.statistics().items() if tier is not Tier.NVME]
    return Usage(
        kv_used_bytes=sum(statistics.used_bytes for statistics in in_memory),
        kv_cap_bytes=sum(statistics.capacity_bytes for statistics in in_memory),
        peak_rss_bytes=peak_rss_bytes(),
    )


def write_report(file: Path, text: str) -> None:
    """Write the report's file.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the report {file} cannot be written ({error.strerror}): name another file") from error


def memory_fields(usage: Usage) -> dict[str, object]:
    """Memory under the stable keys of `--json`."""
    return {
        "kv_used_bytes": usage.kv_used_bytes,
        "kv_cap_bytes": usage.kv_cap_bytes,
        "peak_rss_bytes": usage.peak_rss_bytes,
    }


def prompt(session: Session, document: str, question: str, sampling: SamplingParameters) -> Request:
    """The request for one question.

    Raises:
        ContextLengthError: it does not fit the context; the message names the flags that help.
    """
    tokens = prompt_tokens(session.node.tokenizer, document, question)
    needed, limit = len(tokens) + sampling.max_new_tokens, session.node.config.max_context
    if needed > limit:
        alone = len(session.node.tokenizer.encode(question))
        raise ContextLengthError(
            f"{len(tokens):,} prompt tokens (of them {alone:,} for the question) and {sampling.max_new_tokens:,} for "
            f"the answer are {needed:,}, but the context holds {limit:,}: shorten the document or the question, lower "
            f"--max-new-tokens, or {reach_further(session, needed)}",
            needed_tokens=needed,
            limit_tokens=limit,
        )
    return Request(prompt=tuple(tokens), sampling=sampling)


def reach_further(session: Session, needed: int) -> str:
    """What makes so many tokens fit the context: flags, or another model where none would do."""
    config = session.node.config
    trained = session.context.trained_tokens or config.max_context
    if needed <= trained:
        return f"give --max-context {needed}: the model was trained for {trained:,}"
    if session.context.rope is None and config.is_scaled:
        return (
            f"choose a model that reaches further: this one brings its own rope scaling '{config.rope.kind}' to "
            f"{trained:,} tokens and cannot be stretched"
        )
    return (
        f"reach beyond the {trained:,} that the model was trained for, at some cost in quality, with --max-context "
        f"{needed} (static NTK rope scaling) or --rope ntk:{-(-needed // trained)}"
    )


class Speaker:
    """Runs one request at a time and shows what happens.

    Args:
        console: of stderr.
        progress: shows reading where the tiers are not shown.
        interrupts: looked at between steps.
        streams: whether the text goes to stdout as it comes.
    """

    def __init__(self, console: Console, progress: StageProgress, interrupts: Interrupts, *, streams: bool) -> None:
        self._console = console
        self._progress = progress
        self._interrupts = interrupts
        self._streams = streams
        self.clock = MonotonicClock()

    def ask(self, question: str, *, is_only: bool) -> None:
        """Show the question where answers would otherwise run together."""
        if self._streams and not is_only:
            self._write(f"> {question}\n")

    def answer(self, node: Node, question: str, request: Request, peaks: Peaks) -> Answer:
        """Run a request to its end, with a look at the tiers after each step.

        Raises:
            KeyboardInterrupt: Ctrl-C came; the node has been closed.
        """
        with contextlib.closing(self._display(node)) as display:
            display.read(0, len(request.prompt))
            pieces: list[str] = []
            for event in node.engine.generate(request):
                peaks.look()
                match event:
                    case PrefillProgress():
                        display.read(event.done_tokens, event.prompt_tokens)
                    case TokenGenerated():
                        pieces.append(event.text)
                        display.write(event.text)
                    case Finished():
                        display.write("\n")
                        return Answer(question, "".join(pieces), event.reason, event.statistics)
                if self._interrupts.came:
                    # A line that has begun is ended, so that the next one stands alone.
                    display.write("\n" * bool(pieces))
                    display.close()
                    node.close()
                    raise KeyboardInterrupt
        raise AssertionError("a request ends with Finished, or raises")

    def _display(self, node: Node) -> Display:
        if self._console.is_terminal and node.stores.host is not None:
            self._progress.end()
            return TierScreen(self._console, node, self.clock, streams=self._streams)
        return PlainDisplay(self._progress, streams=self._streams)

    def _write(self, text: str) -> None:
        if self._streams:
            typer.echo(text, nl=False)
