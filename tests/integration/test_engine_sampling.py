"""Grammars, penalties and logprobs through the whole engine, beside requests that want none of it."""

import json
import math
from collections.abc import Iterator

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from h3kv.core.errors import RequestError
from h3kv.engine.events import Failed, Finished, TokenGenerated
from h3kv.engine.request import Request, RequestId, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.models.grammars import GrammarCompiler, GrammarKind
from h3kv.models.tokenizer import Tokenizer, byte_of_letter
from h3kv.testing.engines import END_TOKEN, Rig, make_rig, one_thread, prompt_tokens

CLOSING = tuple((token, 6.0) for token in (*b'"}', END_TOKEN))
"""A random model finds the end of its answer sooner so."""


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """For the engine's vocabulary: a token is a byte, and one is the end."""
    backend = tokenizers.Tokenizer(models.BPE(dict(byte_of_letter()), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(
        backend, eos_ids=frozenset({END_TOKEN}), special_tokens={}, chat_template=None, path="one token for each byte"
    )
    assert tokenizer.encode("{\u00e9") == list("{\u00e9".encode())
    return GrammarCompiler(tokenizer)


def run(rig: Rig, *requests: Request) -> list[tuple[list[TokenGenerated], Finished | Failed]]:
    """Tokens and end of requests that run side by side."""
    order: list[RequestId] = [rig.engine.submit(request) for request in requests]
    tokens: dict[RequestId, list[TokenGenerated]] = {request: [] for request in order}
    ends: dict[RequestId, Finished | Failed] = {}
    while rig.engine.has_work:
        for event in rig.engine.step():
            match event:
                case TokenGenerated():
                    tokens[event.request].append(event)
                case Finished() | Failed():
                    ends[event.request] = event
    rig.check_idle()
    return [(tokens[request], ends[request]) for request in order]


def request(number: int, **sampling: object) -> Request:
    return Request(prompt=tuple(prompt_tokens(number, 60)), sampling=SamplingParameters(**sampling))


def numbers(tokens: list[TokenGenerated]) -> list[int]:
    return [event.token for event in tokens]


def test_answers_follow_their_grammar_beside_others_that_have_none(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 200}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = compiler.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    plain = request(1, max_new_tokens=30, ignore_eos=True)
    asked = [
        request(seed, max_new_tokens=400, temperature=temperature, seed=seed, grammar=grammar, logit_bias=CLOSING)
        for seed, temperature in ((2, 0.0), (3, 1.0), (4, 2.0))
    ]
    alone, _ = run(make_rig(), plain)[0]
    (beside, _), *constrained = run(make_rig(), plain, *asked)
    assert numbers(beside) == numbers(alone)
    for tokens, end in constrained:
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.STOP
        said = json.loads("".join(event.text for event in tokens))
        assert set(said) == {"name", "age"}
        assert isinstance(said["age"], int)


def test_length_and_stop_strings_end_an_answer_before_its_grammar_does(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarKind.LARK, 'start: "one two three"')
    (short, at_length), (cut, at_stop) = run(
        make_rig(),
        request(2, grammar=grammar, max_new_tokens=5),
        request(3, grammar=grammar, stop=(" three",)),
    )
    assert isinstance(at_length, Finished) and at_length.reason is FinishReason.LENGTH
    assert isinstance(at_stop, Finished) and at_stop.reason is FinishReason.STOP
    assert "".join(event.text for event in short) == "one t"
    assert "".join(event.text for event in cut) == "one two"


def test_grammar_that_becomes_too_complex_fails_its_own_request_alone(compiler: GrammarCompiler) -> None:
    optional = {"type": "object", "properties": {f"p{number}": {} for number in range(300)}}
    grammar = compiler.compile(GrammarKind.JSON_SCHEMA, json.dumps(optional))
    plain = request(1, max_new_tokens=10, ignore_eos=True)
    (tokens, _), (_, failed) = run(make_rig(), plain, request(2, grammar=grammar))
    assert numbers(tokens) == numbers(run(make_rig(), plain)[0][0])
    assert isinstance(failed, Failed) and isinstance(failed.error, RequestError)
    assert "response_format" in str(failed.error)


def test_logprobs_change_no_token_and_neither_do_other_requests() -> None:
    plain = request(1, max_new_tokens=12, ignore_eos=True)
    asking = request(1, max_new_tokens=12, ignore_eos=True, logprobs=3)
    expected, _ = run(make_rig(), plain)[0]
    alone, _ = run(make_rig(), asking)[0]
    (beside, _), _ = run(make_rig(), asking, request(5, max_new_tokens=20, temperature=1.0))
    assert numbers(alone) == numbers(beside) == numbers(expected)
    assert all(event.logprobs is None for event in expected)
    for event, same in zip(alone, beside, strict=True):
        assert event.logprobs is not None and same.logprobs is not None
        assert event.logprobs.logprob == pytest.approx(same.logprobs.logprob, abs=1e-4)
        assert event.logprobs.top[0] == (event.token, event.logprobs.logprob)
        assert 0 < sum(math.exp(logprob) for _, logprob in event.logprobs.top) <= 1


def test_penalties_count_the_tokens_of_their_own_request() -> None:
    asking = request(1, max_new_tokens=60, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0)
    alone, _ = run(make_rig(), asking)[0]
    (beside, _), (other, _) = run(make_rig(), asking, asking)
    assert numbers(alone) == numbers(beside) == numbers(other)
    plain, _ = run(make_rig(), request(1, max_new_tokens=60, ignore_eos=True))[0]
    assert len(set(numbers(alone))) > len(set(numbers(plain)))


def test_special_tokens_are_named_in_the_text_only_where_they_are_wanted() -> None:
    """The one special token is also the end, so that it is met within an answer only where ends are ignored."""
    asked = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0, "logit_bias": ((END_TOKEN, 5.0),)}
    (skipped, _), (named, _) = run(
        make_rig(),
        request(1, **asked),
        request(1, **asked, skip_special_tokens=False),
    )
    assert numbers(skipped) == numbers(named)
    ends = numbers(named).count(END_TOKEN)
    assert 0 < ends < 40
    text = "".join(event.text for event in named)
    assert text.count("<end>") == ends
    assert "".join(event.text for event in skipped) == text.replace("<end>", "")


def test_bias_outside_the_vocabulary_is_refused_before_it_runs() -> None:
    rig = make_rig()
    with pytest.raises(RequestError, match="logit_bias = 257"):
        rig.engine.submit(request(1, logit_bias=((END_TOKEN + 1, 1.0),)))
    rig.check_idle()
