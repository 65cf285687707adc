"""Questions whose answer stands somewhere in a long context: passkeys, one needle of several, key-value lines, facts.

    context   | head | filler ... needle ... filler |     ends where a full segment does
    question  | question | beginning of the answer |
    answer    | " 48213" |

Plain text without a chat template, and the answer's beginning is given, so that the model need only copy: small models
know how to do that when they know little else. The filler is real text; facts are made up, so that no model knows them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from h3kv.core.errors import ConfigError
from h3kv.models.tokenizer import Tokenizer
from h3kv.quality.facts import ADJECTIVES, FACTS, NAMES, NOUNS, Fact

KEY_LOW, KEY_HIGH = 10_000, 100_000
"""Keys have five digits."""


class Kind(enum.StrEnum):
    """Of a task, as in metrics."""

    PASSKEY = "passkey"
    """One key in filler."""
    NEEDLES = "needles"
    """Several names with a key each, one of them asked."""
    LINES = "lines"
    """Nothing but lines of key and value, one of them asked."""
    QUESTIONS = "questions"
    """Facts inside a document, asked in words."""


HEADS: Final = {
    Kind.PASSKEY: "There is an important pass key hidden in this text. Remember it.\n\n",
    Kind.NEEDLES: "There are important pass keys of several towns hidden in this text. Remember them.\n\n",
    Kind.LINES: "This is a list of names with a number each. Remember them.\n\n",
    Kind.QUESTIONS: "There are notes on several towns in this text. Remember them.\n\n",
}


@dataclass(frozen=True, slots=True)
class Question:
    """One trial."""

    tokens: tuple[int, ...]
    """From behind the context to the beginning of the answer."""
    answer: tuple[int, ...]
    """What must be the likeliest continuation, token by token."""
    depth: float
    """Where the answer stands, from 0 at the context's beginning to 1 at its end."""


@dataclass(frozen=True, slots=True)
class Task:
    """One context and what is asked of it."""

    kind: Kind
    context: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A text to hide, and the question that asks for it."""

    text: str
    ask: str
    begin: str
    answer: str


class TaskMaker:
    """Makes tasks of one model over one filler. Equal seeds give equal tasks.

    Args:
        tokenizer: of the model.
        filler: tokens of real text.
        seed: of keys, names and facts.
    """

    def __init__(self, tokenizer: Tokenizer, filler: Sequence[int], *, seed: int) -> None:
        self._tokenizer = tokenizer
        self._filler = filler
        self._chance = np.random.default_rng(seed)

    def passkeys(self, tokens: int, *, depths: int) -> list[Task]:
        """One task for each depth, evenly from the beginning to the end."""
        return [self._hide(Kind.PASSKEY, [self._passkey()], tokens, [depth]) for depth in np.linspace(0, 1, depths)]

    def needles(self, tokens: int, *, keys: int, contexts: int) -> list[Task]:
        """Contexts with so many keys each, all of them asked one by one."""
        return [
            self._hide(Kind.NEEDLES, [self._needle(name) for name in self._names(keys)], tokens, _spread(keys))
            for _ in range(contexts)
        ]

    def facts(self, tokens: int, *, facts: int, contexts: int) -> list[Task]:
        """Contexts with so many facts each, all of them asked."""
        tasks = []
        for _ in range(contexts):
            kinds = [FACTS[int(index)] for index in self._chance.permutation(len(FACTS))[:facts]]
            placed = [self._fact(kind, name) for kind, name in zip(kinds, self._names(facts), strict=True)]
            tasks.append(self._hide(Kind.QUESTIONS, placed, tokens, _spread(facts)))
        return tasks

    def lines(self, tokens: int, *, asked: int, contexts: int) -> list[Task]:
        """Contexts of lines `amber falcon: 90417`, some of them asked."""
        return [self._make_lines(tokens, asked) for _ in range(contexts)]

    def _make_lines(self, tokens: int, asked: int) -> Task:
        head = self._tokenizer.encode(HEADS[Kind.LINES])
        pairs: list[tuple[str, int]] = []
        lines: list[list[int]] = []
        for place in self._chance.permutation(len(ADJECTIVES) * len(NOUNS)):
            name = f"{ADJECTIVES[int(place) % len(ADJECTIVES)]} {NOUNS[int(place) // len(ADJECTIVES)]}"
            value = self._key()
            line = self._tokenizer.encode(f"{name}: {value}\n")
            if len(head) + sum(map(len, lines)) + len(line) > tokens:
                break
            pairs.append((name, value))
            lines.append(line)
        room = tokens - len(head) - sum(map(len, lines))
        context = [*head, *self._filler[:room], *(token for line in lines for token in line)]
        # In the middle of each of as many equal parts.
        chosen = [pairs[int(depth * len(pairs))] for depth in _spread(asked)]
        placed = [_Placed("", f"What is the number of {name}?", f"{name}:", f" {value}") for name, value in chosen]
        questions = [self._question(one, depth) for one, depth in zip(placed, _spread(asked), strict=True)]
        return Task(Kind.LINES, tuple(context), tuple(questions))

    def _hide(self, kind: Kind, placed: Sequence[_Placed], tokens: int, depths: Sequence[float]) -> Task:
        """A context of exactly so many tokens with these texts at these depths of the filler."""
        head = self._tokenizer.encode(HEADS[kind])
        hidden = [self._tokenizer.encode(one.text) for one in placed]
        room = tokens - len(head) - sum(map(len, hidden))
        if room < 0 or room > len(self._filler):
            raise ConfigError(
                f"a context of {tokens:,} tokens needs {room:,} of filler, and the text has {len(self._filler):,}: "
                "give more --text",
                field="text",
            )
        context, used = list(head), 0
        for text, depth in zip(hidden, depths, strict=True):
            end = round(depth * room)
            context += [*self._filler[used:end], *text]
            used = end
        context += self._filler[used:room]
        questions = [self._question(one, depth) for one, depth in zip(placed, depths, strict=True)]
        return Task(kind, tuple(context), tuple(questions))

    def _question(self, placed: _Placed, depth: float) -> Question:
        tokens = self._tokenizer.encode(f"\n\n{placed.ask} {placed.begin}")
        return Question(tuple(tokens), tuple(self._tokenizer.encode(placed.answer)), float(depth))

    def _passkey(self) -> _Placed:
        key = self._key()
        text = f"\n\nHere is an important message. The pass key is {key}. Remember it. The pass key is {key}.\n\n"
        return _Placed(text, "What is the pass key?", "The pass key is", f" {key}")

    def _needle(self, name: str) -> _Placed:
        key = self._key()
        text = f"\n\nThe pass key of {name} is {key}. Remember it. The pass key of {name} is {key}.\n\n"
        return _Placed(text, f"What is the pass key of {name}?", f"The pass key of {name} is", f" {key}")

    def _fact(self, fact: Fact, name: str) -> _Placed:
        value = fact.values[int(self._chance.integers(len(fact.values)))]
        begin = fact.statement.format(name=name)
        return _Placed(
            f"\n\n{begin} {value}. Remember it. {begin} {value}.\n\n",
            fact.question.format(name=name),
            begin,
            f" {value}",
        )

    def _key(self) -> int:
        return int(self._chance.integers(KEY_LOW, KEY_HIGH))

    def _names(self, count: int) -> list[str]:
        return [NAMES[int(index)] for index in self._chance.permutation(len(NAMES))[:count]]


def _spread(count: int) -> list[float]:
    """Depths in the middle of as many equal parts."""
    return [(part + 0.5) / count for part in range(count)]
