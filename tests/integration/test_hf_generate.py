"""`generate` of unmodified transformers models with an H3Cache: the tokens that they answer with their own cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.unit.hf.models import CACHE, PAD, greedy, ids_of, model_of
from transformers import DynamicCache

from h3kv.hf import H3Cache

FAMILIES = ["llama", "qwen2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def own_cache(family: str) -> DynamicCache:
    return DynamicCache(config=model_of(family, "sdpa").config)


def h3_cache(family: str, device_bytes: str = "16MiB") -> H3Cache:
    return H3Cache(model_of(family, "h3").config, device_bytes=device_bytes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_prompt(family: str, attention: str) -> None:
    ids = ids_of(150)
    expected = greedy(model_of(family, attention), ids, own_cache(family), tokens=60)
    with h3_cache(family) as cache:
        assert torch.equal(greedy(model_of(family, "h3"), ids, cache, tokens=60), expected)
        assert cache.get_seq_length() == 209
        cache.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_with_padding_on_the_left(family: str) -> None:
    ids = ids_of(70, 1, 131)
    expected = greedy(model_of(family, "sdpa"), ids, own_cache(family), tokens=40)
    with h3_cache(family) as cache:
        assert torch.equal(greedy(model_of(family, "h3"), ids, cache, tokens=40), expected)
        cache.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(140,), (140, 37)])
def test_a_chat_goes_on_with_the_same_cache(family: str, lengths: tuple[int, ...]) -> None:
    def chat(model: object, cache: object) -> torch.Tensor:
        ids = ids_of(*lengths)
        for turn in range(3):
            answer = greedy(model, ids, cache, tokens=9)
            ids = torch.cat([answer, ids_of(*(len(answer) * [5]), seed=turn)], dim=1)
        return ids

    expected = chat(model_of(family, "sdpa"), own_cache(family))
    with h3_cache(family) as cache:
        assert torch.equal(chat(model_of(family, "h3"), cache), expected)
        cache.check_integrity()


@pytest.mark.parametrize("lengths", [(300,), (300, 45)])
@pytest.mark.parametrize("chunk", [64, 37])
def test_a_prompt_in_chunks(lengths: tuple[int, ...], chunk: int) -> None:
    ids = ids_of(*lengths)
    expected = greedy(model_of("llama", "sdpa"), ids, own_cache("llama"), tokens=20)
    with h3_cache("llama") as cache:
        answer = greedy(model_of("llama", "h3"), ids, cache, tokens=20, prefill_chunk_size=chunk)
        assert torch.equal(answer, expected)
        cache.check_integrity()


def test_several_answers_to_one_prompt() -> None:
    ids = ids_of(40)
    with h3_cache("llama") as cache:
        torch.manual_seed(0)
        several = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "pad_token_id": PAD}
        answers = model_of("llama", "h3").generate(ids, **{CACHE: cache}, **several)
        torch.manual_seed(0)
        expected = model_of("llama", "sdpa").generate(ids, **several)
        assert torch.equal(answers, expected)


def test_the_older_name_of_the_argument_works_too() -> None:
    ids = ids_of(20)
    expected = greedy(model_of("llama", "sdpa"), ids, own_cache("llama"), tokens=5)
    with h3_cache("llama") as cache, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
        answer = model_of("llama", "h3").generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(answer, expected)
