"""What this installation found on this machine."""

from __future__ import annotations

import json
import platform

import torch
import typer

from h3kv import __version__, _native, machine
from h3kv.core.units import describe_size


def show_info(*, as_json: bool) -> None:
    """Print versions, instruction sets, cores and memory."""
    found = machine.detect()
    facts: dict[str, object] = {
        "h3_version": __version__,
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "isa": _native.isa_current(),
        "isa_supported": _native.isa_list(),
        "cpus_allowed": found.cpus,
        "cores_allowed": found.cores,
        "memory_total_bytes": found.memory_total_bytes,
        "memory_available_bytes": found.memory_available_bytes,
        "cuda_devices": torch.cuda.device_count(),
    }
    typer.echo(json.dumps(facts) if as_json else "\n".join(_line(name, value) for name, value in facts.items()))


def _line(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_bytes"):
        text = describe_size(value)
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{name.removesuffix('_bytes').replace('_', ' '):<18} {text}"
