import json

import jsonschema
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h3kv.engine.detokenizer import Detokenizer
from h3kv.engine.request import SamplingParameters
from h3kv.engine.sampling import Sampler
from h3kv.engine.stopping import FinishReason, StopRule
from h3kv.models.grammars import GrammarCompiler, GrammarKind
from h3kv.models.tokenizer import Tokenizer
from h3kv.testing.tiny_models import byte_tokenizer

END = 260
TOKENIZER = Tokenizer(byte_tokenizer(), eos_ids=frozenset({END}), special_tokens={}, chat_template=None, path="tiny")
COMPILER = GrammarCompiler(TOKENIZER)
ROWS = 264
STEPS_MAX = 3000
CLOSING = tuple((token, 4.0) for token in {END, *TOKENIZER.encode('"}]')})
"""Random scores find the end of a text or a list sooner so."""

NAMES = st.text(min_size=1, max_size=6)
LEAVES = st.sampled_from(
    [
        {"type": "string", "maxLength": 12},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a \u00e9", 3, None, [1]]},
        {"const": {"the": 'quote " and \\'}},
    ]
)


def objects(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.dictionaries(NAMES, values, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        }
    )


def arrays(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.tuples(values, st.integers(0, 2)).map(
        lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": pair[1] + 2}
    )


def choices(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(values, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


SCHEMAS = objects(st.recursive(LEAVES, lambda inner: st.one_of(objects(inner), arrays(inner), choices(inner))))


def answer(kind: GrammarKind, text: str, *, seed: int, temperature: float = 1.0) -> tuple[str, FinishReason]:
    """What a model that knows nothing says under the grammar, as the engine decodes it."""
    parameters = SamplingParameters(
        temperature=temperature,
        seed=seed,
        max_new_tokens=STEPS_MAX,
        logit_bias=CLOSING,
        grammar=COMPILER.compile(kind, text),
    )
    scores = torch.Generator().manual_seed(seed)
    sampler, rule = Sampler(parameters, prompt=(1, 2)), StopRule(parameters, TOKENIZER.eos_ids)
    detokenizer, said, reason, generated = Detokenizer(TOKENIZER.token_bytes), "", None, 0
    while reason is None:
        token = sampler.choose(2 * torch.randn(ROWS, generator=scores)).token
        generated += 1
        said += "" if rule.is_end_token(token) else detokenizer.push(token)
        reason = rule.check(token, generated=generated, stop_string_found=False)
    return said + detokenizer.finish(), reason


@settings(max_examples=40)
@given(SCHEMAS, st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_every_answer_is_valid_by_its_schema(schema: dict[str, object], seed: int, temperature: float) -> None:
    said, reason = answer(GrammarKind.JSON_SCHEMA, json.dumps(schema), seed=seed, temperature=temperature)
    assert reason is FinishReason.STOP
    jsonschema.Draft202012Validator(schema).validate(json.loads(said))


PATTERNS = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-c]{2,5}$"},
        "day": {"type": "string", "format": "date"},
        "share": {"type": "integer", "multipleOf": 7, "minimum": 3, "maximum": 100},
    },
    "required": ["code", "day", "share"],
    "additionalProperties": False,
}


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_patterns_and_formats_hold(seed: int) -> None:
    said, reason = answer(GrammarKind.JSON_SCHEMA, json.dumps(PATTERNS), seed=seed)
    assert reason is FinishReason.STOP
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(PATTERNS, format_checker=checker).validate(json.loads(said))


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_every_answer_is_an_object_where_that_is_asked_for(seed: int) -> None:
    said, reason = answer(GrammarKind.JSON_OBJECT, "", seed=seed)
    assert reason is FinishReason.STOP
    assert isinstance(json.loads(said), dict)


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_every_answer_is_a_word_of_its_grammar(seed: int) -> None:
    said, _ = answer(GrammarKind.LARK, 'start: pair\npair: "(" pair ")" | "the"', seed=seed)
    assert said == "(" * (len(said) // 2 - 1) + "the" + ")" * (len(said) // 2 - 1)
