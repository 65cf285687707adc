"""Runs the main job on the document that the repository ships, and says whether the answers are right.

Usage: demo.py [--document FILE] [--question TEXT]... [--rope KIND:FACTOR] [flags of h3 run]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(os.path.relpath(Path(__file__).parents[1] / "examples" / "demo"))


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
    return Job(
        document=chosen.document or FOLDER / shipped["document"],
        questions=chosen.question or [item["question"] for item in shipped["questions"]],
        expected=[item["expect"] for item in shipped["questions"]] if is_shipped else [],
        flags=["--rope", chosen.rope, "--max-new-tokens", str(shipped["answer_tokens"]), *others],
    )


def command(asked: Job) -> list[str]:
    """The same as a person would type."""
    questions = [word for question in asked.questions for word in ("--question", question)]
    return ["h3", "run", "--document", str(asked.document), *asked.flags, *questions]


def spoken(words: list[str]) -> str:
    """Run a command, pass its output on as it comes, and give it back. Ends the process where the command fails."""
    program = [sys.executable, "-m", "h3kv", *words[1:]]
    said: list[str] = []
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            while piece := os.read(process.stdout.fileno(), 4096):
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
                said.append(piece.decode("utf-8", errors="replace"))
        except KeyboardInterrupt:
            # The command got it too, and ends by itself.
            process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    return "".join(said)


def main() -> None:
    """Run the job, then compare."""
    asked = job(sys.argv[1:])
    words = command(asked)
    print(f"$ {shlex.join(words)}", flush=True)
    text = spoken(words)
    wrong = [word for word in asked.expected if word not in text]
    if wrong:
        sys.exit(f"error: the answers lack {', '.join(wrong)}")
    if asked.expected:
        print(f"all answers are right: they name {', '.join(asked.expected)}")


if __name__ == "__main__":
    main()
