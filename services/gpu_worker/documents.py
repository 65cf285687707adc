"""Documents: texts that are kept for prompts, whose KV is read once.

    create --> READING --its prefix is in the tiers--> READY
                  |
                  +--it cannot be read--> FAILED         all --delete, or its time is over--> being erased --> gone

The records live here, and in files; `DocumentKeeper` does what takes time.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from h3kv.core.errors import (
    ContextLengthError,
    DocumentNotFoundError,
    QuotaError,
    RequestError,
    StoreError,
    TierFullError,
)
from h3kv.core.hashing import block_keys, root_key
from h3kv.core.limits import BLOCK_TOKENS
from h3kv.core.reach import Reach, join
from h3kv.core.types import BlockKey, Tier
from h3kv.models.document_prompt import prefix_tokens
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from services.gpu_worker.documents_entry import DocumentLimits, DocumentModel, Entry, Erasure
from services.gpu_worker.documents_files import DocumentFiles
from services.gpu_worker.documents_prompts import OpenPrompts
from services.gpu_worker.documents_record import DocumentRecord, ErasureRecord, Owner, State

ID_BYTES: Final = 16
FOLLOWS_MAX: Final = 64
"""Lists of documents before one that are remembered. With more, all KV of its tenant goes with it, but that of other
documents alone."""

_log = logging.getLogger(__name__)


class Documents:
    """All of one model and node. Thread-safe; satisfies `chats.DocumentTexts`.

    Args:
        files: where they are kept.
        model: that reads them.
        limits: see there.
        now_s: seconds since 1970.
        prompts: that are being answered.
    """

    def __init__(
        self,
        files: DocumentFiles,
        model: DocumentModel,
        *,
        limits: DocumentLimits,
        now_s: Callable[[], int],
        prompts: OpenPrompts,
    ) -> None:
        self.model = model
        self.prompts = prompts
        self._files = files
        self._limits = limits
        self._now_s = now_s
        self._lock = threading.RLock()
        kept = files.load()
        # What was ready is looked for first: its KV may have gone since.
        self._entries = {each.id: Entry(replace(each, state=_unread(each.state))) for each in kept.documents}
        self._erasures = {each.id: Erasure(each) for each in kept.erasures}
        self.changed = threading.Event()
        """Set when there is something to be read, to be held, or to be erased."""

    def create(
        self, owner: Owner, text: str, *, name: str, ttl_s: int | None, is_pinned: bool, check: Callable[[Entry], None]
    ) -> Entry:
        """A new document, kept and to be read.

        Args:
            owner: whose it is.
            text: of it.
            name: what it is called.
            ttl_s: for how long it is kept; None: until it is deleted.
            is_pinned: whether its KV must stay.
            check: refuses what the tiers do not hold, before anything is kept.

        Raises:
            RequestError: the text is empty or too long, or the model has no chat template.
            ContextLengthError: no prompt with it fits the context.
            TierFullError: pinned documents would take too much of the tiers.
            QuotaError: the tenant has as many documents, or as much KV of them, as it may have.
            StoreError: it cannot be kept.
        """
        size = len(text.encode())
        if not text or size > self._limits.text_bytes_max:
            rule = f"must have 1 to {self._limits.text_bytes_max} bytes"
            raise RequestError(f"text has {size} bytes: {rule}; split it, or raise document_text_bytes_max")
        prompt = tuple(prefix_tokens(self.model.tokenizer, [text]))
        if len(prompt) + 1 > self.model.context_tokens:
            raise ContextLengthError(
                f"the document takes {len(prompt)} tokens with its place in a chat, and the context holds "
                f"{self.model.context_tokens} with question and answer: split it, or raise model.max_context",
                needed_tokens=len(prompt) + 1,
                limit_tokens=self.model.context_tokens,
            )
        now_s = self._now_s()
        record = DocumentRecord(
            id=f"doc_{secrets.token_hex(ID_BYTES)}",
            tenant=owner.name,
            salt=owner.salt,
            name=name,
            created_s=now_s,
            expires_s=None if ttl_s is None else now_s + ttl_s,
            is_pinned=is_pinned,
            tokens=len(prompt),
        )
        entry = Entry(record, prompt)
        check(entry)
        with self._lock:
            self._check_quota(owner, record)
            if is_pinned:
                self._check_pins(record)
            self._files.add(record, text)
            self._entries[record.id] = entry
        self.changed.set()
        return entry

    def get(self, tenant: str, document: str) -> Entry:
        """A tenant's document. Raises DocumentNotFoundError, also for another tenant's."""
        with self._lock:
            entry = self._entries.get(document)
            if entry is None or entry.record.tenant != tenant or self._is_over(entry.record):
                raise DocumentNotFoundError(
                    f"there is no document {document[:100]!r}: list the documents, or upload it again",
                    document=document[:100],
                )
            return entry

    def of_tenant(self, tenant: str) -> list[Entry]:
        """All of a tenant, oldest first."""
        with self._lock:
            mine = [each for each in self._entries.values() if each.record.tenant == tenant]
            return [entry for entry in mine if not self._is_over(entry.record)]

    def update(self, tenant: str, document: str, *, ttl_s: int | None, is_pinned: bool | None) -> Entry:
        """Change how long a document is kept, from now on, or whether it is pinned; None: as before.

        Raises:
            DocumentNotFoundError: see `get`.
            TierFullError: pinned documents would take too much of the tiers.
            StoreError: the change cannot be kept.
        """
        with self._lock:
            entry = self.get(tenant, document)
            changed = entry.record
            if ttl_s is not None:
                changed = replace(changed, expires_s=self._now_s() + ttl_s)
            if is_pinned is not None:
                changed = replace(changed, is_pinned=is_pinned)
            if changed.is_pinned and not entry.record.is_pinned:
                self._check_pins(changed)
            self.change(entry, changed)
        self.changed.set()
        return entry

    def change(self, entry: Entry, record: DocumentRecord) -> None:
        """Keep another record of a document, unless it was deleted meanwhile."""
        with self._lock:
            if self._entries.get(record.id) is entry and record != entry.record:
                self._files.change(record)
                entry.record = record

    def next_unread(self) -> Entry | None:
        """The oldest document that is to be read; None: all are."""
        with self._lock:
            unread = (entry for entry in self._entries.values() if entry.record.state is State.READING)
            return next((entry for entry in unread if not self._is_over(entry.record)), None)

    def has(self, entry: Entry) -> bool:
        """Whether a document was not deleted."""
        with self._lock:
            return self._entries.get(entry.record.id) is entry

    def note_ready(self, entry: Entry) -> None:
        """A document was read. Raises StoreError."""
        with self._lock:
            self.change(entry, replace(entry.record, state=State.READY, failure=""))
        entry.done_tokens, entry.prompt = entry.record.tokens, None
        self.changed.set()

    def note_failed(self, entry: Entry, failure: str) -> None:
        """A document cannot be read. Its record says so as far as it can be kept."""
        with self._lock:
            self._remember(entry, replace(entry.record, state=State.FAILED, failure=failure))

    def read_again(self, entry: Entry) -> None:
        """A document's KV is nowhere any more."""
        with self._lock:
            entry.record, entry.done_tokens = replace(entry.record, state=State.READING), 0

    def texts(self, tenant: str, ids: Sequence[str]) -> list[str]:
        """See `chats.DocumentTexts.texts`. Remembers which documents stood before which."""
        with self._lock:
            entries = [self.get(tenant, document) for document in ids]
            for at, entry in enumerate(entries[1:], start=1):
                before, known = tuple(ids[:at]), entry.record.follows
                if before not in known and len(known) <= FOLLOWS_MAX:
                    self._remember(entry, replace(entry.record, follows=(*known, before)))
        return [self._files.text(entry.record.id) for entry in entries]

    def delete(self, tenant: str, document: str) -> Erasure:
        """Forget a document; what is left to be erased.

        Raises:
            DocumentNotFoundError: see `get`.
            StoreError: it cannot be forgotten.
        """
        return self._delete(self.get(tenant, document))

    def over(self) -> list[Entry]:
        """Documents that have been kept as long as they should."""
        with self._lock:
            return [entry for entry in self._entries.values() if self._is_over(entry.record)]

    def forget(self, entry: Entry) -> None:
        """Delete one that is over. Raises StoreError; nothing happens to one that was deleted meanwhile."""
        with contextlib.suppress(DocumentNotFoundError):
            self._delete(entry)

    def entries(self) -> list[Entry]:
        """All documents of all tenants, oldest first."""
        with self._lock:
            return list(self._entries.values())

    def erasures(self) -> list[Erasure]:
        """All that are not over."""
        with self._lock:
            return list(self._erasures.values())

    def end_erasure(self, erasure: Erasure) -> None:
        """Nothing of it is left."""
        with self._lock:
            if erasure.record.id in self._erasures:
                self._files.end_erasure(erasure.record.id)
                del self._erasures[erasure.record.id]

    def prompt(self, entry: Entry) -> tuple[int, ...]:
        """The tokens of a document's prefix."""
        if entry.prompt is None:
            entry.prompt = tuple(prefix_tokens(self.model.tokenizer, [self._files.text(entry.record.id)]))
        return entry.prompt

    def keys(self, entry: Entry) -> tuple[BlockKey, ...]:
        """Keys of the prefix's whole blocks."""
        if entry.keys is None:
            salt = entry.record.salt
            entry.keys = tuple(block_keys(self.prompt(entry), fingerprint=self.model.fingerprint, tenant=salt))
        return entry.keys

    def reach(self, entry: Entry) -> Reach:
        """Where a document's KV may be, alone and behind others: all that is its tenant's where that is not known."""
        record, root = entry.record, root_key(self.model.fingerprint, entry.record.salt)
        everywhere = Reach(frozenset(entry.keys or ()), frozenset({root}))
        if len(record.follows) > FOLLOWS_MAX:
            return everywhere
        try:
            keys = self.keys(entry)
            reaches = [Reach(frozenset(keys), frozenset(keys[-1:] or [root]))]
            reaches += [each for ids in record.follows if (each := self._reach_behind(entry, ids, root)) is not None]
        except StoreError:
            # Its text cannot be read any more.
            return everywhere
        return join(reaches, ())

    def spared(self, record: ErasureRecord) -> list[BlockKey]:
        """Blocks of the tenant's documents that are not deleted."""
        spared: list[BlockKey] = []
        for entry in self.entries():
            if entry.record.salt == record.salt:
                # One whose text is damaged is read by nobody.
                with contextlib.suppress(StoreError):
                    spared += self.keys(entry)
        return spared

    def _remember(self, entry: Entry, record: DocumentRecord) -> None:
        """Change a record, in this process alone where it cannot be kept: calls go on."""
        try:
            self.change(entry, record)
        except StoreError as error:
            entry.record = record
            log_event(_log, "document_not_kept", {spans.DOCUMENT: record.id}, error=error, level=logging.WARNING)

    def _reach_behind(self, entry: Entry, ids: Sequence[str], root: BlockKey) -> Reach | None:
        """Where its KV is in chats that have others before it; None where one of them was deleted, and that with it."""
        with self._lock:
            if not all(document in self._entries for document in ids):
                return None
        texts = [self._files.text(document) for document in ids]
        start = len(prefix_tokens(self.model.tokenizer, texts)) // BLOCK_TOKENS
        prompt = prefix_tokens(self.model.tokenizer, [*texts, self._files.text(entry.record.id)])
        keys = block_keys(prompt, fingerprint=self.model.fingerprint, tenant=entry.record.salt)
        return Reach(frozenset(keys[start:]), frozenset(keys[-1:] or [root]))

    def _delete(self, entry: Entry) -> Erasure:
        record, reach = entry.record, self.reach(entry)
        left = ErasureRecord(
            id=record.id, tenant=record.tenant, salt=record.salt, own=tuple(reach.own), ends=tuple(reach.ends)
        )
        with self._lock:
            if self._entries.get(record.id) is not entry:
                raise DocumentNotFoundError(f"document {record.id} was deleted meanwhile", document=record.id)
            self._files.delete(left)
            del self._entries[record.id]
            # After it was taken off: a prompt that opens from now on does not get it any more.
            readers = self.prompts.reading(reach, record.salt)
            erasure = self._erasures[record.id] = Erasure(left, readers)
        entry.stop()
        self.changed.set()
        return erasure

    def _is_over(self, record: DocumentRecord) -> bool:
        return record.expires_s is not None and record.expires_s <= self._now_s()

    def _check_quota(self, owner: Owner, record: DocumentRecord) -> None:
        mine = self.of_tenant(owner.name)
        if len(mine) >= self._limits.documents_max:
            raise QuotaError(
                f"the tenant has {len(mine)} documents, as many as it may have: delete one, or raise documents_max",
                retry_after_s=None,
            )
        used, needed = (
            sum(tokens) * self.model.token_bytes for tokens in ([e.record.tokens for e in mine], [record.tokens])
        )
        if owner.document_bytes is not None and used + needed > owner.document_bytes:
            raise QuotaError(
                f"the document takes {needed} bytes of KV; the tenant has {used} bytes of documents and may have "
                f"{owner.document_bytes}: delete one, or have document_bytes raised",
                retry_after_s=None,
            )

    def _check_pins(self, record: DocumentRecord) -> None:
        pinned = [
            each.record for each in self._entries.values() if each.record.is_pinned and each.record.id != record.id
        ]
        used, needed = (sum(_blocks(each) for each in records) for records in (pinned, [record]))
        if used + needed > self._limits.pinned_blocks_max:
            block_bytes = BLOCK_TOKENS * self.model.token_bytes
            raise TierFullError(
                f"pinned documents take {used} blocks of {BLOCK_TOKENS} tokens, this one takes {needed}, and "
                f"{self._limits.pinned_blocks_max} are allowed: unpin or delete one, or raise pinned_share_max",
                tier=Tier.HOST,
                needed_bytes=needed * block_bytes,
                free_bytes=max(self._limits.pinned_blocks_max - used, 0) * block_bytes,
            )


def _blocks(record: DocumentRecord) -> int:
    return -(-record.tokens // BLOCK_TOKENS)


def _unread(state: State) -> State:
    return State.READING if state is State.READY else state
