"""API keys of tenants: how they look, and what is kept of them.

h3-VbnK5z0Zk1c...      32 random bytes in URL-safe base64 behind a prefix: 256 bits, which nobody can try
sha256:9f86d081...     what a file keeps: such a key needs no slow hash, since there is nothing to guess
"""

from __future__ import annotations

import hashlib
from typing import Final

KEY_PREFIX: Final = "h3-"
KEY_RANDOM_BYTES: Final = 32
HASH_PREFIX: Final = "sha256:"

_SALT_DOMAIN: Final = b"h3kv tenant salt\0"
"""Keeps salts apart from other hashes of names."""


def hash_key(key: str) -> str:
    """What a file of tenants keeps of a key."""
    return HASH_PREFIX + hashlib.sha256(key.encode(errors="replace")).hexdigest()


def salt_of(tenant: str) -> bytes:
    """32 bytes that keep a tenant's KV apart from that of all others, the same after every restart."""
    return hashlib.sha256(_SALT_DOMAIN + tenant.encode()).digest()
