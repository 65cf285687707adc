"""Puts together what keeps documents."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3kv.core.ports import Telemetry
from h3kv.engine.documents import DocumentKv
from h3kv.node import Node
from services.gpu_worker.documents import Documents
from services.gpu_worker.documents_calls import KeptDocuments
from services.gpu_worker.documents_entry import DocumentLimits, DocumentModel
from services.gpu_worker.documents_files import FolderFiles, MemoryFiles
from services.gpu_worker.documents_keeper import DocumentEngine, DocumentKeeper
from services.gpu_worker.documents_prompts import OpenPrompts
from services.gpu_worker.documents_reader import DocumentReader
from services.gpu_worker.loop import EngineLoop

FOLDER_DIGITS: Final = 32
"""Of the fingerprint in the name of a model's folder: documents belong to the model that reads them."""


@dataclass(frozen=True, slots=True)
class DocumentConfig:
    """Where documents are kept, and what bounds them."""

    folder: Path | None = None
    """None: in memory, until the process ends."""
    documents_max: int = DocumentLimits().documents_max
    """Of one tenant."""
    text_bytes_max: int = DocumentLimits().text_bytes_max
    """Of one text."""
    pinned_share_max: float = 0.5
    """Part of all tiers that pinned documents may take together."""


def utc_seconds() -> int:
    """Seconds since 1970. They may go back: then documents are kept longer."""
    return int(dt.datetime.now(dt.UTC).timestamp())


def open_documents(config: DocumentConfig, node: Node, loop: EngineLoop, telemetry: Telemetry) -> KeptDocuments:
    """What an earlier process kept, and what will be.

    Args:
        config: see there.
        node: whose model reads them; its loop does not run yet.
        loop: of the node.
        telemetry: receives how many there are, from any thread.

    Raises:
        StoreError: the folder cannot be made or read.
    """
    model = DocumentModel(node.tokenizer, node.fingerprint, node.config.max_context, node.pool.layout.token_bytes)
    pinned_blocks = int(config.pinned_share_max * node.pool.capacity.all_blocks)
    files = (
        MemoryFiles() if config.folder is None else FolderFiles(config.folder / model.fingerprint.hex()[:FOLDER_DIGITS])
    )
    engine = DocumentEngine(loop, DocumentKv(node.pool))
    documents = Documents(
        files,
        model,
        limits=DocumentLimits(config.documents_max, config.text_bytes_max, pinned_blocks),
        now_s=utc_seconds,
        prompts=OpenPrompts(model.fingerprint),
        mark=engine.mark,
    )
    # Before anything leaves a tier: nobody else touches the node yet.
    engine.kv.mark(documents.marks())
    reader = DocumentReader(documents, engine)
    return KeptDocuments(documents, reader, DocumentKeeper(documents, engine, telemetry, on_unread=reader.note))
