"""What this installation found on this machine, and what the tiers can use of it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
import typer

from h3kv import __version__, _native, machine
from h3kv.cli.store_facts import store_contents
from h3kv.config import NvmeSettings
from h3kv.core.errors import StoreBusyError, StoreError
from h3kv.core.units import describe_size
from h3kv.memory.mapping import HUGE_PAGE_BYTES
from h3kv.memory.region import Region
from h3kv.memory.region_format import RegionGeometry
from h3kv.tiers.cold.place import resolve
from h3kv.tiers.host import HostStoreConfig
from h3kv.tiers.io import IoEngine, direct_file

PROBE_BLOCK_BYTES: Final = 64 << 10


def show_info(nvme: NvmeSettings, *, as_json: bool) -> None:
    """Print versions, instruction sets, cores, memory, and what the tiers can use."""
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
    facts |= memory_facts() | store_facts(nvme.store)
    typer.echo(json.dumps(facts) if as_json else "\n".join(_line(name, value) for name, value in facts.items()))


def memory_facts() -> dict[str, object]:
    """What HOST and the I/O engine get of this kernel and container: tried with a small region."""
    offered = machine.detect_huge_pages()
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts: dict[str, object] = {
        "huge_pages_free_bytes": offered.free_pages * HUGE_PAGE_BYTES,
        "memlock_limit_bytes": None if limit_bytes == resource.RLIM_INFINITY else limit_bytes,
    }
    geometry = RegionGeometry(block_bytes=PROBE_BLOCK_BYTES, blocks=HUGE_PAGE_BYTES // PROBE_BLOCK_BYTES)
    with contextlib.closing(Region.create(geometry, kinds=HostStoreConfig(geometry.data_bytes).kinds)) as region:
        facts |= {
            "region_kind": region.kind.value,
            "region_huge_pages": region.has_huge_pages,
            # Huge pages can come by another way than the one that was tried first: then nothing is missing.
            "region_fallback_reason": None if region.has_huge_pages else region.fallback_reason,
        }
        file = os.memfd_create("h3-info", os.MFD_CLOEXEC)
        buffer = (region.data.data_ptr(), geometry.data_bytes)
        try:
            with contextlib.closing(IoEngine.open([file], depth=1, buffers=[buffer])) as engine:
                facts |= {
                    "io_backend": engine.backend,
                    "io_fallback_reason": engine.fallback_reason,
                    "io_fixed_buffers": engine.fixed_buffers,
                    "io_buffers_reason": engine.buffers_reason,
                }
        finally:
            os.close(file)
    return facts


def store_facts(place: Path | None) -> dict[str, object]:
    """Whether the cold store's file, or a new one in its folder, bypasses the page cache, and what a store there holds.
    Nothing stays behind.

    Raises:
        StoreFormatError: something else lies there.
        StoreError: it cannot be opened or read, or its folder is missing.
    """
    if place is None:
        return {"store": None, "store_direct": None}
    path, is_there = resolve(place)
    try:
        # A file without a name is gone when it is closed.
        file, is_direct = direct_file(*(path, os.O_RDONLY) if is_there else (path.parent, os.O_RDWR | os.O_TMPFILE))
    except FileNotFoundError as error:
        raise StoreError(f"there is no folder {path.parent}: make it first, or name another", path=str(path)) from error
    except OSError as error:
        return {"store": str(path), "store_direct": f"unknown: {error.strerror}"}
    os.close(file)
    facts: dict[str, object] = {"store": str(path), "store_direct": is_direct, "store_exists": is_there}
    if not is_there:
        return facts
    try:
        held = store_contents(path)
    except StoreBusyError:
        return facts | {"store_in_use": True}
    return facts | {"store_in_use": False} | {f"store_{name}": value for name, value in asdict(held).items()}


def _line(name: str, value: object) -> str:
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, int):
        text = describe_size(value) if name.endswith("_bytes") else f"{value:,}"
    elif value is None:
        text = "unlimited" if name == "memlock_limit_bytes" else "-"
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{name.removesuffix('_bytes').replace('_', ' '):<22} {text}"
