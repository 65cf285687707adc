"""The folder of sockets, and the facts in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3kv.core.errors import AddressInUseError, ConfigError, PeerUnavailableError
from h3kv.supervisor.run_folder import (
    FACTS,
    ProcessFacts,
    held_folder,
    make_folder,
    read_facts,
    remove_facts,
    write_facts,
)

FACTS_OF_TWO = [
    ProcessFacts("nvme_io", "unix:///x/nvme_io.sock", "http://127.0.0.1:9403/metrics"),
    ProcessFacts("gateway", None, None),
]


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    make_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    make_folder(folder)


def test_a_folder_that_others_may_open_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        make_folder(folder)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="open to others, or theirs"):
        make_folder(tmp_path / "link")


def test_facts_are_read_as_they_were_written_and_gone_once_removed(tmp_path: Path) -> None:
    write_facts(tmp_path, FACTS_OF_TWO)
    assert read_facts(tmp_path) == FACTS_OF_TWO
    remove_facts(tmp_path)
    with pytest.raises(PeerUnavailableError, match="start one with `h3 up`"):
        read_facts(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"processes": [{"nme": 1}]}'])
def test_damaged_facts_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FACTS).write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        read_facts(tmp_path)


def test_a_folder_has_one_node_at_a_time(tmp_path: Path) -> None:
    with held_folder(tmp_path), pytest.raises(AddressInUseError, match="a node runs in"), held_folder(tmp_path):
        pass
    with held_folder(tmp_path):
        pass
