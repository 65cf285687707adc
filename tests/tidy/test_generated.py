import subprocess
import sys

import pytest

from .sources import ROOT


@pytest.mark.parametrize("tool", ["gendocs.py", "genproto.py"])
def test_generated_files_match_their_source(tool: str) -> None:
    command = [sys.executable, f"tools/{tool}", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
