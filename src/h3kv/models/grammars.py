"""Compiles what an answer must be, JSON of some schema or text of a grammar, with llguidance.

Shapes: V vocabulary.
"""

from __future__ import annotations

import contextlib
import enum
import json
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Final, TypeVar

import llguidance
import numpy as np
import torch
from torch import Tensor

from h3kv.core.errors import HostMemoryError, InternalError, PeerBusyError, RequestError
from h3kv.models import grammar_probe
from h3kv.models.json_text import read_json
from h3kv.models.tokenizer import Tokenizer

GRAMMAR_BYTES_MAX: Final = 64 << 10
"""Of a schema or grammar. One of this size with thousands of properties compiles for half a second."""

GRAMMAR_DEPTH_MAX: Final = 64
"""Of arrays and objects within one another in a schema. The library itself refuses more than twice as many."""

GRAMMARS_MAX: Final = 64
"""Compiled grammars that are kept: requests repeat few of them. As many refusals are kept, which cost as much."""

WAITERS_MAX: Final = 8
"""Requests that wait for their grammars to be compiled: more would only wait longer. One tenant gets half of them."""

WAIT_S_MAX: Final = 10.0
"""How long each of them does."""

PROBE_S_MAX: Final = 30
"""For the probe to end by its limits, on a machine that has much else to do."""

REASON_CHARACTERS: Final = 500
"""Of the library's reason for a refusal: messages travel in the trailers of a call, which have a bound."""

_HARD_KEYWORDS: Final = ("allOf", "format", "multipleOf", "pattern", "patternProperties", "propertyNames")
"""Those of JSON schemas that become regular expressions, whose intersections may take forever to compile. All others
compile in time that grows with their number."""

_WHITESPACE: Final = r"[ \t\r\n]{0,64}"
"""Between two tokens of JSON. With a bound, a model that writes nothing else comes to its end."""


_Value = TypeVar("_Value")


class GrammarKind(enum.StrEnum):
    """How a grammar is written."""

    JSON_OBJECT = "json_object"
    """Any JSON object: there is no text."""
    JSON_SCHEMA = "json_schema"
    LARK = "lark"


_Key = tuple[bytes, GrammarKind, str]
"""Whose a grammar is, how it is written, and its text."""


class GrammarMatcher:
    """Follows one answer; see `engine.grammar.Matcher`.

    Args:
        matcher: owned by this object.
        vocabulary_size: of its tokenizer.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary_size: int) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        # One bit for each token, the lowest first.
        self._allowed = np.zeros((vocabulary_size + 31) // 32, dtype=np.uint32)

    def restrict(self, scores_V: Tensor) -> None:
        """See `engine.grammar.Matcher`. Cost: often 0.1 ms, seldom more than 10."""
        self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        # The library lets a matcher that has failed end its answer: that would look like a whole one.
        self._check()
        bits = np.unpackbits((~self._allowed).view(np.uint8), bitorder="little", count=self._vocabulary_size)
        known_V = scores_V[: self._vocabulary_size]
        known_V.masked_fill_(torch.from_numpy(bits).bool()[: len(known_V)], float("-inf"))
        # Rows of the model's embedding that no token has.
        scores_V[self._vocabulary_size :] = float("-inf")

    def accept(self, token: int) -> None:
        """See `engine.grammar.Matcher`."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"response_format: the answer cannot go on by its grammar ({_line(self._matcher.get_error())}); "
                "simplify the grammar"
            )


class CompiledGrammar:
    """A grammar for one tokenizer; see `engine.grammar.Grammar`.

    Args:
        start: at the beginning of an answer. Never advanced.
        vocabulary_size: of its tokenizer.
    """

    def __init__(self, start: llguidance.LLMatcher, vocabulary_size: int) -> None:
        self._start = start
        self._vocabulary_size = vocabulary_size

    def matcher(self) -> GrammarMatcher:
        """See `engine.grammar.Grammar`."""
        return GrammarMatcher(self._start.deep_copy(), self._vocabulary_size)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps those it was asked for last. Thread-safe.

    Args:
        tokenizer: of the model.

    Cost: its vocabulary is read once: half a second for 50,000 tokens, in which no other Python code runs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary, self._problem = _vocabulary(tokenizer)
        self._limits = grammar_probe.limits()
        # Held while one is compiled, which takes one core at most: others compute answers.
        self._compiling = threading.Lock()
        self._keeping = threading.Lock()
        self._waiting: Counter[bytes] = Counter()
        self._kept: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[_Key, str] = OrderedDict()

    def compile(self, kind: GrammarKind, text: str = "", *, tenant: bytes = b"") -> CompiledGrammar:
        """What makes matchers of a grammar.

        Args:
            kind: how it is written.
            text: a JSON schema or a grammar in Lark's notation.
            tenant: its salt. How long this takes tells nobody what another tenant asked for.

        Raises:
            RequestError: it is too large, too complex or not valid, needs what the library has not, or the model has no
                end token.
            PeerBusyError: too many others are compiled before it, or the machine has too much else to do.
            HostMemoryError: the system has no room for the process that tries it.

        Cost: milliseconds for most schemas, 0.1 s for those with patterns and the like, up to seconds at the limits;
        nothing where the tenant asked for it before. Other Python code runs meanwhile.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError("response_format: the grammar is not UTF-8 text; correct it") from error
        if size > GRAMMAR_BYTES_MAX:
            raise RequestError(f"response_format: the grammar has {size} bytes; up to {GRAMMAR_BYTES_MAX} are allowed")
        if self._vocabulary is None:
            raise RequestError(f"response_format: this model cannot follow grammars ({self._problem}); leave it out")
        key = (tenant, kind, text)
        found = self._find(key)
        if found is not None:
            return found
        with self._waiter(tenant):
            if not self._compiling.acquire(timeout=WAIT_S_MAX):
                raise _busy(f"others were compiled for {WAIT_S_MAX:.0f} s before it")
            try:
                # Whoever was before may have wanted the same.
                return self._find(key) or self._try(key, self._vocabulary)
            finally:
                self._compiling.release()

    @contextlib.contextmanager
    def _waiter(self, tenant: bytes) -> Iterator[None]:
        """A place among those who wait. Raises PeerBusyError where there is none."""
        with self._keeping:
            mine = self._waiting[tenant]
            if self._waiting.total() >= WAITERS_MAX or (tenant and mine >= WAITERS_MAX // 2):
                raise _busy(f"{mine} grammars of the tenant, and {self._waiting.total()} of all, wait to be compiled")
            self._waiting[tenant] += 1
        try:
            yield
        finally:
            with self._keeping:
                self._waiting[tenant] -= 1
                if not self._waiting[tenant]:
                    del self._waiting[tenant]

    def _find(self, key: _Key) -> CompiledGrammar | None:
        """One that was asked for lately. Raises RequestError where it was refused then."""
        with self._keeping:
            if (reason := self._refused.get(key)) is not None:
                self._refused.move_to_end(key)
                raise RequestError(reason)
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
            return found

    def _try(self, key: _Key, vocabulary: llguidance.LLTokenizer) -> CompiledGrammar:
        """Compile one, and keep what comes of it: it may be asked for again."""
        _, kind, text = key
        try:
            compiled = self._compile(kind, text, vocabulary)
        except RequestError as error:
            with self._keeping:
                _keep(self._refused, key, str(error))
            raise
        with self._keeping:
            _keep(self._kept, key, compiled)
        return compiled

    def _compile(self, kind: GrammarKind, text: str, vocabulary: llguidance.LLTokenizer) -> CompiledGrammar:
        grammar = _grammar(kind, text)
        if kind is GrammarKind.LARK or any(f'"{keyword}"' in grammar for keyword in _HARD_KEYWORDS):
            _probe(grammar)
        start = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=self._limits)
        # What the first mask needs is made here once, and not for each answer.
        start.compute_bitmask()
        if start.is_error():
            reason = _line(start.get_error())
            raise RequestError(f"response_format: the {kind.value} cannot be followed ({reason}); change it")
        return CompiledGrammar(start, vocabulary.vocab_size)


def _keep(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Keep one more, and forget what was asked for longest ago by whoever has most."""
    kept[key] = value
    if len(kept) > GRAMMARS_MAX:
        counts = Counter(tenant for tenant, _, _ in kept)
        most = max(counts.values())
        del kept[next(each for each in kept if counts[each[0]] == most)]


def _busy(reason: str) -> PeerBusyError:
    return PeerBusyError(f"response_format: the grammar was not compiled ({reason}): repeat it later", peer="grammars")


def _vocabulary(tokenizer: Tokenizer) -> tuple[llguidance.LLTokenizer | None, str]:
    """The tokenizer as the library has it; None with the reason where it cannot."""
    if not tokenizer.eos_ids:
        return None, "it names no end token"
    try:
        return llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=sorted(tokenizer.eos_ids)), ""
    except ValueError as error:
        return None, _line(str(error))


def _grammar(kind: GrammarKind, text: str) -> str:
    if kind is GrammarKind.LARK:
        return llguidance.LLMatcher.grammar_from_lark(text)
    schema: object = {"type": "object"}
    if kind is GrammarKind.JSON_SCHEMA:
        schema = read_json(text, field="response_format", depth_max=GRAMMAR_DEPTH_MAX)
    if not isinstance(schema, dict):
        raise RequestError("response_format: the json_schema must be a JSON object")
    # Said last, so that a schema's own options change neither: no keyword is ignored.
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"lenient": False, "whitespace_pattern": _WHITESPACE}
    )


def _probe(grammar: str) -> None:
    """Compile in a process that has limits of its own. What ends there within them does so here."""
    command = [sys.executable, "-P", grammar_probe.__file__]
    try:
        # The command is this package's own; the grammar is its input.
        ended = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=PROBE_S_MAX, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        # Its limits are of processor time: it did not get any.
        raise _busy(f"trying it took longer than {PROBE_S_MAX} s") from error
    except OSError as error:
        message = f"a grammar could not be tried in a process of its own ({error}): free memory or processes"
        raise HostMemoryError(message, needed_bytes=None, available_bytes=None) from error
    code, said = ended.returncode, ended.stderr.decode(errors="replace")
    if code > 0:
        raise InternalError(f"the probe of a grammar failed ({_line(said[-REASON_CHARACTERS:])}): report it")
    if code < 0:
        raise RequestError("response_format: the grammar takes too long to compile; use fewer or simpler patterns")


def _line(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= REASON_CHARACTERS else f"{line[:REASON_CHARACTERS]}..."
