"""Stop conditions, text and seeds, through the whole engine. A scripted model says what it is told to."""

from collections.abc import Generator
from typing import Literal

import pytest
import torch

from h3kv.engine.events import Finished, TokenGenerated
from h3kv.engine.request import Request, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.models.decoder import SteppedKvCache, TokenBatch
from h3kv.testing.engines import CONFIG, END_TOKEN, make_rig, one_thread, prompt_tokens
from h3kv.testing.hooked_model import Attending


class ScriptedModel:
    """Gives the i-th token of a script the highest score after i tokens of the answer; its KV is zeros."""

    config = CONFIG

    def __init__(self, prompt_length: int, script: bytes | list[int]) -> None:
        self._prompt_length = prompt_length
        self._script = [*script, END_TOKEN]

    def steps(
        self, token_ids_T: torch.Tensor, cache: SteppedKvCache, *, logits: Literal["last", "all", "none"]
    ) -> Generator[None, None, torch.Tensor]:
        self._attend(cache, len(token_ids_T))
        cache.advance(len(token_ids_T))
        yield from ()
        return self._scores(cache.tokens)

    def decode(self, token_ids_B: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        self._attend(batch, len(token_ids_B))
        batch.advance()
        return torch.cat([self._scores(position + 1) for position in batch.positions])

    def _attend(self, attending: Attending, rows: int) -> None:
        for layer in range(CONFIG.layers):
            zeros = torch.zeros(rows, CONFIG.kv_heads, CONFIG.head_dim)
            attending.attend(layer, torch.zeros(rows, CONFIG.heads, CONFIG.head_dim), zeros, zeros)

    def _scores(self, tokens: int) -> torch.Tensor:
        scores_1V = torch.zeros(1, CONFIG.vocabulary_size)
        place = tokens - self._prompt_length
        if place >= 0:
            scores_1V[0, self._script[min(place, len(self._script) - 1)]] = 9.0
        return scores_1V


def run(script: bytes | list[int], **sampling: object) -> tuple[list[str], Finished]:
    prompt = tuple(prompt_tokens(1, 10))
    rig = make_rig(model=ScriptedModel(len(prompt), script))
    parameters = SamplingParameters(**sampling)
    texts: list[str] = []
    for event in rig.engine.generate(Request(prompt=prompt, sampling=parameters)):
        if isinstance(event, TokenGenerated):
            texts.append(event.text)
        if isinstance(event, Finished):
            rig.check_idle()
            return texts, event
    pytest.fail("no finish")


def test_end_token_ends_the_answer_and_adds_no_text() -> None:
    texts, finished = run(b"Hi.")
    assert texts == ["H", "i", ".", ""]
    assert finished.reason is FinishReason.STOP
    assert finished.statistics.generated_tokens == 4


def test_ignored_end_token_goes_on_to_the_length() -> None:
    texts, finished = run(b"Hi", ignore_eos=True, max_new_tokens=5)
    assert "".join(texts) == "Hi"
    assert finished.reason is FinishReason.LENGTH
    assert finished.statistics.generated_tokens == 5


def test_stop_token_ends_the_answer_and_adds_no_text() -> None:
    texts, finished = run(b"ab!cd", stop_token_ids=(ord("!"),))
    assert texts == ["a", "b", ""]
    assert finished.reason is FinishReason.STOP


def test_stop_string_over_several_tokens_is_cut_exactly() -> None:
    texts, finished = run(b"one\n\nUser: two", stop=("\n\nUser:",))
    assert "".join(texts) == "one"
    assert finished.reason is FinishReason.STOP
    assert finished.statistics.generated_tokens == len("one\n\nUser:")


def test_held_back_text_comes_with_the_last_token() -> None:
    texts, finished = run(b"one\n\nUs", stop=("\n\nUser:",))
    assert "".join(texts[:-1]) == "one"
    assert texts[-1] == "\n\nUs"
    assert finished.reason is FinishReason.STOP


def test_half_a_character_at_the_length_limit_is_replaced() -> None:
    texts, finished = run("a\u20ac".encode(), max_new_tokens=3)
    assert texts == ["a", "", "\ufffd"]
    assert finished.reason is FinishReason.LENGTH


def test_length_of_one_gives_one_token() -> None:
    texts, finished = run(b"abc", max_new_tokens=1)
    assert texts == ["a"]
    assert finished.statistics.inter_token_ns == ()


def test_seeds_decide_and_other_requests_do_not() -> None:
    """The same request alone, and beside another one."""
    with one_thread():
        prompt = tuple(prompt_tokens(2, 70))
        sampling = SamplingParameters(temperature=1.0, seed=11, max_new_tokens=10, ignore_eos=True)
        alone, beside = make_rig(), make_rig()
        expected = [
            e.token for e in alone.engine.generate(Request(prompt=prompt, sampling=sampling)) if hasattr(e, "token")
        ]
        beside.engine.submit(Request(prompt=prompt, sampling=SamplingParameters(temperature=1.0, seed=12)))
        seen = [
            e.token for e in beside.engine.generate(Request(prompt=prompt, sampling=sampling)) if hasattr(e, "token")
        ]
        assert seen == expected
        beside.run()
        beside.check_idle()
        alone.check_idle()
