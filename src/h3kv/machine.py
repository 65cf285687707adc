"""What this process may use of the machine, affinity and container limits respected, and what memory it holds.

Reads /proc, /sys and the cgroup files, version 2 and version 1. All functions take the root of the file system, so that
a test can lay out a machine of its own.
"""

from __future__ import annotations

import array
import mmap
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Machine:
    """The share of the machine that this process has, at one moment."""

    cpus: int
    """Logical processors that the scheduler lets us run on."""
    cores: int
    """Physical cores among them, no more than the container's quota of processor time pays for. At least 1."""
    memory_total_bytes: int
    """Main memory, or the container's limit where that is lower."""
    memory_available_bytes: int
    """What can be allocated now without swapping, within every limit."""


@dataclass(frozen=True, slots=True)
class HugePages:
    """Which huge pages the kernel would give to this process, at one moment."""

    free_pages: int
    """Pages of 2 MiB that were set aside and are free, or that the kernel may still set aside by itself."""
    shared: bool
    """Whether shared memory that asks for huge pages gets them as it is touched."""
    private: bool
    """Whether private memory that asks for huge pages gets them as it is touched."""


def detect_huge_pages(root: Path = ROOT) -> HugePages:
    """The kernel's offer as it is now."""
    pool = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free, reserved, overcommit, surplus = (
        _number(pool / f"{name}_hugepages") or 0 for name in ("free", "resv", "nr_overcommit", "surplus")
    )
    modes = root / "sys/kernel/mm/transparent_hugepage"
    return HugePages(
        free_pages=free - reserved + max(0, overcommit - surplus),
        shared=_mode(modes / "shmem_enabled") in {"always", "within_size", "advise", "force"},
        private=_mode(modes / "enabled") in {"always", "madvise"},
    )


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of the container that is tighter than the machine."""

    file: Path
    """Where the kernel states it."""
    bytes: int


def binding_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The container's limit under which the least memory is left; None where the machine itself has less."""
    _, free_bytes = _memory_info(root)
    found: MemoryLimit | None = None
    for file, limit_bytes, left_bytes in _memory_limits(root):
        if left_bytes < free_bytes:
            free_bytes, found = left_bytes, MemoryLimit(file, limit_bytes)
    return found


def memlock_limit_bytes() -> int | None:
    """How much memory this process may lock or have registered for I/O; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def dma_heaps(root: Path = ROOT) -> list[Path]:
    """Device files of the DMA heaps whose memory is contiguous (CMA), in the order of their names.

    The `system` heap is left out: direct I/O refuses its memory. So are heaps that hide theirs from the processor.
    """
    names = sorted(path.name for path in (root / "dev/dma_heap").glob("*"))
    is_contiguous = [name == "reserved" or "cma" in name for name in names]
    is_usable = [not name.startswith(("system", "secure", "restricted", "protected")) for name in names]
    return [
        root / "dev/dma_heap" / name
        for name, contiguous, usable in zip(names, is_contiguous, is_usable, strict=True)
        if contiguous and usable
    ]


def detect(root: Path = ROOT, *, cpus: frozenset[int] | None = None) -> Machine:
    """The machine as it is now.

    Args:
        root: where /proc and /sys are found.
        cpus: logical processors that may be used; the scheduler is asked where None.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if cpus is None else cpus
    quota = _cpu_quota(root)
    cores = _physical_cores(root, allowed)
    limits = [_memory_info(root), *((limit, left) for _, limit, left in _memory_limits(root))]
    return Machine(
        cpus=len(allowed),
        cores=max(1, cores if quota is None else min(cores, int(quota))),
        memory_total_bytes=min(total for total, _ in limits),
        memory_available_bytes=max(0, min(available for _, available in limits)),
    )


def forget_peak(root: Path = ROOT) -> None:
    """Count the peak of this process's memory from now on."""
    (root / "proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_rss_bytes(root: Path = ROOT) -> int:
    """The most main memory that this process has held, pages shared with others included, since `forget_peak`.

    `getrusage` is no help: there a new process begins with the peak of the one that started it.
    """
    for line in (_text(root / "proc/self/status") or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel says nothing of the peak")


def resident_bytes(address: int, size_bytes: int) -> int:
    """How much of a range of this process's memory is held: in main memory or swapped out, in whole pages.

    One u64 a page in /proc/self/pagemap: bit 63 says that it is in memory, bit 62 that it is swapped out.
    """
    first, end = address // mmap.PAGESIZE, -(-(address + size_bytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        pages = array.array("Q", file.read(8 * (end - first)))
    return sum(page >> 62 != 0 for page in pages) * mmap.PAGESIZE


def _physical_cores(root: Path, cpus: frozenset[int]) -> int:
    """Hyper-threads of one core share its vector units, so they count once."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = _text(topology / "physical_package_id"), _text(topology / "core_id")
        cores.add((package, core) if package and core else ("cpu", str(cpu)))
    return len(cores)


def _memory_info(root: Path) -> tuple[int, int]:
    """Total and available bytes of the whole machine."""
    sizes = {}
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes["MemTotal"], sizes["MemAvailable"]


def _memory_limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """File, limit and bytes left below it, for each memory cgroup that holds this process."""
    for folder in _cgroups(root, "memory"):
        file = folder / "memory.max"
        if _number(file) is None:
            file = folder / "memory.limit_in_bytes"
        limit = _number(file)
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        if limit is not None:
            yield file, limit, limit - used + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """Bytes of files in the cache that the kernel drops before it refuses memory."""
    for line in (_text(folder / "memory.stat") or "").splitlines():
        name, _, amount = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"}:
            return int(amount)
    return 0


def _cpu_quota(root: Path) -> float | None:
    """Processors' worth of time that the tightest cgroup grants; None without a quota."""
    quotas = []
    for folder in _cgroups(root, "cpu"):
        quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
        if not quota:
            quota = _text(folder / "cpu.cfs_quota_us") or "max"
            period = _text(folder / "cpu.cfs_period_us") or "100000"
        if quota.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups that bind this process: its own and all above it.

    A line of /proc/self/cgroup is `number:controllers:path`, with no controllers for version 2. Inside a container the
    path is often that of the host; the mount then shows the container's own group as its root.
    """
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.lstrip("/")
        while group != mount:
            if group.is_dir():
                yield group
            group = group.parent
        yield mount


def _mode(path: Path) -> str | None:
    """The chosen word of a file such as `always [madvise] never`."""
    words = (_text(path) or "").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """A count in a file; None for a missing file and for `max`."""
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None
