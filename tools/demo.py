"""Runs the main job on the document that the repository ships, with caps so small that all three tiers work; then once
more in a second process, which finds the document's KV in the cold store. Says whether the answers are right, and how
much sooner the first token came.

Usage: demo.py [--document FILE] [--question TEXT]... [--rope KIND:FACTOR] [flags of h3 run]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(os.path.relpath(Path(__file__).parents[1]))
FOLDER = ROOT / "examples" / "demo"
BUILD = ROOT / "build"
"""Where the cold store lies while the demo runs."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked of which document."""

    document: Path
    questions: list[str]
    expected: list[str]
    """Words that the right answers contain, in the order of the questions; none for another document or question."""
    flags: list[str]


def job(arguments: list[str]) -> Job:
    """The job of demo.json, changed by the flags."""
    shipped = json.loads((FOLDER / "demo.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--document", type=Path)
    parser.add_argument("--question", action="append")
    parser.add_argument("--rope", default=shipped["rope"])
    chosen, others = parser.parse_known_args(arguments)
    is_shipped = chosen.document is None and chosen.question is None
    caps = [word for name, cap in shipped["caps"].items() for word in (f"--{name}", cap)]
    return Job(
        document=chosen.document or FOLDER / shipped["document"],
        questions=chosen.question or [item["question"] for item in shipped["questions"]],
        expected=[item["expect"] for item in shipped["questions"]] if is_shipped else [],
        flags=["--rope", chosen.rope, "--max-new-tokens", str(shipped["answer_tokens"]), *caps, *others],
    )


def command(asked: Job, store: Path, *, questions: list[str]) -> list[str]:
    """The same as a person would type."""
    words = [word for question in questions for word in ("--question", question)]
    return ["h3", "run", "--document", str(asked.document), *asked.flags, "--store", str(store), *words]


def reported(words: list[str], report: Path) -> dict[str, Any]:
    """Run a command that writes its report to a file, and give that back with the seconds that it took.

    Ends the process where the command fails.
    """
    began = time.monotonic()
    program = [sys.executable, "-m", "h3kv", *words[1:], "--report", str(report)]
    with subprocess.Popen(program) as process:
        try:
            process.wait()
        except KeyboardInterrupt:
            # The command got it too, and ends by itself.
            process.wait()
    if process.returncode:
        sys.exit(process.returncode)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found | {"wall_s": time.monotonic() - began}


def missing(expected: list[str], report: dict[str, Any]) -> list[str]:
    """Expected words that the answers of a report lack."""
    return [word for word, answer in zip(expected, report["answers"], strict=False) if word not in answer["answer"]]


def comparison(first: dict[str, Any], second: dict[str, Any]) -> str:
    """What the second process saved: once both were loaded, with loading, and in all."""
    early, late = second["answers"][0], first["answers"][0]
    loaded = [report["load_s"] + report["answers"][0]["ttft_s"] for report in (second, first)]
    walls = ", ".join(
        f"{report['wall_s']:.0f} s with {len(report['answers'])} question{'s' * (len(report['answers']) != 1)}"
        for report in (first, second)
    )
    return (
        f"the second process found {early['cached_tokens']:,} of {early['prompt_tokens']:,} prompt tokens in the "
        f"store: its first token came after {early['ttft_s']:.2f} s, that of the first process after "
        f"{late['ttft_s']:.2f} s: {late['ttft_s'] / early['ttft_s']:.0f} times sooner\n"
        f"loading counted in: after {loaded[0]:.1f} s and {loaded[1]:.1f} s; the whole processes took {walls}"
    )


def main() -> None:
    """Run the job in two processes, then compare."""
    asked = job(sys.argv[1:])
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="demo-") as name:
        store = Path(name)
        reports = []
        for number, questions in enumerate((asked.questions, asked.questions[:1]), 1):
            words = command(asked, store, questions=questions)
            print(f"$ {shlex.join(words)}", flush=True)
            reports.append(reported(words, store / f"report-{number}.json"))
            wrong = missing(asked.expected, reports[-1])
            if wrong:
                sys.exit(f"error: the answers lack {', '.join(wrong)}")
            print(flush=True)
    if asked.expected:
        print(f"all answers are right: they name {', '.join(asked.expected)}")
    print(comparison(*reports))
    print("the caps are small on purpose, so that all tiers work: with larger ones both processes are faster")


if __name__ == "__main__":
    main()
