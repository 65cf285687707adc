import mmap
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from h3kv.machine import (
    HugePages,
    MemoryLimit,
    binding_limit,
    detect,
    detect_huge_pages,
    dma_heaps,
    memlock_limit_bytes,
    peak_rss_bytes,
    resident_bytes,
)
from h3kv.memory.mapping import Mapping as MemoryMapping

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1000 kB\nMemAvailable:    8388608 kB\n"


def lay_out(root: Path, files: Mapping[str, str]) -> Path:
    """A file system with these files, on a machine of 16 GiB of which 8 are available."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def core(cpu: int, core_id: int) -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
    return {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{core_id}\n"}


def test_this_machine_has_cores_and_memory() -> None:
    machine = detect()
    assert 1 <= machine.cores <= machine.cpus
    assert 0 < machine.memory_available_bytes <= machine.memory_total_bytes


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    root = lay_out(tmp_path, core(0, 0) | core(1, 0) | core(2, 1) | core(3, 1))
    machine = detect(root, cpus=frozenset({0, 1, 2, 3}))
    assert (machine.cpus, machine.cores) == (4, 2)


def test_affinity_limits_the_cores(tmp_path: Path) -> None:
    root = lay_out(tmp_path, core(0, 0) | core(1, 1) | core(2, 2))
    assert detect(root, cpus=frozenset({2})).cores == 1


def test_processors_without_topology_count_each(tmp_path: Path) -> None:
    assert detect(lay_out(tmp_path, {}), cpus=frozenset({0, 5})).cores == 2


def test_quota_of_a_version_2_cgroup_limits_the_cores(tmp_path: Path) -> None:
    root = lay_out(tmp_path, {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "150000 100000\n"})
    assert detect(root, cpus=frozenset(range(8))).cores == 1


def test_quota_of_a_version_1_cgroup_limits_the_cores(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        },
    )
    assert detect(root, cpus=frozenset(range(8))).cores == 3


def test_no_quota_leaves_all_cores(tmp_path: Path) -> None:
    root = lay_out(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert detect(root, cpus=frozenset(range(8))).cores == 8


def test_memory_without_a_cgroup_is_the_machines(tmp_path: Path) -> None:
    machine = detect(lay_out(tmp_path, {}), cpus=frozenset({0}))
    assert (machine.memory_total_bytes, machine.memory_available_bytes) == (16 * GIB, 8 * GIB)


def test_container_limit_bounds_memory_and_counts_dropable_file_cache_as_available(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/box"
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box\n",
            f"{group}/memory.max": f"{4 * GIB}\n",
            f"{group}/memory.current": f"{3 * GIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        },
    )
    machine = detect(root, cpus=frozenset({0}))
    assert (machine.memory_total_bytes, machine.memory_available_bytes) == (4 * GIB, 2 * GIB)


def test_tightest_limit_on_the_way_up_wins(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{GIB}\n",
        },
    )
    machine = detect(root, cpus=frozenset({0}))
    assert (machine.memory_total_bytes, machine.memory_available_bytes) == (2 * GIB, GIB)


def test_inside_a_container_the_mount_itself_is_the_group(tmp_path: Path) -> None:
    """The path names a group of the host that cannot be seen; the limit lies at the top of the mount."""
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/host/name/of/this\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
        },
    )
    assert detect(root, cpus=frozenset({0})).memory_available_bytes == GIB // 2


def test_more_in_use_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
        },
    )
    assert detect(root, cpus=frozenset({0})).memory_available_bytes == 0


def huge_pages(root: Path, *, shared: str, private: str, **counts: int) -> HugePages:
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    modes = "sys/kernel/mm/transparent_hugepage"
    files = {f"{pool}/{name}_hugepages": f"{count}\n" for name, count in counts.items()}
    return detect_huge_pages(lay_out(root, {f"{modes}/shmem_enabled": shared, f"{modes}/enabled": private, **files}))


def test_huge_pages_count_what_is_free_and_not_promised_to_others(tmp_path: Path) -> None:
    found = huge_pages(tmp_path, shared="never\n", private="never\n", free=10, resv=4, nr_overcommit=8, surplus=3)
    assert found.free_pages == 11


def test_transparent_huge_pages_follow_the_chosen_words(tmp_path: Path) -> None:
    offers = {
        ("always within_size advise [never] deny force", "always [madvise] never"): (False, True),
        ("always within_size [advise] never deny force", "always madvise [never]"): (True, False),
        ("[always] within_size advise never deny force", "[always] madvise never"): (True, True),
    }
    for (shared, private), expected in offers.items():
        found = huge_pages(tmp_path, shared=shared, private=private)
        assert (found.shared, found.private) == expected


def test_kernel_without_huge_pages_offers_none(tmp_path: Path) -> None:
    assert detect_huge_pages(tmp_path) == HugePages(free_pages=0, shared=False, private=False)


def test_peak_is_of_this_process_and_not_of_the_one_that_started_it() -> None:
    held = bytearray(b"x" * (256 << 20))
    program = "from h3kv.machine import peak_rss_bytes; print(peak_rss_bytes())"
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert peak_rss_bytes() > len(held)
    assert 1 << 20 < int(answer.stdout) < len(held)


def test_memory_is_held_page_by_page_as_it_is_touched() -> None:
    page = mmap.PAGESIZE
    mapping = MemoryMapping(8 * page, fd=None)
    assert resident_bytes(mapping.address, 8 * page) == 0
    mapping.view()[2 * page] = 1
    assert resident_bytes(mapping.address, 8 * page) == page
    assert resident_bytes(mapping.address + 3 * page, page) == 0
    mapping.view()[:] = bytes(8 * page)
    assert resident_bytes(mapping.address, 8 * page) == 8 * page


def test_limit_that_leaves_the_least_memory_is_named_with_its_file(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/outer/inner/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/outer/inner/memory.current": "0\n",
    }
    root = lay_out(tmp_path, files)
    assert binding_limit(root) == MemoryLimit(root / "sys/fs/cgroup/outer/memory.max", 4 * GIB)


def test_limit_above_what_the_machine_has_left_does_not_bind(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{12 * GIB}\n"}
    assert binding_limit(lay_out(tmp_path, files)) is None
    assert binding_limit(lay_out(tmp_path / "bare", {})) is None


def test_heaps_of_contiguous_memory_are_offered_and_no_others(tmp_path: Path) -> None:
    names = [
        "system",
        "system-uncached",
        "system_cma_thing",
        "reserved",
        "linux,cma",
        "default_cma_region",
        "secure_cma",
    ]
    root = lay_out(tmp_path, {f"dev/dma_heap/{name}": "" for name in names})
    assert [heap.name for heap in dma_heaps(root)] == ["default_cma_region", "linux,cma", "reserved"]
    assert dma_heaps(tmp_path / "bare") == []


def test_memlock_limit_is_the_soft_one_or_none() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert memlock_limit_bytes() == (None if soft == resource.RLIM_INFINITY else soft)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        assert memlock_limit_bytes() == 65536
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
