"""Documents over gRPC, on three tiers, in real processes: read once, found by chats, gone with their bytes."""

from __future__ import annotations

import json
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.service_rig import WAIT_S, Rig, running, wait_for

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as pb_grpc
from h3kv.core.errors import (
    ContextLengthError,
    DocumentNotFoundError,
    QuotaError,
    RequestError,
)
from h3kv.testing.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

TEXT = "".join(f"Line {number}: the hat of Jack is number {number * 7919 % 1009}. " for number in range(30))
OTHER = "".join(f"Entry {number} of another book, with {number * 104729 % 997} pages. " for number in range(30))
MINE = pb.Tenant(name="mine", salt=b"mine")
THEIRS = pb.Tenant(name="theirs", salt=b"theirs")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("documents")
    model = folder / "tiny"
    write_tiny_model(model, max_position_embeddings=4096)
    settings = {
        "HOST__KV_BYTES": "96MiB",
        "NVME__STORE": folder / "store",
        "NVME__CAPACITY": "128MiB",
        "DEVICE__WINDOW_TOKENS": 128,
        "DOCUMENTS": folder / "documents",
        "DOCUMENTS_MAX": 5,
        "PINNED_SHARE_MAX": 0.05,
    }
    with running(folder, model, worker=settings) as both:
        yield both


class Client:
    """Calls about documents of one tenant."""

    def __init__(self, stub: Any, tenant: pb.Tenant) -> None:
        self.stub = stub
        self.tenant = tenant

    def create(self, text: str, **fields: Any) -> pb.Document:
        request = pb.CreateDocumentRequest(tenant=self.tenant, text=text, **fields)
        document: pb.Document = self.stub.CreateDocument(request, timeout=WAIT_S).document
        return document

    def get(self, document: str) -> pb.Document:
        request = pb.GetDocumentRequest(tenant=self.tenant, id=document)
        found: pb.Document = self.stub.GetDocument(request, timeout=WAIT_S).document
        return found

    def ids(self) -> list[str]:
        listed = self.stub.ListDocuments(pb.ListDocumentsRequest(tenant=self.tenant), timeout=WAIT_S)
        return [document.id for document in listed.documents]

    def update(self, document: str, **fields: Any) -> pb.Document:
        request = pb.UpdateDocumentRequest(tenant=self.tenant, id=document, **fields)
        changed: pb.Document = self.stub.UpdateDocument(request, timeout=WAIT_S).document
        return changed

    def delete(self, document: str) -> bool:
        request = pb.DeleteDocumentRequest(tenant=self.tenant, id=document)
        return bool(self.stub.DeleteDocument(request, timeout=WAIT_S).is_erased)

    def wait_until_ready(self, document: str) -> pb.Document:
        wait_for(lambda: self.get(document).state != pb.DOCUMENT_STATE_READING, what="the document to be read")
        found = self.get(document)
        assert found.state == pb.DOCUMENT_STATE_READY, found.failure
        assert found.done_tokens == found.tokens
        return found

    def ask(self, question: str, *documents: str, tokens: int = 4) -> Any:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=question)], document_ids=documents)
        sampling = pb.Sampling(temperature=0, max_new_tokens=tokens, ignore_eos=True)
        request = pb.GenerateRequest(chat=chat, sampling=sampling, tenant=self.tenant)
        return self.stub.Generate(request, timeout=WAIT_S)

    def cached(self, question: str, *documents: str) -> int:
        """Prompt tokens that a chat found."""
        usage = list(self.ask(question, *documents))[-1].finished.usage
        return sum(entry.tokens for entry in usage.cached_tokens)


@pytest.fixture
def mine(rig: Rig) -> Iterator[Client]:
    with rig.channel() as channel:
        client = Client(pb_grpc.GpuWorkerServiceStub(channel.grpc), MINE)
        yield client
        for document in client.ids():
            client.delete(document)
    wait_for(rig.is_idle, what="the node to be idle")


@pytest.fixture
def theirs(rig: Rig) -> Iterator[Client]:
    with rig.channel() as channel:
        client = Client(pb_grpc.GpuWorkerServiceStub(channel.grpc), THEIRS)
        yield client
        for document in client.ids():
            client.delete(document)


def files_of(rig: Rig) -> list[Path]:
    (folder,) = (rig.folder / "documents").iterdir()
    return sorted(folder.iterdir())


def test_chat_that_names_a_document_finds_its_kv(rig: Rig, mine: Client) -> None:
    made = mine.create(TEXT, name="hats")
    assert (made.name, made.state, made.is_pinned) == ("hats", pb.DOCUMENT_STATE_READING, False)
    assert made.id.startswith("doc_") and len(made.id) == 36
    assert not made.HasField("expires_s")
    ready = mine.wait_until_ready(made.id)
    token_bytes = mine.stub.GetModel(pb.GetModelRequest()).token_bytes
    assert ready.kv_bytes == ready.tokens * token_bytes
    blocks = ready.tokens // 64
    assert blocks > 10
    assert mine.cached("Which number has hat 3?", made.id) >= blocks * 64
    assert mine.ids() == [made.id]
    record, text = files_of(rig)
    assert (record.name, text.name) == (f"{made.id}.json", f"{made.id}.text")
    assert {stat.S_IMODE(each.stat().st_mode) for each in (record, text)} == {0o600}
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    assert json.loads(record.read_bytes())["state"] == "ready"


def test_documents_of_a_chat_come_in_its_order(mine: Client) -> None:
    first, second = mine.create(TEXT), mine.create(OTHER)
    mine.wait_until_ready(first.id)
    tokens = mine.wait_until_ready(second.id).tokens
    assert mine.cached("Why?", first.id, second.id) >= first.tokens // 64 * 64
    assert mine.cached("Why not?", first.id, second.id) >= (first.tokens + tokens) // 64 * 64 - 256
    assert mine.cached("Why?", second.id, first.id) < second.tokens + first.tokens // 2


def test_another_tenants_document_is_not_found(mine: Client, theirs: Client) -> None:
    made = mine.create(TEXT)
    for call in (theirs.get, theirs.delete, theirs.update, lambda document: list(theirs.ask("Why?", document))):
        with pytest.raises(DocumentNotFoundError):
            call(made.id)
    assert theirs.ids() == []
    with pytest.raises(DocumentNotFoundError):
        mine.get("doc_" + 32 * "0")
    own = theirs.create(TEXT)
    theirs.wait_until_ready(own.id)
    mine.wait_until_ready(made.id)
    mine.delete(made.id)
    assert theirs.cached("Why?", own.id) >= own.tokens // 64 * 64, "another tenant's KV went too"


def test_deleted_document_is_erased_and_its_chats_compute_again(rig: Rig, mine: Client) -> None:
    made, kept = mine.create(TEXT), mine.create(OTHER)
    mine.wait_until_ready(made.id)
    mine.wait_until_ready(kept.id)
    mine.cached("Why?", kept.id, made.id)
    assert mine.cached("Why?", kept.id, made.id) > kept.tokens + made.tokens // 2
    assert mine.delete(made.id)
    with pytest.raises(DocumentNotFoundError):
        mine.delete(made.id)
    with pytest.raises(DocumentNotFoundError):
        list(mine.ask("Why?", made.id))
    assert not [path for path in files_of(rig) if made.id in path.name]
    assert mine.cached("Why?", kept.id) >= kept.tokens // 64 * 64
    again = mine.create(TEXT)
    mine.wait_until_ready(again.id)
    assert mine.cached("Why?", kept.id, again.id) <= kept.tokens + 64, "KV of the deleted document was found"


def test_document_that_is_read_by_an_answer_is_erased_after_it(rig: Rig, mine: Client) -> None:
    made = mine.create(TEXT)
    mine.wait_until_ready(made.id)
    answer = mine.ask("Tell me everything.", made.id, tokens=400)
    next(event for event in answer if event.HasField("token"))
    assert not mine.delete(made.id)
    assert len([event for event in answer if event.HasField("token")]) == 399, "the answer ended early"
    wait_for(lambda: not [path for path in files_of(rig) if made.id in path.name], what="the rest to be erased")


def test_time_to_live_ends_a_document(mine: Client) -> None:
    made = mine.create(TEXT, ttl_s=3600)
    assert made.expires_s == made.created_s + 3600
    assert mine.update(made.id, ttl_s=7200).expires_s >= made.expires_s + 3600
    assert mine.get(made.id).HasField("expires_s")
    mine.update(made.id, ttl_s=1)
    wait_for(lambda: mine.ids() == [], what="it to be deleted by itself")
    with pytest.raises(DocumentNotFoundError):
        mine.get(made.id)


def test_pins_are_bounded_and_taken_off_again(mine: Client) -> None:
    made = mine.create(TEXT, is_pinned=True)
    assert mine.wait_until_ready(made.id).is_pinned
    long = mine.create("".join(f"{number * 7919 % 1000003} " for number in range(380)))
    with pytest.raises(QuotaError, match="pinned_share_max"):
        mine.update(long.id, is_pinned=True)
    assert not mine.update(made.id, is_pinned=False).is_pinned
    assert mine.get(long.id).id == long.id


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"text": ""}, RequestError),
        ({"text": "x" * 9000}, ContextLengthError),
        ({"text": "x", "name": "n" * 257}, RequestError),
        ({"text": "x", "ttl_s": 0}, RequestError),
    ],
)
def test_bad_documents_are_refused(mine: Client, fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        mine.create(**fields)
    assert mine.ids() == []


def test_quotas_bound_documents(rig: Rig, mine: Client) -> None:
    token_bytes = mine.stub.GetModel(pb.GetModelRequest()).token_bytes
    tenant = pb.Tenant(name="mine", salt=b"mine", document_bytes=200 * token_bytes)
    bounded = Client(mine.stub, tenant)
    with pytest.raises(QuotaError, match="document_bytes"):
        bounded.create(TEXT)
    bounded.create("A short one.")
    hurried = Client(mine.stub, pb.Tenant(name="mine", salt=b"mine", tokens_per_minute=50))
    with pytest.raises(QuotaError):
        hurried.create(TEXT)
    with pytest.raises(QuotaError):
        list(hurried.ask("Why? " * 20))
    for number in range(4):
        mine.create(f"Number {number}")
    with pytest.raises(QuotaError, match="documents_max"):
        mine.create("One too many.")


def test_documents_outlive_the_process_and_so_does_their_erasure(rig: Rig, mine: Client) -> None:
    made, gone = mine.create(TEXT, name="hats"), mine.create(OTHER)
    mine.wait_until_ready(made.id)
    mine.wait_until_ready(gone.id)
    mine.stub.EvictCold(pb.EvictColdRequest(), timeout=WAIT_S)
    answer = mine.ask("Tell me everything.", gone.id, tokens=2000)
    next(event for event in answer if event.HasField("token"))
    assert not mine.delete(gone.id)
    erasing = next(path for path in files_of(rig) if path.name == f"{gone.id}.erasing")
    rig.worker.end(with_signal=signal.SIGKILL)
    damaged = erasing.with_name("doc_" + 32 * "a" + ".json")
    damaged.write_bytes(b'{"version": 1')
    rig.start_worker()
    rig.wait_until_serving()
    wait_for(lambda: not erasing.exists(), what="what was begun to be erased")
    assert "document_record_damaged" in rig.worker.text()
    assert damaged.with_suffix(".damaged").exists()
    with rig.channel() as channel:
        after = Client(pb_grpc.GpuWorkerServiceStub(channel.grpc), MINE)
        assert after.ids() == [made.id]
        assert after.wait_until_ready(made.id).name == "hats"
        assert after.cached("Why?", made.id) >= made.tokens // 64 * 64
        assert after.delete(made.id)
