"""What an answer must be, as the engine sees it: a mask over the vocabulary that follows the answer.

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


class Matcher(Protocol):
    """Follows one answer. Not thread-safe."""

    def restrict(self, scores_V: Tensor) -> None:
        """Set the scores of all tokens that may not come next to minus infinity.

        Where nothing may follow, only the model's end tokens keep theirs.

        Args:
            scores_V: fp32 on the CPU; changed in place.

        Raises:
            RequestError: the grammar is too complex at this place.
        """
        ...

    def accept(self, token: int) -> None:
        """Go on by the token that was chosen.

        Raises:
            RequestError: the grammar does not allow it, or is too complex at this place.
        """
        ...


@runtime_checkable
class Grammar(Protocol):
    """A compiled grammar: immutable, for any number of answers of one model. Thread-safe."""

    def matcher(self) -> Matcher:
        """Of one answer, from its beginning. Cheap: nothing is compiled."""
        ...
