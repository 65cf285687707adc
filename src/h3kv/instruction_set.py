"""Which instructions the native core uses in this process."""

from __future__ import annotations

from h3kv import _native
from h3kv.core.errors import ConfigError


def select_isa(wanted: str, *, setting: str, field: str) -> str:
    """Use an instruction set from now on, and give back which one that is.

    Args:
        wanted: one of `_native.isa_list()`, or `auto`: what is used already.
        setting: what messages call the setting that wants it.
        field: of the error.

    Raises:
        ConfigError: this processor lacks it.
    """
    if wanted != "auto":
        if wanted not in _native.isa_list():
            rule = f"this processor has {', '.join(_native.isa_list())}; choose one of them, or auto"
            raise ConfigError(f"{setting} = {wanted!r}: {rule}", field=field)
        _native.isa_select(wanted)
    return _native.isa_current()
