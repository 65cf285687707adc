import json

import pytest

from h3kv.core.errors import RequestError
from h3kv.models.json_text import read_json


def nested(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


@pytest.mark.parametrize("value", [1, "a \u00e9 \U0001f642", None, True, [], {}, {"a": [1.5, {"b": None}]}, -(10**50)])
def test_json_is_read_as_python_reads_it(value: object) -> None:
    assert read_json(json.dumps(value), field="tools", depth_max=3) == value


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_depth_up_to_the_bound_is_read(depth: int) -> None:
    read_json(nested(depth), field="tools", depth_max=3)


@pytest.mark.parametrize("text", [nested(4), nested(500), "[" * 100_000, '{"a":' * 4 + "{}" + "}" * 4])
def test_depth_beyond_the_bound_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"^tools: nested more than 3 deep"):
        read_json(text, field="tools", depth_max=3)


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "NaN", "[Infinity]", '"\\ud800"', "[1] x", "1" * 5000])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"^tools: not valid JSON \(.*\); correct it"):
        read_json(text, field="tools", depth_max=3)
