"""How long a prompt is read before answers go on."""

from h3kv.core.units import NS_PER_MS
from h3kv.policy.turns import TURN_NS_MAX, TURN_SHARE, goes_on, turn_ns


def test_answers_beside_one_prompt_come_at_a_third_of_their_speed() -> None:
    token_ns = 10 * NS_PER_MS
    assert token_ns / (token_ns + turn_ns(token_ns, prompts=1)) == 1 / (1 + TURN_SHARE) == 1 / 3


def test_the_more_prompts_wait_the_more_of_the_time_is_theirs() -> None:
    turns = [turn_ns(NS_PER_MS, prompts=prompts) for prompts in (1, 2, 7)]
    assert turns == [2 * NS_PER_MS, 4 * NS_PER_MS, 14 * NS_PER_MS]


def test_no_turn_is_longer_than_the_bound_whoever_waits() -> None:
    assert turn_ns(200 * NS_PER_MS, prompts=30) == TURN_NS_MAX
    assert turn_ns(None, prompts=1) == TURN_NS_MAX


def test_step_that_would_not_fit_is_not_begun() -> None:
    assert goes_on(5, 5, 10)
    assert not goes_on(6, 5, 10)
    assert not goes_on(0, 11, 10)
