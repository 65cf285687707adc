"""Many requests at once, over a tiny decoder: what each gets is what it gets alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from h3kv.engine.events import Event, Failed, Finished, PrefillProgress, TokenGenerated
from h3kv.engine.request import Request, RequestId, SamplingParameters
from h3kv.engine.stopping import FinishReason
from h3kv.models.decoder import Decoder
from h3kv.models.kernels import Linear
from h3kv.models.native_kernels import NativeKernels
from h3kv.telemetry import names
from h3kv.testing.engines import CONFIG, Rig, make_rig, one_thread, prompt_tokens, tiny_decoder
from h3kv.testing.tiered_rig import tiered_rig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread")]


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def mixed_requests(count: int) -> list[Request]:
    """Prompts of many lengths, greedy and not."""
    requests = []
    for seed in range(count):
        sampling = SamplingParameters(
            max_new_tokens=5 + 7 * seed % 23,
            temperature=0.7 * (seed % 3),
            seed=seed,
            logprobs=2,
            ignore_eos=True,
            frequency_penalty=0.5 * (seed % 2),
        )
        requests.append(Request(prompt=tuple(prompt_tokens(seed, 1 + 97 * seed % 400)), sampling=sampling))
    return requests


def answers_of(rig: Rig, requests: list[Request]) -> list[list[TokenGenerated]]:
    """All at once."""
    ids = [rig.engine.submit(request) for request in requests]
    answers: dict[RequestId, list[TokenGenerated]] = {request_id: [] for request_id in ids}
    while rig.engine.has_work:
        for event in rig.engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, TokenGenerated):
                answers[event.request].append(event)
    return [answers[request_id] for request_id in ids]


def said(answer: list[TokenGenerated]) -> list[object]:
    """All but the number of the request: tokens, text, and probabilities to the last bit."""
    return [(event.token, event.text, event.logprobs) for event in answer]


def test_answers_do_not_depend_on_who_else_is_answered() -> None:
    requests = mixed_requests(24)
    # Library products may round a row differently beside others.
    model = Decoder(CONFIG, tiny_decoder().weights, NativeKernels())
    together = make_rig(capacity_blocks=512, model=model)
    answers = answers_of(together, requests)
    together.check_idle()
    for request, answer in zip(requests, answers, strict=True):
        alone = make_rig(model=model)
        assert said(answer) == said(answers_of(alone, [request])[0])
        alone.check_idle()


def test_answers_go_on_while_a_long_prompt_is_read() -> None:
    rig = make_rig(capacity_blocks=256, chunk_tokens=1024)
    short = rig.engine.submit(
        Request(prompt=(1, 2, 3), sampling=SamplingParameters(max_new_tokens=60, ignore_eos=True))
    )
    while not any(isinstance(event, TokenGenerated) for event in rig.engine.step()):
        pass
    long = rig.engine.submit(
        Request(prompt=tuple(prompt_tokens(1, 2048)), sampling=SamplingParameters(max_new_tokens=1, ignore_eos=True))
    )
    steps: list[list[Event]] = []
    while not steps or not any(event.request == long and isinstance(event, PrefillProgress) for event in steps[-1]):
        steps.append(rig.engine.step())
    assert len(steps) > 5, "a chunk is read in turns"
    assert all(any(isinstance(event, TokenGenerated) and event.request == short for event in step) for step in steps)
    rig.run()
    rig.check_idle()


@pytest.mark.parametrize("turns", [1, 3])
def test_cancel_in_the_middle_of_a_chunk_gives_everything_back(turns: int) -> None:
    rig = make_rig(capacity_blocks=256, chunk_tokens=1024)
    short = Request(prompt=(1, 2, 3), sampling=SamplingParameters(max_new_tokens=60, ignore_eos=True))
    rig.engine.submit(short)
    while not any(isinstance(event, TokenGenerated) for event in rig.engine.step()):
        pass
    long = rig.engine.submit(Request(prompt=tuple(prompt_tokens(1, 2048))))
    for _ in range(turns):
        assert not any(event.request == long for event in rig.engine.step())
    finished = rig.engine.cancel(long)
    assert finished is not None
    assert finished.statistics.generated_tokens == 0
    assert len(rig.run()) == 1
    rig.check_idle()


def test_short_prompt_does_not_wait_for_the_whole_of_a_long_one() -> None:
    rig = make_rig(capacity_blocks=512, chunk_tokens=128)
    one = SamplingParameters(max_new_tokens=1, ignore_eos=True)
    long = rig.engine.submit(Request(prompt=tuple(prompt_tokens(1, 4096)), sampling=one))
    rig.engine.step()
    short = rig.engine.submit(Request(prompt=tuple(prompt_tokens(2, 100)), sampling=one))
    ended: list[RequestId] = []
    read = 0
    while rig.engine.has_work:
        for event in rig.engine.step():
            ended += [event.request] if isinstance(event, Finished) else []
            read += isinstance(event, PrefillProgress) and event.request == long and not ended
    assert ended == [short, long]
    assert read <= 3
    rig.check_idle()


def long_answers(count: int, *, max_new_tokens: int) -> list[Request]:
    sampling = SamplingParameters(max_new_tokens=max_new_tokens, ignore_eos=True)
    return [Request(prompt=tuple(prompt_tokens(seed, 200)), sampling=sampling) for seed in range(count)]


def test_answers_that_outgrow_the_room_go_on_where_they_were() -> None:
    requests = long_answers(3, max_new_tokens=700)
    # Each needs 15 blocks at its longest and is sure of 8 when it starts: all of them begin, and not all of them fit.
    rig = make_rig(capacity_blocks=27)
    answers = answers_of(rig, requests)
    assert rig.telemetry.value(names.SUSPENSIONS) >= 1
    assert rig.telemetry.value(names.PREFILL_TOKENS) < 3 * 200 + 200, "what was computed was found again"
    for request, answer in zip(requests, answers, strict=True):
        roomy = make_rig(capacity_blocks=64)
        assert [event.token for event in answer] == [event.token for event in answers_of(roomy, [request])[0]]
    rig.check_idle()


def test_suspended_answers_move_to_the_cold_store_and_come_back(tmp_path: Path) -> None:
    requests = long_answers(3, max_new_tokens=1000)
    with tiered_rig(tmp_path, units=1, device_blocks=40, host_blocks=64) as rig:
        answers = answers_of(rig, requests)
        assert rig.telemetry.value(names.SUSPENSIONS) >= 1
    for request, answer in zip(requests, answers, strict=True):
        roomy = make_rig(capacity_blocks=64)
        assert [event.token for event in answer] == [event.token for event in answers_of(roomy, [request])[0]]


def test_request_that_was_suspended_can_be_cancelled() -> None:
    requests = long_answers(3, max_new_tokens=700)
    rig = make_rig(capacity_blocks=27)
    ids = [rig.engine.submit(request) for request in requests]
    generated = dict.fromkeys(ids, 0)
    while rig.telemetry.value(names.SUSPENSIONS) == 0:
        for event in rig.engine.step():
            generated[event.request] += isinstance(event, TokenGenerated)
    last = max(request_id for request_id in ids if generated[request_id])
    finished = rig.engine.cancel(last)
    assert finished is not None
    assert finished.statistics.generated_tokens == generated[last]
    assert set(rig.run()) == set(ids) - {last}
    rig.check_idle()


class ForgetfulKernels(NativeKernels):
    """Find no memory for the scores of several rows, once."""

    def __init__(self) -> None:
        self.failures_left = 1

    def logits(self, x_TI: torch.Tensor, norm_I: torch.Tensor, eps: float, lm_head: Linear) -> torch.Tensor:
        if len(x_TI) > 1 and self.failures_left:
            self.failures_left -= 1
            raise MemoryError("no memory for the scores")
        return super().logits(x_TI, norm_I, eps, lm_head)


def test_tokens_whose_scores_failed_are_computed_again_each_alone() -> None:
    requests = mixed_requests(4)
    kernels = ForgetfulKernels()
    rig = make_rig(model=Decoder(CONFIG, tiny_decoder().weights, kernels))
    answers = answers_of(rig, requests)
    assert kernels.failures_left == 0
    sound = make_rig(model=Decoder(CONFIG, tiny_decoder().weights, NativeKernels()))
    for request, answer in zip(requests, answers, strict=True):
        assert said(answer) == said(answers_of(sound, [request])[0])
    rig.check_idle()


class Interrupting:
    """A grammar whose second token is interrupted as by Ctrl-C. Satisfies `engine.grammar.Grammar` and its matcher."""

    def __init__(self) -> None:
        self._tokens = 0

    def matcher(self) -> Interrupting:
        return self

    def restrict(self, scores_V: torch.Tensor) -> None:
        self._tokens += 1
        if self._tokens == 2:
            raise KeyboardInterrupt

    def accept(self, token: int) -> None:
        pass


def test_interrupt_while_one_token_is_chosen_ends_those_that_had_theirs_to_come() -> None:
    rig = make_rig()
    plain = SamplingParameters(max_new_tokens=40, ignore_eos=True)
    interrupted = SamplingParameters(max_new_tokens=40, grammar=Interrupting())
    ids = [
        rig.engine.submit(Request(prompt=(7, 8, seed), sampling=interrupted if seed == 1 else plain))
        for seed in range(3)
    ]
    with pytest.raises(KeyboardInterrupt):
        rig.run()
    finished = rig.run()
    assert finished[ids[1]].reason is FinishReason.CANCELLED
    assert all(rig.engine.cancel(request_id) is None for request_id in ids)
    rig.check_idle()


def test_tenant_does_not_wait_for_the_long_answers_of_another() -> None:
    rig = make_rig(capacity_blocks=512)
    sampling = SamplingParameters(max_new_tokens=200, ignore_eos=True)
    many = [rig.engine.submit(Request(prompt=(1, n, 3), sampling=sampling, tenant=b"many")) for n in range(40)]
    for _ in range(60):
        rig.engine.step()
    assert rig.pool.running == 24, "the other places are not theirs"
    few = [rig.engine.submit(Request(prompt=(1, n, 3), sampling=sampling, tenant=b"few")) for n in range(2)]
    began = [event.request for _ in range(8) for event in rig.engine.step() if isinstance(event, TokenGenerated)]
    assert set(few) <= set(began)
    assert set(rig.run()) == {*many, *few}
    rig.check_idle()


def test_tenant_does_not_wait_behind_one_of_another_that_finds_no_room() -> None:
    rig = make_rig(capacity_blocks=32)
    running, large = (
        Request(
            prompt=tuple(prompt_tokens(seed, tokens)),
            sampling=SamplingParameters(max_new_tokens=answer, ignore_eos=True),
            tenant=b"many",
        )
        for seed, tokens, answer in ((1, 100, 900), (2, 1800, 100))
    )
    many = {rig.engine.submit(running), rig.engine.submit(large)}
    for _ in range(4):
        rig.engine.step()
    assert rig.pool.running == 1
    small = SamplingParameters(max_new_tokens=4, ignore_eos=True)
    few = rig.engine.submit(Request(prompt=(1, 2, 3), sampling=small, tenant=b"few"))
    ended = [event.request for _ in range(12) for event in rig.engine.step() if isinstance(event, Finished)]
    assert ended == [few]
    assert set(rig.run()) == many
    rig.check_idle()


def test_request_that_takes_all_of_the_room_ends_well(tmp_path: Path) -> None:
    with tiered_rig(tmp_path, units=1, device_blocks=40, host_blocks=64) as rig:
        blocks = rig.pool.capacity.blocks
        sampling = SamplingParameters(max_new_tokens=400, ignore_eos=True)
        prompt = tuple(prompt_tokens(3, blocks * 64 - 399))
        assert len(answers_of(rig, [Request(prompt=prompt, sampling=sampling)])[0]) == 400
        assert rig.telemetry.value(names.SUSPENSIONS) == 0


def test_prompt_waits_for_one_that_reads_what_it_begins_with() -> None:
    rig = make_rig(capacity_blocks=256, chunk_tokens=256)
    text = prompt_tokens(1, 2048)
    one = SamplingParameters(max_new_tokens=4, ignore_eos=True)
    reader, asker, stranger = (
        rig.engine.submit(Request(prompt=tuple(prompt), sampling=one))
        for prompt in ([*text, 1], [*text, 2, 3], prompt_tokens(2, 64))
    )
    ended: dict[RequestId, Finished] = {}
    while rig.engine.has_work:
        for event in rig.engine.step():
            if isinstance(event, Finished):
                ended[event.request] = event
    assert next(iter(ended)) == stranger, "it does not wait with them"
    assert ended[reader].statistics.cached_tokens_total == 0
    assert ended[asker].statistics.cached_tokens_total >= 1024
    assert rig.telemetry.value(names.PREFILL_TOKENS) < 2 * len(text)
    rig.check_idle()


@contextlib.contextmanager
def windowed_rig(folder: Path) -> Iterator[Rig]:
    """Windows of the size that nodes have, of four sequences."""
    model = Decoder(CONFIG, tiny_decoder().weights, NativeKernels())
    with tiered_rig(folder, units=4, device_blocks=96, host_blocks=160, window_tokens=1024, model=model) as rig:
        yield rig


def test_prompts_find_what_still_lies_in_the_window_of_another(tmp_path: Path) -> None:
    text = prompt_tokens(1, 1500)
    long, short = (SamplingParameters(max_new_tokens=count, ignore_eos=True, logprobs=1) for count in (1200, 70))
    first = Request(prompt=(*text, 1), sampling=long)
    others = [Request(prompt=(*text, number), sampling=short) for number in (2, 3)]
    with windowed_rig(tmp_path / "together") as rig:
        began = rig.engine.submit(first)
        tokens: dict[RequestId, list[TokenGenerated]] = {began: []}
        ended: dict[RequestId, Finished] = {}
        while rig.engine.has_work:
            for event in rig.engine.step():
                if isinstance(event, TokenGenerated):
                    tokens[event.request].append(event)
                    if event.request == began and len(tokens[began]) == 1:
                        tokens |= {rig.engine.submit(other): [] for other in others}
                if isinstance(event, Finished):
                    ended[event.request] = event
        rig.engine.check_integrity()
    assert list(ended)[-1] == began, "it goes on behind what it shares, until that has left its window"
    for request, other in zip(list(tokens)[1:], others, strict=True):
        assert ended[request].statistics.cached_tokens_total == 1500 // 64 * 64
        with windowed_rig(tmp_path / f"alone{request}") as alone:
            assert said(tokens[request]) == said(answers_of(alone, [other])[0])
    with windowed_rig(tmp_path / "first") as alone:
        assert said(tokens[began]) == said(answers_of(alone, [first])[0])


def test_loss_of_what_was_shared_out_of_a_window_changes_no_answer(tmp_path: Path) -> None:
    text = prompt_tokens(1, 1500)
    first = Request(prompt=(*text, 1), sampling=SamplingParameters(max_new_tokens=1200, ignore_eos=True))
    with windowed_rig(tmp_path / "lost") as rig:
        began = rig.engine.submit(first)
        tokens: list[int] = []
        lost = 0
        while rig.engine.has_work:
            for event in rig.engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, TokenGenerated) and event.request == began:
                    tokens.append(event.token)
                    if len(tokens) == 1:
                        rig.engine.submit(Request(prompt=(*text, 2), sampling=SamplingParameters(max_new_tokens=2)))
            if not lost and len(tokens) > 4:
                newest = rig.segments.sealed()[-1]
                rig.segments.lose(newest)
                lost = newest.room_blocks
        rig.engine.check_integrity()
        read = rig.telemetry.value(names.PREFILL_TOKENS)
    assert lost
    assert read < len(text) + 64 + 64, "it read on in its window"
    with windowed_rig(tmp_path / "alone") as alone:
        assert tokens == [event.token for event in answers_of(alone, [first])[0]]


def test_prompt_that_waits_for_a_longer_one_finds_all_that_they_have_in_common(tmp_path: Path) -> None:
    text = prompt_tokens(1, 1500)
    one = SamplingParameters(max_new_tokens=4, ignore_eos=True)
    with windowed_rig(tmp_path) as rig:
        reader, asker = (
            rig.engine.submit(Request(prompt=tuple(prompt), sampling=one))
            for prompt in ([*text, *prompt_tokens(2, 3000)], [*text, 2, 3])
        )
        ended: dict[RequestId, Finished] = {}
        while rig.engine.has_work:
            for event in rig.engine.step():
                if isinstance(event, Finished):
                    ended[event.request] = event
        rig.engine.check_integrity()
    assert list(ended) == [asker, reader], "it does not wait for what they do not have in common"
    assert ended[asker].statistics.cached_tokens_total == 1500 // 64 * 64


def test_prompt_does_not_wait_for_one_that_is_gone_or_of_another_tenant() -> None:
    rig = make_rig(capacity_blocks=256, chunk_tokens=256)
    text = prompt_tokens(1, 2048)
    one = SamplingParameters(max_new_tokens=4, ignore_eos=True)
    reader = rig.engine.submit(Request(prompt=(*text, 1), sampling=one))
    rig.engine.step()
    asker = rig.engine.submit(Request(prompt=(*text, 2), sampling=one))
    other = rig.engine.submit(Request(prompt=(*text, 2), sampling=one, tenant=b"other"))
    rig.engine.step()
    assert rig.pool.running == 2, "the reader, and the other tenant's"
    rig.engine.cancel(reader)
    rig.engine.step()
    assert rig.pool.running == 2
    assert set(rig.run()) == {asker, other}
    rig.check_idle()
