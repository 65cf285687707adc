"""Contexts of exact length that hold what is asked."""

from __future__ import annotations

import pytest

from h3kv.core.errors import ConfigError
from h3kv.models.tokenizer import Tokenizer, tokenizer_from_folder
from h3kv.quality.tasks import Kind, Task, TaskMaker
from h3kv.testing.tiny_models import byte_tokenizer, write_tokenizer

TOKENS = 64 + 1024
FILLER = "The harbour was quiet and the boats lay still. " * 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_tokenizer())
    return tokenizer_from_folder(folder)


def make(tokenizer: Tokenizer, *, seed: int = 0) -> dict[Kind, list[Task]]:
    maker = TaskMaker(tokenizer, tokenizer.encode(FILLER), seed=seed)
    return {
        Kind.PASSKEY: maker.passkeys(TOKENS, depths=3),
        Kind.NEEDLES: maker.needles(TOKENS, keys=4, contexts=2),
        Kind.LINES: maker.lines(TOKENS, asked=3, contexts=1),
        Kind.QUESTIONS: maker.facts(TOKENS, facts=4, contexts=1),
    }


def test_contexts_have_the_length_that_was_asked_for(tokenizer: Tokenizer) -> None:
    for kind, tasks in make(tokenizer).items():
        assert all(len(task.context) == TOKENS and task.kind is kind for task in tasks)


def test_every_answer_stands_once_behind_its_beginning_or_more(tokenizer: Tokenizer) -> None:
    for tasks in make(tokenizer).values():
        for task in tasks:
            context = tokenizer.decode(task.context)
            for question in task.questions:
                begin = tokenizer.decode(question.tokens).rpartition("? ")[2]
                assert f"{begin}{tokenizer.decode(question.answer)}" in context


def test_passkeys_lie_at_all_depths(tokenizer: Tokenizer) -> None:
    depths = []
    for task in make(tokenizer)[Kind.PASSKEY]:
        answer = tokenizer.decode(task.questions[0].answer)
        depths.append(tokenizer.decode(task.context).index(answer) / TOKENS)
    assert depths[0] < 0.2 < depths[1] < 0.6 < depths[2]


def test_equal_seeds_make_equal_tasks(tokenizer: Tokenizer) -> None:
    assert make(tokenizer) == make(tokenizer)
    assert make(tokenizer, seed=1) != make(tokenizer)


def test_the_names_of_one_context_differ(tokenizer: Tokenizer) -> None:
    for task in make(tokenizer)[Kind.NEEDLES]:
        assert len({question.tokens for question in task.questions}) == 4


def test_too_little_filler_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="of filler"):
        TaskMaker(tokenizer, tokenizer.encode("short"), seed=0).passkeys(TOKENS, depths=1)
