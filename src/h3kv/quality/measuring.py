"""One interleaved run over all variants: windows of text, then questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from h3kv.bench.measure import Progress
from h3kv.core.errors import ConfigError
from h3kv.core.limits import SEGMENT_TOKENS_MAX
from h3kv.core.types import Encoding
from h3kv.models.loader import LoadedModel
from h3kv.quality.answers import DROPPED, Answers, ask_all
from h3kv.quality.lanes import LANES_MAX, LaneCaps, open_banks
from h3kv.quality.reading import SINK_TOKENS, Reading
from h3kv.quality.statistics import Fidelity, summarise
from h3kv.quality.tasks import Kind, Task, TaskMaker
from h3kv.quality.variants import REFERENCE, Variant
from h3kv.quality.windows import WindowScores, WindowSizes, choose_windows, score_windows

QUESTION_TOKENS: Final = 128
"""Room for a question with its answer behind a context."""


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """How many questions, over contexts of how many tokens. A context is the sinks and whole segments."""

    passkey_tokens: tuple[int, ...]
    """Lengths of contexts with one key, each at all depths."""
    passkey_depths: int
    needle_tokens: int
    needle_contexts: int
    needle_keys: int
    line_tokens: int
    line_contexts: int
    lines_asked: int
    fact_tokens: int
    fact_contexts: int
    facts_asked: int

    @property
    def tokens(self) -> int:
        """Of the longest context."""
        return max(*self.passkey_tokens, self.needle_tokens, self.line_tokens, self.fact_tokens)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    windows: int
    window: WindowSizes
    tasks: TaskSizes
    window_tokens: int = 1024
    """Newest tokens that are read exactly while text is scored."""
    task_window_tokens: int = 256
    """The same while questions are answered: small, so that the answer is seldom in it."""
    chunk_tokens: int = 1024


def _context(segments: int) -> int:
    return SINK_TOKENS + segments * SEGMENT_TOKENS_MAX


FULL: Final = Sizes(
    windows=9,
    window=WindowSizes(context_tokens=_context(6), scored_tokens=1984),
    tasks=TaskSizes(
        passkey_tokens=(_context(2), _context(4)),
        passkey_depths=25,
        needle_tokens=_context(4),
        needle_contexts=5,
        needle_keys=8,
        line_tokens=_context(3),
        line_contexts=3,
        lines_asked=8,
        fact_tokens=_context(4),
        fact_contexts=4,
        facts_asked=8,
    ),
)
"""8,192 tokens a window, 17,856 scored in all; 50 passkeys, 40 needles, 24 lines, 32 questions."""

QUICK: Final = Sizes(
    windows=2,
    window=WindowSizes(context_tokens=_context(2), scored_tokens=512),
    tasks=TaskSizes(
        passkey_tokens=(_context(2),),
        passkey_depths=5,
        needle_tokens=_context(2),
        needle_contexts=1,
        needle_keys=4,
        line_tokens=_context(2),
        line_contexts=1,
        lines_asked=4,
        fact_tokens=_context(2),
        fact_contexts=1,
        facts_asked=4,
    ),
    window_tokens=256,
)
"""For a first look: too few tokens for a judgement."""


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured of a variant."""

    variant: Variant
    fidelity: Fidelity
    reading: Reading
    kept: Mapping[Kind, float | None]
    """Share of full attention's right answers that are right here too, by kind; None: full attention has none."""

    @property
    def bytes_share(self) -> float:
        """Bytes read per cold token over its plain ones."""
        share = self.reading.share
        assert share is not None, "windows are longer than what is always read exactly"
        return share


@dataclass(frozen=True, slots=True)
class Measurement:
    """Of one run."""

    points: tuple[Point, ...]
    scored_tokens: int
    documents: int
    """That scored tokens are of."""
    answers: Answers
    recall: Mapping[Encoding, Mapping[int, float]]
    """Mean recall by layer, over all variants of an encoding that retrieve."""


def measure(
    model: LoadedModel,
    variants: Sequence[Variant],
    documents: Sequence[Sequence[int]],
    *,
    sizes: Sizes,
    seed: int,
    progress: Progress,
) -> Measurement:
    """Measure every variant against full attention over plain numbers.

    Args:
        model: its context holds a window.
        variants: without the reference.
        documents: tokens of the text; its beginning is the filler of the questions too.
        sizes: how much.
        seed: of keys, names and facts.
        progress: hears of what was done.

    Raises:
        ConfigError: the text is too short, the model's context is, or there are more variants of one encoding than
            sequences run at a time.
    """
    _check(model, variants, sizes)
    # Everything that a short text can be missing is found before anything is measured.
    windows = choose_windows(documents, sizes.window, sizes.windows)
    filler = [token for document in documents for token in document][: sizes.tasks.tokens]
    tasks = _make_tasks(TaskMaker(model.tokenizer, filler, seed=seed), sizes.tasks)
    every = [REFERENCE, *variants]
    progress(
        f"{len(windows)} windows of {sizes.window.tokens:,} tokens and {sum(len(task.questions) for task in tasks)} "
        f"questions, {len(every)} ways: {', '.join(variant.name for variant in every)}"
    )
    with open_banks(model, every, LaneCaps(sizes.window_tokens, sizes.chunk_tokens, sizes.window.tokens)) as banks:
        scores = score_windows(banks, variants, windows, sizes=sizes.window, progress=progress)
        for variant in variants:
            progress(_tell(variant, summarise(scores.blocks[variant.name])))
        recall = {encoding: dict(bank.node.pool.recall_sample.means) for encoding, bank in banks.items()}
    caps = LaneCaps(sizes.task_window_tokens, sizes.chunk_tokens, sizes.tasks.tokens)
    with open_banks(model, every, caps) as banks:
        answers = ask_all(banks, variants, tasks, window_tokens=sizes.task_window_tokens, progress=progress)
    return Measurement(
        points=tuple(_point(variant, scores, answers) for variant in variants),
        scored_tokens=len(windows) * sizes.window.scored_tokens,
        documents=len(frozenset().union(*(window.documents for window in windows))),
        answers=answers,
        recall=recall,
    )


def _tell(variant: Variant, fidelity: Fidelity) -> str:
    return (
        f"{variant.name}: perplexity {fidelity.perplexity_change:+.3%} ± {fidelity.perplexity_se:.3%}, "
        f"mean KL {fidelity.mean_kl:.2e}, top-1 {fidelity.top1:.4f}"
    )


def dropped_share(answers: Answers) -> float | None:
    """Passkeys that are found without looking at the cold context: how easily the test is passed."""
    return answers.kept([Kind.PASSKEY], DROPPED)


def _point(variant: Variant, scores: WindowScores, answers: Answers) -> Point:
    kept = {kind: answers.kept([kind], variant.name) for kind in Kind}
    return Point(variant, summarise(scores.blocks[variant.name]), scores.readings[variant.name], kept)


def _make_tasks(maker: TaskMaker, sizes: TaskSizes) -> list[Task]:
    passkeys = [task for tokens in sizes.passkey_tokens for task in maker.passkeys(tokens, depths=sizes.passkey_depths)]
    return [
        *passkeys,
        *maker.needles(sizes.needle_tokens, keys=sizes.needle_keys, contexts=sizes.needle_contexts),
        *maker.lines(sizes.line_tokens, asked=sizes.lines_asked, contexts=sizes.line_contexts),
        *maker.facts(sizes.fact_tokens, facts=sizes.facts_asked, contexts=sizes.fact_contexts),
    ]


def _check(model: LoadedModel, variants: Sequence[Variant], sizes: Sizes) -> None:
    # A window's last token is only compared.
    needed, limit = max(sizes.window.tokens - 1, sizes.tasks.tokens + QUESTION_TOKENS), model.config.max_context
    if needed > limit:
        raise ConfigError(
            f"windows of {needed:,} tokens are read, and the model's context holds {limit:,}: choose --quick, or "
            "another --model",
            field="model.max_context",
        )
    for encoding in Encoding:
        lanes = sum(variant.encoding is encoding for variant in (REFERENCE, *variants))
        if lanes > LANES_MAX:
            raise ConfigError(
                f"{lanes} variants in {encoding.value} are more than the {LANES_MAX} that run side by side: measure "
                "fewer at a time",
                field="attention.encoding",
            )
