"""Chats in messages, as templates take them. What comes in is checked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.client_limits import CHAT_DOCUMENTS_MAX
from h3kv.core.errors import RequestError
from h3kv.models.chat_template import Messages, Tools
from h3kv.models.document_prompt import chat_with_documents
from h3kv.models.json_text import read_json

ROLES: Final = ("system", "user", "assistant", "tool")

JSON_BYTES_MAX: Final = 256 << 10
"""Of all tools, and of the calls of one message."""

JSON_DEPTH_MAX: Final = 64
"""Of arrays and objects within one another in tools and calls: templates go through them by recursion."""


class DocumentTexts(Protocol):
    """Where the texts of documents are kept. Thread-safe."""

    def texts(self, tenant: str, ids: Sequence[str]) -> list[str]:
        """Texts in the order of their ids.

        Args:
            tenant: name of whose they are.
            ids: which.

        Raises:
            DocumentNotFoundError: one is not the tenant's.
            ContextLengthError: no prompt with all of them fits the model's context.
        """
        ...

    def note_prompt(self, tenant: str, ids: Sequence[str], prompt: Sequence[int]) -> None:
        """A chat about documents is about to be computed: deleting one of them reaches it from now on.

        Args:
            tenant: name of whose they are.
            ids: as in `texts`.
            prompt: token numbers of the chat.

        Raises:
            DocumentNotFoundError: one was deleted meanwhile.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReadChat:
    """A chat as a template takes it."""

    messages: Messages
    tools: Tools | None


def read_chat(chat: pb.Chat, *, tenant: str, documents: DocumentTexts | None) -> ReadChat:
    """The chat in a message, its documents in place.

    Args:
        chat: as it came.
        tenant: name of whose documents it may name.
        documents: where these are; None: there are none.

    Raises:
        RequestError: it is empty, a part is not what it must be, or it names documents where none are kept.
        DocumentNotFoundError: a document is not the tenant's.
    """
    if not chat.messages:
        raise RequestError("messages: none was given; give at least one")
    messages = [_message(place, message) for place, message in enumerate(chat.messages)]
    tools = (_tools(chat.tools_json) or None) if chat.tools_json else None
    if not chat.document_ids:
        return ReadChat(messages, tools)
    if documents is None:
        raise RequestError("document_ids: this node keeps no documents; put the text in a message")
    if len(chat.document_ids) > CHAT_DOCUMENTS_MAX:
        raise RequestError(f"document_ids: {len(chat.document_ids)} were given; up to {CHAT_DOCUMENTS_MAX} are allowed")
    return ReadChat(chat_with_documents(messages, documents.texts(tenant, list(chat.document_ids))), tools)


def _message(place: int, message: pb.ChatMessage) -> Mapping[str, object]:
    field = f"messages[{place}]"
    if message.role not in ROLES:
        raise RequestError(f"{field}.role = {message.role[:100]!r}: must be one of {', '.join(ROLES)}")
    read: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        read["name"] = message.name
    if message.tool_calls_json:
        if message.role != "assistant":
            raise RequestError(f"{field}.tool_calls: only an assistant calls tools; leave them out")
        read["tool_calls"] = _calls(message.tool_calls_json, f"{field}.tool_calls")
    if message.tool_call_id:
        if message.role != "tool":
            raise RequestError(f"{field}.tool_call_id: only a tool answers calls; leave it out")
        read["tool_call_id"] = message.tool_call_id
    return read


def _tools(text: str) -> Tools:
    tools = _functions(text, "tools")
    for place, tool in enumerate(tools):
        parameters = tool["function"].get("parameters", {})
        if not isinstance(parameters, dict):
            raise RequestError(f"tools[{place}].function.parameters: must be a JSON schema")
    return tools


def _calls(text: str, field: str) -> Tools:
    calls = _functions(text, field)
    for place, call in enumerate(calls):
        if not isinstance(call["function"].get("arguments"), dict):
            raise RequestError(f"{field}[{place}].function.arguments: must be an object")
    return calls


def _functions(text: str, field: str) -> list[dict[str, Any]]:
    """A JSON array of functions that have a name each, as both tools and calls are."""
    size = len(text.encode())
    if size > JSON_BYTES_MAX:
        raise RequestError(f"{field}: {size} bytes of JSON; up to {JSON_BYTES_MAX} are allowed")
    entries = read_json(text, field=field, depth_max=JSON_DEPTH_MAX)
    if not isinstance(entries, list):
        raise RequestError(f"{field}: must be a JSON array")
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("type") != "function":
            raise RequestError(f"{field}[{place}].type: must be 'function'")
        function = entry.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"{field}[{place}].function.name: must be a text that is not empty")
    return entries
