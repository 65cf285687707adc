"""Fail the N-th move or call, for every N: its slab never becomes visible, and nothing leaks."""

import pytest

from h3kv.core.types import Move, SlotHandle
from h3kv.testing.faulty_store import Call, FaultyStore, InjectedFaultError

from .block_store import LAYOUT, settle, slab
from .test_block_store import device_store

MOVES = 8


def submit_all(store: FaultyStore) -> list[SlotHandle]:
    """Eight slabs, alternately copied and published in place, in two batches."""
    handles = store.reserve([2] * MOVES)
    payload = memoryview(b"\x11" * LAYOUT.size_bytes(2))
    moves = [
        Move(slab(number), handle, payload if number % 2 else None) for number, handle in enumerate(handles, start=1)
    ]
    store.submit(moves[:5])
    store.submit(moves[5:])
    return handles


@pytest.mark.parametrize("broken", range(1, MOVES + 1))
def test_broken_move_never_becomes_visible_and_nothing_leaks(broken: int) -> None:
    store = FaultyStore(device_store(units=2), broken_moves=[broken])
    handles = submit_all(store)
    ended = {completion.move.key: completion.error for completion in settle(store, moves=MOVES)}
    assert len(ended) == MOVES
    assert {key for key, error in ended.items() if error is not None} == {slab(broken)}
    error = ended[slab(broken)]
    assert isinstance(error, InjectedFaultError)
    assert error.injected
    for number, handle in enumerate(handles, start=1):
        assert store.lookup(slab(number)) == (None if number == broken else handle)
    store.check_integrity()
    store.release(handles)
    assert store.statistics().used_bytes == 0
    assert store.statistics().slabs_visible == 0
    store.check_integrity()


@pytest.mark.parametrize("broken", range(1, MOVES + 1))
def test_broken_move_can_be_tried_again(broken: int) -> None:
    store = FaultyStore(device_store(units=2), broken_moves=[broken])
    handles = submit_all(store)
    settle(store, moves=MOVES)
    store.submit([Move(slab(broken), handles[broken - 1], None)])
    assert [completion.error for completion in settle(store, moves=1)] == [None]
    assert store.lookup(slab(broken)) == handles[broken - 1]
    store.check_integrity()


def test_every_move_broken_leaves_an_empty_store() -> None:
    store = FaultyStore(device_store(units=2), broken_moves=range(1, MOVES + 1))
    store.release(submit_all(store))
    assert len(settle(store, moves=MOVES)) == MOVES
    assert store.statistics().slabs_visible == 0
    assert store.statistics().used_bytes == 0
    store.check_integrity()


def use(store: FaultyStore, call: Call, number: int) -> None:
    """One call for a slot of its own, which is given back whatever happens."""
    if call == "reserve":
        store.release(store.reserve([2]))
        return
    (handle,) = store.reserve([2])
    try:
        if call == "address":
            store.address(handle)
        else:
            store.submit([Move(slab(number), handle, None)])
            settle(store, moves=1)
            assert store.lookup(slab(number)) == handle
    finally:
        store.release([handle])


@pytest.mark.parametrize("call", ["reserve", "address", "submit"])
@pytest.mark.parametrize("broken", [1, 2, 3])
def test_broken_call_is_refused_once_and_does_nothing(call: Call, broken: int) -> None:
    store = FaultyStore(device_store(units=1), broken_calls={call: [broken]})
    for number in (1, 2, 3, 4):
        if number == broken:
            with pytest.raises(InjectedFaultError, match=f"{call} number {broken}"):
                use(store, call, number)
        else:
            use(store, call, number)
        assert store.statistics().used_bytes == 0
        assert store.poll() == []
        store.check_integrity()
