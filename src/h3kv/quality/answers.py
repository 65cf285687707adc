"""Which questions are answered rightly under which variant.

An answer counts when each of its tokens is the likeliest one after those before it: what greedy decoding would write.
The question's tokens are read as the answer's are, by retrieval where the variant does.

Shapes: T rows of question and answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.core.types import Encoding
from h3kv.quality.lanes import SCORED_CHUNK, Bank, Lane, whole_segments
from h3kv.quality.reading import SINK_TOKENS
from h3kv.quality.tasks import Kind, Question, Task
from h3kv.quality.variants import REFERENCE, Variant


@dataclass(slots=True)
class Answers:
    """Right or wrong, trial by trial in the same order for every variant name, kind by kind."""

    right: dict[Kind, dict[str, list[bool]]] = field(default_factory=dict)

    def add(self, kind: Kind, name: str, is_right: bool) -> None:
        """The next trial of a kind."""
        self.right.setdefault(kind, {}).setdefault(name, []).append(is_right)

    def trials(self, kind: Kind) -> int:
        """Trials of a kind."""
        return len(self.right.get(kind, {}).get(REFERENCE.name, []))

    def found(self, kind: Kind, name: str) -> int:
        """Trials of a kind that a variant answers rightly."""
        return sum(self.right.get(kind, {}).get(name, []))

    def kept(self, kinds: Iterable[Kind], name: str) -> float | None:
        """Of the trials that full attention answers rightly, the share that a variant does too; None without any."""
        pairs = [
            (theirs, ours)
            for kind in kinds
            if name in self.right.get(kind, {})
            for theirs, ours in zip(self.right[kind][REFERENCE.name], self.right[kind][name], strict=True)
        ]
        full = sum(theirs for theirs, _ in pairs)
        return sum(theirs and ours for theirs, ours in pairs) / full if full else None


DROPPED: Final = "dropped"
"""Name of the control: full attention over the sinks, the window and the question, and nothing between."""


def ask_all(
    banks: Mapping[Encoding, Bank],
    variants: Sequence[Variant],
    tasks: Sequence[Task],
    *,
    window_tokens: int,
    progress: Progress,
) -> Answers:
    """Ask every question under the reference, under every variant, and under the control.

    Args:
        banks: of the variants' encodings and of the reference's.
        variants: to compare, without the reference.
        tasks: contexts of whole segments.
        window_tokens: of context that the control still sees.
        progress: hears of every kind.
    """
    answers = Answers()
    asked = [REFERENCE, *variants]
    for number, task in enumerate(tasks, 1):
        for bank in banks.values():
            bank.seal_prefix(task.context)
        for question in task.questions:
            for variant in asked:
                answers.add(task.kind, variant.name, _ask(banks[variant.encoding], variant, task.context, question))
            seen = (*task.context[:SINK_TOKENS], *task.context[-window_tokens:])
            answers.add(task.kind, DROPPED, _ask(banks[REFERENCE.encoding], REFERENCE, seen, question))
        # Contexts begin alike. A prefix over parts of earlier ones would be read exactly where it is used in part.
        for bank in banks.values():
            bank.forget()
        if number == len(tasks) or tasks[number].kind is not task.kind:
            progress(_tell(answers, task.kind))
    return answers


def _ask(bank: Bank, variant: Variant, context: Sequence[int], question: Question) -> bool:
    tokens = (*question.tokens, *question.answer)
    with bank.lane(context, prefix=whole_segments(len(context)), room=len(tokens)) as lane:
        lane.use(variant.retrieval)
        return _is_right(lane, tokens, answer_tokens=len(question.answer))


def _is_right(lane: Lane, tokens: Sequence[int], *, answer_tokens: int) -> bool:
    """Whether each of the last tokens is the likeliest one."""
    first = len(tokens) - answer_tokens
    found: list[int] = []
    # The answer's last token is only compared, not read.
    for start in range(0, len(tokens) - 1, SCORED_CHUNK):
        chunk = tokens[start : min(start + SCORED_CHUNK, len(tokens) - 1)]
        found += lane.read(chunk, logits="all").argmax(1).tolist()
    return found[first - 1 :] == list(tokens[first:])


def _tell(answers: Answers, kind: Kind) -> str:
    counts = ", ".join(f"{name} {sum(right)}" for name, right in answers.right[kind].items())
    return f"{kind.value}, answered rightly of {answers.trials(kind)}: {counts}"
