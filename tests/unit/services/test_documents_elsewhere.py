"""Chats whose prompts do not begin with their documents: deleting one reaches its KV there too."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.services.documents_world import BYTES, MINE, OTHER, TEXT, WAIT_NS, World

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.hashing import root_key
from h3kv.models.tokenizer import Tokenizer
from h3kv.testing.engines import FINGERPRINT
from h3kv.testing.tiny_models import CHAT_TEMPLATE, byte_tokenizer
from services.gpu_worker import documents_reach
from services.gpu_worker.documents_files import FolderFiles
from services.gpu_worker.messages import PromptReader

TOOLS = json.dumps([{"type": "function", "function": {"name": "f" * 70}}])
TOOLS_FIRST = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
SYSTEM_LAST = (
    "{% for message in messages[1:] %}[{{ message.role }}]"
    "{% if loop.last %}{{ messages[0].content }}{% endif %}{{ message.content }}{% endfor %}"
)
ASKED = pb.ChatMessage(role="user", content="What colour has the hat of Jack? " * 3)
ANSWERED = pb.ChatMessage(role="assistant", content="Grey.")


def tokenizer(template: str, tool_template: str | None = None) -> Tokenizer:
    return Tokenizer(
        byte_tokenizer(),
        eos_ids=frozenset({260}),
        special_tokens={},
        chat_template=template,
        tool_template=tool_template,
        path="tiny",
    )


@pytest.mark.parametrize(
    ("model", "chat"),
    [
        (tokenizer(TOOLS_FIRST), pb.Chat(messages=[ASKED], tools_json=TOOLS)),
        (tokenizer(CHAT_TEMPLATE, TOOLS_FIRST), pb.Chat(messages=[ASKED], tools_json=TOOLS)),
        (tokenizer(SYSTEM_LAST), pb.Chat(messages=[ASKED, ANSWERED, ASKED])),
    ],
    ids=["tools come first", "tools have a template of their own", "the system speaks last"],
)
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind another"])
def test_deleted_document_is_erased_where_a_prompt_does_not_begin_with_it(
    model: Tokenizer, chat: pb.Chat, behind: bool
) -> None:
    with closing(World(tokenizer=model)) as world:
        entry, other = world.ready(), world.ready(OTHER)
        named = [other, entry] if behind else [entry]
        chat = pb.Chat(
            messages=chat.messages, tools_json=chat.tools_json, document_ids=[each.record.id for each in named]
        )
        world.answer(chat)
        assert world.answer(chat) > (400 if behind else 200)
        prompt = read(world, chat)
        assert world.keeper.erase(world.documents.delete(MINE.name, entry.record.id), timeout_ns=WAIT_NS)
        *_, finished = world.loop.submit(world.request(prompt), trace=None)
        assert sum(finished.statistics.cached_tokens.values()) == 0
        assert world.found(other.record.keys), "other documents stay"


def test_prompts_that_begin_with_their_documents_leave_all_else_alone() -> None:
    with closing(World(tokenizer=tokenizer(SYSTEM_LAST))) as world:
        entry, other = world.ready(), world.ready(OTHER)
        world.answer(pb.Chat(messages=[ASKED], document_ids=[other.record.id, entry.record.id]))
        assert not entry.record.is_elsewhere and not other.record.is_elsewhere


def test_documents_that_stand_together_often_are_cut_into_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(World()) as world:
        entry, other = world.ready(), world.ready(OTHER)
        world.note(other, entry)
        monkeypatch.setattr(documents_reach, "prefix_tokens", lambda *_: pytest.fail("they were cut again"))
        world.note(other, entry)
        world.note(entry)
        assert not entry.record.is_elsewhere


def test_it_is_remembered_that_a_document_was_elsewhere(tmp_path: Path) -> None:
    with closing(World(FolderFiles(tmp_path), tokenizer=tokenizer(SYSTEM_LAST))) as before:
        entry = before.ready()
        before.answer(pb.Chat(messages=[ASKED, ANSWERED, ASKED], document_ids=[entry.record.id]))
    with closing(World(FolderFiles(tmp_path))) as after:
        erasure = after.documents.delete(MINE.name, entry.record.id)
        assert erasure.record.ends == (root_key(FINGERPRINT, MINE.salt),)


def test_document_that_turns_out_elsewhere_while_it_is_deleted_is_erased_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(World()) as world:
        entry = world.ready()
        of, chats = world.documents.reaches.of, [1]

        def chat_meanwhile(looked_for: object) -> object:
            reach = of(entry)
            if chats:
                chats.pop()
                world.documents.note_prompt(MINE.name, [entry.record.id], BYTES.encode(TEXT))
            return reach

        monkeypatch.setattr(world.documents.reaches, "of", chat_meanwhile)
        assert world.documents.delete(MINE.name, entry.record.id).record.ends == (root_key(FINGERPRINT, MINE.salt),)


def read(world: World, chat: pb.Chat) -> list[int]:
    """The tokens of a chat, without anybody asking for an answer."""
    tenant = pb.Tenant(name=MINE.name, salt=MINE.salt)
    return PromptReader(world.tokenizer, 2, world.documents).read_prompt(pb.TokenizeRequest(chat=chat, tenant=tenant))
