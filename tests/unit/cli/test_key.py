import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from h3kv.cli.app import app
from services.gateway.tenants import read_tenants


def test_a_new_key_is_shown_once_and_let_in_by_the_lines_below_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["key", "--tenant", "research"])
    assert result.exit_code == 0
    key = result.output.split("\n")[1].removeprefix("# ")
    assert key.startswith("h3-")
    assert len(key) >= 3 + 43
    assert result.output.count(key) == 1
    file = tmp_path / "tenants.yaml"
    file.write_text(result.output, encoding="utf-8")
    file.chmod(stat.S_IRUSR)
    assert read_tenants(file).find(f"Bearer {key}").name == "research"


def test_two_keys_differ() -> None:
    keys = [CliRunner().invoke(app, ["key"]).output.split("\n")[1] for _ in range(2)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("name", ["", "two words", "-x", "x" * 65])
def test_a_name_that_no_tenant_can_have_is_refused(name: str) -> None:
    result = CliRunner().invoke(app, ["key", "--tenant", name])
    assert result.exit_code == 1
    assert "1 to 64 letters" in result.output
