"""What all bodies of requests have in common.

A field that is not listed is refused by its name: what a client asks for is done, or it is told. Null says the same as
leaving a field out, and so do a few values of fields that are not served otherwise: clients write them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

SEED_MAX: Final = 2**63 - 1
TOKENS_MAX: Final = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
DocumentId = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Ids = Annotated[list[TokenId], Field(min_length=1)]

_ABSENT: Final = object()


class Body(BaseModel):
    """Base of what clients send: types are not converted, other fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)

    NEUTRAL: ClassVar[Mapping[str, object]] = {}
    """Fields that are not served, each with the value that asks for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None and not cls._is_neutral(name, each)}

    @classmethod
    def _is_neutral(cls, name: object, value: object) -> bool:
        neutral = cls.NEUTRAL.get(name, _ABSENT) if isinstance(name, str) else _ABSENT
        # True is no 1 here.
        return type(value) is type(neutral) and value == neutral
