"""What a client says of its layout, checked: sizes that the store divides memory and disk by."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Final

from h3kv.core.errors import ConfigError, RequestError
from h3kv.core.limits import DIRECT_IO_BYTES
from h3kv.rpc.nvme_io_client import WireLayout

FINGERPRINT_BYTES: Final = 32
LAYERS_MAX: Final = 1024
BLOCK_BYTES_MAX: Final = 64 << 20
_ENCODING: Final = re.compile(r"[a-z0-9]{1,8}")


def check_layout(layout: WireLayout, served: WireLayout | None) -> None:
    """Raise RequestError for a layout that cannot be, ConfigError for another one than is served."""
    is_sound = (
        len(layout.fingerprint) == FINGERPRINT_BYTES
        and 1 <= layout.layers <= LAYERS_MAX
        and 0 < layout.block_bytes <= BLOCK_BYTES_MAX
        and layout.block_bytes % DIRECT_IO_BYTES == 0
        and 0 <= layout.index_bytes <= BLOCK_BYTES_MAX
        and layout.index_bytes % DIRECT_IO_BYTES == 0
        and layout.check_bytes >= DIRECT_IO_BYTES
        and layout.check_bytes % DIRECT_IO_BYTES == 0
        and layout.block_bytes % layout.check_bytes == 0
        and layout.element_bytes in {1, 2, 4}
        and _ENCODING.fullmatch(layout.encoding) is not None
    )
    if not is_sound:
        raise RequestError(f"{layout} is no layout: sizes are multiples of 4 KiB, and a fingerprint has 32 bytes")
    if served is None:
        return
    for field in fields(layout):
        wanted, found = getattr(layout, field.name), getattr(served, field.name)
        if wanted != found:
            shown = (wanted.hex(), found.hex()) if isinstance(wanted, bytes) else (wanted, found)
            raise ConfigError(
                f"{field.name} = {shown[0]}: nvme_io serves {shown[1]}; start all processes with one model and "
                "encoding",
                field=field.name,
            )
