"""Checks, before anything is installed, that this machine can build the native core. Uses the standard library only."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROGRAM = """
#include <Python.h>
#include <atomic>
#include <span>
#if __cplusplus < 202002L
#error "C++20 is needed"
#endif
int main() { std::atomic<int> signal{0}; signal.notify_all(); return 0; }
"""
FLAGS = ["-std=c++20", "-fsyntax-only"]


def problem() -> str | None:
    """What is missing, and how to get it; None when all is there."""
    if sys.version_info < (3, 11):  # noqa: UP036  (whatever Python there is runs this)
        return f"Python 3.11 is needed, this is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11"
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return "Python lacks venv: install it (on Debian: apt-get install python3.11-venv)"
    compiler = os.environ.get("CXX", "")
    if not compiler:
        return "no C++ compiler found: install one (on Debian: apt-get install g++), or name it: make CXX=/path/to/g++"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        return f"Python.h is not in {include}: install Python's headers (on Debian: apt-get install python3.11-dev)"
    return compiler_problem(compiler, include)


def compiler_problem(compiler: str, include: Path) -> str | None:
    """Why `compiler` cannot build the core; None when it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(PROGRAM, encoding="utf-8")
        command = [compiler, *FLAGS, f"-I{include}", str(source)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"the C++ compiler {compiler} does not start: {error}"
    if result.returncode != 0:
        return f"{compiler} lacks C++20 (g++ 12 or newer has it):\n{result.stderr.strip()}"
    return None


if __name__ == "__main__":
    found = problem()
    if found:
        sys.exit(f"error: {found}")
