"""What happens to documents at the same time as something else, or while something is broken."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.services.documents_world import BYTES, MINE, OTHER, TEXT, WAIT_NS, WAIT_S, World

from h3kv.core.errors import ContextLengthError, DocumentNotFoundError, PeerUnavailableError, QuotaError
from h3kv.core.hashing import root_key
from h3kv.core.reach import Reach
from h3kv.models.document_prompt import prefix_tokens
from h3kv.testing.engines import FINGERPRINT
from services.gpu_worker import documents_keeper, documents_reach
from services.gpu_worker.documents_entry import DocumentLimits, Entry
from services.gpu_worker.documents_files import FolderFiles, MemoryFiles
from services.gpu_worker.documents_record import DocumentRecord, ErasureRecord, State
from services.gpu_worker.documents_sizes import DocumentSizes


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_chat_that_names_a_document_behind_another_while_it_is_deleted_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, other = world.ready(), world.ready(OTHER)
    find = world.documents.reaches.of
    chats = [1]

    def chat_meanwhile(looked_for: Entry) -> Reach:
        reach = find(looked_for)
        if chats:
            chats.pop()
            with world.documents.prompts.opening():
                world.note(other, entry)
                world.cached(OTHER, TEXT)
        return reach

    monkeypatch.setattr(world.documents.reaches, "of", chat_meanwhile)
    erasure = world.documents.delete("mine", entry.record.id)
    assert world.keeper.erase(erasure, timeout_ns=WAIT_NS)
    assert world.cached(OTHER, TEXT) <= len(prefix_tokens(BYTES, [OTHER]))


class ObservedFiles(MemoryFiles):
    """Says when something is about to be written."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], None] = lambda: None
        self.writes = 0

    def _write(self) -> None:
        self.writes += 1
        self.before()

    def add(self, record: DocumentRecord, text: str) -> None:
        self._write()
        super().add(record, text)

    def change(self, record: DocumentRecord) -> None:
        self._write()

    def delete(self, erasure: ErasureRecord) -> None:
        self._write()
        super().delete(erasure)

    def end_erasure(self, document: str) -> None:
        self._write()


def test_nobody_waits_for_the_disk_on_which_another_document_is_kept() -> None:
    world = World(files := ObservedFiles())
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        files.before = lambda: threads.submit(world.documents.of_tenant, "mine").result(WAIT_S) and None
        entry, other = world.ready(), world.ready(OTHER)
        before = files.writes
        world.note(other, entry)
        world.note(other, entry)
        assert files.writes == before + 1
        world.documents.update("mine", entry.record.id, ttl_s=60, is_pinned=None)
        assert world.keeper.erase(world.documents.delete("mine", entry.record.id), timeout_ns=WAIT_NS)
        assert files.writes == before + 4
    world.close()


def test_upload_that_is_being_kept_counts_and_is_not_found_yet() -> None:
    world = World(files := ObservedFiles(), limits=DocumentLimits(documents_max=1, pinned_blocks_max=12))
    refused: list[str] = []

    def upload_another() -> None:
        files.before = lambda: None
        assert world.documents.entries() == []
        with pytest.raises(QuotaError, match="documents_max") as caught:
            world.create(OTHER)
        refused.append(str(caught.value))

    files.before = upload_another
    world.ready()
    assert len(refused) == 1
    world.close()


def test_text_is_cut_into_tokens_only_where_it_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(limits=DocumentLimits(documents_max=1))
    world.ready()
    monkeypatch.setattr(DocumentSizes, "prompt", lambda *_: pytest.fail("it was cut"))
    with pytest.raises(QuotaError, match="documents_max"):
        world.create(OTHER)
    with pytest.raises(ContextLengthError):
        world.create("x" * 100_000)
    world.close()


def test_chat_about_more_documents_than_a_context_holds_is_refused_and_leaves_no_trace(world: World) -> None:
    entries = [world.ready(f"{number} {TEXT}") for number in range(3)]
    ids = [entry.record.id for entry in entries]
    with pytest.raises(ContextLengthError, match="document_ids"):
        world.documents.texts("mine", ids * 3)
    assert all(entry.record.follows == () for entry in entries)
    assert len(world.documents.texts("mine", ids)) == 3


def test_document_that_stood_behind_much_text_takes_all_of_its_tenant_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, other = world.ready(), world.ready(OTHER)
    world.note(other, entry)
    monkeypatch.setattr(documents_reach, "REACH_TOKENS_MAX", 100)
    erasure = world.documents.delete("mine", entry.record.id)
    assert erasure.record.ends == (root_key(FINGERPRINT, MINE.salt),)
    assert world.keeper.erase(erasure, timeout_ns=WAIT_NS)


def test_document_is_read_when_the_memory_of_the_engine_is_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, away = world.loop.submit, [1, 2]

    def submit_later(*arguments: Any, **named: Any) -> Any:
        if away:
            away.pop()
            raise PeerUnavailableError("the owner of the memory begins anew", peer="nvme_io")
        return submit(*arguments, **named)

    monkeypatch.setattr("services.gpu_worker.documents_reader.BUSY_S", 0.001)
    monkeypatch.setattr(world.loop, "submit", submit_later)
    world.ready()
    assert away == []


def test_mistake_of_ours_fails_one_document_and_all_others_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = world.documents.reaches.prompt

    def fail_one(entry: Entry) -> Any:
        if entry.record.name == "bad":
            raise RuntimeError("never thought of")
        return prompt(entry)

    monkeypatch.setattr(world.documents.reaches, "prompt", fail_one)
    bad = world.create(name="bad", check=lambda _: None)
    world.ready(OTHER)
    assert (bad.record.state, "log" in bad.record.failure) == (State.FAILED, True)
    assert "document_failed" in caplog.text


def test_mistake_of_ours_leaves_one_document_and_all_others_are_kept(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = world.ready(ttl_s=5), world.ready(OTHER, ttl_s=5)
    forget = world.documents.forget

    def fail_one(entry: Entry) -> None:
        if entry is bad:
            raise RuntimeError("never thought of")
        forget(entry)

    world.now_s += 10
    with monkeypatch.context() as broken:
        broken.setattr(world.documents, "forget", fail_one)
        world.keeper.look()
        assert (bad in world.documents.entries(), good in world.documents.entries()) == (True, False)
        assert "documents_not_kept" in caplog.text
    world.keeper.look()
    assert world.documents.entries() == []


def test_end_waits_for_the_engine_within_a_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_keeper, "END_S", 0.01)
    world.ready(is_pinned=True)
    world.gate.clear()
    world.entered.clear()
    answer = world.loop.submit(world.request(list(range(40))), trace=None)
    assert world.entered.wait(WAIT_S)
    world.keeper.start()
    world.reader.end()
    world.keeper.end()
    world.keeper.stop()
    world.gate.set()
    assert len(list(answer)) > 0


def test_pinned_documents_are_held_a_few_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_keeper, "HELD_AT_A_TIME", 1)
    pinned = [world.ready(f"{number} is a number. " * 4, is_pinned=True) for number in range(3)]
    held: list[int] = []
    for _ in range(4):
        world.keeper.look()
        held.append(sum(entry.is_held for entry in pinned))
    assert held == [1, 2, 3, 3]


def test_document_whose_erasure_cannot_be_read_is_gone_with_all_that_its_tenant_had(tmp_path: Path) -> None:
    before = World(FolderFiles(tmp_path))
    entry, other = before.ready(), before.ready(OTHER)
    before.close()
    (tmp_path / f"{entry.record.id}.erasing").write_bytes(b'{"version": 1')
    after = World(FolderFiles(tmp_path))
    assert [each.record.id for each in after.documents.entries()] == [other.record.id]
    (erasure,) = after.documents.erasures()
    assert (erasure.record.id, erasure.record.ends) == (entry.record.id, (root_key(FINGERPRINT, MINE.salt),))
    after.wait_for(lambda: after.keeper.advance(erasure))
    assert not [path for path in tmp_path.iterdir() if entry.record.id in path.name]
    after.close()


def test_document_that_is_deleted_while_a_chat_looks_for_its_text_is_not_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = world.ready()
    monkeypatch.setattr(
        world.documents._sizes, "check_together", lambda _: world.documents.delete("mine", entry.record.id)
    )
    with pytest.raises(DocumentNotFoundError):
        world.documents.texts("mine", [entry.record.id])
