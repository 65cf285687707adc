"""The native table of the page cache against a dict."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from h3kv.attention.retriever import WANTED_DTYPE
from h3kv.engine.page_slots import FAILED, KEY_DTYPE, LOADING, READY, PageSlots, Pins, Reads, slots_of

SLOTS = 6
UNIT_BYTES = 4096

Key = tuple[int, int, int]
"""Segment, unit, layer."""

pages = st.tuples(st.integers(1, 3), st.integers(0, 5))
keys = st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 1))


@dataclass
class _Slot:
    key: Key | None = None
    """None: free, or its key was forgotten."""
    state: int = 0
    pins: int = 0


@dataclass
class _Model:
    """What the table may look like: which slot is taken next is not said, only which ones may be."""

    slots: list[_Slot] = field(default_factory=lambda: [_Slot() for _ in range(SLOTS)])

    def find(self, key: Key) -> int | None:
        return next((number for number, slot in enumerate(self.slots) if slot.key == key), None)

    @property
    def evictable(self) -> set[int]:
        return {number for number, slot in enumerate(self.slots) if slot.pins == 0 and slot.state != LOADING}

    def settle(self, slot: _Slot) -> None:
        if slot.key is None and slot.pins == 0 and slot.state != LOADING:
            slot.state = 0


def _array(wanted: list[Key]) -> np.ndarray:
    return np.array([(segment, unit, layer, 0) for segment, unit, layer in wanted], dtype=KEY_DTYPE)


class PageSlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        addresses = np.arange(1, SLOTS + 1, dtype=np.uint64) * np.uint64(UNIT_BYTES)
        self.table = PageSlots(addresses, unit_bytes=UNIT_BYTES, page_bytes=UNIT_BYTES, run_units=3)
        self.model = _Model()
        self.reads: list[int] = []
        self.taken: list[np.ndarray] = []
        self.pinned: list[Pins] = []

    @rule(wanted=st.sets(keys, min_size=1, max_size=SLOTS + 1).map(sorted))
    def take(self, wanted: list[Key]) -> None:
        before = [self.model.find(key) for key in wanted]
        missing = before.count(None)
        room = len(self.model.evictable - set(before))
        found = self.table.take(_array(wanted))
        assert (found is None) == (missing > room)
        if found is None:
            return
        slots_N, reads = found
        self._enter(wanted, before, slots_N)
        self._note(reads, {key for key, slot in zip(wanted, before, strict=True) if slot is None}, is_ahead=False)
        self.taken.append(slots_N)

    @rule(layer=st.integers(0, 1), pages=st.sets(pages, min_size=1, max_size=SLOTS + 1).map(sorted))
    def take_pages(self, layer: int, pages: list[tuple[int, int]]) -> None:
        wanted = [(segment, unit, layer) for segment, unit in pages]
        wanted_N = np.array([(segment, 0, unit, 0) for segment, unit in pages], dtype=WANTED_DTYPE)
        before = [self.model.find(key) for key in wanted]
        pins = Pins()
        is_present = self.table.take_present(layer, wanted_N, pins)
        assert is_present == all(slot is not None and self.model.slots[slot].state == READY for slot in before)
        if not is_present:
            room = len(self.model.evictable - set(before))
            taking = self.table.take_pages(layer, wanted_N, pins)
            assert (taking is None) == (before.count(None) > room)
            if taking is None:
                assert len(pins) == 0
                return
            self._enter(wanted, before, pins.slots_N)
            missing = {key for key, slot in zip(wanted, before, strict=True) if slot is None}
            self._note(taking.reads, missing, is_ahead=False)
            assert taking.missing == len(missing)
            assert taking.loading == sum(self.model.slots[number].state == LOADING for number in pins.slots_N.tolist())
        else:
            self._enter(wanted, before, pins.slots_N)
        assert pins.addresses_N.tolist() == [(number + 1) * UNIT_BYTES for number in pins.slots_N.tolist()]
        assert list(zip(*(pins.keys_N[name].tolist() for name in ("segment", "unit", "layer")), strict=True)) == wanted
        self.pinned.append(pins)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def give_back_pins(self, data: st.DataObject) -> None:
        pins = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        slots = pins.slots_N.tolist()
        for _ in range(2):
            # A second time changes nothing.
            self.table.give_back_pins(pins)
        for number in slots:
            self.model.slots[number].pins -= 1
            self.model.settle(self.model.slots[number])

    @rule(wanted=st.sets(keys, min_size=1, max_size=SLOTS + 1).map(sorted), units=st.integers(0, 4))
    def read_ahead(self, wanted: list[Key], units: int) -> None:
        missing = [key for key in wanted if self.model.find(key) is None]
        room = min(units, len(self.model.evictable))
        present = self.table.present(_array(wanted))
        assert present == (wanted.index(missing[0]) if missing else len(wanted))
        reads, dealt_with = self.table.read_ahead(_array(wanted), units=units)
        started = missing[:room]
        assert dealt_with == (wanted.index(missing[room]) if room < len(missing) else len(wanted))
        self._note(reads, set(started), is_ahead=True)

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        tag = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        for _ in range(2):
            # A second time changes nothing.
            self.table.end(np.array([tag], dtype=np.uint64), well=well)
        for number in slots_of(tag):
            slot = self.model.slots[number]
            slot.state = READY if well else FAILED
            slot.key = slot.key if well else None
            self.model.settle(slot)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots_N = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.table.give_back(slots_N)
        for number in slots_N.tolist():
            self.model.slots[number].pins -= 1
            self.model.settle(self.model.slots[number])

    @rule(segment=st.integers(1, 3))
    def forget(self, segment: int) -> None:
        self.table.forget(segment)
        for slot in self.model.slots:
            if slot.key is not None and slot.key[0] == segment:
                slot.key = None
                self.model.settle(slot)

    @invariant()
    def the_table_is_whole(self) -> None:
        self.table.check_integrity()
        counts = self.table.counts()
        assert counts.evictable == len(self.model.evictable)
        assert counts.pinned == sum(slot.pins > 0 for slot in self.model.slots)
        assert counts.in_flight == self.table.in_flight == sum(slot.state == LOADING for slot in self.model.slots)

    @invariant()
    def what_is_taken_has_the_state_of_the_model(self) -> None:
        for slots_N in [*self.taken, *(pins.slots_N for pins in self.pinned)]:
            expected = [self.model.slots[number].state for number in slots_N.tolist()]
            assert self.table.states(slots_N).tolist() == expected
            assert self.table.loading(slots_N) == expected.count(LOADING)

    def _enter(self, wanted: list[Key], before: list[int | None], slots_N: np.ndarray) -> None:
        """What was there is pinned where it was, and the rest in slots that were free to take."""
        for key, slot in zip(wanted, before, strict=True):
            if slot is not None:
                assert slots_N[wanted.index(key)] == slot
                self.model.slots[slot].pins += 1
        for key, slot, number in zip(wanted, before, slots_N.tolist(), strict=True):
            if slot is None:
                assert self.model.slots[number].pins == 0 and self.model.slots[number].state != LOADING
                self.model.slots[number] = _Slot(key, LOADING, 1)

    def _note(self, reads: Reads, started: set[Key], *, is_ahead: bool) -> None:
        """Reads cover what was missing, each unit once, in slots that may be used."""
        covered = []
        for row, segment in zip(reads.reads_R.tolist(), reads.segments_R.tolist(), strict=True):
            tag, target, _, offset, size, ahead = row
            slots = slots_of(tag)
            assert bool(ahead) == is_ahead and size == len(slots) * UNIT_BYTES <= 3 * UNIT_BYTES
            assert target == (slots.start + 1) * UNIT_BYTES
            self.reads.append(tag)
            layers = {key[2] for key in started if key[0] == segment}
            for place, number in enumerate(slots):
                unit = offset // UNIT_BYTES + place
                if is_ahead:
                    slot = self.model.slots[number]
                    assert slot.pins == 0 and slot.state != LOADING
                    key = next(
                        (segment, unit, layer)
                        for layer in sorted(layers)
                        if (segment, unit, layer) in started and (segment, unit, layer) not in covered
                    )
                    self.model.slots[number] = _Slot(key, LOADING, 0)
                else:
                    found = self.model.slots[number].key
                    assert found is not None
                    key = found
                assert key[:2] == (segment, unit)
                covered.append(key)
        assert sorted(covered) == sorted(started)


TestPageSlots = PageSlotsMachine.TestCase
