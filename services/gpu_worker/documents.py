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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from h3kv.core.errors import DocumentNotFoundError, StoreError
from h3kv.core.reach import Reach
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from services.gpu_worker.documents_entry import DocumentLimits, DocumentModel, Entry, Erasure
from services.gpu_worker.documents_files import DocumentFiles
from services.gpu_worker.documents_prompts import OpenPrompts
from services.gpu_worker.documents_reach import DocumentReach, placed
from services.gpu_worker.documents_record import DocumentRecord, Owner, State, erasure_of, taken_up
from services.gpu_worker.documents_room import check_pins, check_quota, check_text
from services.gpu_worker.documents_sizes import DocumentSizes

ID_BYTES: Final = 16

_log = logging.getLogger(__name__)


class Documents:
    """All of one model and node. Thread-safe; satisfies `chats.DocumentTexts`.

    Args:
        files: where they are kept.
        model: that reads them.
        limits: see there.
        now_s: seconds since 1970.
        prompts: that are being answered.
        mark: has zeros over what documents reach wherever it leaves; waits for nothing.
    """

    def __init__(
        self,
        files: DocumentFiles,
        model: DocumentModel,
        *,
        limits: DocumentLimits,
        now_s: Callable[[], int],
        prompts: OpenPrompts,
        mark: Callable[[Mapping[str, Reach]], None],
    ) -> None:
        self.model = model
        self.prompts = prompts
        self._files = files
        self._limits = limits
        self._now_s = now_s
        self._mark = mark
        self._lock = threading.RLock()
        self._read_last = ""
        kept = files.load()
        self._entries = {each.id: Entry(taken_up(each), each) for each in kept.documents}
        # Room that is promised to documents whose files are being written.
        self._coming: list[Entry] = []
        self._sizes = DocumentSizes(model)
        self.reaches = DocumentReach(model, files, self._tokens_of)
        lost = [erasure_of(each, self.reaches.of_tenant(each.salt, each.keys)) for each in kept.unknown]
        for each in lost:
            # Where it cannot be kept, the next process comes to the same.
            with contextlib.suppress(StoreError):
                files.delete(each)
        self._erasures = {each.id: Erasure(each) for each in (*kept.erasures, *lost)}
        self.changed = threading.Event()
        """Set when there is something to be read, to be held, or to be erased."""

    def create(
        self,
        owner: Owner,
        text: str,
        *,
        name: str,
        ttl_s: int | None,
        is_pinned: bool,
        check: Callable[[Entry], None],
        charge: Callable[[Entry], Callable[[], None]] = lambda _: lambda: None,
    ) -> Entry:
        """A new document, kept and to be read.

        Args:
            owner: whose it is.
            text: of it.
            name: what it is called.
            ttl_s: for how long it is kept; None: until it is deleted.
            is_pinned: whether its KV must stay.
            check: refuses what the tiers do not hold, before anything is kept.
            charge: counts its tokens, after all else was checked; gives what gives them back.

        Raises:
            RequestError: the text is empty or too long, or the model has no chat template.
            ContextLengthError: no prompt with it fits the context.
            TierFullError: the tiers do not hold it.
            QuotaError: the tenant has as many documents, or as much KV of them, or as many tokens, as it may have; or
                there is no room for more pins.
            PeerBusyError: many others are uploaded before it.
            StoreError: it cannot be kept.
        """
        check_text(text, self._limits)
        least = self._sizes.check(text)
        now_s = self._now_s()
        record = DocumentRecord(
            id=f"doc_{secrets.token_hex(ID_BYTES)}",
            tenant=owner.name,
            salt=owner.salt,
            name=name,
            created_s=now_s,
            expires_s=None if ttl_s is None else now_s + ttl_s,
            is_pinned=is_pinned,
            tokens=least,
        )
        self._check_room(owner, record)
        prompt = self._sizes.prompt(text)
        self._sizes.check_context(len(prompt))
        record = replace(record, tokens=len(prompt), keys=self.reaches.keys(prompt, owner.salt))
        entry = Entry(record, record, prompt)
        check(entry)
        self._check_room(owner, record)
        give_back = charge(entry)
        try:
            self._add(owner, entry, text)
        except BaseException:
            give_back()
            raise
        self.changed.set()
        return entry

    def _add(self, owner: Owner, entry: Entry, text: str) -> None:
        with self._lock:
            # Others may have come meanwhile.
            self._check_room(owner, entry.record)
            self._coming.append(entry)
        try:
            self._files.add(entry.record, text)
        except BaseException:
            with self._lock:
                self._coming.remove(entry)
            raise
        with self._lock:
            self._coming.remove(entry)
            self._entries[entry.record.id] = entry
            self._mark({entry.record.id: self.reaches.alone(entry.record)})

    def marks(self) -> dict[str, Reach]:
        """What has to be marked before anything is computed: of documents, and of those that are being erased."""
        with self._lock:
            marks = {document: self.reaches.alone(entry.record) for document, entry in self._entries.items()}
            return marks | {document: erasure.reach(()) for document, erasure in self._erasures.items()}

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
            QuotaError: there is no room for more pins.
            StoreError: the change cannot be kept.
        """
        with self._lock:
            entry = self.get(tenant, document)
            before = changed = entry.record
            if ttl_s is not None:
                changed = replace(changed, expires_s=self._now_s() + ttl_s)
            if is_pinned is not None:
                changed = replace(changed, is_pinned=is_pinned)
            if changed.is_pinned and not entry.record.is_pinned:
                self._check_pins(changed)
            entry.record = changed
        try:
            self._keep(entry)
        except StoreError:
            with self._lock:
                entry.record = replace(entry.record, expires_s=before.expires_s, is_pinned=before.is_pinned)
            raise
        self.changed.set()
        return entry

    def next_unread(self) -> Entry | None:
        """The oldest document that is to be read, of one tenant after the other; None: all are."""
        with self._lock:
            oldest: dict[str, Entry] = {}
            for entry in self._entries.values():
                if entry.record.state is State.READING and not self._is_over(entry.record):
                    oldest.setdefault(entry.record.tenant, entry)
            if not oldest:
                return None
            # Whoever comes after the last one in the circle of names.
            self._read_last = min(oldest, key=lambda tenant: (tenant <= self._read_last, tenant))
            return oldest[self._read_last]

    def has(self, entry: Entry) -> bool:
        """Whether a document was not deleted."""
        with self._lock:
            return self._entries.get(entry.record.id) is entry

    def note_ready(self, entry: Entry) -> None:
        """A document was read. Raises StoreError."""
        with self._lock:
            entry.done_tokens, entry.prompt = entry.record.tokens, None
            entry.record = replace(entry.record, state=State.READY, failure="")
        self._keep(entry)
        self.changed.set()

    def note_failed(self, entry: Entry, failure: str) -> None:
        """A document cannot be read. Its record says so as far as it can be kept."""
        with self._lock:
            entry.record = replace(entry.record, state=State.FAILED, failure=failure)
        self._try_to_keep(entry)

    def read_again(self, entry: Entry) -> None:
        """A document's KV is nowhere any more."""
        with self._lock:
            entry.record, entry.done_tokens = replace(entry.record, state=State.READING), 0

    def texts(self, tenant: str, ids: Sequence[str]) -> list[str]:
        """See `chats.DocumentTexts.texts`."""
        with self._reading(tenant, ids) as entries:
            self._sizes.check_together([entry.record.tokens for entry in entries])
            return [self._files.text(entry.record.id) for entry in entries]

    def note_prompt(self, tenant: str, ids: Sequence[str], prompt: Sequence[int]) -> None:
        """See `chats.DocumentTexts.note_prompt`. Remembers which documents stood before which."""
        with self._reading(tenant, ids) as entries:
            is_begun = self.reaches.is_begun_by(prompt, entries)
        with self._lock:
            entries = [self.get(tenant, document) for document in ids]
            for at, entry in enumerate(entries):
                entry.record = placed(before := entry.record, tuple(ids[:at]), is_elsewhere=not is_begun)
                if entry.record.is_elsewhere and not before.is_elsewhere:
                    self._mark({entry.record.id: self.reaches.alone(entry.record)})
        # Before anything is computed, also by another chat that found it remembered already.
        for entry in entries:
            if entry.record.places != entry.kept.places:
                self._try_to_keep(entry)

    @contextlib.contextmanager
    def _reading(self, tenant: str, ids: Sequence[str]) -> Iterator[list[Entry]]:
        """Documents whose texts are read: one that is deleted meanwhile has none any more, and is not found."""
        with self._lock:
            entries = [self.get(tenant, document) for document in ids]
        try:
            yield entries
        except StoreError:
            for document in ids:
                self.get(tenant, document)
            raise

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
            if self._erasures.get(erasure.record.id) is not erasure:
                return
        self._files.end_erasure(erasure.record.id)
        with self._lock:
            self._erasures.pop(erasure.record.id, None)

    def _keep(self, entry: Entry) -> None:
        """Have the file say what the record says by now, unless the document was deleted. Raises StoreError."""
        with entry.writing:
            with self._lock:
                record = entry.record
                if record == entry.kept or not self.has(entry):
                    return
            self._files.change(record)
            entry.kept = record

    def _try_to_keep(self, entry: Entry) -> None:
        """The same; where it cannot be kept, this process alone knows of it: calls go on."""
        try:
            self._keep(entry)
        except StoreError as error:
            named = {spans.DOCUMENT: entry.record.id}
            log_event(_log, "document_not_kept", named, error=error, level=logging.WARNING)

    def _tokens_of(self, document: str) -> int | None:
        with self._lock:
            entry = self._entries.get(document)
            return None if entry is None else entry.record.tokens

    def _delete(self, entry: Entry) -> Erasure:
        while True:
            record, reach = entry.record, self.reaches.of(entry)
            left = erasure_of(record, reach)
            with entry.writing:
                order = self._take_off(entry, record)
                if order is None:
                    # Meanwhile a chat had it behind others.
                    continue
                try:
                    self._files.delete(left)
                except StoreError:
                    self._put_back(entry, order)
                    raise
                # After it was taken off: a prompt that opens from now on does not get it any more.
                erasure = Erasure(left, self.prompts.reading(reach, record.salt))
                with self._lock:
                    self._erasures[record.id] = erasure
            entry.stop()
            self.changed.set()
            return erasure

    def _take_off(self, entry: Entry, record: DocumentRecord) -> list[str] | None:
        """Have nobody find a document any more; the order of all. None where its KV lies elsewhere than it was known.

        Raises:
            DocumentNotFoundError: it was deleted meanwhile.
        """
        with self._lock:
            if not self.has(entry):
                raise DocumentNotFoundError(f"document {record.id} was deleted meanwhile", document=record.id)
            if entry.record.places != record.places:
                return None
            order = list(self._entries)
            del self._entries[record.id]
            return order

    def _put_back(self, entry: Entry, order: list[str]) -> None:
        with self._lock:
            entries = {**self._entries, entry.record.id: entry}
            self._entries = {each: entries[each] for each in dict.fromkeys([*order, *entries]) if each in entries}

    def _is_over(self, record: DocumentRecord) -> bool:
        return record.expires_s is not None and record.expires_s <= self._now_s()

    def _check_room(self, owner: Owner, record: DocumentRecord) -> None:
        with self._lock:
            mine = [*self.of_tenant(owner.name), *(each for each in self._coming if each.record.tenant == owner.name)]
            check_quota(
                owner,
                record.tokens,
                mine=[each.record for each in mine],
                limits=self._limits,
                token_bytes=self.model.token_bytes,
            )
            self._check_pins(record)

    def _check_pins(self, record: DocumentRecord) -> None:
        if record.is_pinned:
            others = [each.record for each in (*self._entries.values(), *self._coming) if each.record.id != record.id]
            check_pins(record, pinned=[each for each in others if each.is_pinned], limits=self._limits)
