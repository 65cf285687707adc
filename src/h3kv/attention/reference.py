"""Slow, plain attention over pages: the oracle of every faster path.

Shapes: T query tokens, H query heads, K KV heads, G query heads per KV head, S tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3kv.attention.parts import Part
from h3kv.core.layout import PageLayout
from h3kv.core.limits import BLOCK_TOKENS, PANEL_DIMS


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of all KV heads in natural order, with their positions."""

    k_SKD: Tensor
    v_SKD: Tensor
    positions_S: Tensor


def attend(q_THD: Tensor, runs: Sequence[TokenRun], *, position: int, scale: float | None = None) -> Part:
    """Attention in fp64 over explicit tokens: row t sees the tokens whose position is <= position + t."""
    tokens, heads, head_dim = q_THD.shape
    k_SKD = torch.cat([run.k_SKD for run in runs]).double()
    v_SKD = torch.cat([run.v_SKD for run in runs]).double()
    positions_S = torch.cat([run.positions_S for run in runs])
    q_TKGD = q_THD.double().view(tokens, k_SKD.shape[1], -1, head_dim)
    scores_TKGS = torch.einsum("tkgd,skd->tkgs", q_TKGD, k_SKD) * (head_dim**-0.5 if scale is None else scale)
    hidden_TS = positions_S[None, :] > position + torch.arange(tokens)[:, None]
    scores_TKGS = scores_TKGS.masked_fill(hidden_TS[:, None, None, :], -torch.inf)
    lse_TKG = torch.logsumexp(scores_TKGS, dim=-1)
    weights_TKGS = torch.exp(scores_TKGS - torch.nan_to_num(lse_TKG, neginf=0.0).unsqueeze(-1))
    out_TKGD = torch.einsum("tkgs,skd->tkgd", weights_TKGS, v_SKD)
    return Part(out_TKGD.reshape(tokens, heads, head_dim).float(), lse_TKG.reshape(tokens, heads).float())


def pack_page(k_SD: Tensor, v_SD: Tensor, layout: PageLayout) -> Tensor:
    """The bytes of a page that holds these tokens (at most 64), as uint8; room without a token is zero."""
    pack = layout.pack
    k_full = torch.zeros(BLOCK_TOKENS, layout.head_dim, dtype=k_SD.dtype)
    v_full = torch.zeros_like(k_full)
    k_full[: len(k_SD)] = k_SD
    v_full[: len(v_SD)] = v_SD
    keys = k_full.view(BLOCK_TOKENS, layout.head_dim // pack, pack).transpose(0, 1)
    panels = torch.split(v_full.view(BLOCK_TOKENS // pack, pack, layout.head_dim).transpose(1, 2), PANEL_DIMS, dim=1)
    values = torch.cat([panel.reshape(-1) for panel in panels])
    page = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    page[: layout.keys_bytes] = keys.reshape(-1).view(torch.uint8)
    page[layout.keys_bytes : 2 * layout.keys_bytes] = values.view(torch.uint8)
    return page
