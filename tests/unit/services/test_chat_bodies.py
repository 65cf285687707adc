import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from services.gateway.chat import ChatBody
from services.gateway.openai import Asked
from services.gateway.problems import FieldError, body_error
from services.gateway.tool_calls import CallMode

TENANT = pb.Tenant()
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


def body_of(**fields: Any) -> ChatBody:
    whole = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return ChatBody.model_validate_json(json.dumps(whole))


def whole(found: Asked) -> pb.GenerateRequest:
    (request,) = found.prompts
    request.sampling.CopyFrom(found.sampling_of(0))
    return request


def asked(**fields: Any) -> pb.GenerateRequest:
    return whole(body_of(**fields).asked(TENANT))


def test_chat_that_names_no_length_has_the_nodes_default() -> None:
    request = asked()
    assert not request.sampling.HasField("max_new_tokens")
    assert request.chat == pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])


def test_both_names_of_the_length_are_known() -> None:
    assert asked(max_tokens=5).sampling.max_new_tokens == 5
    assert asked(max_completion_tokens=6).sampling.max_new_tokens == 6
    assert asked(max_completion_tokens=6, max_tokens=6).sampling.max_new_tokens == 6


def test_a_conversation_with_calls_is_passed_on_as_templates_read_it() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ü"}'}},
                {"id": "c2", "type": "function", "function": {"name": "time", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    system, user, assistant, tool = asked(messages=messages).chat.messages
    assert (system.role, system.content) == ("system", "Be\nbrief.")
    assert (user.name, tool.tool_call_id) == ("Ann", "c1")
    calls = json.loads(assistant.tool_calls_json)
    assert [call["function"]["arguments"] for call in calls] == [{"place": "Ü"}, {}]
    assert [call["id"] for call in calls] == ["c1", "c2"]
    assert assistant.content == ""


def test_tools_are_passed_on_unless_none_may_be_called() -> None:
    request = asked(tools=[WEATHER, TIME])
    assert json.loads(request.chat.tools_json) == [WEATHER, TIME]
    assert not request.sampling.HasField("grammar")
    assert asked(tools=[WEATHER], tool_choice="none").chat.tools_json == ""


def test_names_of_special_tokens_stay_where_calls_may_be_written_with_them() -> None:
    assert not asked().sampling.HasField("skip_special_tokens")
    assert asked(skip_special_tokens=True).sampling.skip_special_tokens
    request = asked(tools=[WEATHER])
    assert request.sampling.HasField("skip_special_tokens")
    assert not request.sampling.skip_special_tokens
    assert asked(tools=[WEATHER], tool_choice="none", skip_special_tokens=True).sampling.skip_special_tokens


def test_a_named_function_holds_the_answer_to_its_arguments() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    request = asked(tools=[WEATHER, TIME], tool_choice=choice)
    assert json.loads(request.sampling.grammar.json_schema) == WEATHER["function"]["parameters"]
    use = body_of(tools=[WEATHER, TIME], tool_choice=choice).tool_use()
    assert use is not None
    assert use.mode is CallMode.NAMED


@pytest.mark.parametrize(("parallel", "most"), [(True, None), (False, 1)])
def test_a_required_call_may_be_of_any_tool(parallel: bool, most: int | None) -> None:
    request = asked(tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=parallel)
    schema = json.loads(request.sampling.grammar.json_schema)
    assert (schema["minItems"], schema.get("maxItems")) == (1, most)
    assert [each["properties"]["name"]["enum"] for each in schema["items"]["anyOf"]] == [["weather"], ["time"]]


def test_the_form_of_the_answer_becomes_a_grammar() -> None:
    assert asked(response_format={"type": "json_object"}).sampling.grammar.json_object
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert json.loads(asked(response_format=form).sampling.grammar.json_schema) == schema
    assert not asked(response_format={"type": "text"}).sampling.HasField("grammar")


def test_logprobs_are_asked_for_by_number() -> None:
    assert not asked().sampling.HasField("logprobs")
    assert asked(logprobs=True).sampling.logprobs == 0
    assert asked(logprobs=True, top_logprobs=4).sampling.logprobs == 4


def test_documents_are_named() -> None:
    assert list(asked(document_ids=["doc_1", "doc_2"]).chat.document_ids) == ["doc_1", "doc_2"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs to true"),
        ({"tools": [WEATHER], "skip_special_tokens": True}, "skip_special_tokens", "calls of tools"),
        ({"tool_choice": "auto"}, "tool_choice", "no tools"),
        ({"tools": [TIME, TIME]}, "tools", "two of them"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": math.inf}}}]},
            "tools",
            "not finite",
        ),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no tool is called x",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"oneOf": []}}},
                ]
            },
            "tools[0].function.parameters.oneOf",
            "not checked",
        ),
        ({"tools": [TIME], "response_format": {"type": "json_object"}}, "response_format", "tool_choice to none"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "goes with"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "names the call"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id", "no other"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
            "messages[0].tool_calls",
            "only an assistant",
        ),
    ],
)
def test_contradictions_are_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        asked(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": NaN}', "[" * 10_000])
def test_arguments_of_a_call_that_are_no_object_are_refused(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(FieldError) as caught:
        asked(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"functions": []}, "functions", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"min_tokens": 3}, "min_tokens", "not supported"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "missing"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to 1"),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages", "at most 4096"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"n": True}, "n", "integer"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "function"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        body_of(**fields)
    error = body_error(caught.value)
    assert error.param == param, error
    assert message in str(error)


def test_fields_that_change_nothing_are_taken() -> None:
    request = asked(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="default",
        safety_identifier="s",
        prompt_cache_key="k",
        top_k=-1,
        min_tokens=0,
        use_beam_search=False,
        length_penalty=1.0,
        chat_template_kwargs={},
        add_generation_prompt=True,
        tools=[],
        tool_choice="none",
        seed=1,
    )
    assert request == asked(seed=1)
