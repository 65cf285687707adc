import dataclasses

import pytest

from h3kv.core.hashing import KEY_BYTES, Fingerprint, block_keys, extend_keys, root_key
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.types import DType, Encoding

FINGERPRINT = Fingerprint(
    weights="a1", dtype=DType.BF16, rope="default 10000", tokenizer="b2", encoding=Encoding.RAW, fidelity="exact"
)
TOKENS = list(range(1000, 1000 + 3 * BLOCK_TOKENS))


def keys(tokens: list[int], *, fingerprint: Fingerprint = FINGERPRINT, tenant: bytes = b"") -> list[bytes]:
    return list(block_keys(tokens, fingerprint=fingerprint.digest(), tenant=tenant))


def test_equal_content_has_equal_keys() -> None:
    assert keys(TOKENS) == keys(list(TOKENS))
    assert all(len(key) == KEY_BYTES for key in keys(TOKENS))
    assert len(set(keys(TOKENS))) == 3


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (63, 0), (64, 1), (65, 1), (127, 1), (128, 2)])
def test_only_whole_blocks_have_keys(tokens: int, blocks: int) -> None:
    assert len(keys(TOKENS[:tokens])) == blocks


@pytest.mark.parametrize("changed", [0, 63, 64, 130])
def test_a_token_changes_its_block_and_all_after_it(changed: int) -> None:
    other = list(TOKENS)
    other[changed] += 1
    block = changed // BLOCK_TOKENS
    assert keys(other)[:block] == keys(TOKENS)[:block]
    assert all(a != b for a, b in zip(keys(other)[block:], keys(TOKENS)[block:], strict=True))


def test_order_of_tokens_and_of_blocks_matters() -> None:
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    assert set(keys(swapped)).isdisjoint(keys(TOKENS))
    blocks_swapped = TOKENS[64:128] + TOKENS[:64] + TOKENS[128:]
    assert set(keys(blocks_swapped)).isdisjoint(keys(TOKENS))


def test_same_block_behind_another_prefix_has_another_key() -> None:
    assert keys(TOKENS[64:128])[0] not in keys(TOKENS)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "a2"},
        {"dtype": DType.FP32},
        {"rope": "ntk 2 10000"},
        {"tokenizer": "b3"},
        {"fidelity": "retrieval 2 %"},
        {"weights": "a1default 10000", "rope": ""},
    ],
)
def test_another_model_has_other_keys(change: dict[str, str]) -> None:
    other = dataclasses.replace(FINGERPRINT, **change)
    assert set(keys(TOKENS, fingerprint=other)).isdisjoint(keys(TOKENS))


def test_every_field_is_in_the_digest() -> None:
    for field in dataclasses.fields(Fingerprint):
        other = dataclasses.replace(FINGERPRINT, **{field.name: "x"})
        assert other.digest() != FINGERPRINT.digest(), field.name


def test_tenants_are_apart() -> None:
    assert set(keys(TOKENS, tenant=b"a")).isdisjoint(keys(TOKENS, tenant=b"b"))
    assert set(keys(TOKENS, tenant=b"a")).isdisjoint(keys(TOKENS))


def test_keys_can_be_extended_block_by_block() -> None:
    root = root_key(FINGERPRINT.digest(), b"t")
    first = extend_keys(root, TOKENS[:64])
    assert first + extend_keys(first[-1], TOKENS[64:]) == keys(TOKENS, tenant=b"t")
    assert extend_keys(root, TOKENS[:63]) == []


def test_known_answer_does_not_drift() -> None:
    """Keys name KV that outlives a process: a change here makes every stored block a miss."""
    assert keys([0] * 64)[0].hex() == "b52d7f81033c8b1632c330d1862ef4eac38afcb4810cb5d6608eebccf3f39c9a"
