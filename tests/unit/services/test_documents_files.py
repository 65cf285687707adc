"""Files of documents: whole or not there, for their owner alone, and gone with their bytes."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from h3kv.core.errors import StoreError
from h3kv.core.types import BlockKey
from services.gpu_worker.documents_files import DocumentFiles, FolderFiles, MemoryFiles
from services.gpu_worker.documents_record import (
    DocumentRecord,
    ErasureRecord,
    State,
    unpack_document,
    unpack_erasure,
)

RECORD = DocumentRecord(
    id="doc_1",
    tenant="mine",
    salt=b"\x00\xff",
    name="Über",
    created_s=5,
    expires_s=None,
    is_pinned=True,
    tokens=100,
    keys=(BlockKey(bytes(32)), BlockKey(bytes(range(32)))),
    follows=(("doc_0",), ("doc_0", "doc_2")),
)
ERASURE = ErasureRecord(
    id="doc_1", tenant="mine", salt=b"s", own=(BlockKey(bytes(32)), BlockKey(bytes([1] * 32))), ends=()
)
TEXT = "Bees make honey. " * 500


def test_records_are_unpacked_as_they_were_packed() -> None:
    for record in (RECORD, replace(RECORD, expires_s=7, state=State.FAILED, failure="no room", follows=())):
        assert unpack_document(record.pack()) == record
    assert unpack_erasure(ERASURE.pack()) == ERASURE


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"tokens": "100"},
        {"is_pinned": 1},
        {"tokens": True},
        {"more": 1},
        {"salt": "zz"},
        {"state": "asleep"},
        {"keys": "00ff"},
        {"expires_s": 1.5},
    ],
)
def test_record_that_is_none_of_ours_is_refused(change: dict[str, object]) -> None:
    fields = json.loads(RECORD.pack()) | change
    with pytest.raises(ValueError, match=r"."):
        unpack_document(json.dumps(fields).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b'{"version": 1}', RECORD.pack()[:-3]])
def test_half_a_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack_document(data)
    with pytest.raises(ValueError, match=r"."):
        unpack_erasure(data)


def test_documents_are_found_again_oldest_first_by_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "documents"
    files = FolderFiles(folder)
    older = replace(RECORD, id="doc_9", created_s=1)
    files.add(RECORD, TEXT)
    files.add(older, "Short.")
    files.change(changed := replace(RECORD, name="other"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    again = FolderFiles(folder)
    kept = again.load()
    assert kept.documents == [older, changed]
    assert kept.erasures == []
    assert again.text("doc_1") == TEXT
    assert again.text("doc_9") == "Short."


def test_deleted_document_is_an_erasure_until_that_is_over(tmp_path: Path) -> None:
    files = FolderFiles(tmp_path)
    files.add(RECORD, TEXT)
    files.delete(ERASURE)
    with pytest.raises(StoreError, match="cannot read"):
        files.text("doc_1")
    again = FolderFiles(tmp_path)
    assert again.load().erasures == [ERASURE]
    again.end_erasure("doc_1")
    again.end_erasure("doc_1")
    assert list(tmp_path.iterdir()) == []


def test_zeros_lie_over_a_text_before_its_file_goes(tmp_path: Path) -> None:
    files = FolderFiles(tmp_path)
    files.add(RECORD, TEXT)
    second_name = tmp_path / "kept"
    second_name.hardlink_to(tmp_path / "doc_1.text")
    files.delete(ERASURE)
    assert not any(second_name.read_bytes())


def test_every_place_where_a_process_may_end_is_tidied_up(tmp_path: Path) -> None:
    files = FolderFiles(tmp_path)
    files.add(RECORD, TEXT)
    files.add(replace(RECORD, id="doc_2"), TEXT)
    record, text = (tmp_path / f"doc_1{end}" for end in (".json", ".text"))
    packed, packed_text = record.read_bytes(), text.read_bytes()
    files.delete(ERASURE)
    # It ended before record and text had gone; another one in the middle of an upload, and of a change.
    record.write_bytes(packed)
    text.write_bytes(packed_text)
    (tmp_path / "doc_3.text").write_bytes(packed_text)
    (tmp_path / "doc_2.json.new").write_bytes(packed[:10])
    kept = FolderFiles(tmp_path).load()
    assert [each.id for each in kept.documents] == ["doc_2"]
    assert kept.erasures == [ERASURE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doc_1.erasing", "doc_2.json", "doc_2.text"]


def test_damaged_record_is_set_aside_and_all_else_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FolderFiles(tmp_path)
    files.add(RECORD, TEXT)
    files.add(replace(RECORD, id="doc_2"), TEXT)
    (tmp_path / "doc_1.json").write_bytes(b"{")
    (tmp_path / "doc_5.erasing").write_bytes(b"{")
    (tmp_path / "doc_6.erasing").write_bytes(bytes(100))
    again = FolderFiles(tmp_path)
    assert [each.id for each in again.load().documents] == ["doc_2"]
    assert sum("document_record_damaged" in record.getMessage() for record in caplog.records) == 2
    assert (tmp_path / "doc_1.damaged").read_bytes() == b"{"
    assert not list(tmp_path.glob("doc_6*")), "it was over"
    assert (tmp_path / "doc_1.text").exists(), "people may want it"
    assert [each.id for each in FolderFiles(tmp_path).load().documents] == ["doc_2"]
    assert (tmp_path / "doc_1.text").exists()


def test_document_is_gone_whatever_its_erasure_holds(tmp_path: Path) -> None:
    files = FolderFiles(tmp_path)
    files.add(RECORD, TEXT)
    (tmp_path / "doc_1.erasing").write_bytes(ERASURE.pack()[:-5])
    for _ in range(2):
        kept = FolderFiles(tmp_path).load()
        assert (kept.documents, kept.erasures, kept.unknown) == ([], [], [RECORD])
    files.delete(ERASURE)
    kept = FolderFiles(tmp_path).load()
    assert (kept.documents, kept.erasures, kept.unknown) == ([], [ERASURE], [])


def test_what_cannot_go_now_goes_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FolderFiles(tmp_path)
    files.add(RECORD, TEXT)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", lambda path, **_: None if path.suffix == ".new" else refuse())
        files.delete(ERASURE)
        with pytest.raises(StoreError):
            files.end_erasure("doc_1")
    assert FolderFiles(tmp_path).load().erasures == [ERASURE]
    files.end_erasure("doc_1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fitting", [0, 1], ids=["the text does not fit", "the record does not fit"])
def test_an_upload_that_does_not_fit_leaves_nothing_of_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitting: int
) -> None:
    files, fsync = FolderFiles(tmp_path), os.fsync
    files.add(replace(RECORD, id="doc_2"), TEXT)
    before = sorted(tmp_path.iterdir())
    written: list[Path] = []

    def fill_up(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if path.suffix == ".new" and path not in written:
            written.append(path)
            path.with_suffix(f".{len(written)}").hardlink_to(path)
            if len(written) > fitting:
                raise OSError(errno.ENOSPC, "no space is left")
        fsync(file)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fill_up)
        with pytest.raises(StoreError, match="no space is left"):
            files.add(RECORD, TEXT)
    assert len(written) == fitting + 1
    second_names = set(tmp_path.iterdir()) - set(before)
    assert {path.suffix for path in second_names} == {f".{place}" for place in range(1, fitting + 2)}
    assert not any(any(path.read_bytes()) for path in second_names), "its bytes lie there still"


def test_what_is_in_place_counts_though_its_folder_was_not_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, fsync = FolderFiles(tmp_path), os.fsync

    def refuse_folders(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EIO, "broken")
        fsync(file)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    files.add(RECORD, TEXT)
    assert FolderFiles(tmp_path).load().documents == [RECORD]
    files.delete(ERASURE)
    assert "document_folder_not_flushed" in caplog.text
    monkeypatch.undo()
    assert FolderFiles(tmp_path).load().erasures == [ERASURE]


def test_damaged_text_says_what_to_do(tmp_path: Path) -> None:
    files = FolderFiles(tmp_path)
    files.add(RECORD, TEXT)
    text = tmp_path / "doc_1.text"
    text.write_bytes(text.read_bytes()[:-10])
    with pytest.raises(StoreError, match="upload it again"):
        files.text("doc_1")


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="set documents to another folder") as caught:
        FolderFiles(tmp_path / "file" / "documents").add(RECORD, TEXT)
    assert caught.value.path == str(tmp_path / "file" / "documents")


def test_memory_keeps_texts_and_forgets_them() -> None:
    files: DocumentFiles = MemoryFiles()
    assert files.load().documents == []
    files.add(RECORD, TEXT)
    files.change(RECORD)
    assert files.text("doc_1") == TEXT
    files.delete(ERASURE)
    files.end_erasure("doc_1")
    assert files.load().erasures == []
