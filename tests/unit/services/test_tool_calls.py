import json
from collections.abc import Mapping
from typing import Any

import pytest

from services.gateway.strict_schema import StrictSchema
from services.gateway.tool_calls import CALLS_MAX, CallMode, CallReader, ToolUse, calls_schema, parse_calls

NAMES = frozenset({"f", "g"})
AUTO = ToolUse(NAMES, CallMode.AUTO, None)


def accepts(name: str, arguments: Mapping[str, Any]) -> bool:
    return name in NAMES


def shown(found: tuple[str, list[Any]]) -> tuple[str, list[tuple[str, object]]]:
    said, calls = found
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


CALLS = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
    (
        'Wait.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "Wait.",
        [("f", {}), ("g", {})],
    ),
    (
        '<tool_call>[{"name": "f", "arguments": {"a": "<b>"}}, {"name": "g"}]</tool_call>',
        "",
        [("f", {"a": "<b>"}), ("g", {})],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}]', "", [("f", {"a": [1]})]),
    ('Sure. [TOOL_CALLS] [{"name": "g", "arguments": "{\\"a\\": 2}"}]', "Sure.", [("g", {"a": 2})]),
    ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": [2]}', "", [("f", {"a": 1}), ("g", {"b": [2]})]),
    ("[TOOL_CALLS]f[CALL_ID]x1[ARGS]{}", "", [("f", {})]),
    ('{"name": "f", "parameters": {"a": null}}', "", [("f", {"a": None})]),
    ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", {}), ("g", {})]),
]
TEXTS = [
    "",
    "Just text.",
    "a < b, [TOOL and <tool",
    '{"name": "unknown", "parameters": {}}',
    '{"name": ["f"], "parameters": {}}',
    '{"name": "f", "parameters": 3}',
    '{"an": "object"}',
    "<tool_call>not json</tool_call>",
    "[TOOL_CALLS]" + "[" * 10_000,
    "[TOOL_CALLS]h{}",
    "[TOOL_CALLS]f[ARGS]{",
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
]

MIXED = [
    'Hi <|python_tag|>{"name": "f", "parameters": {}}',
    'Hi <|python_tag|>{"name": "h"}',
    '  {"name": "f"} and more',
    'One. <tool_call>{"name": "f"}</tool_call> two. [TOOL_CALLS]g{}',
]


@pytest.mark.parametrize(("text", "said", "calls"), CALLS)
def test_calls_are_found_however_the_model_writes_them(
    text: str, said: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    assert shown(parse_calls(text, accepts)) == (said, calls)


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_calls(text, accepts) == (text, [])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("text", [*TEXTS, *(text for text, _, _ in CALLS), *MIXED])
def test_a_stream_says_and_calls_what_the_whole_answer_does(text: str, size: int) -> None:
    reader = CallReader(AUTO)
    said = "".join(reader.feed(text[place : place + size]) for place in range(0, len(text), size))
    rest, calls = reader.end()
    whole, expected = AUTO.read(text)
    assert shown(("", calls))[1] == shown(("", expected))[1]
    assert (said + rest).strip() == whole.strip()
    if not expected:
        assert said + rest == whole


def test_text_before_a_call_is_said_at_once() -> None:
    reader = CallReader(AUTO)
    assert reader.feed("Let me look <") == "Let me look "
    assert reader.feed("b> or <tool_") == "<b> or "
    assert reader.feed('call>{"name": "f"}') == ""
    assert shown(reader.end()) == ("", [("f", {})])


def test_only_as_many_calls_are_made_as_may_be() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert shown(ToolUse(NAMES, CallMode.AUTO, 1).read(text)) == ("", [("f", {})])


def test_a_call_that_breaks_the_schema_of_a_strict_function_is_text() -> None:
    schema = StrictSchema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, place="p")
    use = ToolUse(NAMES, CallMode.AUTO, None, {"f": schema})
    good = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    bad = good.replace("1", '"1"')
    assert shown(use.read(good)) == ("", [("f", {"a": 1})])
    assert use.read(bad) == (bad, [])


def test_forced_calls_are_read_without_marks() -> None:
    assert shown(ToolUse(frozenset({"f"}), CallMode.NAMED, 1).read('{"a": 1}')) == ("", [("f", {"a": 1})])
    required = ToolUse(NAMES, CallMode.REQUIRED, None)
    assert shown(required.read('[{"name": "g", "parameters": {"b": 2}}]')) == ("", [("g", {"b": 2})])
    assert required.read('[{"name": "g", "par') == ('[{"name": "g", "par', [])


def test_references_of_each_function_lead_to_its_own_definitions() -> None:
    own = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#"}},
        "$defs": {"A": {"enum": [1]}},
    }
    schema = calls_schema({"f": None, "g": own}, calls_max=None)
    assert schema["$defs"]["tool_1"]["properties"] == {
        "a": {"$ref": "#/$defs/tool_1/$defs/A"},
        "b": {"$ref": "#/$defs/tool_1"},
    }
    assert schema["items"]["anyOf"][1]["properties"]["parameters"] == {"$ref": "#/$defs/tool_1"}


def test_calls_of_one_answer_are_bounded() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    said, calls = AUTO.read(call * (CALLS_MAX + 1))
    assert (said, len(calls)) == (call, CALLS_MAX)
    listed = "[TOOL_CALLS]" + json.dumps([{"name": "f"}] * (CALLS_MAX + 1))
    assert AUTO.read(listed) == (listed, [])
