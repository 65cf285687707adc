"""Who may ask: whose key a request shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.api_keys import KEY_PREFIX, hash_key, salt_of
from h3kv.core.errors import ApiKeyError
from h3kv.rpc.call_context import BEARER
from h3kv.tenant_file import TenantEntry, read_tenant_file


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tenants by the hashes of their keys. Without any, everybody is the same nameless tenant, and needs no key.

    Args:
        by_hash: hash of a key, and whose it is.
    """

    by_hash: Mapping[str, pb.Tenant] = field(default_factory=dict)

    @property
    def need_keys(self) -> bool:
        """Whether a request must show a key."""
        return bool(self.by_hash)

    def find(self, authorization: str | None) -> pb.Tenant:
        """Whose key a request shows.

        Args:
            authorization: value of the header of that name.

        Raises:
            ApiKeyError: it shows none, or one that nobody has. The message does not repeat it.

        Hashes are looked up, not keys: how long that takes tells nothing that leads to a key.
        """
        if not self.by_hash:
            return pb.Tenant()
        scheme = BEARER.lower()
        if authorization is None or not authorization.lower().startswith(scheme):
            raise ApiKeyError("no API key was sent: send it as the header `Authorization: Bearer KEY`")
        shown = authorization[len(scheme) :].strip()
        found = self.by_hash.get(hash_key(shown)) if shown.startswith(KEY_PREFIX) else None
        if found is None:
            raise ApiKeyError("the API key is not known here: send one that the operator of this node gave you")
        return found


def read_tenants(path: Path | None) -> Tenants:
    """The tenants in a file; without one, nobody needs a key.

    Raises:
        ConfigError: others can write the file, it cannot be read, or what it says breaks a rule.
    """
    entries = [] if path is None else read_tenant_file(path)
    return Tenants({known: _tenant(entry) for entry in entries for known in entry.keys})


def _tenant(entry: TenantEntry) -> pb.Tenant:
    quotas: dict[str, Any] = {"tokens_per_minute": entry.tokens_per_minute, "document_bytes": entry.document_bytes}
    return pb.Tenant(name=entry.name, salt=salt_of(entry.name), **quotas)
