import math

import pytest
import torch

from h3kv.engine.request import SamplingParameters
from h3kv.engine.scores import SEEN_FIRST, ScoreChanges, SeenTokens


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
