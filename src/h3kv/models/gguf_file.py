"""Opens a GGUF file, and turns what the `gguf` package raises into our errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize

from h3kv.core.errors import ModelCorruptError, ModelUnsupportedError
from h3kv.models.fields import Fields
from h3kv.models.file_errors import file_errors


class _PlainReader(GGUFReader):
    """GGUFReader over a plain array.

    Parsing slices the file's array a few times per token of the vocabulary, and each slice of a `memmap` costs a
    microsecond of bookkeeping: three quarters of the time to open a file.
    """

    @property
    def data(self) -> Any:
        """The file's bytes; keeps the mapping alive. An array where the base class has its subclass `memmap`."""
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)


class GgufFile:
    """A GGUF file, mapped into memory: metadata parsed, tensors read when asked for."""

    def __init__(self, path: Path) -> None:
        """Open and check the whole directory of the file, but none of its numbers.

        Raises:
            ModelNotFoundError: it may not be read.
            ModelCorruptError: truncated, or not GGUF at all.
            ModelUnsupportedError: one of several parts, or a tensor type that cannot be decoded.
        """
        self.path = str(path)
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.metadata: dict[str, object] = {key: field.contents() for key, field in self._reader.fields.items()}
        self.fields = Fields(self.metadata, self.path)
        if self.fields.get("split.count") not in (None, 0, 1):
            raise ModelUnsupportedError(
                f"{path} is one of several parts; merge them with 'llama-gguf-split --merge' first", path=self.path
            )
        self._check_types()

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor decoded to fp32. The caller owns it."""
        tensor = self._tensors[name]
        return np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")

    def _check_types(self) -> None:
        """Decode one row of each type, so that an unknown one is found before the model is half loaded."""
        for tensor in {tensor.tensor_type: tensor for tensor in self._reader.tensors}.values():
            try:
                dequantize(tensor.data[:1], tensor.tensor_type)
            except NotImplementedError:
                raise _unsupported_type(self.path, tensor.tensor_type.name) from None


def _open(path: Path) -> GGUFReader:
    try:
        with file_errors(path):
            return _PlainReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            raise _unsupported_type(str(path), f"number {unknown[1]}") from error
        raise ModelCorruptError(
            f"{path} is not a complete GGUF file ({error}); fetch it again", path=str(path)
        ) from error


def _unsupported_type(path: str, name: str) -> ModelUnsupportedError:
    return ModelUnsupportedError(
        f"quantisation type {name} is not supported, found in {path}; choose a file with another one, such as Q8_0",
        path=path,
    )
