from typing import Any

import pytest

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2 as pb
from services.gateway.openai import CompletionBody
from services.gateway.problems import FieldError

TENANT = pb.Tenant(name="t", salt=b"s")


def only(body: CompletionBody) -> pb.GenerateRequest:
    found = body.asked(TENANT)
    (request,) = found.prompts
    request.sampling.CopyFrom(found.sampling_of(0))
    return request


def test_completion_asks_for_what_it_says_and_for_openais_defaults_otherwise() -> None:
    asked = only(CompletionBody(model="m", prompt="x", stop="end", seed=3))
    sampling = pb.Sampling(temperature=1, top_p=1, seed=3, max_new_tokens=16, stop=["end"])
    assert asked == pb.GenerateRequest(text="x", sampling=sampling, tenant=TENANT)
    full = CompletionBody.model_validate(
        {
            "model": "m",
            "prompt": [1, 2],
            "temperature": 0.0,
            "top_p": 0.5,
            "top_k": 4,
            "min_p": 0.1,
            "seed": 0,
            "max_tokens": 5,
            "stop": ["a", "b"],
            "stop_token_ids": [9],
            "ignore_eos": True,
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "repetition_penalty": 1.5,
            "logit_bias": {"7": -100},
            "logprobs": 2,
            "skip_special_tokens": False,
        }
    )
    assert only(full) == pb.GenerateRequest(
        tokens=pb.Tokens(ids=[1, 2]),
        sampling=pb.Sampling(
            temperature=0,
            top_p=0.5,
            top_k=4,
            min_p=0.1,
            seed=0,
            max_new_tokens=5,
            stop=["a", "b"],
            stop_token_ids=[9],
            ignore_eos=True,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={7: -100},
            logprobs=2,
            skip_special_tokens=False,
        ),
        tenant=TENANT,
    )


def test_seed_is_drawn_where_none_is_given() -> None:
    body = CompletionBody(model="m", prompt="x")
    assert only(body).sampling.seed != only(body).sampling.seed


def test_choices_have_seeds_that_follow_one_another_and_are_else_alike() -> None:
    asked = CompletionBody(model="m", prompt="x", n=3, seed=2**63 - 2).asked(TENANT)
    choices = [asked.sampling_of(place) for place in range(asked.count)]
    assert [sampling.seed for sampling in choices] == [2**63 - 2, 2**63 - 1, 0]
    for sampling in choices:
        sampling.seed = 0
    assert choices[0] == choices[1] == choices[2]


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1, 2], [[1, 2]]),
        ("a", ["a"]),
    ],
)
def test_each_prompt_of_a_list_is_asked(prompt: Any, asked: list[Any]) -> None:
    whole = CompletionBody(model="m", prompt=prompt, n=2).asked(TENANT)
    assert whole.count == 2 * len(asked)
    found = whole.prompts
    assert [each.text if each.HasField("text") else list(each.tokens.ids) for each in found] == asked


@pytest.mark.parametrize(
    "neutral", [{"echo": False}, {"echo": None}, {"best_of": 1}, {"suffix": None}, {"whatever": None}, {"n": None}]
)
def test_what_asks_for_nothing_is_as_good_as_left_out(neutral: dict[str, object]) -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "seed": 1, **neutral})
    assert only(body) == only(CompletionBody(model="m", prompt="x", seed=1))


def test_bias_for_one_token_under_two_names_is_refused() -> None:
    body = CompletionBody(model="m", prompt="x", logit_bias={"7": 1.0, "07": 2.0})
    with pytest.raises(FieldError, match="each once"):
        body.asked(TENANT)


def test_stream_options_without_a_stream_are_refused() -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "stream_options": {"include_usage": True}})
    with pytest.raises(FieldError, match="set stream to true"):
        body.asked(TENANT)
