"""Clients of a whole node that never cease to ask, whatever is killed meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from tests.faults.node_rig import WAIT_S, End, Node, Prompt

AGAIN_S = 0.2
"""After an error that says to send the request again."""


class Load:
    """Clients that ask without a pause, while the block runs.

    Args:
        node: which they ask.
        prompts: with their answers.
        clients: at a time.
        seed: of which prompt is next.
    """

    def __init__(self, node: Node, prompts: Sequence[Prompt], *, clients: int, seed: int) -> None:
        self._node = node
        self._prompts = prompts
        self._changed = threading.Condition()
        self._is_over = False
        self._kills = 0
        self._gateway_kills = 0
        self._events = 0
        """Tokens, and answers that are no answer."""
        self._served = [0] * clients
        """Of each client: the last kill after which a request began that was answered."""
        self.ends: dict[End, int] = dict.fromkeys(End, 0)
        self.wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask_on, args=(number, random.Random(seed + number)))
            for number in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def wait_for_events(self, count: int) -> None:
        """Until so many tokens more have come, or refusals: the moment of the next kill."""
        with self._changed:
            end = self._events + count
            assert self._changed.wait_for(lambda: self._events >= end, WAIT_S), "nothing comes"

    def kill(self, name: str) -> int:
        """Kill a process under the load, and give back who is dead."""
        # No request begins or ends meanwhile: each knows which kills it has seen.
        with self._changed:
            self._kills += 1
            self._gateway_kills += name == "gateway"
            return self._node.kill(name)

    def wait_until_served(self) -> None:
        """Until each client has had the right answer to a request that began after the last kill."""
        with self._changed:
            kills = self._kills
            found = self._changed.wait_for(lambda: min(self._served) >= kills or self.wrong, WAIT_S)
        assert found and not self.wrong, (self.wrong, self._node.text()[-5_000:])

    @property
    def answered(self) -> set[End]:
        """How requests have ended so far."""
        with self._changed:
            return {end for end, count in self.ends.items() if count}

    def go_on_for(self, duration_s: float) -> None:
        """Let the clients ask for so long, or until an answer is wrong."""
        with self._changed:
            self._changed.wait_for(lambda: self.wrong, duration_s)

    def mark(self) -> None:
        """Something else than a kill happened, after which the next request counts."""
        with self._changed:
            self._kills += 1

    def _ask_on(self, client: int, chance: random.Random) -> None:
        pause = threading.Event()
        while True:
            prompt = chance.choice(self._prompts)
            with self._changed:
                if self._is_over:
                    return
                begun, gateways = self._kills, self._gateway_kills
            end, said = self._node.ask(prompt, on_token=self._count)
            with self._changed:
                if (end is End.CUT and self._gateway_kills == gateways) or (
                    end is End.REFUSED and not self._gateway_kills
                ):
                    end = End.WRONG
                self.ends[end] += 1
                if end is End.WRONG:
                    self.wrong.append(f"{prompt.text[:20]}: {said[:500]}")
                if end is End.RIGHT:
                    self._served[client] = begun
                    self._changed.notify_all()
            if end is not End.RIGHT:
                self._count()
                pause.wait(AGAIN_S)

    def _count(self) -> None:
        with self._changed:
            self._events += 1
            self._changed.notify_all()
