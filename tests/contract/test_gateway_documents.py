"""Documents and tenants over HTTP, with a gpu_worker that keeps records in a dictionary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.contract.scripted_worker import MODEL, Front, fronted, saying

from h3kv.core.api_keys import hash_key, salt_of
from h3kv.core.errors import QuotaError

pytestmark = pytest.mark.slow

DOCUMENTS = "/v1/documents"
TENANTS = f"""
tenants:
  - {{name: a, keys: ["{hash_key("h3-a")}"], tokens_per_minute: 500, document_bytes: 1MiB}}
  - {{name: b, keys: ["{hash_key("h3-b")}"]}}
"""


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with fronted(tmp_path_factory.mktemp("front"), {"HTTP__DOCUMENT_MAX": "1MiB", "HTTP__BODY_MAX": "64KiB"}) as both:
        yield both


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Asks for keys."""
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "tenants.yaml"
    file.write_text(TENANTS, encoding="utf-8")
    file.chmod(0o600)
    with fronted(folder, {"TENANTS_FILE": file}) as both:
        yield both


def send(
    front: Front, method: str, path: str, body: object = None, *, key: str | None = None
) -> tuple[int, dict[str, Any]]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    status, _, answer = front.ask(method, path, data, headers)
    return status, json.loads(answer)


def test_a_document_lives_from_its_upload_to_its_erasure(front: Front) -> None:
    front.worker.failure = None
    status, made = send(front, "POST", DOCUMENTS, {"text": "Lear", "name": "play", "ttl_seconds": 60})
    assert status == 200
    assert made == {
        "id": made["id"],
        "object": "document",
        "name": "play",
        "status": "processing",
        "error": None,
        "progress": {"done_tokens": 0, "tokens": 4},
        "kv_bytes": 0,
        "created_at": 1_000,
        "expires_at": 1_060,
        "pinned": False,
    }
    path = f"{DOCUMENTS}/{made['id']}"
    assert send(front, "GET", path) == (200, made)
    listed = send(front, "GET", DOCUMENTS)[1]
    assert listed["object"] == "list"
    assert made in listed["data"]
    for method in ("PATCH", "POST"):
        changed = send(front, method, path, {"ttl_seconds": 5, "pinned": method == "PATCH"})[1]
        assert (changed["expires_at"], changed["pinned"]) == (2_005, method == "PATCH")
    gone = {"id": made["id"], "object": "document", "deleted": True, "erased": True}
    assert send(front, "DELETE", path) == (200, gone)
    for method in ("GET", "DELETE"):
        status, answer = send(front, method, path)
        assert (status, answer["error"]["code"]) == (404, "document_not_found")


def test_a_text_can_be_sent_as_it_is(front: Front) -> None:
    front.worker.failure = None
    headers = {"Content-Type": "text/plain; charset=utf-8"}
    status, _, body = front.ask("POST", f"{DOCUMENTS}?name=%C3%9C&ttl_seconds=9&pinned=true", "Öl".encode(), headers)
    made = json.loads(body)
    assert (status, made["name"], made["expires_at"], made["pinned"]) == (200, "Ü", 1_009, True)
    assert made["progress"]["tokens"] == 2


@pytest.mark.parametrize(
    ("query", "kind", "body", "expected"),
    [
        ("", "application/json", b'{"text": ""}', (400, "text")),
        ("", "application/json", b'{"name": "x"}', (400, "text")),
        ("", "application/json", b'{"text": "x", "ttl_seconds": 0}', (400, "ttl_seconds")),
        ("", "application/json", b'{"text": "x", "pinned": 1}', (400, "pinned")),
        ("", "application/json", b'{"text": "x", "file": "y"}', (400, "file")),
        ("", "application/json", b'{"text": "x", "name": "' + b"n" * 257 + b'"}', (400, "name")),
        ("", "text/plain", b"", (400, "text")),
        ("", "text/plain", b"\xff", (400, "text")),
        ("?pinned=yes", "text/plain", b"x", (400, "pinned")),
        ("?ttl_seconds=-1", "text/plain", b"x", (400, "ttl_seconds")),
        ("?other=1", "text/plain", b"x", (400, "other")),
        ("?name=x", "application/json", b'{"text": "x"}', (400, "name")),
        ("", "application/x-www-form-urlencoded", b'{"text": "x"}', (415, None)),
        ("", "multipart/form-data", b"x", (415, None)),
        ("", "text/plain", b"x" * (1 << 20) + b"x", (413, None)),
    ],
)
def test_a_bad_upload_is_refused_by_name(
    front: Front, query: str, kind: str, body: bytes, expected: tuple[int, str | None]
) -> None:
    before = len(front.worker.documents)
    found, _, answer = front.ask("POST", DOCUMENTS + query, body, {"Content-Type": kind})
    assert (found, json.loads(answer)["error"]["param"]) == expected, answer
    assert len(front.worker.documents) == before


def test_a_document_may_be_larger_than_other_bodies(front: Front) -> None:
    front.worker.failure = None
    assert send(front, "POST", DOCUMENTS, {"text": "x" * (100 << 10)})[0] == 200
    assert send(front, "POST", "/v1/completions", {"model": MODEL, "prompt": "x" * (100 << 10)})[0] == 413


def test_a_change_of_nothing_is_refused(front: Front) -> None:
    assert send(front, "PATCH", f"{DOCUMENTS}/doc_1", {})[0] == 400


def test_a_quota_of_bytes_says_that_waiting_does_not_help(front: Front) -> None:
    front.worker.failure = QuotaError("delete documents", retry_after_s=None)
    status, headers, body = front.ask("POST", DOCUMENTS, b'{"text": "x"}')
    assert (status, json.loads(body)["error"]["code"]) == (429, "insufficient_quota")
    assert "retry-after" not in headers
    front.worker.failure = None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", DOCUMENTS),
        ("POST", DOCUMENTS),
        ("GET", f"{DOCUMENTS}/doc_1"),
        ("PATCH", f"{DOCUMENTS}/doc_1"),
        ("DELETE", f"{DOCUMENTS}/doc_1"),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer h3-c"}, {"Authorization": "Basic h3-a"}])
def test_nothing_is_answered_without_a_key(guarded: Front, method: str, path: str, headers: dict[str, str]) -> None:
    status, found, body = guarded.ask(method, path, b"not even JSON", headers)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert found["www-authenticate"] == "Bearer"
    assert guarded.ask("GET", "/health")[0] == 200


def test_metrics_tell_no_tenant_of_others(guarded: Front) -> None:
    for headers in ({}, {"Authorization": "Bearer h3-a"}):
        assert guarded.ask("GET", "/metrics", None, headers)[0] == 404


def test_a_tenant_is_named_to_the_worker_with_its_salt_and_quotas(guarded: Front) -> None:
    guarded.worker.answer(saying("x"))
    for key in ("h3-a", "h3-b"):
        assert send(guarded, "POST", "/v1/completions", {"model": MODEL, "prompt": "x"}, key=key)[0] == 200
    first, second = (request.tenant for request in guarded.worker.asked)
    assert (first.name, first.tokens_per_minute, first.document_bytes) == ("a", 500, 1 << 20)
    assert (first.salt, second.salt) == (salt_of("a"), salt_of("b"))
    assert not second.HasField("tokens_per_minute")


def test_a_strangers_document_is_as_unknown_as_one_that_never_was(guarded: Front) -> None:
    own = send(guarded, "POST", DOCUMENTS, {"text": "secret"}, key="h3-a")[1]["id"]
    never = "doc_" + "f" * 32
    for method, body in (("GET", None), ("PATCH", {"pinned": True}), ("DELETE", None)):
        stranger = send(guarded, method, f"{DOCUMENTS}/{own}", body, key="h3-b")
        unknown = send(guarded, method, f"{DOCUMENTS}/{never}", body, key="h3-b")
        assert stranger[0] == 404
        assert json.dumps(stranger).replace(own, "ID") == json.dumps(unknown).replace(never, "ID")
    assert send(guarded, "GET", DOCUMENTS, key="h3-b")[1]["data"] == []
    assert send(guarded, "GET", f"{DOCUMENTS}/{own}", key="h3-a")[0] == 200


def test_keys_are_in_no_log(guarded: Front) -> None:
    assert "h3-a" not in guarded.gateway.text()
    assert "h3-c" not in guarded.gateway.text()
    assert '"h3.tenant": "a"' in guarded.gateway.text() or "h3.tenant=a" in guarded.gateway.text()
