"""Where the KV of documents lies: by their texts alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from h3kv.core.errors import StoreError
from h3kv.core.hashing import block_keys, root_key
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.reach import Reach, join
from h3kv.core.types import BlockKey
from h3kv.models.document_prompt import prefix_tokens
from services.gpu_worker.documents_entry import DocumentModel, Entry
from services.gpu_worker.documents_files import DocumentFiles

FOLLOWS_MAX: Final = 64
"""Lists of documents before one that are remembered. With more, all KV of its tenant goes with it, but that of other
documents alone."""

REACH_TOKENS_MAX: Final = 1 << 18
"""Of all these lists and the document behind each: with more, cutting them into tokens would take seconds, and the same
goes."""


class DocumentReach:
    """Thread-safe.

    Args:
        model: that reads them.
        files: with their texts.
        tokens_of: a document's tokens; None: it is not there any more.
    """

    def __init__(self, model: DocumentModel, files: DocumentFiles, tokens_of: Callable[[str], int | None]) -> None:
        self._model = model
        self._files = files
        self._tokens_of = tokens_of

    def prompt(self, entry: Entry) -> tuple[int, ...]:
        """The tokens of a document's prefix. Raises StoreError: its text cannot be read."""
        if entry.prompt is None:
            entry.prompt = tuple(prefix_tokens(self._model.tokenizer, [self._files.text(entry.record.id)]))
        return entry.prompt

    def keys(self, entry: Entry) -> tuple[BlockKey, ...]:
        """Keys of the prefix's whole blocks. Raises StoreError: its text cannot be read."""
        if entry.keys is None:
            entry.keys = tuple(self._keys(self.prompt(entry), entry.record.salt))
        return entry.keys

    def of_tenant(self, salt: bytes, own: Iterable[BlockKey] = ()) -> Reach:
        """All that a tenant has."""
        return Reach(frozenset(own), frozenset({root_key(self._model.fingerprint, salt)}))

    def of(self, entry: Entry) -> Reach:
        """Where a document's KV may be, alone and behind others: all that is its tenant's where that is not known."""
        record = entry.record
        everywhere = self.of_tenant(record.salt, entry.keys or ())
        known = [ids for ids in record.follows if self._tokens(ids) is not None]
        tokens = sum((self._tokens(ids) or 0) + record.tokens for ids in known)
        if len(record.follows) > FOLLOWS_MAX or tokens > REACH_TOKENS_MAX:
            return everywhere
        try:
            keys = self.keys(entry)
            reaches = [Reach(frozenset(keys), frozenset(keys[-1:]) or everywhere.ends)]
            reaches += [reach for ids in known if (reach := self._behind(entry, ids)) is not None]
        except StoreError:
            # Its text cannot be read any more.
            return everywhere
        return join(reaches, ())

    def spared(self, entries: Iterable[Entry], salt: bytes) -> list[BlockKey]:
        """Blocks of a tenant's documents among these."""
        spared: list[BlockKey] = []
        for entry in entries:
            if entry.record.salt == salt:
                # One whose text is damaged is read by nobody.
                with contextlib.suppress(StoreError):
                    spared += self.keys(entry)
        return spared

    def _tokens(self, ids: Sequence[str]) -> int | None:
        """Of documents together; None where one is gone, and what lay behind it with it."""
        tokens = [self._tokens_of(document) for document in ids]
        return None if None in tokens else sum(each for each in tokens if each is not None)

    def _behind(self, entry: Entry, ids: Sequence[str]) -> Reach | None:
        """Where its KV is in chats that have others before it; None as `_tokens`."""
        salt = entry.record.salt
        own = self._files.text(entry.record.id)
        try:
            texts = [self._files.text(document) for document in ids]
        except StoreError:
            if self._tokens(ids) is None:
                return None
            raise
        start = len(prefix_tokens(self._model.tokenizer, texts)) // BLOCK_TOKENS
        keys = self._keys(prefix_tokens(self._model.tokenizer, [*texts, own]), salt)
        return Reach(frozenset(keys[start:]), frozenset(keys[-1:]) or self.of_tenant(salt).ends)

    def _keys(self, prompt: Sequence[int], salt: bytes) -> list[BlockKey]:
        return block_keys(prompt, fingerprint=self._model.fingerprint, tenant=salt)
