"""How likely tokens were.

Shapes: V vocabulary, N tokens that are named.
"""

from __future__ import annotations

from torch import Tensor

from h3kv.engine.events import TokenLogprobs
from h3kv.engine.ranking import largest


def token_logprobs(logits_V: Tensor, token: int, count: int) -> TokenLogprobs:
    """Natural logarithms of the probabilities of a token and of the likeliest ones.

    Args:
        logits_V: fp32 scores on the CPU, as the model gave them. Not modified.
        token: whichever was chosen.
        count: of the likeliest tokens. Fewer are named where the model rules out all others.
    """
    # One row is computed by one thread, so that the sum's order is always the same.
    logprobs_V = logits_V.double().log_softmax(0)
    ids_N = largest(logits_V, max(count, 1))[:count]
    ids_N = ids_N[logits_V[ids_N].isfinite()]
    top = tuple(zip(ids_N.tolist(), logprobs_V[ids_N].tolist(), strict=True))
    return TokenLogprobs(float(logprobs_V[token]), top)
