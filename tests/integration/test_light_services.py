"""Processes whose images carry no torch: importing them must not want it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("service", ["nvme_io", "ann_offload", "migration_controller", "gateway"])
def test_a_light_service_imports_no_torch(service: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"importlib.import_module('services.{service}.app')\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=True)
