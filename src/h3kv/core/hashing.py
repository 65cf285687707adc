"""Names for content: what a block's KV was computed from, and nothing else.

    root = H(fingerprint, tenant)      key_0 = H(root, tokens 0..63)      key_i = H(key_{i-1}, tokens 64i..64i+63)

Keys are chained, so a key stands for its block and for everything before it. Two equal keys mean: the same tokens in
the same order from the first one on, the same model, the same numerics, the same tenant.
"""

from __future__ import annotations

import bisect
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.types import BlockKey, DType, Encoding

KEY_BYTES: Final = 32
"""blake2b-256: collisions are out of reach even for someone who chooses the tokens."""

_BLOCK: Final = struct.Struct(f"<{BLOCK_TOKENS}i")


def _hash(purpose: str, *parts: bytes) -> bytes:
    """Hash of the parts. Each is preceded by its length, so that moving a byte between two parts changes it."""
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=purpose.encode())
    for part in parts:
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything besides the tokens that decides what a block's keys and values are."""

    weights: str
    """Digest of the model's weights and of the shape they are used in."""
    dtype: DType
    rope: str
    """Kind of rotary embedding with base, static factor and the context length it is fixed for."""
    tokenizer: str
    """Digest of the tokenizer: the same number must mean the same text."""
    encoding: Encoding
    fidelity: str
    """Which arithmetic computed it: the kernels' family, and later the retrieval settings."""

    def digest(self) -> bytes:
        """32 bytes that differ when any field differs."""
        names = [field.name for field in fields(self)]
        parts = [part.encode() for name in names for part in (name, str(getattr(self, name)))]
        return _hash("h3-fingerprint", str(BLOCK_TOKENS).encode(), *parts)


def root_key(fingerprint: bytes, tenant: bytes) -> BlockKey:
    """The key before the first block.

    Args:
        fingerprint: `Fingerprint.digest()`.
        tenant: salt that keeps tenants apart: their blocks never match, so none can probe for another's prompt.
    """
    return BlockKey(_hash("h3-root", fingerprint, tenant))


def extend_keys(previous: BlockKey, tokens: Sequence[int]) -> list[BlockKey]:
    """Keys of the whole blocks of `tokens`, which follow the block named `previous`. A rest below 64 is left out."""
    keys: list[BlockKey] = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = _BLOCK.pack(*tokens[start : start + BLOCK_TOKENS])
        previous = BlockKey(_hash("h3-block", previous, block))
        keys.append(previous)
    return keys


def blocks_in_common(keys: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """Whole blocks with which two prompts begin alike, by their root keys and the keys of their blocks."""
    # Keys are chained: from the first that differs on, all do.
    places = range(1, min(len(keys), len(others)))
    return bisect.bisect_left(places, True, key=lambda place: keys[place] != others[place])


def block_keys(tokens: Sequence[int], *, fingerprint: bytes, tenant: bytes) -> list[BlockKey]:
    """Keys of the whole blocks of a prompt, first block first.

    Args:
        tokens: token numbers from the start of the sequence, each below 2**31.
        fingerprint: `Fingerprint.digest()`.
        tenant: salt that keeps tenants apart; may be empty.

    Cost: about 3 us per block.
    """
    return extend_keys(root_key(fingerprint, tenant), tokens)
