"""Tables that share what did not change."""

from __future__ import annotations

import pytest

from h3kv.core.types import SegmentId
from h3kv.policy.migration_tables import SHARDS, SegmentRef, SegmentTable, TableDraft


def ref(segment: int, owner: str = "gpu_worker") -> SegmentRef:
    return SegmentRef(owner, SegmentId(segment))


def table_of(*segments: int) -> SegmentTable[int]:
    draft = TableDraft(SegmentTable[int]())
    for segment in segments:
        draft[ref(segment)] = segment
    return draft.freeze()


def test_a_draft_leaves_the_table_that_it_began_as_alone() -> None:
    before = table_of(1, 2)
    draft = TableDraft(before)
    draft[ref(1)] = 10
    del draft[ref(2)]
    draft[ref(3)] = 30
    after = draft.freeze()
    assert before == {ref(1): 1, ref(2): 2}
    assert after == {ref(1): 10, ref(3): 30}
    assert (len(before), len(after)) == (2, 2)


def test_only_shards_that_change_are_copied() -> None:
    before = table_of(1, 2, SHARDS + 1)
    draft = TableDraft(before)
    draft[ref(1)] = 10
    after = draft.freeze()
    changed = [number for number in range(SHARDS) if before.shards[number] is not after.shards[number]]
    assert changed == [1]
    assert after[ref(SHARDS + 1)] == SHARDS + 1


def test_equal_numbers_of_two_owners_are_two_segments() -> None:
    draft = TableDraft(table_of(7))
    draft[ref(7, "other")] = 70
    assert dict(draft) == {ref(7): 7, ref(7, "other"): 70}


def test_what_is_not_there_is_a_key_error_and_changes_nothing() -> None:
    draft = TableDraft(table_of(1))
    with pytest.raises(KeyError):
        del draft[ref(2)]
    with pytest.raises(KeyError):
        draft[ref(2)]
    assert draft.pop(ref(2), None) is None
    assert draft.freeze() == table_of(1)
