from hypothesis import given
from hypothesis import strategies as st

from h3kv.core.hashing import block_keys, root_key
from h3kv.core.reach import Reach, join
from h3kv.core.types import BlockKey

FINGERPRINT = bytes(32)
ROOT = root_key(FINGERPRINT, b"")


def keys(*blocks: int) -> list[BlockKey]:
    """Keys of a prompt whose blocks each repeat one token."""
    return block_keys([token for token in blocks for _ in range(64)], fingerprint=FINGERPRINT, tenant=b"")


def reach(*blocks: int, spared: list[BlockKey] | None = None) -> Reach:
    own = keys(*blocks)
    return Reach(frozenset(own), frozenset(own[-1:] or [ROOT]), frozenset(spared or ()))


def test_blocks_of_a_document_and_what_continues_it_are_covered() -> None:
    document = reach(1, 2, 3)
    assert document.covers(ROOT, keys(1, 2, 3), set())
    assert document.covers(ROOT, keys(1, 9), set()), "its first block"
    assert document.covers(keys(1, 2, 3)[-1], keys(1, 2, 3, 4)[3:], set())
    assert not document.covers(ROOT, keys(4, 5), set())


def test_chain_is_followed_through_what_was_found() -> None:
    document, found = reach(1), set[BlockKey]()
    chain = keys(1, 5, 6, 7)
    assert not document.covers(chain[1], chain[2:], found), "nothing is known of its parent yet"
    assert document.covers(chain[0], chain[1:2], found)
    assert document.covers(chain[1], chain[2:], found)


def test_common_beginning_is_spared_and_what_continues_it_otherwise_is_not() -> None:
    document = reach(1, 2, 3, spared=keys(1, 2, 8))
    assert not document.covers(ROOT, keys(1, 2), set())
    assert not document.covers(ROOT, keys(1, 2, 8), set())
    assert document.covers(ROOT, keys(1, 2, 3), set())
    same = reach(1, 2, spared=keys(1, 2))
    assert not same.covers(ROOT, keys(1, 2), set())
    assert same.covers(ROOT, keys(1, 2, 7), set()), "its last tokens may be in there"


def test_document_without_a_whole_block_takes_all_that_begins_otherwise() -> None:
    document = reach(spared=keys(1))
    assert document.covers(ROOT, keys(5), set())
    assert not document.covers(ROOT, keys(1), set())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_prompt_is_covered_where_it_begins_like_the_document(document: list[int], prompt: list[int]) -> None:
    assert reach(*document).covers(ROOT, keys(*prompt), set()) == (document[0] == prompt[0])


def test_joined_reaches_cover_what_each_does() -> None:
    both = join([reach(1), reach(2, 3)], keys(7))
    assert both.covers(ROOT, keys(1), set())
    assert both.covers(ROOT, keys(2), set())
    assert not both.covers(ROOT, keys(7), set())
