"""`h3 key`: a new API key, shown once, and the lines that let it in."""

from __future__ import annotations

import re
import secrets
from typing import Final

import typer
import yaml

from h3kv.core.api_keys import KEY_PREFIX, KEY_RANDOM_BYTES, hash_key
from h3kv.core.client_limits import TENANT_NAME
from h3kv.core.errors import ConfigError

_NAME: Final = re.compile(TENANT_NAME)


def make_key(tenant: str) -> None:
    """Print a new key, and the entry of the gateway's file of tenants that has its hash.

    Raises:
        ConfigError: no tenant can be called so.
    """
    if not _NAME.fullmatch(tenant):
        rule = "a name is 1 to 64 letters, digits, '_', '.' and '-', and begins with a letter or digit"
        raise ConfigError(f"--tenant {tenant[:100]}: {rule}", field="tenant")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_RANDOM_BYTES)
    entry = yaml.safe_dump({"tenants": [{"name": tenant, "keys": [hash_key(key)]}]}, sort_keys=False)
    typer.echo("# The key, which is kept nowhere: give it to the tenant.")
    typer.echo(f"# {key}")
    typer.echo("# For the file of tenants, which has one list of all of them; then start the gateway again.")
    typer.echo(entry, nl=False)
