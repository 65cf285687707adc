"""The cold tier: segments on a file or block device, kept over restarts. `docs/cold-store.md` draws the format."""

from h3kv.tiers.cold.config import ColdStoreConfig
from h3kv.tiers.cold.store import ColdStore

__all__ = ["ColdStore", "ColdStoreConfig"]
