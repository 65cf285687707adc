"""What a document has is overwritten wherever it leaves a tier: from its upload until nobody reads it any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.services.documents_world import BYTES, MINE, OTHER, TEXT, WAIT_NS, World

from h3kv.core.errors import PeerBusyError
from h3kv.core.types import BlockKey
from services.gpu_worker.documents_files import FolderFiles


@pytest.fixture
def world() -> Iterator[World]:
    with closing(World()) as made:
        yield made


def are_marked(world: World, keys: tuple[BlockKey, ...]) -> bool:
    """Whether all that holds these blocks is overwritten when it leaves."""

    def look() -> bool:
        segments = world.kv.find(keys)
        assert segments
        return all(segment.is_erased for segment in segments)

    return world.loop.call(lambda _: look(), timeout_ns=WAIT_NS)


def marks(world: World) -> set[BlockKey]:
    return world.loop.call(lambda _: set(world.rig.segments.marked), timeout_ns=WAIT_NS)


def test_kv_of_a_document_that_was_never_read_is_marked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise PeerBusyError("full", peer="engine")

    monkeypatch.setattr(world.reader, "_answer", busy)
    monkeypatch.setattr("services.gpu_worker.documents_reader.BUSY_S", 0.001)
    world.cached(OTHER)
    entry, earlier = world.create(), world.create(OTHER)
    assert are_marked(world, earlier.record.keys), "what chats had before"
    world.cached(TEXT)
    assert are_marked(world, entry.record.keys)


def test_documents_are_marked_when_a_process_begins(tmp_path: Path) -> None:
    with closing(World(FolderFiles(tmp_path))) as before:
        entry, gone = before.ready(), before.ready(OTHER)
        with before.documents.prompts.opening():
            before.documents.delete(MINE.name, gone.record.id)
    with closing(World(FolderFiles(tmp_path))) as after:
        (again,) = after.documents.entries()
        assert again.record.keys == entry.record.keys
        assert marks(after) >= {*entry.record.keys, *gone.record.keys}


def test_what_a_running_chat_seals_of_a_deleted_document_is_still_marked(world: World) -> None:
    entry, same = world.ready(), world.ready(OTHER)
    keys = entry.record.keys
    with world.documents.prompts.opening():
        erasure = world.documents.delete(MINE.name, entry.record.id)
        assert not world.keeper.erase(erasure, timeout_ns=0)
        world.cached(TEXT)
        assert are_marked(world, keys)
    assert world.keeper.erase(erasure, timeout_ns=WAIT_NS)
    assert marks(world) == set(same.record.keys)
    world.cached(TEXT)
    assert not are_marked(world, keys), "it is nobody's document any more"


def test_marks_stay_as_long_as_a_document_has_them(world: World) -> None:
    first, second, short = world.ready(), world.ready(), world.ready("x")
    world.documents.note_prompt(MINE.name, [first.record.id], BYTES.encode(TEXT))
    assert world.keeper.erase(world.documents.delete(MINE.name, first.record.id), timeout_ns=WAIT_NS)
    assert marks(world) >= set(second.record.keys)
    world.cached("Any text of the tenant. " * 9)
    for entry in (second, short):
        assert world.keeper.erase(world.documents.delete(MINE.name, entry.record.id), timeout_ns=WAIT_NS)
    assert marks(world) == set()
