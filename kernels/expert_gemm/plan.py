"""Which tile of a call works on which picks: picks sorted by expert, cut into tiles of one expert each. No host synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.expert_gemv.slabs import SKIP


class Plan(NamedTuple):
    """order: int64 [T*K], flat picks by expert, those outside the call last.

    tiles: int32 [M, 4], kind, expert, first and end place in `order`; kind SKIP where there is no tile.
    """

    order: Tensor
    tiles: Tensor


def plan_tiles(picks: Tensor, kinds: Tensor, tile_size: int) -> Plan:
    """The plan of picks [T, K] over experts of `kinds` int32 [E]; M depends on the shapes alone."""
    experts, flat = kinds.shape[0], picks.flatten()
    keys, order = torch.sort(torch.where(flat < 0, experts, flat), stable=True)
    ids = torch.arange(experts + 1, device=picks.device, dtype=keys.dtype)
    bounds = torch.searchsorted(keys, ids)
    tiles = (bounds.diff() + tile_size - 1) // tile_size
    ends = tiles.cumsum(0)
    places = torch.arange(flat.numel() // tile_size + min(experts, flat.numel()), device=picks.device)
    expert = torch.searchsorted(ends, places, right=True).clamp(max=experts - 1)
    first = bounds[expert] + (places - ends[expert] + tiles[expert]) * tile_size
    end = torch.minimum(bounds[expert + 1], first + tile_size)
    kind = torch.where(places < ends[-1], kinds[expert], SKIP)
    return Plan(order, torch.stack([kind, expert, first, end], 1).int())
