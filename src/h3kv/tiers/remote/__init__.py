"""The cold store of another process: reads and writes pass as records through a shared region, bytes lie in slots."""

from h3kv.tiers.remote.store import RemoteColdStore

__all__ = ["RemoteColdStore"]
