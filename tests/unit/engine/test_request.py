import math

import pytest

from h3kv.core.client_limits import SEED_MAX
from h3kv.core.errors import RequestError
from h3kv.engine.request import Request, SamplingParameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 101),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", SEED_MAX + 1),
        ("seed", 1.0),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("max_new_tokens", 2.0),
        ("stop", ("",)),
        ("stop", ("a",) * 17),
        ("stop", (3,)),
        ("stop", "END"),
        ("stop", ["END"]),
        ("stop", None),
        ("stop", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", 5),
        ("stop_token_ids", None),
        ("stop_token_ids", [1]),
        ("ignore_eos", "no"),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "much"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10.1),
        ("repetition_penalty", math.inf),
        ("logit_bias", {1: 1.0}),
        ("logit_bias", ((1, 101),)),
        ("logit_bias", ((1, -101),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((-1, 1),)),
        ("logit_bias", ((1, 1), (1, 2))),
        ("logit_bias", ((1,),)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("grammar", "json"),
    ],
)
def test_bad_value_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParameters(**{field: value})
    assert str(caught.value).startswith(f"{field} = {value!r}: must be")


@pytest.mark.parametrize(
    ("field", "value"), [("prompt", [1, 2]), ("prompt", "text"), ("prompt", None), ("tenant", "me"), ("sampling", None)]
)
def test_field_of_another_type_is_refused_by_its_name(field: str, value: object) -> None:
    fields: dict[str, object] = {"prompt": (1, 2), field: value}
    with pytest.raises(RequestError) as caught:
        Request(**fields)
    assert str(caught.value).startswith(f"{field} = {value!r}: must be")


def test_limits_themselves_are_accepted() -> None:
    SamplingParameters(temperature=100, top_k=1, top_p=1, min_p=0, seed=SEED_MAX, max_new_tokens=1)
    SamplingParameters(presence_penalty=2, frequency_penalty=-2, repetition_penalty=10, logprobs=0)
    SamplingParameters(repetition_penalty=1e-9, logit_bias=((0, 100), (1, -100)), logprobs=20)
    SamplingParameters(temperature=0.5, top_p=1e-9, min_p=1.0, seed=0, stop=("a",) * 16, stop_token_ids=(0,))


@pytest.mark.parametrize("prompt", [(), (1, 2, 10), (-1,), (1.0,), (True,)])
def test_prompt_outside_the_vocabulary_is_refused(prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="prompt"):
        Request(prompt=prompt).check(vocabulary_size=10)


def test_refused_prompt_names_the_place() -> None:
    with pytest.raises(RequestError, match=r"prompt\[2\] = 10: must be a token number from 0 to 9"):
        Request(prompt=(1, 2, 10)).check(vocabulary_size=10)


def test_ten_thousand_stop_strings_are_refused_by_name_and_shortly() -> None:
    with pytest.raises(RequestError, match=r"^stop = \('END0', .*\.\.\.: must be a tuple of up to 16") as caught:
        SamplingParameters(stop=tuple(f"END{number}" for number in range(10_000)))
    assert len(str(caught.value)) < 400


def test_bias_of_a_token_outside_the_vocabulary_is_refused() -> None:
    request = Request(prompt=(1,), sampling=SamplingParameters(logit_bias=((9, 1.0), (10, 1.0))))
    request.check(vocabulary_size=11)
    with pytest.raises(RequestError, match="logit_bias = 10: must be of token numbers from 0 to 9"):
        request.check(vocabulary_size=10)


def test_a_grammar_ends_the_answer() -> None:
    class Anything:
        def matcher(self) -> None: ...

    SamplingParameters(grammar=Anything())
    with pytest.raises(RequestError, match="ignore_eos = True: must be false with a grammar"):
        SamplingParameters(grammar=Anything(), ignore_eos=True)
