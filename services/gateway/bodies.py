"""What all bodies of requests have in common.

A field that is not listed is refused by its name: what a client asks for is done, or it is told. Null says the same as
leaving a field out, and so do a few values of fields that are not served otherwise: clients write them as they are.

A body that is wrong in a million places costs no more than one that is wrong in one: lists stop at their first error,
and names and sizes are looked at before anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

TOKENS_MAX: Final = 2**31 - 1
IDS_MAX: Final = 4 << 20
"""Tokens of a prompt: more than a body holds."""
UNKNOWN_MAX: Final = 20
"""Names that are not listed, of one object, which are told one by one."""

TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
DocumentId = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=IDS_MAX, fail_fast=True)]


def few(most: int) -> BeforeValidator:
    """Refuses an object with more members before it looks at any of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"should have at most {most} members, not {len(value)}")
        return value

    return BeforeValidator(check)


class UnknownFieldError(ValueError):
    """An object has many names that are not listed; `field` is the first."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported")
        self.field = field


class Body(BaseModel):
    """Base of what clients send: types are not converted, other fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Values that ask for nothing, by field; most of these fields are not served otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: each for name, each in value.items() if each is not None and not cls._is_neutral(name, each)}
        unknown = given.keys() - known
        if len(unknown) > UNKNOWN_MAX:
            name = next(name for name in given if name in unknown)
            raise UnknownFieldError(str(name)[:100])
        return given

    @classmethod
    def _is_neutral(cls, name: object, value: object) -> bool:
        neutral = cls.NEUTRAL.get(name, ()) if isinstance(name, str) else ()
        # True is no 1 here.
        return any(type(value) is type(each) and value == each for each in neutral)
