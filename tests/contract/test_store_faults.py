"""Fail the N-th move, fetch or call, for every N: its slab never becomes visible, and nothing leaks."""

import pytest

from h3kv.core.errors import SlabCorruptError
from h3kv.core.types import Fetch, Move, SlotHandle
from h3kv.testing.faulty_store import Call, FaultyStore, InjectedFaultError, ever_from

from .store_suite import LAYOUT, memory, payload, settle, slab
from .test_block_store import device_store

MOVES = 8
SIZE_BYTES = LAYOUT.size_bytes(2)


def submit_all(store: FaultyStore) -> list[SlotHandle]:
    """Eight slabs, alternately copied and published in place, in two batches."""
    handles = store.reserve([2] * MOVES)
    moves = [
        Move(slab(number), handle, payload(number, SIZE_BYTES) if number % 2 else None)
        for number, handle in enumerate(handles, start=1)
    ]
    store.submit(moves[:5])
    store.submit(moves[5:])
    return handles


@pytest.mark.parametrize("broken", range(1, MOVES + 1))
def test_broken_move_never_becomes_visible_and_nothing_leaks(broken: int) -> None:
    store = FaultyStore(device_store(units=2), broken_moves=[broken])
    handles = submit_all(store)
    ended = {completion.move.key: completion.error for completion in settle(store, MOVES)}
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
    settle(store, MOVES)
    store.submit([Move(slab(broken), handles[broken - 1], None)])
    assert [completion.error for completion in settle(store, 1)] == [None]
    assert store.lookup(slab(broken)) == handles[broken - 1]
    store.check_integrity()


@pytest.mark.parametrize("broken", range(1, MOVES + 1))
def test_all_moves_from_one_on_stay_broken(broken: int) -> None:
    store = FaultyStore(device_store(units=2), broken_moves=ever_from(broken))
    handles = submit_all(store)
    assert len(settle(store, MOVES)) == MOVES
    assert store.statistics().slabs_visible == broken - 1
    store.submit([Move(slab(MOVES), handles[-1], None)])
    (again,) = settle(store, 1)
    assert isinstance(again.error, InjectedFaultError)
    store.release(handles)
    assert store.statistics().used_bytes == 0
    store.check_integrity()


@pytest.mark.parametrize("broken", range(1, MOVES + 1))
def test_broken_fetch_ends_with_an_error_and_leaves_its_target(broken: int) -> None:
    store = FaultyStore(device_store(units=2), broken_fetches=[broken])
    handles = submit_all(store)
    settle(store, MOVES)
    fetches = [Fetch(slab(n), handle, memory(SIZE_BYTES)) for n, handle in enumerate(handles, start=1)]
    store.submit(fetches[:3])
    store.submit(fetches[3:])
    ended = {completion.move.key: completion.error for completion in settle(store, MOVES)}
    assert {key for key, error in ended.items() if error is not None} == {slab(broken)}
    assert isinstance(ended[slab(broken)], InjectedFaultError)
    assert not any(fetches[broken - 1].target)
    for number in range(1, MOVES + 1, 2):
        assert number == broken or fetches[number - 1].target == payload(number, SIZE_BYTES)
    store.check_integrity()


@pytest.mark.parametrize("corrupt", range(1, 4))
def test_corrupt_fetch_says_so_and_the_slab_itself_is_whole(corrupt: int) -> None:
    store = FaultyStore(device_store(units=1), corrupt_fetches=[corrupt])
    (handle,) = store.reserve([2])
    store.submit([Move(slab(1), handle, payload(1, SIZE_BYTES))])
    settle(store, 1)
    for number in range(1, 5):
        target = memory(SIZE_BYTES)
        store.submit([Fetch(slab(1), handle, target)])
        (ended,) = settle(store, 1)
        assert (target == payload(1, SIZE_BYTES)) == (number != corrupt)
        assert isinstance(ended.error, SlabCorruptError) == (number == corrupt)
    assert store.lookup(slab(1)) == handle
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
            settle(store, 1)
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
