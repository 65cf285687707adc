import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3kv.core.errors import RequestError
from h3kv.core.types import BlockKey, SegmentId, Tier
from h3kv.directory.entries import GENERATION_MAX, DirectoryEntry, check_entry, decode, encode
from h3kv.policy.migration_state import Owner

KEY = BlockKey(bytes(range(32)))
ENTRY = DirectoryEntry(KEY, Tier.HOST, Owner("gpu_worker-0", "b0a1"), SegmentId(7), 9, 3)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)


def test_an_entry_has_the_bytes_of_the_drawing() -> None:
    assert encode(ENTRY) == bytes.fromhex("01 01 0003 0000000000000007 0000000000000009 04") + b"b0a1gpu_worker-0"


@given(
    tier=st.sampled_from(list(Tier)),
    owner=st.builds(Owner, NAMES, NAMES),
    segment=st.integers(0, 2**64 - 1),
    generation=st.integers(0, GENERATION_MAX),
    index=st.integers(0, 2**16 - 1),
)
def test_every_entry_comes_back(tier: Tier, owner: Owner, segment: int, generation: int, index: int) -> None:
    entry = DirectoryEntry(KEY, tier, owner, SegmentId(segment), generation, index)
    check_entry(entry)
    assert decode(KEY, encode(entry)) == entry


@given(st.binary(max_size=80))
def test_whatever_lies_in_the_server_is_an_entry_or_none(value: bytes) -> None:
    entry = decode(KEY, value)
    if entry is not None:
        check_entry(entry)
        assert encode(entry) == value


@pytest.mark.parametrize(
    "entry",
    [
        DirectoryEntry(BlockKey(b"short"), Tier.HOST, ENTRY.owner, SegmentId(1), 1, 0),
        DirectoryEntry(KEY, Tier.HOST, Owner("", "boot"), SegmentId(1), 1, 0),
        DirectoryEntry(KEY, Tier.HOST, Owner("../etc", "boot"), SegmentId(1), 1, 0),
        DirectoryEntry(KEY, Tier.HOST, Owner("worker*", "boot"), SegmentId(1), 1, 0),
        DirectoryEntry(KEY, Tier.HOST, Owner("worker\n", "boot"), SegmentId(1), 1, 0),
        DirectoryEntry(KEY, Tier.HOST, Owner("worker", "b" * 65), SegmentId(1), 1, 0),
        DirectoryEntry(KEY, Tier.HOST, ENTRY.owner, SegmentId(-1), 1, 0),
        DirectoryEntry(KEY, Tier.HOST, ENTRY.owner, SegmentId(1), 2**53, 0),
        DirectoryEntry(KEY, Tier.HOST, ENTRY.owner, SegmentId(1), 1, 2**16),
    ],
)
def test_what_cannot_be_kept_is_refused(entry: DirectoryEntry) -> None:
    with pytest.raises(RequestError):
        check_entry(entry)
