"""The file of tenants: who may ask a node for answers, and for how many.

tenants:
  - name: research
    keys: ["sha256:..."]               # `h3 key` makes them
    tokens_per_minute: 100000          # prompt and answer tokens; left out: any number
    document_bytes: 20GiB              # KV of its documents; left out: any number
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import Field, ValidationError

from h3kv.config import Count, Section, Size
from h3kv.core.client_limits import TENANT_NAME
from h3kv.core.errors import ConfigError

SETTING: Final = "tenants_file"
FILE_BYTES_MAX: Final = 4 << 20
"""Ten thousand keys take less than one."""

KeyHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class TenantEntry(Section):
    """One tenant of the file."""

    name: Annotated[str, Field(pattern=rf"^{TENANT_NAME}$")]
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


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """See yaml."""
        names = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                problem = f"'{name}' is there twice: write one list of all tenants"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def read_tenant_file(path: Path) -> list[TenantEntry]:
    """The tenants in a file.

    Raises:
        ConfigError: others can write the file, it cannot be read, or what it says breaks a rule.
    """
    try:
        file = TenantFile.model_validate(yaml.load(_read_text(path), _OnceLoader))  # noqa: S506  (a safe one)
    except yaml.YAMLError as error:
        raise _refusal(path, f"no valid YAML ({' '.join(str(error).split())[:200]})") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        rule = problem["msg"].removeprefix("Value error, ")
        raise _refusal(path, f"{place or 'the file'}: {rule}") from error
    _check_once(path, [entry.name for entry in file.tenants], "the name")
    _check_once(path, [known for entry in file.tenants for known in entry.keys], "the key")
    return file.tenants


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
    value, times = Counter(values).most_common(1)[0]
    if times > 1:
        raise _refusal(path, f"{what} {value} is there twice: keep one")


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{SETTING} = {path}: {why}", field=SETTING)
