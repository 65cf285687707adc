"""A document as this process has it, and what bounds and reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from h3kv.core.client_limits import DOCUMENT_TEXT_BYTES_MAX
from h3kv.core.reach import Reach
from h3kv.core.types import BlockKey
from h3kv.models.tokenizer import Tokenizer
from services.gpu_worker.documents_record import DocumentRecord, ErasureRecord


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Bounds of what is kept."""

    documents_max: int = 1000
    """Of one tenant."""
    text_bytes_max: int = DOCUMENT_TEXT_BYTES_MAX
    """Of one text."""
    pinned_blocks_max: int = 0
    """Of all pinned documents together."""


@dataclass(frozen=True, slots=True)
class DocumentModel:
    """What documents are read by."""

    tokenizer: Tokenizer
    fingerprint: bytes
    context_tokens: int
    token_bytes: int
    """Bytes of KV of one token, over all layers."""


@dataclass(slots=True, eq=False)
class Entry:
    """A document, and what this process knows of it besides."""

    record: DocumentRecord
    kept: DocumentRecord
    """What its file says. Changed by whoever holds `writing`."""
    prompt: tuple[int, ...] | None = None
    """Its prefix, until it was read."""
    done_tokens: int = 0
    stop: Callable[[], None] = lambda: None
    """Ends its reading, while it is being read."""
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while one of its files is written."""
    is_held: bool = False
    """Whether its KV stays."""


@dataclass(slots=True, eq=False)
class Erasure:
    """A deleted document of which something may be left."""

    record: ErasureRecord
    readers: frozenset[int] = field(default_factory=frozenset)
    """Prompts that may have it."""
    is_begun: bool = False
    """Whether it was looked for."""
    is_last: bool = False
    """Whether it was after the last of these prompts had ended."""

    def reach(self, spared: Sequence[BlockKey]) -> Reach:
        """What is erased, beside blocks that stay."""
        return Reach(frozenset(self.record.own), frozenset(self.record.ends), frozenset(spared))
