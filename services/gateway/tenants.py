"""Who may ask: the file of tenants, and whose key a request shows.

tenants:
  - name: research
    keys: ["sha256:9f86d081..."]       # `h3 key` makes them
    tokens_per_minute: 100000          # prompt and answer tokens; left out: any number
    document_bytes: 20GiB              # KV of its documents; left out: any number
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import Field, ValidationError

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.config import Count, Section, Size
from h3kv.core.api_keys import hash_key, salt_of
from h3kv.core.errors import ApiKeyError, ConfigError
from h3kv.rpc.call_context import BEARER

SETTING: Final = "tenants_file"
FILE_BYTES_MAX: Final = 4 << 20
"""Ten thousand keys take less than one."""

KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class TenantEntry(Section):
    """One tenant of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """What its quotas are counted under. Another name is another tenant, which shares nothing with it."""
    keys: Annotated[list[KeyHash], Field(min_length=1)]
    """Hashes of its keys, any of which lets it in: two while one replaces the other."""
    tokens_per_minute: Annotated[Count, Field(ge=1, le=2**53)] | None = None
    """Prompt and answer tokens. Nothing: any number."""
    document_bytes: Annotated[Size, Field(ge=1, le=2**53)] | None = None
    """Bytes of KV of all its documents. Nothing: any number."""


class TenantFile(Section):
    """The whole file."""

    tenants: Annotated[list[TenantEntry], Field(min_length=1)]
    """Names and keys are each there once."""


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

        Cost: the key is compared with all that there are, so that the time tells nothing about any.
        """
        if not self.by_hash:
            return pb.Tenant()
        scheme = BEARER.lower()
        if authorization is None or not authorization.lower().startswith(scheme):
            raise ApiKeyError("no API key was sent: send it as the header `Authorization: Bearer KEY`")
        shown = hash_key(authorization[len(scheme) :].strip())
        found = [tenant for known, tenant in self.by_hash.items() if hmac.compare_digest(known, shown)]
        if not found:
            raise ApiKeyError("the API key is not known here: send one that the operator of this node gave you")
        return found[0]


def read_tenants(path: Path | None) -> Tenants:
    """The tenants in a file; without one, nobody needs a key.

    Raises:
        ConfigError: others can write the file, it cannot be read, or what it says breaks a rule.
    """
    if path is None:
        return Tenants()
    try:
        file = TenantFile.model_validate(yaml.safe_load(_read_text(path)))
    except yaml.YAMLError as error:
        raise _refusal(path, f"no valid YAML ({' '.join(str(error).split())[:200]})") from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        rule = problem["msg"].removeprefix("Value error, ")
        raise _refusal(path, f"{place or 'the file'}: {rule}") from error
    _check_once(path, [entry.name for entry in file.tenants], "the name")
    _check_once(path, [known for entry in file.tenants for known in entry.keys], "the key")
    return Tenants({known: _tenant(entry) for entry in file.tenants for known in entry.keys})


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise _refusal(path, "others can write it, and so let themselves in: `chmod go-w` it")
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise _refusal(path, f"larger than {FILE_BYTES_MAX >> 20} MiB: name the file of tenants")
        return text.decode()
    except OSError as error:
        raise _refusal(path, f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise _refusal(path, f"it is no UTF-8 text ({error.reason} at byte {error.start})") from error


def _check_once(path: Path, values: Sequence[str], what: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise _refusal(path, f"{what} {value} is there twice: keep one")


def _tenant(entry: TenantEntry) -> pb.Tenant:
    quotas: dict[str, Any] = {"tokens_per_minute": entry.tokens_per_minute, "document_bytes": entry.document_bytes}
    return pb.Tenant(name=entry.name, salt=salt_of(entry.name), **quotas)


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{SETTING} = {path}: {why}", field=SETTING)
