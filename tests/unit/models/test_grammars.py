import contextlib
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models

from h3kv.core.errors import HostMemoryError, PeerBusyError, RequestError
from h3kv.engine.grammar import Grammar, Matcher
from h3kv.models import grammars
from h3kv.models.gguf_file import GgufFile
from h3kv.models.gguf_tokenizer import tokenizer_from_gguf
from h3kv.models.grammars import GRAMMAR_BYTES_MAX, GRAMMARS_MAX, GrammarCompiler, GrammarKind
from h3kv.models.tokenizer import Tokenizer
from h3kv.testing.tiny_gguf import write_tiny_gguf
from h3kv.testing.tiny_models import byte_tokenizer, write_tiny_model

END, OTHER_END = 260, 258
TOKENIZER = Tokenizer(
    byte_tokenizer(), eos_ids=frozenset({END, OTHER_END}), special_tokens={}, chat_template=None, path="tiny"
)
ROWS = 320
"""Of scores: a model's embedding may have more than its tokenizer."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER)


def allowed(matcher: Matcher, rows: int = ROWS) -> set[int]:
    scores_V = torch.zeros(rows)
    matcher.restrict(scores_V)
    assert set(scores_V.unique().tolist()) <= {0.0, float("-inf")}
    return set(scores_V.isfinite().nonzero().squeeze(1).tolist())


def follow(grammar: Grammar, text: str, tokenizer: Tokenizer = TOKENIZER) -> Matcher:
    matcher = grammar.matcher()
    for token in tokenizer.encode(text):
        assert token in allowed(matcher)
        matcher.accept(token)
    return matcher


def test_only_what_may_come_next_keeps_its_score(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarKind.LARK, 'start: "a" /[0-9]+/ "the"?')
    assert isinstance(grammar, Grammar)
    assert allowed(grammar.matcher()) == set(TOKENIZER.encode("a"))
    digits = {TOKENIZER.encode(digit)[0] for digit in "0123456789"}
    assert allowed(follow(grammar, "a")) == digits
    after = allowed(follow(grammar, "a1"))
    assert after == digits | {END, OTHER_END} | {TOKENIZER.encode(text)[0] for text in ("t", "th", "the")}


def test_end_tokens_alone_follow_a_whole_answer(compiler: GrammarCompiler) -> None:
    matcher = follow(compiler.compile(GrammarKind.JSON_OBJECT), '{"a": [1, "x\u00e9"]}')
    assert allowed(matcher) == {END, OTHER_END}
    matcher.accept(END)


def test_scores_are_changed_in_place_whatever_their_number(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarKind.LARK, "start: /[a-z]/")
    fewer = allowed(grammar.matcher(), rows=257)
    assert fewer == {token for token in allowed(grammar.matcher()) if token < 257}
    scores_V = torch.arange(ROWS, dtype=torch.float32)
    grammar.matcher().restrict(scores_V)
    assert all(scores_V[token] == token for token in fewer)


def test_answers_of_one_grammar_do_not_see_each_other(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarKind.LARK, 'start: "ab"')
    first = follow(grammar, "a")
    assert allowed(grammar.matcher()) == set(TOKENIZER.encode("a"))
    assert allowed(first) == set(TOKENIZER.encode("b"))


def test_white_space_ends(compiler: GrammarCompiler) -> None:
    matcher = follow(compiler.compile(GrammarKind.JSON_OBJECT), "{" + "\n" * 63)
    space = TOKENIZER.encode("\n")[0]
    assert space in allowed(matcher)
    matcher.accept(space)
    assert allowed(matcher) == {TOKENIZER.encode(text)[0] for text in '}"'}


def test_a_token_that_may_not_come_is_an_error_from_then_on(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GrammarKind.JSON_OBJECT).matcher()
    with pytest.raises(RequestError, match="response_format: the answer cannot go on by its grammar"):
        matcher.accept(TOKENIZER.encode("x")[0])
    with pytest.raises(RequestError, match="response_format"):
        matcher.restrict(torch.zeros(ROWS))


def test_grammar_that_grows_too_complex_ends_its_own_request_alone(compiler: GrammarCompiler) -> None:
    # Any of these may come first.
    properties: dict[str, object] = {f"p{number}": {} for number in range(300)}
    grammar = compiler.compile(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": properties}))
    with pytest.raises(RequestError, match=r"response_format: .*simplify the grammar"):
        follow(grammar, "{")
    assert TOKENIZER.encode("{")[0] in allowed(grammar.matcher())


def nested(depth: int) -> str:
    return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "objekt"}', "objekt"),
        (GrammarKind.JSON_SCHEMA, '{"type": ', "not valid JSON"),
        (GrammarKind.JSON_SCHEMA, "", "not valid JSON"),
        (GrammarKind.JSON_SCHEMA, "[1]", "must be a JSON object"),
        (GrammarKind.JSON_SCHEMA, "true", "must be a JSON object"),
        (GrammarKind.JSON_SCHEMA, '{"maximum": NaN}', "no number of JSON"),
        (GrammarKind.JSON_SCHEMA, '{"const": "\\ud800"}', "not valid JSON"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "nowhere"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1/schema"}', "127.0.0.1"),
        (GrammarKind.JSON_SCHEMA, '{"not": {}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"not": {}, "x-guidance": {"lenient": true}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"enum": []}', "Unsatisfiable"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "("}', "regex"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        (GrammarKind.JSON_SCHEMA, nested(65), "nested more than 64 deep"),
        (GrammarKind.JSON_SCHEMA, "[" * 60_000, "nested more than 64 deep"),
        (GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["x" * GRAMMAR_BYTES_MAX]}), "bytes; up to 65536"),
        (GrammarKind.LARK, "start: nowhere", "nowhere"),
        (GrammarKind.LARK, "begin: /a/", "start"),
        (GrammarKind.LARK, "start: /(/", "regex"),
        (GrammarKind.LARK, 'start: "\ud800"', "UTF-8"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_reason(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=r"^response_format: ") as caught:
        compiler.compile(kind, text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_schema_as_deep_as_allowed_is_followed(compiler: GrammarCompiler) -> None:
    compiler.compile(GrammarKind.JSON_SCHEMA, nested(64))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": f"[a-z]{{{number},}}"} for number in range(20)]},
        {"allOf": [{"anyOf": [{"type": "object", "properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(9)]},
        {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
        {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
        {"enum": [f"value {number}" for number in range(3000)]},
        {"type": "object", "properties": {f"property {number}": {"type": "string"} for number in range(1500)}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    ],
    ids=["intersection", "product", "repetitions", "items", "values", "properties", "cycle"],
)
@pytest.mark.timeout(60)
def test_hard_schemas_are_compiled_or_refused_but_never_hang(
    compiler: GrammarCompiler, schema: dict[str, object]
) -> None:
    with contextlib.suppress(RequestError):
        allowed(compiler.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema)).matcher())


def test_grammars_are_kept_by_their_text(compiler: GrammarCompiler) -> None:
    kept = compiler.compile(GrammarKind.JSON_SCHEMA, "{}")
    assert compiler.compile(GrammarKind.JSON_SCHEMA, "{}") is kept
    assert compiler.compile(GrammarKind.LARK, "start: /a/") is not kept
    for number in range(GRAMMARS_MAX):
        compiler.compile(GrammarKind.JSON_SCHEMA, f'{{"const": {number}}}')
    assert compiler.compile(GrammarKind.JSON_SCHEMA, "{}") is not kept


def test_grammar_of_one_tenant_is_not_found_by_another(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, refused = '{"const": "of ann"}', '{"type": "string", "pattern": "(?=a)of ann"}'
    kept = compiler.compile(GrammarKind.JSON_SCHEMA, text, tenant=b"ann")
    with pytest.raises(RequestError, match="look-around"):
        compiler.compile(GrammarKind.JSON_SCHEMA, refused, tenant=b"ann")
    assert compiler.compile(GrammarKind.JSON_SCHEMA, text, tenant=b"ann") is kept
    assert compiler.compile(GrammarKind.JSON_SCHEMA, text, tenant=b"bob") is not kept
    # Trying it needs this.
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(HostMemoryError):
        compiler.compile(GrammarKind.JSON_SCHEMA, refused, tenant=b"bob")


def test_tenant_with_many_grammars_pushes_out_its_own(compiler: GrammarCompiler) -> None:
    kept = compiler.compile(GrammarKind.JSON_OBJECT, tenant=b"ann")
    for number in range(GRAMMARS_MAX + 4):
        compiler.compile(GrammarKind.JSON_SCHEMA, f'{{"const": {number}}}', tenant=b"bob")
    assert compiler.compile(GrammarKind.JSON_OBJECT, tenant=b"ann") is kept


def test_what_was_refused_is_not_tried_again(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"type": "string", "pattern": "(?=a)again"}'
    with pytest.raises(RequestError, match="look-around") as first:
        compiler.compile(GrammarKind.JSON_SCHEMA, text)
    # Trying it would need this.
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(RequestError) as second:
        compiler.compile(GrammarKind.JSON_SCHEMA, text)
    assert str(second.value) == str(first.value)


def test_requests_that_wait_for_a_long_row_of_grammars_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "WAIT_S_MAX", 0.01)
    compiler = GrammarCompiler(TOKENIZER)
    kept = compiler.compile(GrammarKind.JSON_OBJECT)
    with compiler._compiling:
        with pytest.raises(PeerBusyError, match="repeat it later"):
            compiler.compile(GrammarKind.JSON_SCHEMA, "{}")
        assert compiler.compile(GrammarKind.JSON_OBJECT) is kept
    with contextlib.ExitStack() as waiting:
        for _ in range(grammars.WAITERS_MAX // 2):
            waiting.enter_context(compiler._waiter(b"ann"))
        with pytest.raises(PeerBusyError, match="4 grammars of the tenant"):
            compiler.compile(GrammarKind.JSON_SCHEMA, "{}", tenant=b"ann")
        compiler.compile(GrammarKind.JSON_SCHEMA, "{}", tenant=b"bob")
        for _ in range(grammars.WAITERS_MAX // 2):
            waiting.enter_context(compiler._waiter(b""))
        with pytest.raises(PeerBusyError, match="wait to be compiled"):
            compiler.compile(GrammarKind.JSON_SCHEMA, "{}")
    compiler.compile(GrammarKind.JSON_SCHEMA, "{}", tenant=b"ann")


def test_compiling_in_many_threads_gives_what_one_gives(compiler: GrammarCompiler) -> None:
    failures: list[str] = []

    def compile_all() -> None:
        for number in range(30):
            matcher = compiler.compile(GrammarKind.JSON_SCHEMA, f'{{"const": {number}}}').matcher()
            if allowed(matcher) != {TOKENIZER.encode(str(number)[0])[0]}:
                failures.append(str(number))

    threads = [threading.Thread(target=compile_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_model_without_an_end_token_cannot_follow_grammars() -> None:
    endless = Tokenizer(byte_tokenizer(), eos_ids=frozenset(), special_tokens={}, chat_template=None, path="tiny")
    with pytest.raises(RequestError, match=r"response_format: this model cannot follow grammars .*no end token"):
        GrammarCompiler(endless).compile(GrammarKind.JSON_OBJECT)


def test_tokenizer_that_the_library_does_not_know_is_named_only_when_it_matters() -> None:
    backend = Pipeline(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    unknown = Tokenizer(backend, eos_ids=frozenset({99}), special_tokens={}, chat_template=None, path="tiny")
    compiler = GrammarCompiler(unknown)
    with pytest.raises(RequestError, match="response_format: this model cannot follow grammars"):
        compiler.compile(GrammarKind.JSON_OBJECT)


def test_gguf_models_follow_grammars_as_folders_do(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "folder"))
    tokenizer = tokenizer_from_gguf(GgufFile(tmp_path / "model.gguf"))
    grammar = GrammarCompiler(tokenizer).compile(GrammarKind.JSON_OBJECT)
    assert allowed(follow(grammar, '{"the": "\u00e9"}', tokenizer)) == tokenizer.eos_ids


def test_sentencepiece_models_follow_grammars(tmp_path: Path) -> None:
    pieces = {"\u2581": -9.0, "{": -8.0, '{"': -7.0, "a": -2.0, '"}': -3.0, "\u2581a": -1.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "folder"), metadata=metadata)
    tokenizer = tokenizer_from_gguf(GgufFile(tmp_path / "model.gguf"))
    grammar = GrammarCompiler(tokenizer).compile(GrammarKind.LARK, 'start: "{" /[a ]/ "a"')
    opening = allowed(grammar.matcher())
    assert {tokenizer.token_bytes(token) for token in opening} == {b"{"}
    matcher = grammar.matcher()
    matcher.accept(min(opening))
    assert {tokenizer.token_bytes(token) for token in allowed(matcher)} == {b"a", b" ", b" a"}
