import json
from pathlib import Path

from typer.testing import CliRunner

from h3kv.cli.app import app


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


def test_folder_that_cannot_be_tried_is_no_error() -> None:
    result = CliRunner().invoke(app, ["info", "--json", "--store", "nowhere/at/all"])
    assert result.exit_code == 0
    assert json.loads(result.output)["store_direct"] == "unknown: No such file or directory"
