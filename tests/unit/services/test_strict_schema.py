from typing import Any

import pytest

from services.gateway.problems import FieldError
from services.gateway.strict_schema import STEPS_MAX, Budget, StrictSchema

POINT: dict[str, Any] = {
    "title": "Point",
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "description": "From the left."},
        "name": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2},
        "next": {"$ref": "#/$defs/Next"},
    },
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"Next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}


def holds(schema: dict[str, Any], value: object) -> bool:
    return StrictSchema(schema, place="p").holds(value, Budget())


@pytest.mark.parametrize(
    "value",
    [
        {"x": 0},
        {"x": 3.0, "name": None, "tags": ["a", 1]},
        {"x": 1, "next": {"x": 2, "next": {"x": 3, "next": None}}},
        {"x": 1, "name": "abc"},
    ],
)
def test_arguments_that_the_schema_allows_hold(value: object) -> None:
    assert holds(POINT, value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        {"x": -1},
        {"x": True},
        {"x": 1.5},
        {"x": "1"},
        {"x": 1, "y": 2},
        {"x": 1, "name": "abcd"},
        {"x": 1, "tags": [True]},
        {"x": 1, "tags": ["a", "a", "a"]},
        {"x": 1, "next": {"x": 2, "next": {"x": -3}}},
    ],
)
def test_arguments_that_it_does_not_allow_break_it(value: object) -> None:
    assert not holds(POINT, value)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"pattern": "(a+)+$"}, "p.pattern"),
        ({"properties": {"d": {"type": "string", "format": "date"}}}, "p.properties.d.format"),
        ({"anyOf": [{"oneOf": []}]}, "p.anyOf[0].oneOf"),
        ({"type": "text"}, "p.type"),
        ({"type": []}, "p.type"),
        ({"$ref": "http://elsewhere/schema"}, "p.$ref"),
        ({"$ref": "#/$defs/None"}, "p.$ref"),
        ({"$ref": "#/properties/a", "properties": {"a": {}}}, "p.$ref"),
        ({"$ref": "#/$defs/a/default", "$defs": {"a": {"default": {"type": 1}}}}, "p.$ref"),
        ({"$ref": "#/const", "const": {"oneOf": 1}}, "p.$ref"),
        ({"$ref": "#/"}, "p.$ref"),
        ({"required": "x"}, "p.required"),
        ({"minimum": "0"}, "p.minimum"),
        ({"items": [1]}, "p.items"),
        ({"properties": []}, "p.properties"),
    ],
)
def test_what_would_not_be_checked_is_refused_by_name(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(FieldError) as caught:
        StrictSchema(schema, place="p")
    assert caught.value.param == place


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"items": {"$ref": "#"}, "anyOf": [{"$ref": "#"}]}],
)
def test_schemas_that_go_round_in_circles_hold_nothing_and_end(schema: dict[str, Any]) -> None:
    assert not holds(schema, [[]])


def test_all_checks_of_one_answer_have_one_budget() -> None:
    schema, budget = StrictSchema({"items": {"type": "integer"}}, place="p"), Budget()
    assert schema.holds([1] * 100, budget)
    assert budget.steps_left == STEPS_MAX - 101
    assert not schema.holds([1] * STEPS_MAX, budget)
    assert not schema.holds([], budget)
