import math
from typing import Any

import pytest

from h3kv.api.common.v1 import types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.errors import InternalError
from services.gateway.openai import CHAT, COMPLETION
from services.gateway.tool_calls import CallMode, ToolUse
from services.gateway.writers import AnswerWriter, ChoiceWriter, Style, usage_fields

USAGE = pb.Usage(
    prompt_tokens=100,
    generated_tokens=7,
    cached_tokens=[
        pb.TierTokens(tier=types_pb2.TIER_HOST, tokens=64),
        pb.TierTokens(tier=types_pb2.TIER_NVME, tokens=32),
    ],
    waiting_ns=1_000_000,
    prefill_ns=2_500_000,
    time_to_first_token_ns=4_000_000,
    recall=0.5,
    recomputed_tokens=2,
)
STOP = pb.Finished(reason=pb.FINISH_REASON_STOP, usage=USAGE)
LENGTH = pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=USAGE)


def said(text: str) -> pb.TokenGenerated:
    return pb.TokenGenerated(id=1, text=text)


def likely(text: str, data: bytes, logprob: float = -0.5) -> pb.TokenGenerated:
    entry = pb.TokenLogprob(id=1, logprob=logprob, text=data)
    return pb.TokenGenerated(id=1, text=text, logprobs=pb.TokenLogprobs(chosen=entry, top=[entry]))


def whole_of(choice: ChoiceWriter, tokens: list[pb.TokenGenerated], end: pb.Finished) -> dict[str, Any]:
    likely = [token for token in tokens if token.HasField("logprobs")]
    return choice.whole("".join(token.text for token in tokens), likely, end)


def test_usage_says_where_the_prompt_was_found_and_leaves_out_what_was_not_measured() -> None:
    fields = usage_fields([USAGE], choices_per_prompt=1)
    assert fields["total_tokens"] == 107
    assert fields["prompt_tokens_details"] == {"cached_tokens": 96}
    assert fields["h3"] == {
        "cached_tokens": {"device": 0, "host": 64, "nvme": 32},
        "recomputed_tokens": 2,
        "attended_fraction": None,
        "recall": 0.5,
        "waiting_ms": 1.0,
        "prefill_ms": 2.5,
        "time_to_first_token_ms": 4.0,
        "inter_token_ms_mean": None,
        "inter_token_ms_max": None,
    }


def test_usage_counts_a_prompt_once_and_every_answer() -> None:
    fields = usage_fields([USAGE] * 4, choices_per_prompt=2)
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (200, 28)
    assert fields["prompt_tokens_details"] == {"cached_tokens": 192}
    assert len(fields["h3"]["choices"]) == 4


def test_chat_is_written_as_chat() -> None:
    choice, writer = ChoiceWriter(Style(CHAT), 2), AnswerWriter(CHAT, "1", "m", 5)
    assert [piece["delta"] for piece in choice.opening()] == [{"role": "assistant", "content": ""}]
    assert choice.grow(said("")) == []
    assert choice.grow(said("hi")) == [
        {"index": 2, "delta": {"content": "hi"}, "logprobs": None, "finish_reason": None}
    ]
    assert choice.end(STOP) == [{"index": 2, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    whole = writer.whole([whole_of(choice, [said("h"), said("i")], LENGTH)], [USAGE], choices_per_prompt=1)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "length"
    assert (whole["id"], whole["object"], whole["created"]) == ("chatcmpl-1", "chat.completion", 5)


def test_completion_is_written_as_text() -> None:
    choice, writer = ChoiceWriter(Style(COMPLETION), 0), AnswerWriter(COMPLETION, "1", "m", 5)
    assert choice.opening() == []
    assert [piece["text"] for piece in choice.grow(said("hi"))] == ["hi"]
    assert choice.end(LENGTH)[-1]["finish_reason"] == "length"
    assert whole_of(choice, [said("hi")], STOP)["text"] == "hi"
    assert writer.usage_chunk([USAGE], choices_per_prompt=1)["choices"] == []


def test_logprobs_leave_out_the_token_that_ends_the_text() -> None:
    tokens = [likely("", b"\xc3"), likely("ü", b"\xbc"), likely("!", b"!"), likely("", b"<end>", -math.inf)]
    style = Style(COMPLETION, has_logprobs=True)
    found = whole_of(ChoiceWriter(style, 0), tokens, STOP)["logprobs"]
    assert found["tokens"] == ["\\xc3", "\\xbc", "!"]
    assert found["text_offset"] == [0, 0, 1]
    assert found["top_logprobs"][2] == {"!": -0.5}
    cut = whole_of(ChoiceWriter(style, 0), tokens, LENGTH)["logprobs"]
    assert cut["token_logprobs"][-1] == -9999.0


def test_a_stream_has_the_logprobs_of_the_whole_answer() -> None:
    tokens = [likely("", b"\xc3"), likely("ü", b"\xbc"), likely("", b"<end>")]
    style = Style(CHAT, has_logprobs=True)
    choice = ChoiceWriter(style, 0)
    pieces = [piece for token in tokens for piece in choice.grow(token)] + choice.end(STOP)
    entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert entries == whole_of(ChoiceWriter(style, 0), tokens, STOP)["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xBC]]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == "ü"


def test_calls_end_an_answer_as_calls() -> None:
    tools = ToolUse(frozenset({"f"}), CallMode.AUTO, None)
    text = 'So: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    whole = whole_of(ChoiceWriter(Style(CHAT, tools=tools), 0), [said(text)], STOP)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "So:"
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    choice = ChoiceWriter(Style(CHAT, tools=tools), 0)
    pieces = [piece for letter in text for piece in choice.grow(said(letter))] + choice.end(STOP)
    assert pieces[-1]["finish_reason"] == "tool_calls"
    (calls,) = [piece["delta"]["tool_calls"] for piece in pieces if "tool_calls" in piece["delta"]]
    assert calls[0]["index"] == 0
    assert calls[0]["function"] == {"name": "f", "arguments": '{"a":1}'}


def test_arguments_of_a_named_function_are_streamed_as_they_come() -> None:
    choice = ChoiceWriter(Style(CHAT, tools=ToolUse(frozenset({"f"}), CallMode.NAMED, 1)), 0)
    opening = choice.opening()
    assert opening[1]["delta"]["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    assert choice.grow(said('{"a"'))[0]["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}
    assert choice.end(LENGTH)[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("reason", [pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_CANCELLED])
def test_an_end_that_no_answer_has_is_an_error(reason: pb.FinishReason) -> None:
    with pytest.raises(InternalError, match="FINISH_REASON"):
        ChoiceWriter(Style(CHAT), 0).end(pb.Finished(reason=reason))


def test_what_is_no_number_is_null() -> None:
    usage = pb.Usage(recall=math.nan, attended_fraction=math.inf)
    found = usage_fields([usage], choices_per_prompt=1)["h3"]
    assert (found["recall"], found["attended_fraction"]) == (None, None)
    entry = pb.TokenLogprob(id=1, logprob=math.nan, text=b"x")
    token = pb.TokenGenerated(text="x", logprobs=pb.TokenLogprobs(chosen=entry))
    choice = ChoiceWriter(Style(CHAT, has_logprobs=True), 0)
    choice.grow(token)
    (chunk, _) = choice.end(LENGTH)
    assert chunk["logprobs"]["content"][0]["logprob"] is None
