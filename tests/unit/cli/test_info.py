import contextlib
import json
from pathlib import Path

from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.cli.info import memory_facts
from h3kv.testing.cold_segments import LAYOUT, open_store, write_segments
from h3kv.tiers.cold.geometry import MIB


def test_info_says_what_was_detected() -> None:
    result = CliRunner().invoke(app, ["info", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.output)
    assert facts["isa"] in facts["isa_supported"]
    assert "portable" in facts["isa_supported"]
    assert 1 <= facts["cores_allowed"] <= facts["cpus_allowed"]
    assert 0 < facts["memory_available_bytes"] <= facts["memory_total_bytes"]


def test_info_for_people_has_the_same_facts() -> None:
    lines = CliRunner().invoke(app, ["info"]).output.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["h3", "python", "torch"]
    assert any(line.startswith("memory total") and "GiB" in line for line in lines)


def test_info_says_what_the_tiers_can_use(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["info", "--json", "--store", str(tmp_path)])
    facts = json.loads(result.output)
    assert facts["region_kind"] in {"hugetlb", "memfd", "anonymous"}
    assert facts["io_backend"] in {"io_uring", "threads"}
    assert (facts["io_backend"] == "threads") == (facts["io_fallback_reason"] is not None)
    assert facts["store"] == str(tmp_path / "store.h3")
    assert facts["store_direct"] in {True, False}
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_there_is_an_error() -> None:
    result = CliRunner().invoke(app, ["info", "--json", "--store", "nowhere/at/all"])
    assert result.exit_code == 1
    assert "error: there is no folder nowhere/at: make it first" in result.stderr


def test_file_that_is_no_store_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Somebody's notes.")
    result = CliRunner().invoke(app, ["info", "--store", str(tmp_path / "notes.txt")])
    assert result.exit_code == 1
    assert "is not a cold store" in result.stderr


def test_info_says_what_a_store_holds_and_whether_it_is_in_use(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path, capacity_bytes=20 * MIB)) as store:
        write_segments(store, [(1, 16)])
        result = CliRunner().invoke(app, ["info", "--json", "--store", str(tmp_path)])
        assert json.loads(result.output)["store_in_use"] is True
    facts = json.loads(CliRunner().invoke(app, ["info", "--json", "--store", str(tmp_path)]).output)
    assert facts["store_in_use"] is False
    assert facts["store_capacity_bytes"] == 20 * MIB
    assert (facts["store_models"], facts["store_segments"], facts["store_tokens"]) == (1, 1, 1024)
    assert facts["store_kv_bytes"] == 16 * LAYOUT.block_bytes


def test_a_reason_is_shown_only_where_huge_pages_are_missing() -> None:
    facts = memory_facts()
    assert not (facts["region_huge_pages"] and facts["region_fallback_reason"])
