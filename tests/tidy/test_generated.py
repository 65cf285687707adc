import subprocess
import sys

from .sources import ROOT


def test_reference_pages_match_the_code() -> None:
    command = [sys.executable, "tools/gendocs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
