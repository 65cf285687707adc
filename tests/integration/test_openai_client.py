"""The official client against a whole node: gateway and gpu_worker as processes, a tiny random model."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from tests.integration.service_rig import PROMPT, Rig, running, wait_for

from h3kv.core.api_keys import hash_key
from h3kv.testing.tiny_models import byte_tokenizer, write_tiny_model

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}"
    "{{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}{% endfor %}{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two small numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/$defs/B"}},
                "required": ["a", "b"],
                "additionalProperties": False,
                "$defs": {"B": {"type": "boolean"}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
SPACES = {str(byte_tokenizer().token_to_id(letter)): -100 for letter in "ĠĊĉč"}
"""A random model likes to go on with white space for ever, wherever JSON has room for it."""
KEYS = {"ann": "h3-key-of-ann", "bob": "h3-key-of-bob"}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(model, max_position_embeddings=2048)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    folder = tmp_path_factory.mktemp("node")
    tenants = [{"name": name, "keys": [hash_key(key)]} for name, key in KEYS.items()]
    file = folder / "tenants.yaml"
    file.write_text(json.dumps({"tenants": tenants}), encoding="utf-8")
    file.chmod(0o600)
    with running(folder, model, gateway={"TENANTS_FILE": file}) as both:
        yield both


def client_of(rig: Rig, *, key: str = KEYS["ann"]) -> openai.OpenAI:
    http = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(rig.http_socket)))
    return openai.OpenAI(api_key=key, base_url="http://node/v1", http_client=http, max_retries=0)


@pytest.fixture
def client(rig: Rig) -> Iterator[openai.OpenAI]:
    with client_of(rig) as opened:
        yield opened


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "h3"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_answered_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=12, temperature=0)
    with client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_a_completion_of_several_prompts_and_choices_is_ordered(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=6, temperature=0, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    alone = client.completions.create(model="tiny", prompt="two", max_tokens=6, temperature=0)
    assert alone.choices[0].text == texts[2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_choices_differ_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny", messages=USER, n=4, max_tokens=8, seed=7, temperature=2, extra_body={"top_k": 50}
        )
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 4
    assert texts() == first


def test_further_choices_find_the_prompt_of_the_first(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=f"Found {PROMPT}", n=3, max_tokens=4, seed=1)
    assert answer.usage is not None
    usage: dict[str, Any] = answer.usage.to_dict()
    found = usage["h3"]["choices"]
    assert sum(found[0]["cached_tokens"].values()) == 0
    assert all(sum(choice["cached_tokens"].values()) >= 256 for choice in found[1:])


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for entry in logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert entry.bytes == entry.top_logprobs[0].bytes
    spelled = b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode(errors="replace")
    assert spelled == chat.choices[0].message.content
    plain = client.completions.create(model="tiny", prompt="hi", max_tokens=5, temperature=0, logprobs=2)
    found = plain.choices[0].logprobs
    assert found is not None
    assert [len(top) for top in found.top_logprobs or []] == [2] * 5
    assert (found.text_offset or [])[0] == 0


def test_biases_penalties_and_stop_tokens_change_the_answer(client: openai.OpenAI) -> None:
    only = client.completions.create(model="tiny", prompt="x", max_tokens=4, temperature=0, logit_bias={"65": 100})
    text = only.choices[0].text
    assert text == text[0] * 4
    varied = client.completions.create(
        model="tiny", prompt="x", max_tokens=4, temperature=0, frequency_penalty=2, presence_penalty=2
    )
    plain = client.completions.create(model="tiny", prompt="x", max_tokens=4, temperature=0)
    assert varied.usage is not None
    assert plain.usage is not None
    stopped = client.completions.create(
        model="tiny", prompt="x", max_tokens=4, logit_bias={"65": 100}, extra_body={"stop_token_ids": [65]}
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")


def test_an_answer_is_held_to_json_and_to_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "one": {"enum": ["a", "b"]}},
        "required": ["yes", "one"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_tokens=64,
        seed=1,
        logit_bias=SPACES,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"yes", "one"}
    free = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=400, seed=1, response_format={"type": "json_object"}
    )
    assert (free.choices[0].message.content or "").lstrip().startswith("{")


class Verdict(BaseModel):
    """What an answer must be."""

    is_true: bool
    votes: list[bool]


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=USER, response_format=Verdict, max_tokens=400, seed=1, logit_bias=SPACES
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_valid_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": USER,
        "tools": TOOLS[:1],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 2,
        "logit_bias": SPACES,
    }
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add"
    assert arguments["a"] in {1, 2}
    assert isinstance(arguments["b"], bool)
    deltas = [
        delta
        for chunk in client.chat.completions.create(**asked, stream=True)
        for each in chunk.choices
        for delta in each.delta.tool_calls or []
    ]
    assert "".join(delta.function.name or "" for delta in deltas) == "add"
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == arguments


def test_a_conversation_goes_on_after_a_call(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "add"}},
        max_tokens=100,
        seed=4,
        logit_bias=SPACES,
    )
    message = first.choices[0].message
    assert message.tool_calls
    answered: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    history: list[Any] = [*USER, message, answered]
    second = client.chat.completions.create(model="tiny", messages=history, tools=TOOLS, max_tokens=4)
    assert second.choices[0].finish_reason in {"length", "stop"}


def test_a_document_is_read_once_and_named_in_chats(rig: Rig, client: openai.OpenAI) -> None:
    text = f"The whale is white. {PROMPT}"
    made: Any = client.post("/documents", cast_to=object, body={"text": text, "name": "whale"})
    assert (made["object"], made["name"]) == ("document", "whale")

    def is_ready() -> bool:
        found: Any = client.get(f"/documents/{made['id']}", cast_to=object)
        assert found["status"] != "failed", found
        return bool(found["status"] == "ready")

    wait_for(is_ready, what="the document to be read")
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=4, extra_body={"document_ids": [made["id"]]}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= 256
    with client_of(rig, key=KEYS["bob"]) as other, pytest.raises(openai.NotFoundError):
        other.chat.completions.create(
            model="tiny", messages=USER, max_tokens=4, extra_body={"document_ids": [made["id"]]}
        )
    gone: Any = client.delete(f"/documents/{made['id']}", cast_to=object)
    assert gone["deleted"]
    with pytest.raises(openai.NotFoundError):
        client.get(f"/documents/{made['id']}", cast_to=object)


def test_two_hundred_clients_at_once_are_answered_or_told_when_to_come_again(rig: Rig) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEYS['ann']}"}
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda _: rig.post("/v1/completions", body, headers=headers), range(200)))
    assert {answer.status for answer in answers} <= {200, 429}
    texts = {answer.fields["choices"][0]["text"] for answer in answers if answer.status == 200}
    assert len(texts) == 1
    assert all("retry-after" in answer.headers for answer in answers if answer.status == 429)
    wait_for(rig.is_idle, what="the node to be idle")


def test_tenants_share_no_kv(rig: Rig, client: openai.OpenAI) -> None:
    prompt = f"Secret {PROMPT}"
    client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    own = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    with client_of(rig, key=KEYS["bob"]) as other:
        strange = other.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    for answer, is_found in ((own, True), (strange, False)):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert bool(answer.usage.prompt_tokens_details.cached_tokens) is is_found


def test_a_wrong_key_is_an_authentication_error(rig: Rig) -> None:
    with client_of(rig, key="h3-wrong") as stranger, pytest.raises(openai.AuthenticationError) as caught:
        stranger.models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": 5000}, None, "context_length_exceeded"),
        ({"temperature": 101}, "temperature", "request"),
        ({"tool_choice": "auto"}, "tool_choice", "request"),
        ({"stop": ["x"] * 10_000}, "stop", "request"),
        ({"extra_body": {"min_tokens": 3}}, "min_tokens", "request"),
        ({"messages": []}, "messages", "request"),
    ],
)
def test_bad_requests_are_bad_request_errors(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": USER, **fields})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_prompts_of_every_length_are_answered_or_refused_with_the_sum(client: openai.OpenAI) -> None:
    one = client.completions.create(model="tiny", prompt=[65], max_tokens=1)
    assert one.usage is not None
    assert one.usage.prompt_tokens == 1
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="", max_tokens=1)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 200_000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "max_new_tokens" not in caught.value.message
