"""Whether the arguments of a call are what a strict function takes.

Where the model calls what it likes, no grammar holds it to a schema: a call of a strict function that breaks its schema
is then no call, but text. Keywords that are not checked here are refused by name: nothing is promised that is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from services.gateway.problems import FieldError

Schema = Mapping[str, Any] | bool

STEPS_MAX: Final = 100_000
"""Of all checks for one answer. References may go round in circles."""

DEPTH_MAX: Final = 150
"""Of schemas within one another, and of references. Deeper values hold nothing."""

DEFINITIONS: Final = ("$defs", "definitions")
SAID: Final = frozenset({*DEFINITIONS, "$schema", "default", "description", "examples", "title"})
"""Keywords that ask for nothing."""


class Budget:
    """How much may still be checked. Made for one answer."""

    def __init__(self) -> None:
        self.steps_left = STEPS_MAX


class StrictSchema:
    """A schema whose every keyword is checked.

    Args:
        root: JSON schema. References lead to places in it.
        place: of it in the body, for errors.

    Raises:
        FieldError: it has a keyword that is not checked, or one with a malformed value.
    """

    def __init__(self, root: Mapping[str, Any], *, place: str) -> None:
        self._root = root
        self._place = place
        self._check(root, "")

    def holds(self, value: object, budget: Budget) -> bool:
        """Whether a value is what the schema allows; never, once the budget is spent."""
        return _Check(self._root, budget).holds(self._root, value)

    def _check(self, schema: object, path: str) -> None:
        """Raise FieldError for what `_holds` could not check."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise self._refusal(path, "must be a schema")
        for name, wanted in schema.items():
            if not self._is_sound(name, wanted):
                rule = "is not checked where strict goes with free calls: leave it or strict out"
                raise self._refusal(f"{path}.{name}", rule)
            for key, each in _inner(name, wanted).items():
                self._check(each, f"{path}.{name}{key}")

    def _is_sound(self, name: str, wanted: object) -> bool:
        if name in {"properties", *DEFINITIONS}:
            return isinstance(wanted, Mapping)
        if name in SAID | {"const", "items", "additionalProperties"}:
            return True
        if name in _BOUNDS:
            return _is_number(wanted)
        match name, wanted:
            case "type", str() | list():
                named = [wanted] if isinstance(wanted, str) else wanted
                return bool(named) and all(isinstance(each, str) and each in _TYPES for each in named)
            case "required", list():
                return all(isinstance(each, str) for each in wanted)
            case "enum" | "anyOf", list():
                return bool(wanted)
            case "$ref", str():
                return isinstance(_found(self._root, wanted), Mapping | bool)
            case _:
                return False

    def _refusal(self, path: str, rule: str) -> FieldError:
        place = self._place + path
        return FieldError(f"{place[:200]}: {rule}", param=place[:200])


class _Check:
    """One value against one schema."""

    def __init__(self, root: Mapping[str, Any], budget: Budget) -> None:
        self._root = root
        self._budget = budget
        self._depth = 0

    def holds(self, schema: Schema, value: Any) -> bool:
        """Whether it does."""
        self._budget.steps_left -= 1
        if isinstance(schema, bool) or self._budget.steps_left < 0 or self._depth == DEPTH_MAX:
            return schema is True and self._budget.steps_left >= 0
        self._depth += 1
        found = all(self._keyword_holds(schema, name, value) for name in schema if name not in SAID)
        self._depth -= 1
        return found

    def _keyword_holds(self, schema: Mapping[str, Any], name: str, value: Any) -> bool:
        wanted = schema[name]
        match name:
            case "type":
                return any(_TYPES[each](value) for each in ([wanted] if isinstance(wanted, str) else wanted))
            case "const" | "enum":
                return any(_is_same(each, value) for each in ([wanted] if name == "const" else wanted))
            case "$ref":
                return self.holds(_found(self._root, wanted), value)
            case "anyOf":
                return any(self.holds(each, value) for each in wanted)
            case "items":
                return not isinstance(value, list) or all(self.holds(wanted, each) for each in value)
            case "required" | "properties" | "additionalProperties":
                return not isinstance(value, dict) or self._member_holds(schema, name, value)
            case _:
                return _BOUNDS[name](value, wanted)

    def _member_holds(self, schema: Mapping[str, Any], name: str, value: Mapping[str, Any]) -> bool:
        wanted, named = schema[name], schema.get("properties", {})
        match name:
            case "required":
                return set(wanted) <= value.keys()
            case "properties":
                return all(self.holds(each, value[key]) for key, each in wanted.items() if key in value)
            case _:
                return all(self.holds(wanted, value[key]) for key in value if key not in named)


def _found(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference leads to; None where that is no place whose schema was checked."""
    if reference == "#":
        return root
    _, _, path = reference.partition("#/")
    definitions, _, name = path.partition("/")
    if not reference.startswith("#/") or definitions not in DEFINITIONS or not name or "/" in name:
        return None
    return root.get(definitions, {}).get(name.replace("~1", "/").replace("~0", "~"))


def _inner(name: str, wanted: Any) -> dict[str, object]:
    """Schemas in the value of a keyword, by where they lie in it."""
    if name in {"properties", *DEFINITIONS}:
        return {f".{key}": each for key, each in wanted.items()}
    if name in {"items", "additionalProperties"}:
        return {"": wanted}
    return {f"[{index}]": each for index, each in enumerate(wanted)} if name == "anyOf" else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(wanted: object, value: object) -> bool:
    """Equality of JSON: true is no 1."""
    return isinstance(wanted, bool) == isinstance(value, bool) and wanted == value


_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),
}
_BOUNDS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "minimum": lambda value, bound: not _is_number(value) or value >= bound,
    "maximum": lambda value, bound: not _is_number(value) or value <= bound,
    "exclusiveMinimum": lambda value, bound: not _is_number(value) or value > bound,
    "exclusiveMaximum": lambda value, bound: not _is_number(value) or value < bound,
    "minLength": lambda value, bound: not isinstance(value, str) or len(value) >= bound,
    "maxLength": lambda value, bound: not isinstance(value, str) or len(value) <= bound,
    "minItems": lambda value, bound: not isinstance(value, list) or len(value) >= bound,
    "maxItems": lambda value, bound: not isinstance(value, list) or len(value) <= bound,
}
