import json
import math
from collections.abc import Sequence

import pytest

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from h3kv.core.client_limits import CHAT_DOCUMENTS_MAX
from h3kv.core.errors import DocumentNotFoundError, InternalError, RequestError
from h3kv.core.types import Tier
from h3kv.engine.events import Failed, Finished, PrefillProgress, RequestStatistics, TokenGenerated, TokenLogprobs
from h3kv.engine.request import RequestId, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.models.tokenizer import Tokenizer
from h3kv.testing.tiny_models import CHAT_TEMPLATE, byte_tokenizer
from services.gpu_worker.messages import PromptReader, check_admit, event_message

TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}{# tool_calls #}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}}
REQUEST = RequestId(7)


def tokenizer(template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    return Tokenizer(byte_tokenizer(), eos_ids=frozenset({260}), special_tokens={}, chat_template=template, path="tiny")


class Shelf:
    """Documents of tenants, in a dictionary."""

    def __init__(self, texts: dict[tuple[str, str], str]) -> None:
        self._texts = texts
        self.noted: list[tuple[str, list[str], str]] = []

    def texts(self, tenant: str, ids: Sequence[str]) -> list[str]:
        for document in ids:
            if (tenant, document) not in self._texts:
                raise DocumentNotFoundError(f"no document {document}", document=document)
        return [self._texts[tenant, document] for document in ids]

    def note_prompt(self, tenant: str, ids: Sequence[str], prompt: Sequence[int]) -> None:
        self.noted.append((tenant, list(ids), tokenizer().decode(prompt)))


READER = PromptReader(tokenizer(), 33, Shelf({("ann", "doc_1"): "One.", ("bob", "doc_2"): "Two."}))
TOOL_READER = PromptReader(tokenizer(TOOL_TEMPLATE), 33)


def sampling(**fields: object) -> SamplingParameters:
    return READER.read_request(pb.GenerateRequest(text="x", sampling=pb.Sampling(**fields))).sampling


def chat(*messages: dict[str, object], **fields: object) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(**message) for message in messages], **fields)


def prompt(reader: PromptReader, sent: pb.Chat, tenant: str = "") -> str:
    tokens = reader.read_prompt(pb.GenerateRequest(chat=sent, tenant=pb.Tenant(name=tenant)))
    return reader.tokenizer.decode(tokens)


def test_what_is_left_out_has_the_default() -> None:
    assert sampling() == SamplingParameters(max_new_tokens=33)


def test_every_field_of_sampling_is_read() -> None:
    read = sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=4,
        max_new_tokens=5,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={7: -100.0, 3: 0.5},
        logprobs=0,
    )
    assert read == SamplingParameters(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=4,
        max_new_tokens=5,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((3, 0.5), (7, -100.0)),
        logprobs=0,
    )
    assert {field.name for field in pb.Sampling.DESCRIPTOR.fields} == set(SamplingParameters.__dataclass_fields__)


@pytest.mark.parametrize(
    ("grammar", "first"),
    [
        (pb.Grammar(json_object=True), '{"a": 1}'),
        (pb.Grammar(json_schema='{"type": "integer"}'), "12"),
        (pb.Grammar(lark='start: "the"'), "the"),
    ],
)
def test_grammars_are_compiled_before_the_engine_sees_them(grammar: pb.Grammar, first: str) -> None:
    compiled = sampling(grammar=grammar).grammar
    assert compiled is not None
    matcher = compiled.matcher()
    for token in READER.tokenizer.encode(first):
        matcher.accept(token)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"grammar": pb.Grammar()}, "response_format: no kind"),
        ({"grammar": pb.Grammar(json_object=False)}, "response_format: no kind"),
        ({"grammar": pb.Grammar(json_schema='{"type": 3}')}, "response_format: the json_schema cannot be followed"),
        ({"grammar": pb.Grammar(json_object=True), "ignore_eos": True}, "ignore_eos"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a"] * 10_000}, "stop"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}") as caught:
        sampling(**fields)
    assert len(str(caught.value)) < 700


def test_tenants_share_by_salt() -> None:
    message = pb.GenerateRequest(text="x", tenant=pb.Tenant(name="ann", salt=b"\x01" * 64))
    assert READER.read_request(message).tenant == b"\x01" * 64
    assert READER.read_request(pb.GenerateRequest(text="x")).tenant == b""


@pytest.mark.parametrize("tenant", [pb.Tenant(name="n" * 65), pb.Tenant(name="\u00e9" * 33), pb.Tenant(salt=b"s" * 65)])
def test_long_names_and_salts_are_refused(tenant: pb.Tenant) -> None:
    for read in (READER.read_request, READER.read_prompt):
        with pytest.raises(RequestError, match=r"^tenant\.(name|salt) has 6[56] bytes"):
            read(pb.GenerateRequest(text="x", tenant=tenant))


def test_prompts_are_text_or_tokens_or_a_chat() -> None:
    assert READER.read_prompt(pb.GenerateRequest(text="the")) == READER.tokenizer.encode("the")
    assert READER.read_prompt(pb.GenerateRequest(tokens=pb.Tokens(ids=[5, 6]))) == [5, 6]
    said = chat({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(READER, said) == expected
    with pytest.raises(RequestError, match=r"^prompt: none was given"):
        READER.read_prompt(pb.GenerateRequest())


def test_bare_text_has_no_begin_token() -> None:
    from tokenizers import processors

    backend = byte_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 259)]
    )
    reader = PromptReader(
        Tokenizer(backend, eos_ids=frozenset({260}), special_tokens={}, chat_template=None, path="tiny"), 1
    )
    assert reader.read_prompt(pb.TokenizeRequest(text="the"))[0] == 259
    assert reader.read_prompt(pb.TokenizeRequest(text="the", is_bare=True)) == [257]
    assert reader.read_prompt(pb.GenerateRequest(text="the"))[0] == 259


def test_documents_of_the_tenant_open_its_chat() -> None:
    question = {"role": "user", "content": "u"}
    text = prompt(READER, chat(question, document_ids=["doc_1", "doc_1"]), "ann")
    assert text.startswith("<|im_start|>system\nDocument 1:\nOne.\n\nDocument 2:\nOne.\n\n<|im_end|>")
    for tenant, document in (("bob", "doc_1"), ("", "doc_1"), ("ann", "doc_3")):
        with pytest.raises(DocumentNotFoundError):
            prompt(READER, chat(question, document_ids=[document]), tenant)
    with pytest.raises(RequestError, match=r"^document_ids: 65 were given"):
        prompt(READER, chat(question, document_ids=["doc_1"] * (CHAT_DOCUMENTS_MAX + 1)), "ann")
    with pytest.raises(RequestError, match=r"^document_ids: this node keeps no documents"):
        prompt(TOOL_READER, chat(question, document_ids=["doc_1"]))


def test_chat_about_documents_is_noted_where_it_is_computed_and_not_where_it_is_counted() -> None:
    shelf = Shelf({("ann", "doc_1"): "One."})
    reader = PromptReader(tokenizer(), 33, shelf)
    sent = chat({"role": "user", "content": "u"}, document_ids=["doc_1"])
    tokens = reader.read_prompt(pb.TokenizeRequest(chat=sent, tenant=pb.Tenant(name="ann")))
    assert shelf.noted == []
    text = prompt(reader, sent, "ann")
    assert text == reader.tokenizer.decode(tokens)
    assert shelf.noted == [("ann", ["doc_1"], text)]
    prompt(reader, chat({"role": "user", "content": "u"}), "ann")
    assert len(shelf.noted) == 1


def test_tools_and_their_calls_reach_the_template() -> None:
    sent = chat(
        {"role": "user", "content": "u", "name": "ann"},
        {"role": "assistant", "tool_calls_json": json.dumps([CALL])},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        tools_json=json.dumps([TOOL]),
    )
    messages = [
        {"role": "user", "content": "u", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    assert prompt(TOOL_READER, sent) == json.dumps([TOOL]) + json.dumps(messages)
    plain = chat({"role": "user", "content": "u"}, tools_json="[]")
    assert prompt(TOOL_READER, plain) == json.dumps([{"role": "user", "content": "u"}])


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (chat(), "messages: none was given"),
        (chat({"role": "root", "content": "x"}), r"messages\[0\].role = 'root': must be one of"),
        (chat({"role": "r" * 10_000}), r"messages\[0\].role = "),
        (chat({"role": "user", "tool_calls_json": "[]"}), r"messages\[0\].tool_calls: only an assistant"),
        (chat({"role": "user", "tool_call_id": "c"}), r"messages\[0\].tool_call_id: only a tool"),
        (chat({"role": "assistant", "tool_calls_json": "{"}), r"messages\[0\].tool_calls: not valid JSON"),
        (
            chat({"role": "assistant", "tool_calls_json": '[{"type": "function", "function": {"name": "f"}}]'}),
            r"messages\[0\].tool_calls\[0\].function.arguments: must be an object",
        ),
        (chat({"role": "user"}, tools_json="{}"), "tools: must be a JSON array"),
        (chat({"role": "user"}, tools_json="[1]"), r"tools\[0\].type: must be 'function'"),
        (chat({"role": "user"}, tools_json='[{"type": "web"}]'), r"tools\[0\].type: must be 'function'"),
        (chat({"role": "user"}, tools_json='[{"type": "function"}]'), r"tools\[0\].function.name"),
        (chat({"role": "user"}, tools_json='[{"type": "function", "function": {"name": ""}}]'), r"tools\[0\].function"),
        (
            chat({"role": "user"}, tools_json='[{"type": "function", "function": {"name": "f", "parameters": 1}}]'),
            r"tools\[0\].function.parameters",
        ),
        (chat({"role": "user"}, tools_json="[" * 1000), "tools: nested more than 64 deep"),
        (chat({"role": "user"}, tools_json=" " * 300_000), "tools: 300000 bytes of JSON"),
        (chat({"role": "user"}, tools_json='["\\ud800"]'), "tools: not valid JSON"),
    ],
)
def test_malformed_chats_are_refused_by_the_part_that_is_wrong(sent: pb.Chat, named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}") as caught:
        prompt(TOOL_READER, sent)
    assert len(str(caught.value)) < 400


def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    with pytest.raises(RequestError, match=r"^tools: "):
        prompt(READER, chat({"role": "user"}, tools_json=json.dumps([TOOL])))


def test_tokens_are_written_with_how_likely_they_were() -> None:
    logprobs = TokenLogprobs(-0.5, ((257, -0.25), (195 + 7, -math.log(8))))
    event = TokenGenerated(REQUEST, 257, "the", logprobs)
    written = event_message(event, READER.tokenizer.token_bytes).token
    assert (written.id, written.text) == (257, "the")
    assert (written.logprobs.chosen.id, written.logprobs.chosen.logprob) == (257, -0.5)
    assert [(top.id, top.logprob, top.text) for top in written.logprobs.top] == [
        (token, logprob, READER.tokenizer.token_bytes(token)) for token, logprob in logprobs.top
    ]
    plain = event_message(TokenGenerated(REQUEST, 257, ""), READER.tokenizer.token_bytes)
    assert not plain.token.HasField("logprobs")


def test_the_end_is_written_with_all_that_was_counted() -> None:
    statistics = RequestStatistics(
        prompt_tokens=9,
        cached_tokens={Tier.HOST: 4, Tier.NVME: 0},
        generated_tokens=3,
        waiting_ns=1,
        prefill_ns=2,
        time_to_first_token_ns=5,
        inter_token_ns=(4, 8),
        recall=0.5,
        attended_fraction=0.25,
        recomputed_tokens=2,
    )
    usage = event_message(Finished(REQUEST, FinishReason.LENGTH, statistics), READER.tokenizer.token_bytes)
    read = usage.finished.usage
    assert usage.finished.reason == pb.FINISH_REASON_LENGTH
    assert [found.tokens for found in read.cached_tokens] == [4]
    assert (read.prompt_tokens, read.generated_tokens, read.waiting_ns, read.prefill_ns) == (9, 3, 1, 2)
    assert (read.time_to_first_token_ns, read.inter_token_ns_mean, read.inter_token_ns_max) == (5, 6, 8)
    assert (read.recall, read.attended_fraction, read.recomputed_tokens) == (0.5, 0.25, 2)
    assert {field.name for field in read.DESCRIPTOR.fields} == {field.name for field, _ in read.ListFields()}


def test_progress_is_written_and_failures_have_no_message() -> None:
    written = event_message(PrefillProgress(REQUEST, 3, 2, 9), READER.tokenizer.token_bytes).progress
    assert (written.done_tokens, written.cached_tokens, written.prompt_tokens) == (3, 2, 9)
    with pytest.raises(InternalError, match="Failed has no message"):
        event_message(Failed(REQUEST, RequestError("x")), READER.tokenizer.token_bytes)


def test_an_answer_without_a_length_has_what_its_prompt_leaves() -> None:
    reader = PromptReader(tokenizer(), None, room_tokens=10_000)
    tokens = pb.Tokens(ids=[1] * 100)
    assert reader.read_request(pb.GenerateRequest(tokens=tokens)).sampling.max_new_tokens == 9_900
    assert reader.default_length(20_000, pb.Tenant()) == 1
    limited = pb.Tenant(name="a", tokens_per_minute=100_000)
    assert reader.default_length(100, limited) == 4096
    limited.tokens_per_minute = 1_100
    assert reader.default_length(100, limited) == 1_000
    assert reader.default_length(100, limited, answers=4) == 250
    asked = pb.GenerateRequest(tokens=tokens, sampling=pb.Sampling(max_new_tokens=7))
    assert reader.read_request(asked).sampling.max_new_tokens == 7
    assert PromptReader(tokenizer(), 33, room_tokens=10_000).default_length(100, limited) == 33


def test_an_admitted_answer_is_no_longer_than_was_admitted() -> None:
    reader = PromptReader(tokenizer(), None)
    message = pb.GenerateRequest(admitted=pb.AdmittedPrompt(id=b"x"))
    asked = reader.read_request(message, prompt=(1, 2), length_max=5)
    assert (asked.prompt, asked.sampling.max_new_tokens) == ((1, 2), 5)
    message.sampling.max_new_tokens = 6
    with pytest.raises(RequestError, match="5 were admitted"):
        reader.read_request(message, prompt=(1, 2), length_max=5)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (pb.AdmitRequest(answers=1), "prompts = 0"),
        (pb.AdmitRequest(prompts=[pb.GenerateRequest(text="x")]), "answers = 0"),
        (pb.AdmitRequest(prompts=[pb.GenerateRequest(text="x")], answers=17), "answers = 17"),
        (pb.AdmitRequest(prompts=[pb.GenerateRequest(text="x")], answers=1, max_new_tokens=0), "max_new_tokens = 0"),
        (pb.AdmitRequest(prompts=[pb.GenerateRequest(text="x")], answers=1, tenant=pb.Tenant(name="a")), "tenant"),
    ],
)
def test_an_admission_is_checked_before_its_prompts_are_read(message: pb.AdmitRequest, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        check_admit(message)


def test_a_model_without_a_template_says_so_without_its_path() -> None:
    reader = PromptReader(tokenizer(None), 33)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    with pytest.raises(RequestError, match="no chat template") as caught:
        reader.read_prompt(pb.TokenizeRequest(chat=chat))
    assert "/" not in str(caught.value)
