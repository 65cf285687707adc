"""Calls of tools: how models write them, and the grammar of calls that are forced.

Models differ in how they say that they call something; these are read, wherever the name is one that was offered:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>      once or more, text before it is said as usual
    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
    [TOOL_CALLS]f[ARGS]{...}                                      once or more
    {"name": "f", "parameters": {...}}                            the whole answer, several with ";" between
    <|python_tag|>{"name": "f", "parameters": {...}}

What does not parse, or breaks the schema of a strict function, is text. A forced call needs no such marks: the grammar
leaves room for nothing else.
"""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.gateway.json_text import read_json, write_json
from services.gateway.strict_schema import Budget, StrictSchema

OPEN: Final = "<tool_call>"
LIST: Final = "[TOOL_CALLS]"
PYTHON: Final = "<|python_tag|>"
MARKS: Final = (OPEN, LIST, PYTHON)
LOCAL: Final = "#/"
DEFINITIONS: Final = "$defs"
CALLS_MAX: Final = 128
"""Of one answer. What would be one more is text, as all behind it."""
Accepts = Callable[[str, Mapping[str, Any]], bool]
NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}

_NAMED: Final = re.compile(r"([A-Za-z0-9_-]{1,64})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_TAGGED: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class CallMode(enum.StrEnum):
    """Whether the model calls something."""

    AUTO = "auto"
    """As it likes."""
    REQUIRED = "required"
    """One tool or more."""
    NAMED = "named"
    """The one function that was named: the answer is its arguments."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What may be called in an answer."""

    names: frozenset[str]
    mode: CallMode
    calls_max: int | None
    """None: any number."""
    strict: Mapping[str, StrictSchema] = field(default_factory=dict)
    """What the arguments of some functions must be, where nothing else holds the model to it."""

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """What a whole answer says, and what it calls: the same as in a stream."""
        if self.mode is CallMode.NAMED:
            return self.read_held(text)
        reader = CallReader(self)
        said = reader.feed(text)
        rest, calls = reader.end()
        return ((said + rest).strip(), calls) if calls else (text, [])

    def read_held(self, text: str) -> tuple[str, list[ToolCall]]:
        """The same of the part of an answer that may be a call."""
        budget = Budget()

        def accepts(name: str, arguments: Mapping[str, Any]) -> bool:
            return name in self.names and (name not in self.strict or self.strict[name].holds(arguments, budget))

        match self.mode:
            case CallMode.NAMED:
                return "", [ToolCall(next(iter(self.names)), text)]
            case CallMode.REQUIRED:
                calls = _calls_of(_parsed(text), accepts)
                return ("", calls) if calls else (text, [])
            case CallMode.AUTO:
                said, calls = parse_calls(text, accepts)
                return said, calls[: self.calls_max]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call."""

    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def fields(self) -> dict[str, Any]:
        """As answers write it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class CallReader:
    """Splits an answer into what is said and what is called, as it comes. What may become a call is held back."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._is_held = use.mode is CallMode.REQUIRED
        self._has_said = False

    def feed(self, text: str) -> str:
        """What is certainly no call of the text so far, and was not given back yet."""
        self._held += text
        if self._is_held:
            return ""
        if not self._has_said:
            start = self._held.lstrip()
            self._is_held = start.startswith("{")
            if not start or self._is_held:
                return ""
        places = [place for mark in MARKS if (place := self._held.find(mark)) >= 0]
        self._is_held = bool(places)
        cut = min(places, default=len(self._held) - _begun_mark(self._held))
        said, self._held = self._held[:cut], self._held[cut:]
        self._has_said = self._has_said or bool(said)
        return said

    def end(self) -> tuple[str, list[ToolCall]]:
        """The rest: what is said, and what is called."""
        held, self._held = self._held, ""
        return self._use.read_held(held)


def parse_calls(text: str, accepts: Accepts) -> tuple[str, list[ToolCall]]:
    """What an answer says, and the calls in it, however its model writes them.

    Args:
        text: whole.
        accepts: whether something with this name and these arguments is a call.
    """
    whole = text.strip()
    if whole.startswith(("{", PYTHON)):
        calls = _bare_calls(whole.removeprefix(PYTHON).strip(), accepts)
        return ("", calls) if calls else (text, [])
    said, *listed = text.split(LIST, CALLS_MAX)
    if listed:
        pieces = [_listed_calls(piece, accepts) for piece in listed]
        return (said.strip(), [call for calls in pieces for call in calls]) if all(pieces) else (text, [])
    found: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        calls = _calls_of(_parsed(match[1]), accepts) if len(found) < CALLS_MAX else []
        found.extend(calls)
        return "" if calls else match[0]

    rest = _TAGGED.sub(take, text)
    return (rest.strip(), found) if found else (text, [])


def arguments_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What the arguments of a function must be."""
    return NO_ARGUMENTS if parameters is None else parameters


def calls_schema(parameters: Mapping[str, Mapping[str, Any] | None], *, calls_max: int | None) -> dict[str, Any]:
    """What a list of one call or more must be.

    Args:
        parameters: of each function by name: a JSON schema, whose references begin at its own root.
        calls_max: of the list.
    """
    calls, definitions = [], {}
    for place, (name, schema) in enumerate(parameters.items()):
        root = f"{LOCAL}{DEFINITIONS}/tool_{place}"
        definitions[f"tool_{place}"] = _rooted(arguments_schema(schema), root)
        properties = {"name": {"enum": [name]}, "parameters": {"$ref": root}}
        required = list(properties)
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    bound = {} if calls_max is None else {"maxItems": calls_max}
    return {"type": "array", "minItems": 1, **bound, "items": {"anyOf": calls}, DEFINITIONS: definitions}


def _rooted(schema: Any, root: str) -> Any:
    """The schema, with its references to its own root led to where it lies now."""
    if isinstance(schema, list):
        return [_rooted(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _rooted(each, root) for name, each in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference.removeprefix("#").rstrip("/")
    return moved


def _begun_mark(text: str) -> int:
    """Length of the longest end of a text with which a mark may begin."""
    longest = max(map(len, MARKS)) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in MARKS)), 0)


def _bare_calls(text: str, accepts: Accepts) -> list[ToolCall]:
    """Calls that are the whole text, or nothing."""
    for pieces in ([text], text.split(";", CALLS_MAX)):
        found = [_calls_of(_parsed(piece), accepts) for piece in pieces]
        if all(found):
            return [call for calls in found for call in calls]
    return []


def _listed_calls(text: str, accepts: Accepts) -> list[ToolCall]:
    """Calls after one mark: a list, or a name with its arguments."""
    named = _NAMED.fullmatch(text.strip())
    value = _parsed(text) if named is None else {"name": named[1], "arguments": _parsed(named[2])}
    return _calls_of(value, accepts)


def _calls_of(value: object, accepts: Accepts) -> list[ToolCall]:
    """One call, or a list of calls; nothing where any of them is none."""
    values = value if isinstance(value, list) else [value]
    if len(values) > CALLS_MAX:
        return []
    calls = [call for each in values if (call := _call_of(each, accepts)) is not None]
    return calls if len(calls) == len(values) else []


def _call_of(value: object, accepts: Accepts) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict) or not accepts(name, arguments):
        return None
    return ToolCall(name, write_json(arguments))


def _parsed(text: str) -> object:
    """A JSON value, or None."""
    try:
        return read_json(text)
    except ValueError:
        return None
