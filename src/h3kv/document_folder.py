"""Where documents lie, when nobody says where: beside the cold store, so that both last equally long."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FOLDER: Final = "documents"


def beside_store(store: Path | None) -> Path | None:
    """The folder of documents of a cold store.

    Args:
        store: folder, file or block device of the cold store; a path that is not there becomes a file.

    Returns:
        None where there is no store, or beside a device, where no files belong.
    """
    if store is None or store.is_block_device():
        return None
    return store / FOLDER if store.is_dir() else store.with_name(f"{store.name}.{FOLDER}")
