"""`h3 run` on three tiers: what is found again, what is said, what is refused.

The tiny model takes 1.5 KiB of KV a token in bf16; HOST must hold a segment of 1,024 tokens and two slabs of staging.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.h3_run import fields, invoke, written
from typer.testing import CliRunner, Result

from h3kv.cli.app import app
from h3kv.testing.tiny_models import write_tiny_model

DOCUMENT = "The lighthouse was built by Mathilda Voss, who kept it for forty years and never slept at night. " * 32
QUESTION = "Who built the lighthouse?"
FP32_CAPS = ("--window", "64", "--device-kv", "2048tokens", "--host-kv", "16MiB")
"""1,024 tokens on the device: fp32 takes twice the bytes that a cap in tokens counts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reaches 4,096 tokens; a token is a byte or two."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, max_position_embeddings=4096)
    return folder


@pytest.fixture
def document(tmp_path: Path) -> Path:
    return written(tmp_path, DOCUMENT)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Flags of a store that is intact when the test has ended."""
    folder = tmp_path / "kv"
    folder.mkdir()
    yield ("--store", str(folder), "--store-capacity", "128MiB")
    if (folder / "store.h3").exists():
        assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 0


def run(model: Path, document: Path, *flags: str) -> Result:
    return invoke(model, document, "--question", QUESTION, "--dtype", "fp32", *flags)


def run_json(model: Path, document: Path, *flags: str) -> dict[str, Any]:
    return fields(run(model, document, "--json", *flags))


def refusal(result: Result) -> str:
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_document_is_found_again_by_the_next_process(model: Path, document: Path, store: tuple[str, ...]) -> None:
    resident = run_json(model, document)["answers"][0]
    first = run_json(model, document, *FP32_CAPS, *store)
    again = run_json(model, document, *FP32_CAPS, *store)
    (answer,), (second,) = first["answers"], again["answers"]
    assert answer["answer"] == second["answer"] == resident["answer"]
    assert answer["cached_tokens"] == 0
    assert second["cached_tokens"] > second["prompt_tokens"] - 64
    assert second["cached_tokens_by_tier"]["nvme"] > 0
    assert again["moved_bytes"]["nvme_streamed"] + again["moved_bytes"]["nvme_to_host"] > 0


def test_caps_hold_and_moves_are_reported(model: Path, document: Path, store: tuple[str, ...]) -> None:
    found = run_json(model, document, *FP32_CAPS, *store)
    tiers = found["tiers"]
    assert list(tiers) == ["device", "host", "nvme"]
    assert tiers["device"]["cap_bytes"] == 2048 * 1536
    assert tiers["host"]["cap_bytes"] == 16 << 20
    assert all(tier["used_bytes"] <= tier["cap_bytes"] for tier in tiers.values())
    assert found["kv_cap_bytes"] == tiers["device"]["cap_bytes"] + tiers["host"]["cap_bytes"]
    assert found["kv_used_bytes"] <= found["kv_cap_bytes"]
    assert found["moved_bytes"]["host_to_nvme"] > 0
    assert found["region"]["kind"] in {"hugetlb", "memfd", "anonymous"}
    assert found["store"]["backend"] in {"io_uring", "threads"}
    assert found["store"]["degraded"] is False


def test_tiering_off_keeps_everything_on_the_device(model: Path, document: Path, store: tuple[str, ...]) -> None:
    result = run(model, document, "--json", "--tiering", "off", "--host-kv", "1MiB", *store)
    found = json.loads(result.stdout)
    assert list(found["tiers"]) == ["device"]
    assert (found["region"], found["store"]) == (None, None)
    assert "warning: tiering is off" in result.stderr
    assert list(Path(store[1]).iterdir()) == []


def test_host_alone_serves_without_a_store(model: Path, document: Path) -> None:
    found = run_json(model, document, "--window", "64", "--device-kv", "2048tokens", "--host-kv", "32MiB")
    assert list(found["tiers"]) == ["device", "host"]
    assert found["answers"][0]["answer"] == run_json(model, document)["answers"][0]["answer"]


def test_report_has_what_json_has_beside_the_text(model: Path, document: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run(model, document, "--report", str(file))
    found = json.loads(file.read_text(encoding="utf-8"))
    assert result.stdout == f"{found['answers'][0]['answer']}\n"
    assert set(found) == set(run_json(model, document))


def test_table_has_a_row_for_each_tier(model: Path, document: Path, store: tuple[str, ...]) -> None:
    lines = run(model, document, *FP32_CAPS, *store).stderr.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("tier "))
    assert [line.split()[0] for line in lines[start : start + 4]] == ["tier", "device", "host", "nvme"]


def test_peaks_are_those_while_it_ran(model: Path, document: Path, store: tuple[str, ...]) -> None:
    found = run_json(model, document, *FP32_CAPS, *store)
    peaks, tiers = found["peak_kv_bytes"], found["tiers"]
    assert tiers["device"]["used_bytes"] == 0 < peaks["device"] <= tiers["device"]["cap_bytes"]
    assert all(tiers[tier]["used_bytes"] <= peaks[tier] <= tiers[tier]["cap_bytes"] for tier in peaks)
    assert found["dropped_segments"] == {"device": 0, "host": 0, "nvme": 0}


def test_what_a_full_store_drops_is_said(model: Path, tmp_path: Path) -> None:
    place = ("--store", str(tmp_path / "kv.h3"), "--store-capacity", "24MiB")
    caps = ("--window", "64", "--device-kv", "2048tokens", "--host-kv", "7MiB")
    results = []
    for number in range(3):
        text = tmp_path / f"{number}.txt"
        text.write_text(f"{number}. {DOCUMENT}", encoding="utf-8")
        results.append(run(model, text, "--json", *caps, *place))
    last = results[-1]
    assert last.exit_code == 0, last.stderr
    assert json.loads(last.stdout)["dropped_segments"]["nvme"] > 0
    assert "warning: the cold store was full" in last.stderr


def test_threads_instead_of_io_uring_are_one_warning(
    model: Path, document: Path, store: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H3_NVME__BACKEND", "threads")
    result = run(model, document, "--json", *FP32_CAPS, *store)
    found = json.loads(result.stdout)["store"]
    assert found["backend"] == "threads"
    assert found["fallback_reason"]
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert "threads instead of io_uring" in line


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (("--device-kv", "512tokens"), "device.kv_bytes"),
        (("--host-kv", "1024tokens"), "host.kv_bytes"),
        (("--window", "2048"), "device.window_tokens"),
        (("--device-kv", "0B"), "device.kv_bytes"),
        (("--host-kv", "64KiB"), "host.kv_bytes"),
        (("--store-capacity", "1MiB"), "nvme.capacity"),
    ],
)
def test_caps_that_are_too_small_are_refused_by_the_settings_name(
    model: Path, document: Path, store: tuple[str, ...], flags: tuple[str, ...], setting: str
) -> None:
    assert setting in refusal(run(model, document, *FP32_CAPS, *store, *flags))


def test_request_beyond_all_tiers_together_is_refused_before_it_starts(
    model: Path, document: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text(DOCUMENT * 30, encoding="utf-8")
    line = refusal(run(model, long, *FP32_CAPS, "--max-context", "200000"))
    assert "raise host.kv_bytes to at least" in line


def suffices(line: str) -> str:
    """The cap that a refusal names."""
    found = re.search(r"raise \S+ to at least (\w+)", line)
    assert found is not None, line
    return found[1]


def test_cap_that_a_refusal_names_suffices(model: Path, document: Path, tmp_path: Path) -> None:
    caps = ("--window", "64", "--device-kv", "2048tokens", "--host-kv", "7MiB")
    place = tmp_path / "kv.h3"
    small = ("--store", str(place), "--store-capacity", "5MiB")
    cap = suffices(refusal(run(model, document, *caps, *small)))
    run_json(model, document, *caps, "--store", str(place), "--store-capacity", cap)
    run_json(model, document, *caps, "--store", str(tmp_path / "new.h3"), "--store-capacity", cap)


def test_store_that_holds_no_segment_is_not_made(model: Path, document: Path, tmp_path: Path) -> None:
    place = tmp_path / "kv.h3"
    line = refusal(run(model, document, *FP32_CAPS, "--store", str(place), "--store-capacity", "2MiB"))
    assert "--store-capacity sets nvme.capacity" in line
    assert not place.exists()
    run_json(model, document, *FP32_CAPS, "--store", str(place), "--store-capacity", suffices(line))


def stranger(folder: Path) -> str:
    (folder / "store.h3").write_bytes(b"somebody's data" * 1000)
    return "is not a cold store, and nothing on it is overwritten"


def missing(folder: Path) -> str:
    folder.rmdir()
    folder.parent.rmdir()
    return "make its folder first"


def read_only(folder: Path) -> str:
    folder.chmod(0o500)
    return "give this user the right to read and write it"


def no_file(folder: Path) -> str:
    os.mkfifo(folder / "store.h3")
    return "neither a file nor a block device"


@pytest.mark.parametrize("spoil", [stranger, missing, read_only, no_file])
def test_place_that_cannot_serve_ends_it_before_the_model_is_loaded(
    model: Path, document: Path, tmp_path: Path, spoil: Any
) -> None:
    if spoil is read_only and os.geteuid() == 0:
        pytest.skip("nothing is read-only to root")
    folder = tmp_path / "above" / "kv"
    folder.mkdir(parents=True)
    rule = spoil(folder)
    place = folder / "store.h3" if spoil is missing else folder
    result = run(model, document, *FP32_CAPS, "--store", str(place), "--store-capacity", "128MiB")
    assert rule in refusal(result)
    assert "loading" in result.stderr
    assert "100 %" not in result.stderr


def test_store_that_another_process_uses_is_refused(model: Path, document: Path, store: tuple[str, ...]) -> None:
    run_json(model, document, *FP32_CAPS, *store)
    with (Path(store[1]) / "store.h3").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "in use by another process" in refusal(run(model, document, *FP32_CAPS, *store))


def test_report_that_cannot_be_written_is_refused_first(model: Path, document: Path) -> None:
    assert "cannot be written" in refusal(run(model, document, "--report", "nowhere/report.json"))
