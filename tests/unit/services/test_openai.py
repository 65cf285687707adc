from h3kv.api.common.v1 import types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from services.gateway.openai import CHAT, COMPLETION, AnswerWriter, ChatBody, CompletionBody, usage_fields

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
)


def test_completion_asks_for_what_it_says_and_for_openais_defaults_otherwise() -> None:
    asked = CompletionBody(model="m", prompt="x", stop="end", seed=3).request()
    assert asked == pb.GenerateRequest(
        text="x", sampling=pb.Sampling(temperature=1, top_p=1, seed=3, max_new_tokens=16, stop=["end"])
    )
    full = CompletionBody(model="m", prompt=[1, 2], temperature=0.0, top_p=0.5, seed=0, max_tokens=5, stop=["a", "b"])
    assert full.request() == pb.GenerateRequest(
        tokens=pb.Tokens(ids=[1, 2]),
        sampling=pb.Sampling(temperature=0, top_p=0.5, seed=0, max_new_tokens=5, stop=["a", "b"]),
    )


def test_chat_that_names_no_length_has_the_nodes_default() -> None:
    body = ChatBody.model_validate_json('{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
    asked = body.request()
    assert not asked.sampling.HasField("max_new_tokens")
    assert asked.chat == pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])


def test_seed_is_drawn_where_none_is_given() -> None:
    body = CompletionBody(model="m", prompt="x")
    assert body.request().sampling.seed != body.request().sampling.seed


def test_usage_says_where_the_prompt_was_found_and_leaves_out_what_was_not_measured() -> None:
    fields = usage_fields(USAGE)
    assert fields["total_tokens"] == 107
    assert fields["prompt_tokens_details"] == {"cached_tokens": 96}
    assert fields["h3"] == {
        "cached_tokens": {"device": 0, "host": 64, "nvme": 32},
        "recall": 0.5,
        "waiting_ms": 1.0,
        "prefill_ms": 2.5,
        "time_to_first_token_ms": 4.0,
        "inter_token_ms_mean": None,
        "inter_token_ms_max": None,
    }


def test_chat_is_written_as_chat() -> None:
    writer = AnswerWriter(CHAT, "1", "m", 5)
    assert [chunk["choices"][0]["delta"] for chunk in writer.opening()] == [{"role": "assistant", "content": ""}]
    assert writer.chunk("hi")["choices"] == [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]
    assert writer.chunk("", pb.FINISH_REASON_STOP)["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    whole = writer.whole("hi", pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=USAGE))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert (whole["id"], whole["object"], whole["created"]) == ("chatcmpl-1", "chat.completion", 5)


def test_completion_is_written_as_text() -> None:
    writer = AnswerWriter(COMPLETION, "1", "m", 5)
    assert writer.opening() == []
    assert writer.chunk("hi")["choices"][0]["text"] == "hi"
    assert writer.chunk("", pb.FINISH_REASON_LENGTH)["choices"][0]["finish_reason"] == "length"
    assert writer.usage_chunk(USAGE)["choices"] == []
