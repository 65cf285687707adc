import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h3kv.engine.request import SamplingParameters
from h3kv.engine.scores import SEEN_FIRST, ScoreChanges, SeenTokens

VOCABULARY = 12
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
PENALTIES = st.floats(-2, 2, width=16)


def plainly(scores: list[float], parameters: SamplingParameters, prompt: list[int], answer: list[int]) -> list[float]:
    """The definitions, token by token."""
    counts, changed = Counter(answer), list(scores)
    for token, bias in parameters.logit_bias:
        changed[token] += bias
    for token in {*prompt, *answer}:
        repetition = parameters.repetition_penalty
        changed[token] = changed[token] / repetition if changed[token] > 0 else changed[token] * repetition
    for token, count in counts.items():
        changed[token] -= parameters.frequency_penalty * count + parameters.presence_penalty
    return changed


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    TOKENS,
    TOKENS,
    st.tuples(PENALTIES, PENALTIES, st.floats(0.5, 2, width=16)),
    st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=16)),
)
def test_changes_are_those_of_the_definitions(
    scores: list[float],
    prompt: list[int],
    answer: list[int],
    penalties: tuple[float, float, float],
    biases: dict[int, float],
) -> None:
    presence, frequency, repetition = penalties
    parameters = SamplingParameters(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(biases.items()),
    )
    changes = ScoreChanges(parameters, prompt)
    for token in answer:
        changes.add(token)
    scores_V = torch.tensor(scores)
    changes.apply(scores_V)
    expected = plainly(scores, parameters, prompt, answer)
    torch.testing.assert_close(scores_V, torch.tensor(expected), rtol=1e-5, atol=1e-4)
    is_empty = not biases and penalties == (0, 0, 1)
    assert changes.is_empty is is_empty
    if is_empty:
        assert scores_V.tolist() == scores


def test_impossible_tokens_stay_impossible() -> None:
    parameters = SamplingParameters(repetition_penalty=2.0, presence_penalty=-2.0, logit_bias=((1, 100.0),))
    changes = ScoreChanges(parameters, [0, 1])
    changes.add(1)
    scores_V = torch.tensor([-math.inf, -math.inf, 1.0])
    changes.apply(scores_V)
    assert scores_V.tolist() == [-math.inf, -math.inf, 1.0]


@pytest.mark.parametrize("prompt", [0, 7, SEEN_FIRST, 3 * SEEN_FIRST])
def test_any_number_of_tokens_is_counted(prompt: int) -> None:
    seen = SeenTokens([*range(prompt), *range(prompt)])
    for token in (*range(5000, 5000 + 2 * SEEN_FIRST), 5000):
        seen.add(token)
    assert seen.ids_N.tolist() == [*range(prompt), *range(5000, 5000 + 2 * SEEN_FIRST)]
    assert seen.counts_N.tolist() == [0.0] * prompt + [2.0] + [1.0] * (2 * SEEN_FIRST - 1)
