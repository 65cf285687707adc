import contextlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from h3kv.cli.app import app
from h3kv.testing.cold_segments import open_store, payload, write_segments
from h3kv.tiers.cold.geometry import MIB, TABLE_OFFSET
from h3kv.tiers.cold.record import SECTOR_BYTES


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_format_makes_a_store_and_says_what_it_is(tmp_path: Path) -> None:
    code, out, _ = run("format", str(tmp_path), "--capacity", "40MiB", "--area", "8MiB")
    assert code == 0
    assert "4 areas of 8.00 MiB" in out
    code, _, err = run("format", str(tmp_path), "--capacity", "40MiB")
    assert code == 1
    assert "--yes=40MiB" in err
    code, _, _ = run("format", str(tmp_path), "--yes", "40MiB")
    assert code == 0


def test_format_explains_a_bad_size(tmp_path: Path) -> None:
    code, _, err = run("format", str(tmp_path), "--capacity", "lots")
    assert code == 1
    assert "--capacity lots: a size is a number and a unit" in err


def test_verify_fails_when_something_is_damaged(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path, capacity_bytes=20 * MIB)) as store:
        write_segments(store, [(1, 16)])
    code, out, _ = run("verify", str(tmp_path))
    assert code == 0
    assert "1 segments in 1 areas, 1,024 tokens, " in out
    assert "all intact" in out
    place = tmp_path / "store.h3"
    content = bytearray(place.read_bytes())
    content[content.index(bytes(payload(1, 0, 4096)))] ^= 1
    place.write_bytes(content)
    code, out, _ = run("verify", str(tmp_path), "--json")
    assert code == 1
    assert json.loads(out)["damage"] == 1
    code, out, _ = run("verify", str(tmp_path))
    assert code == 1
    assert "damaged: segment at block 0, layer 0" in out


def test_verify_tells_of_an_area_whose_owner_cannot_be_read(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write_segments(store, [(1, 1)])
    content = bytearray((tmp_path / "store.h3").read_bytes())
    for copy in range(2):
        content[TABLE_OFFSET + copy * SECTOR_BYTES + 40] ^= 1
    (tmp_path / "store.h3").write_bytes(content)
    code, out, _ = run("verify", str(tmp_path))
    assert code == 1
    assert "area 0, model unknown" in out
    code, out, _ = run("verify", str(tmp_path), "--json")
    assert code == 1
    assert json.loads(out)["areas"][0]["fingerprint"] is None


def test_verify_of_no_store_says_so(tmp_path: Path) -> None:
    code, _, err = run("verify", str(tmp_path))
    assert code == 1
    assert "store.h3" in err


def test_format_names_its_own_flag_when_the_cap_is_too_small(tmp_path: Path) -> None:
    code, _, err = run("format", str(tmp_path), "--capacity", "10MiB", "--area", "32MiB")
    assert code == 1
    assert "--capacity sets nvme.capacity" in err
    assert "--store-capacity" not in err
    assert list(tmp_path.iterdir()) == []


def test_format_says_why_it_takes_no_tokens(tmp_path: Path) -> None:
    code, _, err = run("format", str(tmp_path), "--capacity", "4096tokens")
    assert code == 1
    assert "how many bytes a token takes depends on the model" in err


@pytest.mark.parametrize("arguments", [("format", ""), ("verify", ""), ("info", "--store", "")])
def test_empty_path_is_wrong_usage(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 2
    assert "the path is empty" in err
    assert list(tmp_path.iterdir()) == []
