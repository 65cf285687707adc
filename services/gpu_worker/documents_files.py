"""Where documents are kept: files of one folder, or memory alone.

    doc_....json          record, replaced as a whole
    doc_....text          the text, zlib; written once
    doc_....erasing       what is left to be erased of a deleted one
    doc_....damaged       a record that could not be read, set aside

A document is there when its record is; a text without one is a document whose upload was cut off. It is deleted when
the `erasing` is there, whatever that holds. Zeros lie over a file before it goes: an `erasing` of zeros was over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from h3kv.core.errors import StoreError
from h3kv.telemetry import spans
from h3kv.telemetry.event_log import log_event
from services.gpu_worker.documents_record import DocumentRecord, ErasureRecord, unpack_document, unpack_erasure

RECORD: Final = ".json"
TEXT: Final = ".text"
ERASING: Final = ".erasing"
DAMAGED: Final = ".damaged"
NEW: Final = ".new"
"""Behind the name of a file that is not whole yet."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Kept:
    """What an earlier process left."""

    documents: list[DocumentRecord] = field(default_factory=list)
    erasures: list[ErasureRecord] = field(default_factory=list)
    unknown: list[DocumentRecord] = field(default_factory=list)
    """Deleted ones of which nobody knows any more what is left: all of their tenant is to be erased."""


class DocumentFiles(Protocol):
    """Keeps documents. Each call has happened when it returns; StoreError: it has not. Calls about different documents
    may come at once.
    """

    def load(self) -> Kept:
        """What is there, oldest first. Called once, before anything else."""
        ...

    def add(self, record: DocumentRecord, text: str) -> None:
        """Keep a new document."""
        ...

    def change(self, record: DocumentRecord) -> None:
        """Keep another record of a document."""
        ...

    def text(self, document: str) -> str:
        """A document's text."""
        ...

    def delete(self, erasure: ErasureRecord) -> None:
        """Keep what is left to be erased of a document, which is deleted then, and forget its text.

        What cannot be forgotten now is with `end_erasure`.
        """
        ...

    def end_erasure(self, document: str) -> None:
        """Nothing else is left to be erased."""
        ...


class MemoryFiles:
    """Satisfies `DocumentFiles`; they end with the process, as does the KV of a node without a cold store."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}

    def load(self) -> Kept:
        """See `DocumentFiles.load`."""
        return Kept()

    def add(self, record: DocumentRecord, text: str) -> None:
        """See `DocumentFiles.add`."""
        self._texts[record.id] = zlib.compress(text.encode(), level=1)

    def change(self, record: DocumentRecord) -> None:
        """See `DocumentFiles.change`."""

    def text(self, document: str) -> str:
        """See `DocumentFiles.text`."""
        packed = self._texts.get(document)
        if packed is None:
            raise StoreError(f"the text of {document} is gone: upload the document again", path="memory")
        return zlib.decompress(packed).decode()

    def delete(self, erasure: ErasureRecord) -> None:
        """See `DocumentFiles.delete`."""
        self._texts.pop(erasure.id, None)

    def end_erasure(self, document: str) -> None:
        """See `DocumentFiles.end_erasure`."""


class FolderFiles:
    """Satisfies `DocumentFiles`.

    Args:
        folder: made with the first document, for its owner alone; nobody else writes into it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> Kept:
        """See `DocumentFiles.load`. A record that cannot be read is set aside, and everything else served."""
        kept = Kept()
        with self._mapped("cannot read"):
            if not self._folder.exists():
                return kept
            names = sorted(path.name for path in self._folder.iterdir() if path.is_file())
            gone = {name.removesuffix(ERASING) for name in names if name.endswith(ERASING)}
            for document in sorted(gone):
                self._load_erasure(document, kept)
            # Their records tell whose they were until what is left of them is written again.
            gone -= {record.id for record in kept.unknown}
            for name in names:
                if name.endswith(NEW) or (name.removesuffix(RECORD).removesuffix(TEXT) in gone):
                    self._destroy(name)
                elif name.endswith(RECORD) and name.removesuffix(RECORD) + ERASING not in names:
                    self._unpack(name, kept)
            there = {record.id for record in (*kept.documents, *kept.unknown)} | {
                path.name.removesuffix(DAMAGED) for path in self._folder.glob(f"*{DAMAGED}")
            }
            for name in names:
                if name.endswith(TEXT) and name.removesuffix(TEXT) not in there:
                    self._destroy(name)
        kept.documents.sort(key=lambda record: (record.created_s, record.id))
        return kept

    def add(self, record: DocumentRecord, text: str) -> None:
        """See `DocumentFiles.add`."""
        with self._mapped("cannot write"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._write(record.id + TEXT, zlib.compress(text.encode(), level=1))
                self._write(record.id + RECORD, record.pack())
            except OSError:
                self._undo(record.id + TEXT)
                raise

    def change(self, record: DocumentRecord) -> None:
        """See `DocumentFiles.change`."""
        with self._mapped("cannot write"):
            self._write(record.id + RECORD, record.pack())

    def text(self, document: str) -> str:
        """See `DocumentFiles.text`."""
        with self._mapped("cannot read"):
            packed = (self._folder / (document + TEXT)).read_bytes()
        try:
            return zlib.decompress(packed).decode()
        except (zlib.error, UnicodeDecodeError) as error:
            message = f"the text of {document} is damaged: delete the document and upload it again"
            raise StoreError(message, path=str(self._folder)) from error

    def delete(self, erasure: ErasureRecord) -> None:
        """See `DocumentFiles.delete`."""
        with self._mapped("cannot write"):
            self._write(erasure.id + ERASING, erasure.pack())
        try:
            self._forget(erasure.id)
        except OSError as error:
            named = {spans.DOCUMENT: erasure.id, spans.REASON: str(error)}
            log_event(_log, "document_files_left", named, level=logging.WARNING)

    def end_erasure(self, document: str) -> None:
        """See `DocumentFiles.end_erasure`."""
        with self._mapped("cannot write"):
            self._forget(document)
            self._destroy(document + ERASING)

    def _forget(self, document: str) -> None:
        self._destroy(document + RECORD)
        self._destroy(document + TEXT)

    def _load_erasure(self, document: str, kept: Kept) -> None:
        path = self._folder / (document + ERASING)
        data = path.read_bytes()
        try:
            kept.erasures.append(unpack_erasure(data))
        except ValueError as error:
            if data and not any(data):
                self._destroy(path.name)
                return
            with contextlib.suppress(ValueError, FileNotFoundError):
                kept.unknown.append(unpack_document((self._folder / (document + RECORD)).read_bytes()))
                return
            self._set_aside(path, error)

    def _unpack(self, name: str, kept: Kept) -> None:
        path = self._folder / name
        try:
            kept.documents.append(unpack_document(path.read_bytes()))
        except ValueError as error:
            self._set_aside(path, error)

    def _set_aside(self, path: Path, error: ValueError) -> None:
        aside = path.with_name(f"{path.name.rpartition('.')[0]}{DAMAGED}")
        path.replace(aside)
        named = {spans.ADDRESS: str(aside), spans.REASON: f"{type(error).__name__}: {error}"[:200]}
        log_event(_log, "document_record_damaged", named, level=logging.ERROR)

    def _write(self, name: str, data: bytes) -> None:
        """Put a whole file in place of what is there, on the disk when this returns; OSError: what was there stays."""
        new = self._folder / f"{name}{NEW}"
        self._destroy(new.name)
        try:
            file = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "wb") as written:
                written.write(data)
                written.flush()
                os.fsync(file)
            new.replace(self._folder / name)
        except OSError:
            self._undo(new.name)
            raise
        try:
            self._sync_folder()
        except OSError as error:
            # It stands from now on. Only where the system itself stops now, the disk may have what was before.
            named = {spans.ADDRESS: str(self._folder / name), spans.REASON: str(error)}
            log_event(_log, "document_folder_not_flushed", named, level=logging.ERROR)

    def _undo(self, name: str) -> None:
        """Destroy what was written in vain. What cannot be destroyed now is when the next process loads."""
        try:
            self._destroy(name)
        except OSError as error:
            named = {spans.ADDRESS: str(self._folder / name), spans.REASON: str(error)}
            log_event(_log, "document_files_left", named, level=logging.WARNING)

    def _destroy(self, name: str) -> None:
        """Zeros over a file, and then it goes. Nothing where it is not there."""
        path = self._folder / name
        with contextlib.suppress(FileNotFoundError):
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
            self._sync_folder()

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = (
                f"{what} documents in {self._folder}: {error.strerror}; mend it, or set documents to another folder"
            )
            raise StoreError(message, path=str(self._folder)) from error
