"""The I/O benchmark measures what it says, in small, and leaves no file behind."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from h3kv.bench.io import Setting, run
from h3kv.bench.results import Results
from h3kv.core.errors import ConfigError

MIB = 1 << 20
ANSWER = '{"jobs": [{"read": {"bw_bytes": 2000000000}}]}'


def setting(folder: Path, *, file: Path | None = None, told: list[str] | None = None) -> Setting:
    return Setting(file, folder, 32 * MIB, 1, 0.05, (told if told is not None else []).append)


@pytest.mark.slow
def test_io_benchmark_emits_every_metric_and_removes_its_file(tmp_path: Path) -> None:
    results = Results()
    run(results, setting(tmp_path))
    figures = ("gb_per_s",) if shutil.which("fio") is None else ("gb_per_s", "fio_gb_per_s", "vs_fio")
    assert set(results.metrics) == {f"io.read_{size}.{figure}" for size in ("4m", "64k", "4k") for figure in figures}
    assert all(math.isfinite(value) and value > 0 for value in results.metrics.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_fio_our_own_figures_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    results, told = Results(), list[str]()
    run(results, setting(tmp_path, told=told))
    assert set(results.metrics) == {f"io.read_{size}.gb_per_s" for size in ("4m", "64k", "4k")}
    assert "fio is not on the PATH: our own figures only" in told


def test_a_file_that_is_missing_or_too_small_and_a_folder_that_refuses_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        run(Results(), setting(tmp_path, file=tmp_path / "missing"))
    (tmp_path / "small").write_bytes(bytes(4096))
    with pytest.raises(ConfigError, match="choose one of 4 GiB or more"):
        run(Results(), setting(tmp_path, file=tmp_path / "small"))
    with pytest.raises(ConfigError, match="choose another --folder"):
        run(Results(), setting(tmp_path / "nowhere"))


def test_nothing_is_open_after_a_measurement_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fio").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match="fio failed") as failure:
        run(Results(), setting(tmp_path))
    assert failure.tb is not None, "what the measurement held is still referenced"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_fio_is_run_with_memory_on_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fio"
    script.write_text(f"#!/bin/sh\necho $GLIBC_TUNABLES > {tmp_path}/said\necho '{ANSWER}'\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    results = Results()
    run(results, setting(tmp_path))
    assert results.metrics["io.read_4k.fio_gb_per_s"] == 2
    assert (tmp_path / "said").read_text() == "glibc.malloc.hugetlb=1\n"
