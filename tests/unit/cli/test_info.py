import json

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
