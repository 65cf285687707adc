"""gpu_worker over gRPC: every call of its protocol, on three tiers."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.integration.service_rig import PROMPT, WAIT_S, Rig, metric_names, running, wait_for

from h3kv.api.common.v1 import types_pb2
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2_grpc as pb_grpc
from h3kv.core.errors import ContextLengthError, PeerBusyError, PeerTimeoutError, QuotaError, RequestError
from h3kv.core.units import NS_PER_S
from h3kv.telemetry.metric import Service
from h3kv.telemetry.names import METRICS
from h3kv.testing.tiny_models import byte_tokenizer, write_tiny_model

pytestmark = pytest.mark.slow

LONG = f"{PROMPT * 3}What does Jack lack?"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("tiered")
    model = folder / "tiny"
    write_tiny_model(model, max_position_embeddings=2048)
    settings = {
        "HOST__KV_BYTES": "64MiB",
        "NVME__STORE": folder / "store",
        "NVME__CAPACITY": "64MiB",
        "DEVICE__WINDOW_TOKENS": 128,
        "REQUESTS_MAX": 4,
    }
    with running(folder, model, worker=settings) as both:
        yield both


@pytest.fixture
def stub(rig: Rig) -> Iterator[Any]:
    with rig.channel() as channel:
        yield pb_grpc.GpuWorkerServiceStub(channel.grpc)
    wait_for(rig.is_idle, what="the node to be idle")


def greedy(tokens: int) -> pb.Sampling:
    return pb.Sampling(temperature=0, max_new_tokens=tokens)


def answer(stub: Any, prompt: str, *, tokens: int = 8) -> tuple[str, pb.Usage]:
    text = ""
    for event in stub.Generate(pb.GenerateRequest(text=prompt, sampling=greedy(tokens)), timeout=WAIT_S):
        text += event.token.text
        if event.HasField("finished"):
            return text, event.finished.usage
    pytest.fail("no end")


def test_model_is_described(stub: Any) -> None:
    model = stub.GetModel(pb.GetModelRequest())
    assert (model.name, model.layers, model.query_heads, model.kv_heads, model.head_dim) == ("tiny", 3, 4, 2, 64)
    assert (model.dtype, model.encoding, model.attention) == ("fp32", "raw", "exact")
    assert model.token_bytes == 2 * 3 * 2 * 64 * 4
    assert (len(model.fingerprint), model.context_tokens, model.has_chat_template) == (32, 2048, True)
    assert model == stub.GetModel(pb.GetModelRequest())


def test_prompt_is_read_as_text_chat_or_tokens(stub: Any) -> None:
    backend = byte_tokenizer()
    plain = stub.Tokenize(pb.TokenizeRequest(text="the hat"))
    assert list(plain.ids) == backend.encode("the hat").ids
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    templated = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(stub.Tokenize(pb.TokenizeRequest(chat=chat)).ids) == backend.encode(templated).ids
    asked = [
        pb.GenerateRequest(text=templated, sampling=greedy(4)),
        pb.GenerateRequest(chat=chat, sampling=greedy(4)),
        pb.GenerateRequest(tokens=pb.Tokens(ids=backend.encode(templated).ids), sampling=greedy(4)),
    ]
    ids = [
        [event.token.id for event in stub.Generate(each, timeout=WAIT_S) if event.HasField("token")] for each in asked
    ]
    assert ids[0] == ids[1] == ids[2]
    assert len(ids[0]) == 4


def test_prompt_is_found_in_the_tier_where_it_lies(rig: Rig, stub: Any) -> None:
    text, first = answer(stub, LONG)
    assert not first.cached_tokens
    again, second = answer(stub, LONG)
    assert again == text
    assert [entry.tier for entry in second.cached_tokens] == [types_pb2.TIER_HOST]
    evicted = stub.EvictCold(pb.EvictColdRequest(), timeout=WAIT_S)
    assert evicted.segments > 0
    assert evicted.size_bytes == evicted_bytes(rig, evicted.size_bytes)
    cold, third = answer(stub, LONG)
    assert cold == text
    assert [entry.tier for entry in third.cached_tokens] == [types_pb2.TIER_NVME]
    assert third.cached_tokens[0].tokens == second.cached_tokens[0].tokens
    totals = {entry.tier: entry.tokens for entry in rig.statistics().cached_tokens_total}
    assert totals[types_pb2.TIER_NVME] >= third.cached_tokens[0].tokens


def evicted_bytes(rig: Rig, size_bytes: int) -> int:
    """What was given up, as far as HOST has that much room now."""
    host = next(tier for tier in rig.statistics().tiers if tier.tier == types_pb2.TIER_HOST)
    assert host.capacity_bytes - host.used_bytes >= size_bytes
    return size_bytes


def test_eviction_keeps_to_its_bound(stub: Any) -> None:
    answer(stub, f"Another one. {LONG}")
    assert stub.EvictCold(pb.EvictColdRequest(size_bytes=1), timeout=WAIT_S) == pb.EvictColdResponse()
    bounded = stub.EvictCold(pb.EvictColdRequest(size_bytes=6 << 20), timeout=WAIT_S)
    assert bounded.size_bytes <= 6 << 20


def test_what_was_used_lately_is_not_evicted(stub: Any) -> None:
    answer(stub, f"One of today. {LONG}")
    hour_ns = 3600 * NS_PER_S
    assert stub.EvictCold(pb.EvictColdRequest(idle_ns=hour_ns), timeout=WAIT_S) == pb.EvictColdResponse()
    assert stub.EvictCold(pb.EvictColdRequest(idle_ns=1), timeout=WAIT_S).segments > 0
    assert stub.EvictCold(pb.EvictColdRequest(idle_ns=1), timeout=WAIT_S) == pb.EvictColdResponse()


def test_usage_has_times(stub: Any) -> None:
    _, usage = answer(stub, PROMPT)
    assert usage.generated_tokens == 8
    assert 0 < usage.inter_token_ns_mean <= usage.inter_token_ns_max
    assert usage.time_to_first_token_ns > 0
    assert not usage.HasField("recall")
    _, single = answer(stub, PROMPT, tokens=1)
    assert not single.HasField("inter_token_ns_mean")


def test_request_ends_at_its_deadline(stub: Any) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.Sampling(max_new_tokens=1600, ignore_eos=True))
    with pytest.raises(PeerTimeoutError):
        for _ in stub.Generate(request, timeout=0.3):
            pass


def test_reader_that_does_not_read_stops_nobody(rig: Rig, stub: Any) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.Sampling(max_new_tokens=1600, ignore_eos=True))
    idle = stub.Generate(request, timeout=WAIT_S)
    next(idle)
    assert answer(stub, "Are you there?", tokens=4)[1].generated_tokens == 4
    idle.cancel()
    wait_for(rig.is_idle, what="the request to end")


def test_more_requests_than_allowed_are_refused_to_be_repeated(rig: Rig, stub: Any) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.Sampling(max_new_tokens=1600, ignore_eos=True))
    streams = [stub.Generate(request, timeout=WAIT_S) for _ in range(4)]
    for stream in streams:
        next(stream)
    with pytest.raises(PeerBusyError):
        answer(stub, "One more?")
    refused = rig.complete(prompt="One more?")
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    for stream in streams:
        stream.cancel()


def test_answers_that_are_admitted_together_count_each_prompt_once(stub: Any) -> None:
    prompt = list(stub.Tokenize(pb.TokenizeRequest(text=PROMPT)).ids)
    tenant = pb.Tenant(name="t", salt=b"t", tokens_per_minute=len(prompt) + 2 * 8)
    asked = pb.GenerateRequest(tokens=pb.Tokens(ids=prompt), tenant=tenant)
    together = pb.AdmitRequest(prompts=[asked], answers=2, max_new_tokens=8, tenant=tenant)
    admission = stub.Admit(together, timeout=WAIT_S)
    admitted = next(admission)
    assert admitted.answers_at_a_time == 2
    with pytest.raises(QuotaError):
        next(stub.Admit(together, timeout=WAIT_S))
    part = pb.AdmittedPrompt(id=admitted.id)
    for tokens in (8, 4):
        request = pb.GenerateRequest(admitted=part, sampling=greedy(tokens), tenant=tenant)
        events = list(stub.Generate(request, timeout=WAIT_S))
        assert events[-1].finished.usage.prompt_tokens == len(prompt)
    with pytest.raises(RequestError, match="all answers"):
        list(stub.Generate(pb.GenerateRequest(admitted=part, tenant=tenant), timeout=WAIT_S))
    admission.cancel()

    def is_closed() -> bool:
        request = pb.GenerateRequest(admitted=part, tenant=tenant)
        with pytest.raises(RequestError) as caught:
            list(stub.Generate(request, timeout=WAIT_S))
        return "nothing is admitted" in str(caught.value)

    wait_for(is_closed, what="the admission to be closed")


def test_one_tenant_leaves_room_for_others(stub: Any) -> None:
    tenant = pb.Tenant(name="t", salt=b"t")
    sampling = pb.Sampling(max_new_tokens=1600, ignore_eos=True)
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling, tenant=tenant)
    streams = [stub.Generate(request, timeout=WAIT_S) for _ in range(2)]
    for stream in streams:
        next(stream)
    with pytest.raises(QuotaError, match="may have 2"):
        next(stub.Generate(request, timeout=WAIT_S))
    assert answer(stub, "Is there room?", tokens=2)[1].generated_tokens == 2
    for stream in streams:
        stream.cancel()


@pytest.mark.parametrize(
    ("request_", "kind", "message"),
    [
        (pb.GenerateRequest(), RequestError, "none was given"),
        (pb.GenerateRequest(text=""), RequestError, "empty"),
        (pb.GenerateRequest(chat=pb.Chat()), RequestError, "at least one"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="king")])), RequestError, "role"),
        (pb.GenerateRequest(tokens=pb.Tokens(ids=[1 << 20])), RequestError, "vocabulary|from 0 to 319"),
        (pb.GenerateRequest(text="x", tenant=pb.Tenant(salt=bytes(65))), RequestError, "tenant"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(top_p=2)), RequestError, "top_p"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(max_new_tokens=4000)), ContextLengthError, "2048"),
    ],
)
def test_bad_request_is_refused_by_name(
    stub: Any, request_: pb.GenerateRequest, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        list(stub.Generate(request_, timeout=WAIT_S))


def test_moves_to_a_device_that_is_the_processor_are_refused_by_name(stub: Any) -> None:
    with pytest.raises(RequestError, match="Promote: the device of this node is cpu"):
        stub.Promote(pb.PromoteRequest())
    with pytest.raises(RequestError, match="Demote: the device of this node is cpu"):
        stub.Demote(pb.DemoteRequest())


def test_malformed_message_is_refused(rig: Rig) -> None:
    with rig.channel() as channel:
        call = channel.grpc.unary_stream(
            "/h3kv.api.gpu_worker.v1.GpuWorkerService/Generate",
            request_serializer=bytes,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        with pytest.raises(RequestError, match="malformed"):
            list(call(b"\xff\xff\xff", timeout=WAIT_S))


def test_page_has_every_metric_of_the_worker_and_no_other(rig: Rig, stub: Any) -> None:
    answer(stub, PROMPT)
    found = re.search(
        r"metrics h3.peer.name=gpu_worker h3.address=(http://127\.0\.0\.1:\d+/metrics)", rig.worker.text()
    )
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=WAIT_S) as response:
        page = response.read().decode()
    assert metric_names(page) == {metric.name for metric in METRICS.values() if Service.GPU_WORKER in metric.services}
    assert 'h3_tier_capacity_bytes{tier="nvme"}' in page
    assert re.search(r"^h3_time_to_first_token_seconds_count [1-9]", page, re.MULTILINE)


def test_statistics_name_the_process(rig: Rig) -> None:
    first, second = rig.statistics(), rig.statistics()
    assert first.server.name == "gpu_worker"
    assert len(first.server.boot_token) == 16
    assert first.server == second.server
    assert [tier.tier for tier in first.tiers] == [types_pb2.TIER_DEVICE, types_pb2.TIER_HOST, types_pb2.TIER_NVME]


def test_call_without_a_deadline_is_refused(rig: Rig) -> None:
    with grpc.insecure_channel(f"unix:{rig.worker_socket}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(pb_grpc.GpuWorkerServiceStub(channel).Generate(pb.GenerateRequest(text="x")))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_long_prompt_beyond_a_quota_is_refused_before_it_is_cut_into_tokens(rig: Rig) -> None:
    tenant = pb.Tenant(name="t", salt=b"t", tokens_per_minute=1_000)
    prompt = pb.GenerateRequest(text="x" * 600_000, tenant=tenant)
    with rig.channel() as channel:
        stub = pb_grpc.GpuWorkerServiceStub(channel.grpc)
        for ask in (
            lambda: stub.Generate(prompt, timeout=WAIT_S),
            lambda: stub.Admit(pb.AdmitRequest(prompts=[prompt], answers=2, tenant=tenant), timeout=WAIT_S),
        ):
            with pytest.raises(QuotaError) as caught:
                list(ask())
            assert "600000 of the prompt" not in str(caught.value), "it was cut"
