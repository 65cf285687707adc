"""KV of documents on three tiers: held there, withdrawn, erased in memory and on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.integration.nvme_io_rig import linked, nvme_io, settings_for

from h3kv.core.errors import TierFullError
from h3kv.core.hashing import block_keys, root_key
from h3kv.core.ports import PersistentStore
from h3kv.core.reach import Reach
from h3kv.core.types import BlockKey, SlotHandle, Tier
from h3kv.core.units import NS_PER_MS
from h3kv.engine import documents
from h3kv.engine.documents import DocumentKv
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.segment import Segment
from h3kv.testing.engines import FINGERPRINT, Rig, one_thread, prompt_tokens
from h3kv.testing.remote_rig import remote_rig
from h3kv.testing.tiered_rig import tiered_rig
from h3kv.tiers.host import RegionStore
from h3kv.tiers.remote.link import NodeLink

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]

DEADLINE_S = 30.0
TEXT = prompt_tokens(1, 700)
"""10 whole blocks and 60 tokens."""


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def keys_of(tokens: list[int]) -> list[BlockKey]:
    return block_keys(tokens, fingerprint=FINGERPRINT, tenant=b"")


def reach_of(tokens: list[int], *, spared: list[BlockKey] | None = None) -> Reach:
    keys = keys_of(tokens)
    ends = keys[-1:] or [root_key(FINGERPRINT, b"")]
    return Reach(frozenset(keys), frozenset(ends), frozenset(spared or ()))


def erase(rig: Rig, kv: DocumentKv, reach: Reach) -> None:
    """Repeat it until nothing is left."""
    end_s = time.monotonic() + DEADLINE_S
    while not kv.erase(reach):
        assert time.monotonic() < end_s, "it is still there"
        rig.engine.step()


def settle(rig: Rig) -> None:
    """Have everything in the cold store."""
    rig.pool.placer.settle(int(DEADLINE_S) * 1000 * NS_PER_MS)


def pieces_of(rig: Rig, segments: list[Segment]) -> list[bytes]:
    """What can only be theirs: 512 bytes of each slab in HOST, none of them zeros alone."""
    assert all(segment.home_L for segment in segments)
    return [piece for slot in slots_of(rig, segments) if any(piece := bytes(slot[4096:4608]))]


def slots_of(rig: Rig, segments: list[Segment]) -> list[memoryview]:
    """Their memory in HOST."""
    home = rig.pool.home
    assert isinstance(home, RegionStore)
    return [home.view(handle) for each in segments for handle in each.home_L or ()]


def cached(rig: Rig, prompt: list[int]) -> int:
    return sum(rig.answer(prompt)[1].statistics.cached_tokens.values())


def test_bytes_of_an_erased_document_are_nowhere_in_the_store_file(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, host_blocks=160) as rig:
        kv = DocumentKv(rig.pool)
        rig.answer(TEXT, max_new_tokens=1)
        rig.answer([*TEXT, *prompt_tokens(2, 200)], max_new_tokens=1)
        rig.answer(other := prompt_tokens(3, 500), max_new_tokens=1)
        segments = kv.find(keys_of(TEXT))
        assert segments is not None
        of_chat = [each for each in rig.segments.sealed() if each.parent == segments[-1].id]
        of_other = kv.find(keys_of(other))
        assert of_chat and of_other
        gone, stays = pieces_of(rig, [*segments, *of_chat]), pieces_of(rig, of_other)
        slots = slots_of(rig, segments)
        settle(rig)
        store = tmp_path / "store.h3"
        assert all(piece in store.read_bytes() for piece in (*gone, *stays))
        erase(rig, kv, reach_of(TEXT))
        data = store.read_bytes()
        assert not any(piece in data for piece in gone)
        assert all(piece in data for piece in stays)
        assert not any(any(slot) for slot in slots), "what was in memory lies there still"
        assert kv.find(keys_of(TEXT)) is None
        assert cached(rig, TEXT) == 0
        assert cached(rig, other) == 448
        kv.check_integrity()
        rig.engine.check_integrity()


def test_erased_document_stays_gone_after_a_restart(tmp_path: Path) -> None:
    with tiered_rig(tmp_path) as rig:
        rig.answer(TEXT, max_new_tokens=1)
    with tiered_rig(tmp_path) as rig:
        kv = DocumentKv(rig.pool)
        assert kv.find(keys_of(TEXT)) is not None
        erase(rig, kv, reach_of(TEXT))
    with tiered_rig(tmp_path) as rig:
        assert DocumentKv(rig.pool).find(keys_of(TEXT)[:1]) is None
        assert cached(rig, TEXT) == 0


def test_document_is_not_held_where_the_longest_answer_may_need_the_room(tmp_path: Path) -> None:
    """It was taken on, so it must be able to end: also when it is all alone at its longest."""
    with tiered_rig(tmp_path) as rig:
        kv = DocumentKv(rig.pool)
        rig.answer(TEXT, max_new_tokens=1)
        longest = (rig.pool.capacity.blocks - 4) * 64 - 100
        running = rig.engine.submit(
            Request(
                prompt=tuple(prompt_tokens(5, 100)),
                sampling=SamplingParameters(max_new_tokens=longest, ignore_eos=True),
            )
        )
        assert not kv.hold("doc", keys_of(TEXT)), "while it waits"
        for _ in range(5):
            rig.engine.step()
        assert not kv.hold("doc", keys_of(TEXT)), "while it runs"
        rig.engine.cancel(running)
        assert kv.hold("doc", keys_of(TEXT))
        kv.let_go("doc")


class Ailing:
    """A cold store that can be told to take nothing more. Otherwise what it stands before."""

    def __init__(self, store: PersistentStore) -> None:
        self._store = store
        self.is_degraded = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_documents_in_a_store_that_takes_nothing_more_leave_memory_to_requests(tmp_path: Path) -> None:
    ailing: list[Ailing] = []

    def around(store: PersistentStore) -> PersistentStore:
        ailing.append(Ailing(store))
        return cast("PersistentStore", ailing[0])

    long = prompt_tokens(6, 40 * 64)
    with tiered_rig(tmp_path, around=around) as rig:
        kv = DocumentKv(rig.pool)
        rig.answer(long, max_new_tokens=1)
        settle(rig)
        assert kv.hold("doc", keys_of(long))
        rig.answer(prompt_tokens(7, 900), max_new_tokens=1)
        settle(rig)
        ailing[0].is_degraded = True
        assert rig.segments.held_blocks > rig.pool.capacity.home_blocks, "as many as would leave less than nothing"
        assert len(rig.answer(prompt_tokens(8, 100), max_new_tokens=4)[0]) == 4
        kv.let_go("doc")


def test_segments_that_a_request_reads_are_erased_when_it_ends(tmp_path: Path) -> None:
    with tiered_rig(tmp_path) as rig:
        kv = DocumentKv(rig.pool)
        rig.answer(TEXT, max_new_tokens=1)
        prompt = [*TEXT, *prompt_tokens(2, 200)]
        expected = rig.answer(prompt, max_new_tokens=80)[0]
        sampling = SamplingParameters(max_new_tokens=80, ignore_eos=True)
        running = rig.engine.submit(Request(prompt=tuple(prompt), sampling=sampling))
        for _ in range(20):
            rig.engine.step()
        assert not kv.erase(reach_of(TEXT))
        assert kv.find(keys_of(TEXT)[:1]) is None, "it is found though it was withdrawn"
        rig.engine.check_integrity()
        tokens = []
        while rig.engine.has_work:
            tokens += [event.token for event in rig.engine.step() if hasattr(event, "token")]
            assert not kv.erase(reach_of(TEXT)) or not rig.engine.has_work
        assert tokens == expected[-len(tokens) :], f"request {running} reads something else since"
        erase(rig, kv, reach_of(TEXT))
        assert not [each for each in rig.segments.everywhere() if each.is_erased]
        assert cached(rig, prompt) == 0
        rig.engine.check_integrity()


@pytest.mark.parametrize("bound", ["ERASED_BYTES", "ERASED_SEGMENTS"])
def test_one_call_erases_so_much_and_the_rest_is_erased_by_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    with tiered_rig(tmp_path) as rig:
        kv = DocumentKv(rig.pool)
        monkeypatch.setattr(documents, bound, 1)
        rig.answer(TEXT, max_new_tokens=1)
        segments = kv.find(keys_of(TEXT))
        assert segments is not None and len(segments) > 1
        before = len(rig.segments.everywhere())
        assert not kv.erase(reach_of(TEXT))
        assert kv.is_behind
        assert len(rig.segments.everywhere()) >= before - 1
        while kv.is_behind:
            kv.go_on()
        assert kv.find(keys_of(TEXT)[:1]) is None
        erase(rig, kv, reach_of(TEXT))
        rig.engine.check_integrity()


def test_beginning_that_another_document_has_too_is_spared(tmp_path: Path) -> None:
    with tiered_rig(tmp_path) as rig:
        kv = DocumentKv(rig.pool)
        other = [*TEXT[:320], *prompt_tokens(5, 320)]
        rig.answer(other, max_new_tokens=1)
        rig.answer(TEXT, max_new_tokens=1)
        erase(rig, kv, reach_of(TEXT, spared=keys_of(other)))
        assert kv.find(keys_of(other)) is not None
        assert cached(rig, TEXT) == 320
        rig.engine.check_integrity()


def test_held_document_stays_in_some_tier_while_all_else_goes(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=4) as rig:
        kv = DocumentKv(rig.pool)
        rig.answer(TEXT, max_new_tokens=1)
        assert kv.hold("a", keys_of(TEXT))
        assert kv.hold("b", keys_of(TEXT))
        for number in range(10, 18):
            rig.answer(prompt_tokens(number, 900), max_new_tokens=1)
            rig.engine.check_integrity()
        rig.engine.evict_cached()
        assert kv.holds("a")
        assert kv.find(keys_of(TEXT)) is not None
        assert cached(rig, TEXT) == 640
        kv.check_integrity()
        kv.let_go("a")
        rig.engine.evict_cached()
        assert kv.find(keys_of(TEXT)) is not None
        kv.let_go("b")
        kv.let_go("b")
        assert rig.segments.held_blocks == 0
        rig.engine.evict_cached()
        assert kv.find(keys_of(TEXT)) is None
        kv.check_integrity()
        rig.engine.check_integrity()


def test_held_room_is_not_promised_to_requests(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=1) as rig:
        kv = DocumentKv(rig.pool)
        before = rig.pool.capacity.blocks
        rig.answer(TEXT, max_new_tokens=1)
        assert kv.hold("a", keys_of(TEXT))
        assert rig.pool.capacity.blocks < before
        rig.answer(prompt_tokens(4, 64 * (rig.pool.capacity.blocks - 2)), max_new_tokens=1)
        assert kv.holds("a")
        kv.let_go("a")
        assert rig.pool.capacity.blocks == before
        rig.engine.check_integrity()


def test_what_a_document_had_on_disk_goes_too_where_only_its_room_was_wanted(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=2, host_blocks=64) as rig:
        kv = DocumentKv(rig.pool)
        rig.answer(TEXT, max_new_tokens=1)
        segments = kv.find(keys_of(TEXT))
        assert segments is not None
        pieces = pieces_of(rig, segments)
        kv.mark({"a": reach_of(TEXT)})
        settle(rig)
        assert any(piece in (tmp_path / "store.h3").read_bytes() for piece in pieces)
        for number in range(10, 14):
            rig.answer(prompt_tokens(number, 900), max_new_tokens=1)
        assert kv.find(keys_of(TEXT)) is None
        erase(rig, kv, reach_of(TEXT))
        data = (tmp_path / "store.h3").read_bytes()
        assert not any(piece in data for piece in pieces)
        rig.engine.check_integrity()


def test_copies_wait_for_room_that_is_being_erased_and_nobody_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered_rig(tmp_path) as rig:
        cold = rig.segments.cold
        assert cold is not None

        def refuse(sizes: object) -> list[SlotHandle]:
            raise TierFullError("full", tier=Tier.NVME, needed_bytes=2, free_bytes=1)

        with monkeypatch.context() as full:
            full.setattr(type(cold), "erasing", property(lambda _: 1))
            full.setattr(type(cold), "reserve", lambda _, sizes: refuse(sizes))
            full.setattr(type(cold), "wait", lambda *_: pytest.fail("the engine's thread waited"))
            rig.answer(TEXT, max_new_tokens=1)
            rig.pool.placer.tick()
            assert rig.pool.placer.is_moving, "they are not forgotten"
            full.setattr(type(cold), "wait", lambda *_: None)
            assert not rig.pool.placer.make_room(rig.segments.free_blocks() + 1, waits=True), "it waits for nothing"
        settle(rig)
        segments = DocumentKv(rig.pool).find(keys_of(TEXT))
        assert segments is not None and all(segment.cold_L for segment in segments)
        rig.engine.check_integrity()


def test_document_that_is_computed_again_is_marked_again(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, host_blocks=160) as rig:
        kv = DocumentKv(rig.pool)
        kv.mark({"a": reach_of(TEXT)})
        rig.answer([*TEXT, *prompt_tokens(2, 200)], max_new_tokens=1)
        rig.answer(prompt_tokens(3, 200), max_new_tokens=1)
        segments = kv.find(keys_of(TEXT))
        assert segments is not None
        assert all(segment.is_erased for segment in segments)
        other = kv.find(keys_of(prompt_tokens(3, 200)))
        assert other is not None
        assert not any(segment.is_erased for segment in other)
        erase(rig, kv, reach_of(TEXT))
        rig.answer(TEXT, max_new_tokens=1)
        again = kv.find(keys_of(TEXT))
        assert again is not None
        assert all(segment.is_erased for segment in again), "it is marked until it is said to be over"
        kv.unmark("a")
        assert not rig.segments.marked
        rig.engine.check_integrity()


def test_document_is_erased_in_the_store_of_another_process(tmp_path: Path) -> None:
    store = tmp_path / "store" / "store.h3"

    def act(rig: Rig) -> None:
        kv = DocumentKv(rig.pool)
        rig.answer(TEXT, max_new_tokens=1)
        segments = kv.find(keys_of(TEXT))
        assert segments is not None
        pieces = pieces_of(rig, segments)
        settle(rig)
        assert all(piece in store.read_bytes() for piece in pieces)
        erase(rig, kv, reach_of(TEXT))
        assert not any(piece in store.read_bytes() for piece in pieces)
        kv.await_earlier()
        erase(rig, kv, reach_of(TEXT))
        rig.pool.check_integrity()

    def run(link: NodeLink) -> None:
        # When this returns, nothing of the server's memory is in use here.
        with remote_rig(link) as remote:
            act(remote.rig)

    with nvme_io(tmp_path, **settings_for(host_blocks=160)) as server:
        with linked(server) as link:
            run(link)
        assert server.end() == 0


def test_held_document_that_takes_most_of_the_room_can_be_asked_about(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=1, device_blocks=40, host_blocks=64) as rig:
        kv = DocumentKv(rig.pool)
        blocks = rig.pool.capacity.blocks
        text = prompt_tokens(5, (blocks * 2 // 3) * 64)
        expected, _ = rig.answer([*text, 1, 2, 3], max_new_tokens=8)
        assert kv.hold("a", keys_of(text))
        for _ in range(2):
            tokens, finished = rig.answer([*text, 1, 2, 3], max_new_tokens=8)
            assert tokens == expected
            assert finished.statistics.cached_tokens_total == len(text)
        with pytest.raises(TierFullError):
            rig.answer(prompt_tokens(6, len(text)), max_new_tokens=8)
        kv.let_go("a")
        rig.answer(prompt_tokens(6, len(text)), max_new_tokens=8)
        rig.engine.check_integrity()
