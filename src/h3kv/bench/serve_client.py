"""A client of any server with OpenAI's API, which notes when each piece of an answer came.

    sent           first piece     piece     piece          end
     |----- ttft ------|--- gap ----|-- gap --|--- ... ------|

A piece is an event with text: servers send one for each token, and join tokens that are no text by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final

from h3kv.bench.serve_http import Address, Connection, Head
from h3kv.core.errors import PeerBusyError, PeerTimeoutError, PeerUnavailableError, RequestError
from h3kv.core.types import Tier

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
TIERS: Final = tuple(Tier)
DATA: Final = b"data:"
END: Final = b"[DONE]"
EXTENSIONS: Final = {"ignore_eos": True, "skip_special_tokens": False}
"""Not of OpenAI's API: answers are as long as was asked for, and every token is text."""
ANSWER_S: Final = 3600.0
SAID_MAX: Final = 400
"""Characters of a refusal that an error brings along."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: Sequence[int] | Sequence[Mapping[str, str]]
    """Token numbers, or the messages of a chat."""
    answer_tokens: int

    @property
    def is_chat(self) -> bool:
        """Whether it is made of messages."""
        return bool(self.prompt) and isinstance(self.prompt[0], Mapping)


@dataclass(slots=True)
class Answer:
    """What came back, and when. Times are of `time.perf_counter_ns`."""

    sent_ns: int
    piece_ns: list[int] = field(default_factory=list)
    end_ns: int = 0
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, found in a cache."""
    cached_by_tier: dict[Tier, int] = field(default_factory=dict)
    """Where they were, of servers that say it."""
    is_done: bool = False
    """Whether the server said that this is all."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    @property
    def ttft_ns(self) -> int:
        """From when it was asked for to its first piece; to its end, if it has no text."""
        return (self.piece_ns[0] if self.piece_ns else self.end_ns) - self.sent_ns

    @property
    def gaps_ns(self) -> list[int]:
        """Between its pieces."""
        return [later - sooner for sooner, later in zip(self.piece_ns, self.piece_ns[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is asked."""

    name: str
    """In metrics."""
    address: Address
    model: str
    """As the server calls it."""
    key: str | None = None
    refused: frozenset[str] = frozenset()
    """What it does not know of `EXTENSIONS`."""
    group: int | None = None
    """Of its processes, where they are stopped while it rests: an idle server that polls takes from the others."""

    @property
    def ignores_eos(self) -> bool:
        """Whether it can go on behind the end of a text: answers have all tokens that were asked for then."""
        return "ignore_eos" not in self.refused

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """A turn of this server. It rests from then on."""
        if self.group is None:
            yield
            return
        os.killpg(self.group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.group, signal.SIGSTOP)

    def connection(self) -> Connection:
        """A new one."""
        return Connection(self.address, key=self.key)

    async def answer(self, connection: Connection, ask: Ask, into: Answer | None = None) -> Answer:
        """Ask, and read the answer to its end. Greedy.

        Args:
            connection: nothing else uses it meanwhile. It is closed if this is cancelled or fails.
            ask: the request.
            into: an answer to write to, for those who look at it while it grows.

        Raises:
            RequestError: the server refuses.
            PeerBusyError: it refuses because of its load.
            PeerUnavailableError: it goes away, or fails in the middle of the answer.
            PeerTimeoutError: the answer does not end.
        """
        answer = Answer(0) if into is None else into
        answer.sent_ns = time.perf_counter_ns()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._read(connection, ask, answer)
        except TimeoutError as error:
            await connection.close()
            message = f"{self.name} did not end an answer within {ANSWER_S:g} s"
            raise PeerTimeoutError(message, peer=str(self.address)) from error
        except BaseException:
            await connection.close()
            raise
        answer.end_ns = time.perf_counter_ns()
        return answer

    async def _read(self, connection: Connection, ask: Ask, answer: Answer) -> None:
        head = await connection.request("POST", CHAT if ask.is_chat else COMPLETIONS, self.fields(ask))
        await _require_ok(head, connection)
        async for line in connection.lines(head):
            if not line.startswith(DATA):
                continue
            said = line[len(DATA) :].strip()
            if said == END:
                answer.is_done = True
            else:
                self._note(answer, json.loads(said))

    def fields(self, ask: Ask) -> dict[str, object]:
        """The body of a request."""
        return {
            "model": self.model,
            "messages" if ask.is_chat else "prompt": list(ask.prompt),
            "max_tokens": ask.answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in EXTENSIONS.items() if name not in self.refused},
        }

    def _note(self, answer: Answer, event: Mapping[str, Any]) -> None:
        if "error" in event:
            raise PeerUnavailableError(f"{self.name} failed within an answer: {event['error']}", peer=self.name)
        for choice in event.get("choices", ()):
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                answer.piece_ns.append(time.perf_counter_ns())
                answer.pieces.append(text)
        usage = event.get("usage")
        if usage:
            note_usage(answer, usage)


def note_usage(answer: Answer, usage: Mapping[str, Any]) -> None:
    """Keep what a server counted."""
    answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    answer.answer_tokens = int(usage.get("completion_tokens") or 0)
    answer.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    by_tier = (usage.get("h3") or {}).get("cached_tokens") or {}
    answer.cached_by_tier = {tier: int(by_tier[tier]) for tier in TIERS if tier in by_tier}


async def learn(target: Target) -> Target:
    """The same server, with what it can do: it is asked for one token, without what it refused by name.

    Raises:
        RequestError: it refuses something else.
        PeerUnavailableError: nobody answers.
    """
    ask = Ask((1, 2, 3), 1)
    async with target.connection() as connection:
        while True:
            try:
                await target.answer(connection, ask)
            except RequestError as error:
                refused = {name for name in EXTENSIONS if name in str(error)} - target.refused
                if not refused:
                    raise
                target = replace(target, refused=target.refused | refused)
            else:
                return target


async def _require_ok(head: Head, connection: Connection) -> None:
    if head.status == HTTPStatus.OK:
        return
    said = (await connection.body(head)).decode("utf-8", "replace")[:SAID_MAX]
    message = f"the server answered {head.status}: {said}"
    if head.status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        raise PeerBusyError(message, peer=str(connection.address))
    raise RequestError(message)
