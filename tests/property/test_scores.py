from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from h3kv.engine.request import SamplingParameters
from h3kv.engine.scores import ScoreChanges

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
