"""Typed access to a model file's metadata, with errors that name the key, the file and the cure."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Final

from h3kv.core.errors import ConfigError, ModelCorruptError, ModelUnsupportedError

COUNT_MAX: Final = (1 << 31) - 1
"""Token ids and positions are int32 in the cache, and no dimension of a model comes near."""


class Fields:
    """The metadata of one file."""

    def __init__(self, raw: Mapping[str, object], path: str) -> None:
        self._raw = raw
        self.path = path

    def get(self, key: str) -> object:
        """The value as it is, or None when absent."""
        return self._raw.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer of at most `COUNT_MAX`.

        Raises:
            ModelCorruptError: absent without a default, or anything else.
        """
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= COUNT_MAX:
            raise self._wrong(key, value, f"a positive whole number up to {COUNT_MAX}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive and finite number. Raises ModelCorruptError as `count`."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, value, "a positive, finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value. Raises ModelCorruptError when it is something else."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of texts. Raises ModelCorruptError when it is absent or something else."""
        value = self._present(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, type(value), "a list of texts")
        return value

    def numbers(self, key: str, length: int) -> list[float]:
        """A list of so many numbers. Raises ModelCorruptError when it is absent or something else."""
        value = self._present(key, None)
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(isinstance(item, int | float) for item in value)
        ):
            raise self._wrong(key, type(value), f"a list of {length} numbers")
        return value

    def unsupported(self, feature: str) -> ModelUnsupportedError:
        """The error that names a feature of this file which is not implemented."""
        message = f"{feature} is not supported, found in {self.path}; choose another model"
        return ModelUnsupportedError(message, path=self.path)

    @contextlib.contextmanager
    def scaling_errors(self) -> Iterator[None]:
        """Turn a ConfigError about numbers that came from this file into a ModelCorruptError."""
        try:
            yield
        except ConfigError as error:
            message = f"{error}; this was read from {self.path}, fetch the model again"
            raise ModelCorruptError(message, path=self.path) from error

    def _present(self, key: str, default: float | None) -> object:
        value = self._raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelCorruptError(f"{self.path} lacks '{key}'; fetch the model again", path=self.path)
        return value

    def _wrong(self, key: str, value: object, rule: str) -> ModelCorruptError:
        return ModelCorruptError(
            f"'{key}' in {self.path} is {value!r}, not {rule}; fetch the model again", path=self.path
        )
