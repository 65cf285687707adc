"""Where the KV of documents lies: by their texts alone, as far as the prompts of chats begin with them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from h3kv.core.errors import StoreError
from h3kv.core.hashing import block_keys, root_key
from h3kv.core.reach import Reach, join
from h3kv.core.types import BlockKey
from h3kv.models.document_prompt import prefix_tokens
from services.gpu_worker.documents_entry import DocumentModel, Entry
from services.gpu_worker.documents_files import DocumentFiles
from services.gpu_worker.documents_record import DocumentRecord

FOLLOWS_MAX: Final = 64
"""Lists of documents before one that are remembered. With more, all KV of its tenant goes with it, but that of other
documents alone."""

REACH_TOKENS_MAX: Final = 1 << 18
"""Of all these lists and the document behind each: with more, cutting them into tokens would take seconds, and the same
goes."""

LISTS_MAX: Final = 1024
"""Documents that stand together in chats, whose end is remembered: otherwise each chat would cut them again."""


_End = tuple[int, BlockKey | None]
"""How many blocks there are, and the key of the last one."""


def placed(record: DocumentRecord, before: tuple[str, ...], *, is_elsewhere: bool) -> DocumentRecord:
    """What is known of a document once a chat has it behind these others, or where nobody looks for it."""
    if before and before not in record.follows and len(record.follows) <= FOLLOWS_MAX:
        record = replace(record, follows=(*record.follows, before))
    return replace(record, is_elsewhere=True) if is_elsewhere else record


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
        self._lock = threading.Lock()
        self._ends: OrderedDict[tuple[str, ...], _End] = OrderedDict()

    def prompt(self, entry: Entry) -> tuple[int, ...]:
        """The tokens of a document's prefix. Raises StoreError: its text cannot be read."""
        if entry.prompt is None:
            entry.prompt = tuple(prefix_tokens(self._model.tokenizer, [self._files.text(entry.record.id)]))
        return entry.prompt

    def keys(self, prompt: Sequence[int], salt: bytes) -> tuple[BlockKey, ...]:
        """Keys of a prompt's whole blocks."""
        return tuple(block_keys(prompt, fingerprint=self._model.fingerprint, tenant=salt))

    def of_tenant(self, salt: bytes, own: Iterable[BlockKey] = ()) -> Reach:
        """All that a tenant has."""
        return Reach(frozenset(own), frozenset({root_key(self._model.fingerprint, salt)}))

    def alone(self, record: DocumentRecord) -> Reach:
        """Where a document's KV may be, but for where others are before it: there it continues theirs."""
        everywhere = self.of_tenant(record.salt, record.keys)
        if record.is_elsewhere:
            return everywhere
        return Reach(everywhere.own, frozenset(record.keys[-1:]) or everywhere.ends)

    def of(self, entry: Entry) -> Reach:
        """Where a document's KV may be, alone and behind others: all that is its tenant's where that is not known."""
        record = entry.record
        everywhere = self.of_tenant(record.salt, record.keys)
        known = [ids for ids in record.follows if self._tokens(ids) is not None]
        tokens = sum((self._tokens(ids) or 0) + record.tokens for ids in known)
        if record.is_elsewhere or len(record.follows) > FOLLOWS_MAX or tokens > REACH_TOKENS_MAX:
            return everywhere
        try:
            reaches = [reach for ids in known if (reach := self._behind(entry, ids)) is not None]
        except StoreError:
            # Its text cannot be read any more.
            return everywhere
        return join([self.alone(record), *reaches], ())

    def is_begun_by(self, prompt: Sequence[int], entries: Sequence[Entry]) -> bool:
        """Whether a chat's prompt begins with its documents: only then its KV of them is where `of` has it.

        Templates may put tools before them, or what the system says into the last message.

        Args:
            prompt: token numbers.
            entries: of one tenant, in order.

        Raises:
            StoreError: a text cannot be read.
        """
        salt, ends = entries[0].record.salt, [_end_of(entries[0].record.keys)]
        ids = tuple(entry.record.id for entry in entries)
        ends += [self._end_of_all(ids[:count], salt) for count in range(2, len(ids) + 1)]
        found = self.keys(prompt, salt)
        # A key stands for all that is before it.
        return all(_end_of(found[:blocks]) == (blocks, last) for blocks, last in ends)

    def spared(self, entries: Iterable[Entry], salt: bytes) -> list[BlockKey]:
        """Blocks of a tenant's documents among these."""
        return [key for entry in entries if entry.record.salt == salt for key in entry.record.keys]

    def _tokens(self, ids: Sequence[str]) -> int | None:
        """Of documents together; None where one is gone, and what lay behind it with it."""
        tokens = [self._tokens_of(document) for document in ids]
        return None if None in tokens else sum(each for each in tokens if each is not None)

    def _behind(self, entry: Entry, ids: Sequence[str]) -> Reach | None:
        """Where its KV is in chats that have others before it; None as `_tokens`."""
        salt = entry.record.salt
        try:
            start, _ = self._end_of_all(tuple(ids), salt)
            keys = self._keys_of_all((*ids, entry.record.id), salt)
        except StoreError:
            if self._tokens(ids) is None:
                return None
            raise
        return Reach(frozenset(keys[start:]), frozenset(keys[-1:]) or self.of_tenant(salt).ends)

    def _keys_of_all(self, ids: tuple[str, ...], salt: bytes) -> tuple[BlockKey, ...]:
        """Keys of the whole blocks with which chats about several documents begin."""
        texts = [self._files.text(document) for document in ids]
        return self.keys(prefix_tokens(self._model.tokenizer, texts), salt)

    def _end_of_all(self, ids: tuple[str, ...], salt: bytes) -> _End:
        """Where these blocks end."""
        with self._lock:
            if (found := self._ends.get(ids)) is not None:
                self._ends.move_to_end(ids)
                return found
        end = _end_of(self._keys_of_all(ids, salt))
        with self._lock:
            self._ends[ids] = end
            while len(self._ends) > LISTS_MAX:
                self._ends.popitem(last=False)
        return end


def _end_of(keys: tuple[BlockKey, ...]) -> _End:
    return len(keys), keys[-1] if keys else None
