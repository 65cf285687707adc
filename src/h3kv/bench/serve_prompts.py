"""What servers are asked: prompts that share nothing, a document with questions, chats that go on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from h3kv.bench.serve_client import Ask

WORDS: Final = ("north", "sea", "old", "stone", "river", "light", "ship", "seven", "garden", "winter", "road", "hand")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Draws prompts: the same ones for the same seed.

    Args:
        vocabulary: token numbers lie below it.
        seed: of all of them.
    """

    vocabulary: int
    seed: int = 0

    def tokens(self, count: int, *key: object) -> tuple[int, ...]:
        """A prompt that shares nothing with those of other keys."""
        chance = random.Random(f"{self.seed}/{key}")
        return tuple(chance.choices(range(self.vocabulary), k=count))

    def unshared(self, count: int, *key: object, prompt_tokens: int, answer_tokens: int) -> list[Ask]:
        """So many requests of one length."""
        return [Ask(self.tokens(prompt_tokens, *key, number), answer_tokens) for number in range(count)]

    def questions(self, count: int, *key: object, document: int, question: int, answer: int) -> list[Ask]:
        """Questions to one document, which each of them begins with. All three lengths are in tokens."""
        text = self.tokens(document, *key, "document")
        return [Ask(text + self.tokens(question, *key, number), answer) for number in range(count)]

    def mixed(self, count: int, *, prompt_tokens: tuple[int, int], answer_tokens: tuple[int, int]) -> list[Ask]:
        """Requests whose lengths lie between two numbers, both of which occur."""
        chance = random.Random(f"{self.seed}/mixed")
        prompts = [*prompt_tokens, *(chance.randint(*prompt_tokens) for _ in range(count))][:count]
        answers = [*answer_tokens, *(chance.randint(*answer_tokens) for _ in range(count))][:count]
        asks = [Ask(self.tokens(p, "mixed", n), a) for n, (p, a) in enumerate(zip(prompts, answers, strict=True))]
        chance.shuffle(asks)
        return asks

    def short(self, count: int, *, prompt_tokens: int, answer_tokens: int) -> Iterator[Ask]:
        """So many short requests, made when they are taken: one may be 1 token long, another twice the mean."""
        chance = random.Random(f"{self.seed}/short")
        for _ in range(count):
            length = chance.randint(1, 2 * prompt_tokens - 1)
            yield Ask(tuple(chance.choices(range(self.vocabulary), k=length)), answer_tokens)


@dataclass(slots=True)
class Conversation:
    """One chat that grows from turn to turn.

    Args:
        user: whose it is; no two begin alike.
        answer_tokens: of each answer, at most.
    """

    user: int
    answer_tokens: int
    messages: tuple[dict[str, str], ...] = ()

    def say(self, words: int) -> Ask:
        """The request of the next turn: all that was said, and so many new words."""
        chance = random.Random(f"{self.user}/{len(self.messages)}")
        text = f"{self.user}. " + " ".join(chance.choices(WORDS, k=words))
        self.messages = (*self.messages, {"role": "user", "content": text})
        return Ask(self.messages, self.answer_tokens)

    def hear(self, text: str) -> None:
        """Keep what was answered."""
        self.messages = (*self.messages, {"role": "assistant", "content": text})


def longest(asks: Sequence[Ask]) -> int:
    """Tokens of the longest prompt with its answer. The prompts are tokens."""
    return max(len(ask.prompt) + ask.answer_tokens for ask in asks)
