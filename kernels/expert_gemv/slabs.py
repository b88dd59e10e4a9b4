"""How a kernel is told where an expert's weights lie and what their bytes mean: addresses, kinds, table rows. Computes nothing.

A pick names its slabs by address, not by buffer: slots in VRAM and in pinned host memory, of any plane, are then one case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import INT2_LEVELS, e8m0_to_float32
from kernels.split import SplitTable, check_table

KINDS = FP4, TWO_BIT, SPLIT = 0, 1, 2  # SPLIT is base + residual
SKIP = -1  # the kind of a pick whose output is left alone
ADDRESS_UNIT = 16  # bytes: addresses are given in these, so that a kernel knows what it may load at once


class Rows(NamedTuple):
    """The 256 rows of w1, w3 and w2 in one layer, as the kernels read them.

    levels: int32 [3, 256, 2]: the four values of a row as float16, their low bytes in one word and their high bytes in the next.
    scales: float32 [3, 256], the power of two that a row's levels were divided by; their largest is then below 1.
    bfloat16_levels: int32 [3, 256, 2], the values themselves as bfloat16, laid out as `levels`; for products that take those.
    split_rows: int32 [3, 256], exponent byte + 256 * partition; zeros where the layer has no base plane.
    """

    levels: Tensor
    scales: Tensor
    bfloat16_levels: Tensor
    split_rows: Tensor


class Picks(NamedTuple):
    """Experts to run, each for one token; all on the device.

    slabs: int64 [P, 2], address / 16 of the fp4, 2-bit or base slab, and of the residual's (SPLIT only).
    kinds: int32 [P]. tokens: int32 [P], the row of x. weights: float32 [P], of the route.
    normalisers: float32 [P, 3], of INT2 and QUAD2 matrices; 1 elsewhere.
    """

    slabs: Tensor
    kinds: Tensor
    tokens: Tensor
    weights: Tensor
    normalisers: Tensor


def int2_rows(device: torch.device | str) -> Rows:
    """INT2's rows, the same in every layer: E4M3(byte) times four levels."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    return _rows((values[:, None] * torch.tensor(INT2_LEVELS, device=device)).expand(3, -1, -1))


def quad2_rows(levels: Tensor) -> Rows:
    """QUAD2's rows of one layer: levels float16 [3, 256, 4]."""
    return _rows(levels.float())


def split_rows(tables: tuple[SplitTable, SplitTable, SplitTable]) -> Rows:
    """SPLIT's rows of one layer, for the base alone and for both planes.

    Raises:
        ValueError: A table is damaged.
    """
    for table in tables:
        check_table(table)
    levels = torch.stack([table.levels.float() * e8m0_to_float32(table.exponents)[:, None] for table in tables])
    codes = torch.stack([table.exponents.int() + 256 * table.partitions.int() for table in tables])
    return _rows(levels)._replace(split_rows=codes)


def _rows(values: Tensor) -> Rows:
    """Levels [3, 256, 4] float32 in the kernels' form; a NaN stays one."""
    largest = values.nan_to_num(0.0).abs().amax(-1)
    exponents = torch.where(largest > 0, torch.floor(torch.log2(largest)) + 1, torch.zeros_like(largest))
    scales = torch.exp2(exponents.clamp(-125, 127))
    none = torch.zeros(3, 256, dtype=torch.int32, device=values.device)
    return Rows(_byte_planes((values / scales[..., None]).half()), scales, _byte_planes(values.bfloat16()), none)


def _byte_planes(levels: Tensor) -> Tensor:
    """Four 16-bit values [..., 4] as two words [..., 2] int32: the low bytes, then the high bytes."""
    pairs = levels.contiguous().view(torch.uint8).unflatten(-1, (4, 2))
    return pairs.transpose(-1, -2).contiguous().view(torch.int32).squeeze(-1)
