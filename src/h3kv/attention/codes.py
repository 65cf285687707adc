"""Tokens as codes, in plain torch: what the native core does, slowly, for devices without it and for tests.

Shapes: X any dimensions, S 64 tokens of a page, D head dim, B bytes.

A page of codes is two pieces of memory, drawn in `core/layout.py`: the page, and its plane in the slab's index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from h3kv.core.layout import SCALES_BYTES, PageLayout
from h3kv.core.limits import BLOCK_CLUSTERS, BLOCK_TOKENS, CLUSTER_TOKENS, LANE_TOKENS
from h3kv.core.types import Encoding

KEY_LEVELS = {Encoding.INT8: 255, Encoding.K8V4: 255, Encoding.INT4: 15}
"""Largest code of a key; codes begin at 0."""

VALUE_LEVELS = {Encoding.INT8: 255, Encoding.K8V4: 15, Encoding.INT4: 15}
"""Largest code of a value."""


RESIDUE_STEPS = 16
"""Parts of a step that residues tell apart."""


def rotate(x_XD: Tensor) -> Tensor:
    """A Hadamard transform in Sylvester order, of runs as long as the largest power of two that divides D.

    Orthonormal and its own inverse; in fp32, new. The order of sums is the native core's: equal bit for bit.
    """
    head_dim = x_XD.shape[-1]
    block = head_dim & -head_dim
    runs = x_XD.float().reshape(*x_XD.shape[:-1], head_dim // block, block)
    half = 1
    while half < block:
        pairs = _split(runs, -1, (block // (2 * half), 2, half))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        runs = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    norm = torch.tensor(1.0) / torch.tensor(float(block)).sqrt()
    return (runs * norm.to(runs.device)).reshape(x_XD.shape)


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of numbers, number = scale * code + offset."""

    codes_XD: Tensor
    """uint8."""
    scale_X: Tensor
    """fp16; NaN, like the offset, where a row is not all finite, or has a number below -65,504, or a
    step above that."""
    offset_X: Tensor
    residues_XD: Tensor | None = None
    """uint8: what codes leave out, in sixteenths of a step; None where that is not kept."""

    def decode(self) -> Tensor:
        """The numbers, fp32."""
        codes_XD = self.codes_XD.float()
        if self.residues_XD is not None:
            codes_XD = codes_XD + ((self.residues_XD.float() + 0.5) / RESIDUE_STEPS - 0.5)
        return codes_XD * self.scale_X.float()[..., None] + self.offset_X.float()[..., None]


def encode(x_XD: Tensor, levels: int) -> CodedRows:
    """Codes of fp32 rows, each row between its own least and largest number.

    A code is the nearest one under the scale and the offset as they are kept, in fp16.
    """
    least_X, most_X = x_XD.amin(-1), x_XD.amax(-1)
    scale_X, offset_X = ((most_X - least_X) / levels).half(), least_X.half()
    is_bad_X = ~(x_XD.isfinite().all(-1) & scale_X.isfinite() & offset_X.isfinite())
    scale_X, offset_X = (each.masked_fill(is_bad_X, torch.nan) for each in (scale_X, offset_X))
    steps_XD = (x_XD - offset_X.float()[..., None]) / scale_X.float()[..., None]
    codes_XD = steps_XD.round().clamp(0, levels).masked_fill((is_bad_X | (scale_X == 0))[..., None], 0)
    return CodedRows(codes_XD.to(torch.uint8), scale_X, offset_X)


def with_residues(coded: CodedRows, x_XD: Tensor) -> CodedRows:
    """The codes of these rows, with what they leave out."""
    scale_X1 = coded.scale_X.float()[..., None]
    steps_XD = (x_XD - coded.offset_X.float()[..., None]) / scale_X1 - coded.codes_XD.float()
    residues_XD = ((steps_XD + 0.5) * RESIDUE_STEPS).floor().clamp(0, RESIDUE_STEPS - 1)
    residues_XD = residues_XD.masked_fill(~(scale_X1 > 0), RESIDUE_STEPS // 2).to(torch.uint8)
    return CodedRows(coded.codes_XD, coded.scale_X, coded.offset_X, residues_XD)


@dataclass(frozen=True, slots=True)
class CodedTokens:
    """Keys and values of the same tokens, rotated and coded."""

    keys: CodedRows
    values: CodedRows

    @classmethod
    def of(cls, k_XD: Tensor, v_XD: Tensor, encoding: Encoding) -> CodedTokens:
        """Rotate and encode, with residues of values where the encoding has them."""
        values_XD = rotate(v_XD)
        values = encode(values_XD, VALUE_LEVELS[encoding])
        if encoding is Encoding.K8V4:
            values = with_residues(values, values_XD)
        return cls(encode(rotate(k_XD), KEY_LEVELS[encoding]), values)

    def without_residues(self) -> CodedTokens:
        """The same, with values as their codes alone say."""
        return CodedTokens(self.keys, replace(self.values, residues_XD=None))

    def decode(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they were before the rotation, but for what the codes lost; fp32."""
        return rotate(self.keys.decode()), rotate(self.values.decode())


def pack_residues(tokens: CodedTokens) -> Tensor:
    """The bytes of the residues of pages of 64 tokens each, [X, B]; empty where there are none."""
    residues_XSD = tokens.values.residues_XD
    if residues_XSD is None:
        return torch.empty(*tokens.values.scale_X.shape[:-1], 0, dtype=torch.uint8)
    groups = _split(residues_XSD, -1, (-1, 2, LANE_TOKENS // 2))
    return (groups[..., 0, :] | groups[..., 1, :] << 4).flatten(-3)


def unpack_residues(bytes_XB: Tensor, head_dim: int) -> Tensor:
    """What `pack_residues` was given, [X, S, D]."""
    groups = _split(bytes_XB, -1, (BLOCK_TOKENS, head_dim // LANE_TOKENS, LANE_TOKENS // 2))
    return torch.stack([groups & 15, groups >> 4], dim=-2).flatten(-3)


def pack(tokens: CodedTokens, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """The bytes of pages of 64 tokens each, but for residues.

    Returns:
        Keys and values [X, B] as they lie in a page, and nibbles and scales [X, B] as they begin a plane; uint8.
    """
    k_XSD, v_XSD = tokens.keys.codes_XD, tokens.values.codes_XD
    is_byte = layout.encoding is Encoding.INT8
    values = _pack_values(v_XSD, is_byte=is_byte)
    rows = (tokens.keys.scale_X, tokens.keys.offset_X, tokens.values.scale_X, tokens.values.offset_X)
    scales = torch.stack(rows, dim=-2).contiguous().view(torch.uint8).flatten(-2)
    match layout.encoding:
        case Encoding.INT8:
            return torch.cat([_pack_keys(k_XSD, is_byte=True), values], dim=-1), scales
        case Encoding.K8V4:
            page = torch.cat([_pack_keys(k_XSD % 16, is_byte=False), values], dim=-1)
            return page, torch.cat([_pack_keys(k_XSD // 16, is_byte=False), scales], dim=-1)
        case _:
            return values, torch.cat([_pack_keys(k_XSD, is_byte=False), scales], dim=-1)


def unpack(page_XB: Tensor, plane_XB: Tensor, layout: PageLayout) -> CodedTokens:
    """The tokens of pages: what `pack` was given, without residues. More bytes than it gives back may follow."""
    head_dim, encoding = layout.head_dim, layout.encoding
    is_byte = encoding is Encoding.INT8
    keys = page_XB[..., : layout.keys_bytes]
    values = page_XB[..., layout.keys_bytes : layout.keys_bytes + layout.values_bytes]
    nibbles = plane_XB[..., : layout.nibbles_bytes]
    scales = plane_XB[..., layout.nibbles_bytes : layout.nibbles_bytes + SCALES_BYTES].contiguous().view(torch.float16)
    k_scale, k_offset, v_scale, v_offset = _split(scales, -1, (4, BLOCK_TOKENS)).unbind(-2)
    match encoding:
        case Encoding.INT8:
            k_XSD = _unpack_keys(keys, head_dim, is_byte=True)
        case Encoding.K8V4:
            low, high = (_unpack_keys(each, head_dim, is_byte=False) for each in (keys, nibbles))
            k_XSD = 16 * high + low
        case _:
            k_XSD = _unpack_keys(nibbles, head_dim, is_byte=False)
    v_XSD = _unpack_values(values, head_dim, is_byte=is_byte)
    return CodedTokens(CodedRows(k_XSD, k_scale, k_offset), CodedRows(v_XSD, v_scale, v_offset))


def _split(x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """One axis, counted from the end, as several."""
    behind = x.shape[x.ndim + axis + 1 :]
    return x.reshape(*x.shape[: x.ndim + axis], *sizes, *behind)


def _join_nibbles(n_X8: Tensor) -> Tensor:
    """Four bytes of eight numbers below 16: byte b holds number b low and number 4 + b high."""
    return n_X8[..., :4] | n_X8[..., 4:] << 4


def _split_nibbles(bytes_X4: Tensor) -> Tensor:
    return torch.cat([bytes_X4 & 15, bytes_X4 >> 4], dim=-1)


def _pack_keys(codes_XSD: Tensor, *, is_byte: bool) -> Tensor:
    width = 4 if is_byte else 8
    quads = _split(codes_XSD, -1, (-1, width))
    lanes = _split(quads, -3, (BLOCK_CLUSTERS, CLUSTER_TOKENS)).transpose(-3, -2)
    return (lanes if is_byte else _join_nibbles(lanes)).flatten(-4)


def _unpack_keys(bytes_XB: Tensor, head_dim: int, *, is_byte: bool) -> Tensor:
    width = 4 if is_byte else 8
    lanes = _split(bytes_XB, -1, (BLOCK_CLUSTERS, head_dim // width, CLUSTER_TOKENS, 4))
    return (lanes if is_byte else _split_nibbles(lanes)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _pack_values(codes_XSD: Tensor, *, is_byte: bool) -> Tensor:
    width = 4 if is_byte else 8
    lanes = _split(_split(codes_XSD, -1, (-1, LANE_TOKENS)), -3, (-1, width)).movedim(-3, -1)
    return (lanes if is_byte else _join_nibbles(lanes)).flatten(-4)


def _unpack_values(bytes_XB: Tensor, head_dim: int, *, is_byte: bool) -> Tensor:
    width = 4 if is_byte else 8
    lanes = _split(bytes_XB, -1, (BLOCK_TOKENS // width, head_dim // LANE_TOKENS, LANE_TOKENS, 4))
    return (lanes if is_byte else _split_nibbles(lanes)).movedim(-1, -3).flatten(-2).flatten(-3, -2)
