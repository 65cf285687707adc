"""Documents over a tiny engine whose thread runs: read, held, bounded, over, deleted. A test owns the time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.services.documents_world import BYTES, MINE, OTHER, TEXT, THEIRS, WAIT_NS, WAIT_S, World

from h3kv.core.errors import (
    ContextLengthError,
    DocumentNotFoundError,
    QuotaError,
    RequestError,
    StoreError,
    TierFullError,
)
from h3kv.models.document_prompt import prefix_tokens
from h3kv.node import Node
from h3kv.telemetry import names
from h3kv.testing.engines import LAYOUT
from services.gpu_worker.documents_entry import DocumentLimits, Entry
from services.gpu_worker.documents_files import FolderFiles, MemoryFiles
from services.gpu_worker.documents_reach import FOLLOWS_MAX
from services.gpu_worker.documents_record import DocumentRecord, ErasureRecord, State


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_document_is_read_and_chats_find_it(world: World) -> None:
    entry = world.ready(name="hats")
    tokens = len(prefix_tokens(BYTES, [TEXT]))
    assert (entry.record.tokens, entry.done_tokens, entry.record.name) == (tokens, tokens, "hats")
    assert world.documents.texts("mine", [entry.record.id]) == [TEXT]
    assert world.cached(TEXT) == tokens // 64 * 64
    assert world.cached(TEXT, owner=THEIRS) == 0


def test_reading_a_document_is_no_request_of_a_client(world: World) -> None:
    world.ready()
    told = world.rig.telemetry
    assert (told.value(names.REQUESTS, reason="length"), told.distribution(names.TTFT)) == (0, None)
    assert told.value(names.PREFILL_TOKENS) > 0
    world.cached(OTHER)
    times = told.distribution(names.TTFT)
    assert times is not None
    assert (told.value(names.REQUESTS, reason="length"), times.count) == (1, 1)


def test_one_document_is_read_at_a_time_with_progress_and_chats_go_on(world: World) -> None:
    world.gate.clear()
    first, second = world.create(check=lambda _: None), world.create(OTHER, check=lambda _: None)
    assert world.entered.wait(WAIT_S)
    assert {first.record.state, second.record.state} == {State.READING}
    answer = world.loop.submit(world.request(list(range(40))), trace=None)
    world.gate.set()
    assert len(list(answer)) > 2
    world.wait_for(lambda: second.record.state is State.READY)
    assert first.record.state is State.READY
    world.keeper.report()
    assert world.telemetry.value(names.DOCUMENTS, state="ready") == 2


def test_documents_are_listed_oldest_first_for_their_tenant_alone(world: World) -> None:
    first = world.ready()
    world.now_s += 1
    second = world.ready(OTHER)
    world.ready(owner=THEIRS)
    assert world.documents.of_tenant("mine") == [first, second]
    assert world.documents.of_tenant("nobody") == []
    for call in (world.documents.get, world.documents.delete, lambda who, which: world.documents.texts(who, [which])):
        with pytest.raises(DocumentNotFoundError):
            call("theirs", first.record.id)


def test_deleted_document_is_erased_and_its_chats_with_it(world: World) -> None:
    entry, other = world.ready(), world.ready(OTHER)
    world.note(other, entry)
    world.cached(OTHER, TEXT)
    both = len(prefix_tokens(BYTES, [OTHER, TEXT]))
    assert world.cached(OTHER, TEXT) >= both // 64 * 64
    keys = entry.record.keys
    erasure = world.documents.delete("mine", entry.record.id)
    assert world.keeper.erase(erasure, timeout_ns=WAIT_NS)
    assert world.documents.erasures() == []
    assert not world.found(keys[:1])
    assert world.cached(OTHER, TEXT) <= len(prefix_tokens(BYTES, [OTHER]))
    assert world.found(other.record.keys)


def test_document_is_called_erased_only_when_no_prompt_may_have_it(world: World) -> None:
    entry = world.ready()
    with world.documents.prompts.opening() as note:
        with world.documents.prompts.opening() as elsewhere:
            elsewhere(world.request(list(range(200))))
            note(world.request([*prefix_tokens(BYTES, [TEXT]), 1, 2]))
            erasure = world.documents.delete("mine", entry.record.id)
            assert len(erasure.readers) == 1, "another prompt has nothing of it"
            assert not world.keeper.erase(erasure, timeout_ns=WAIT_NS)
            world.keeper.look()
            assert world.telemetry.value(names.DOCUMENT_ERASURES) == 1
        # What it computes meanwhile is found when it has ended.
        world.cached(TEXT)
    assert world.keeper.advance(erasure)
    world.keeper.report()
    assert world.telemetry.value(names.DOCUMENT_ERASURES) == 0
    assert world.cached(TEXT) == 0


def test_prompt_that_is_not_known_yet_may_have_any_document(world: World) -> None:
    entry = world.ready()
    with world.documents.prompts.opening():
        assert len(world.documents.delete("mine", entry.record.id).readers) == 1


def test_document_that_is_deleted_while_it_is_read_leaves_nothing(world: World) -> None:
    world.gate.clear()
    entry = world.create("One line after the other. " * 40)
    assert world.entered.wait(WAIT_S)
    keys = entry.record.keys
    erasure = world.documents.delete("mine", entry.record.id)
    world.gate.set()
    world.wait_for(lambda: world.keeper.advance(erasure))
    assert not world.found(keys[:1])
    assert not world.rig.engine.has_work


def test_same_text_kept_twice_stays_for_the_other(world: World) -> None:
    first, second = world.ready(), world.ready()
    assert world.keeper.erase(world.documents.delete("mine", first.record.id), timeout_ns=WAIT_NS)
    assert world.found(second.record.keys)


def test_time_to_live_ends_a_document(world: World) -> None:
    entry = world.ready(ttl_s=60)
    assert entry.record.expires_s == 1060
    world.now_s += 30
    assert world.documents.update("mine", entry.record.id, ttl_s=60, is_pinned=None).record.expires_s == 1090
    world.now_s = 1089
    world.keeper.look()
    assert world.documents.get("mine", entry.record.id) is entry
    world.now_s = 1090
    with pytest.raises(DocumentNotFoundError):
        world.documents.get("mine", entry.record.id)
    assert world.documents.of_tenant("mine") == []
    world.keeper.look()
    assert world.documents.entries() == world.documents.erasures() == []
    assert world.cached(TEXT) == 0


def test_pinned_document_is_held_and_read_again_where_it_was_lost(world: World) -> None:
    entry = world.ready(is_pinned=True)
    world.keeper.look()
    assert world.loop.call(lambda _: world.rig.engine.evict_cached(), timeout_ns=WAIT_NS) == 0
    assert world.cached(TEXT) > 0

    def lose(_: Node) -> None:
        segment = world.rig.segments.sealed()[-1]
        world.rig.segments.lose(segment)

    world.loop.call(lose, timeout_ns=WAIT_NS)
    world.keeper.look()
    world.wait_for(lambda: entry.record.state is State.READY)
    world.keeper.look()
    assert entry.is_held
    world.documents.update("mine", entry.record.id, ttl_s=None, is_pinned=False)
    world.keeper.look()
    assert not entry.is_held
    assert world.loop.call(lambda _: world.rig.engine.evict_cached(), timeout_ns=WAIT_NS) > 0


def test_pins_are_bounded_together(world: World) -> None:
    first = world.ready(is_pinned=True)
    with pytest.raises(QuotaError, match="pinned_share_max"):
        world.create(OTHER * 2, is_pinned=True)
    second = world.ready(OTHER * 2)
    with pytest.raises(QuotaError):
        world.documents.update("mine", second.record.id, ttl_s=None, is_pinned=True)
    world.documents.update("mine", first.record.id, ttl_s=None, is_pinned=False)
    assert world.documents.update("mine", second.record.id, ttl_s=None, is_pinned=True).record.is_pinned


def test_bounds_are_refused_by_name(world: World) -> None:
    with pytest.raises(RequestError, match="document_text_bytes_max"):
        world.create("")
    with pytest.raises(RequestError, match="document_text_bytes_max"):
        world.create("x" * (5 << 20))
    with pytest.raises(ContextLengthError):
        world.create("x" * 3000)
    token_bytes = LAYOUT.token_bytes
    with pytest.raises(QuotaError, match="document_bytes"):
        world.create(owner=replace(MINE, document_bytes=100 * token_bytes))
    assert world.documents.entries() == []


def test_number_of_documents_is_bounded_for_each_tenant() -> None:
    world = World(limits=DocumentLimits(documents_max=1))
    world.ready()
    with pytest.raises(QuotaError, match="documents_max"):
        world.create(OTHER)
    world.ready(OTHER, owner=THEIRS)
    world.close()


def test_document_that_the_tiers_never_hold_is_refused_before_it_is_kept(world: World) -> None:
    full = TierFullError("too small", tier=world.rig.store.tier, needed_bytes=2, free_bytes=1)

    def refuse(_: Entry) -> None:
        raise full

    with pytest.raises(TierFullError, match="too small"):
        world.create(check=refuse)
    assert world.documents.entries() == []


def test_documents_are_found_or_read_again_after_a_restart(tmp_path: Path) -> None:
    before = World(FolderFiles(tmp_path))
    entry = before.ready(name="hats", is_pinned=True)
    gone = before.ready(OTHER)
    before.note(gone, entry)
    with before.documents.prompts.opening():
        assert not before.keeper.erase(before.documents.delete("mine", gone.record.id), timeout_ns=0)
    before.close()
    after = World(FolderFiles(tmp_path))
    (again,) = after.documents.entries()
    after.wait_for(lambda: again.record.state is State.READY)
    assert again.record == entry.record
    (erasure,) = after.documents.erasures()
    after.keeper.look()
    assert after.documents.erasures() == []
    assert erasure.record.id == gone.record.id
    assert after.documents.texts("mine", [again.record.id]) == [TEXT]
    after.close()


def test_document_that_stood_behind_too_many_others_takes_all_of_its_tenant_with_it(world: World) -> None:
    entry, other, short = world.ready(), world.ready(OTHER), world.ready("x")
    world.cached("Something else entirely. " * 10)
    for number in range(FOLLOWS_MAX + 2):
        world.note(*[short] * (number + 1), entry)
    assert len(entry.record.follows) == FOLLOWS_MAX + 1
    assert world.keeper.erase(world.documents.delete("mine", entry.record.id), timeout_ns=WAIT_NS)
    assert world.cached("Something else entirely. " * 10) == 0
    assert world.found(other.record.keys), "other documents stay"


class FullFiles(MemoryFiles):
    """A disk that is full from some time on."""

    is_full = False

    def _check(self) -> None:
        if self.is_full:
            raise StoreError("no space is left", path="documents")

    def change(self, record: DocumentRecord) -> None:
        self._check()

    def delete(self, erasure: ErasureRecord) -> None:
        self._check()
        super().delete(erasure)

    def end_erasure(self, document: str) -> None:
        self._check()


def test_full_disk_refuses_what_must_be_kept_and_chats_go_on() -> None:
    world = World(files := FullFiles())
    entry, other, over = world.ready(), world.ready(OTHER), world.ready("Short. " * 30, ttl_s=5)
    files.is_full = True
    world.note(other, entry)
    assert entry.record.follows == ((other.record.id,),)
    with pytest.raises(StoreError):
        world.documents.update("mine", entry.record.id, ttl_s=60, is_pinned=None)
    with pytest.raises(StoreError):
        world.documents.delete("mine", entry.record.id)
    assert world.documents.get("mine", entry.record.id) is entry
    world.now_s += 10
    world.keeper.look()
    assert over in world.documents.entries()
    files.is_full = False
    world.keeper.look()
    assert world.documents.entries() == [entry, other]
    erasure = world.documents.delete("mine", entry.record.id)
    files.is_full = True
    assert not world.keeper.erase(erasure, timeout_ns=0)
    files.is_full = False
    world.keeper.look()
    assert world.documents.erasures() == []
    world.close()


def test_a_refused_upload_takes_no_tokens() -> None:
    world = World(limits=DocumentLimits(documents_max=1))
    charged: list[str] = []

    def charge(entry: Entry) -> Callable[[], None]:
        charged.append(entry.record.id)
        return lambda: charged.remove(entry.record.id)

    world.ready(charge=charge)
    assert len(charged) == 1
    with pytest.raises(QuotaError, match="documents_max"):
        world.create(OTHER, charge=charge)
    with pytest.raises(QuotaError, match="more pins"):
        world.create(OTHER, owner=THEIRS, is_pinned=True, charge=charge)
    assert len(charged) == 1
    world.close()


class NoRoom(MemoryFiles):
    """A disk on which nothing fits."""

    def add(self, record: DocumentRecord, text: str) -> None:
        raise StoreError("no space is left", path="documents")


def test_an_upload_that_cannot_be_kept_gives_its_tokens_back() -> None:
    world, given_back = World(NoRoom()), threading.Event()
    with pytest.raises(StoreError):
        world.create(charge=lambda _: given_back.set)
    assert given_back.is_set()
    assert world.documents.entries() == []
    world.close()


def test_tenants_take_turns_in_having_documents_read(world: World) -> None:
    world.gate.clear()
    made = [world.create(f"{TEXT} 0", MINE, check=lambda _: None)]
    assert world.entered.wait(WAIT_S)
    made += [world.create(f"{TEXT} {place}", MINE, check=lambda _: None) for place in (1, 2)]
    theirs = world.create(OTHER, THEIRS, check=lambda _: None)
    order = []
    for _ in range(4):
        entry = world.documents.next_unread()
        assert entry is not None
        order.append(entry)
        entry.record = replace(entry.record, state=State.READY)
    assert sorted(map(order.index, made)) == [order.index(each) for each in made]
    assert order.index(theirs) < 2


class GoingFiles(MemoryFiles):
    """Something happens before a text is read."""

    before: Callable[[str], None] | None = None

    def text(self, document: str) -> str:
        if self.before is not None:
            self.before(document)
        return super().text(document)


def test_a_document_that_goes_while_it_is_read_was_never_there() -> None:
    world = World(files := GoingFiles())
    entry = world.ready()

    def go(document: str) -> None:
        files.before = None
        world.documents.delete("mine", document)
        raise StoreError("no such file", path=document)

    files.before = go
    with pytest.raises(DocumentNotFoundError):
        world.documents.texts("mine", [entry.record.id])
    world.close()
