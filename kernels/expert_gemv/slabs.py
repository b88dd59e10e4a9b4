"""How a kernel is told where an expert's weights lie and what their bytes mean: addresses, kinds, table rows.

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

    levels: int64 [3, 256], four levels as multiples of 4 up to 2^14 under a scale of their row: their high bytes in the lower word,
        their low bytes in the upper one. The lowest two bits of each of these are two bits of a byte, the exponent of 64 times
        that scale; 255 in a row that is not finite, 0 in one that is zero.
    bfloat16_levels: int32 [3, 256, 2], the levels as bfloat16: low bytes in one word, high bytes in the next; for GEMM.
    split_selectors: int64 [3, 256], for cells 1, 2 and 3 of base + residual 16 bits each, 0x3210 where the cell of three lies
        below it, else 0x4321; then the row's scale as bfloat16. Zeros where the layer has no base plane.
    split_rows: int32 [3, 256], the same as exponent byte + 256 * partition; for GEMM.
    """

    levels: Tensor
    bfloat16_levels: Tensor
    split_selectors: Tensor
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
    exponents = torch.stack([table.exponents for table in tables])
    partitions = torch.stack([table.partitions for table in tables]).int()
    levels = torch.stack([table.levels.float() for table in tables]) * e8m0_to_float32(exponents)[..., None]
    selectors = [torch.where(partitions < cell, 0x3210, 0x4321).long() for cell in (1, 2, 3)]
    scales = (e8m0_to_float32(exponents).view(torch.int32) >> 16).long()
    words = selectors[0] | selectors[1] << 16 | selectors[2] << 32 | scales << 48
    return _rows(levels)._replace(split_selectors=words, split_rows=exponents.int() + 256 * partitions)


def _rows(values: Tensor) -> Rows:
    """Levels [3, 256, 4] float32 in the kernels' form; a NaN makes its row NaN."""
    none = torch.zeros(3, 256, dtype=torch.int32, device=values.device)
    return Rows(_integer_levels(values), _byte_planes(values.bfloat16()), none.long(), none)


def _integer_levels(values: Tensor) -> Tensor:
    largest = values.abs().amax(-1)  # NaN where any is
    exponents = (largest.view(torch.int32) >> 23).clamp(min=8)  # of the largest, biased; its byte stays above zero's
    is_number = largest < torch.inf
    scaled = torch.where(is_number[..., None], values.double() * torch.exp2((140 - exponents).double())[..., None], 0.0)
    integers = ((scaled / 4).round() * 4).int()  # the largest is 2^13 to 2^14
    high = (integers + 128) >> 8
    low = integers - high * 256
    byte = torch.where(is_number, torch.where(largest > 0, exponents - 7, 0), 255)
    low |= byte[..., None] >> torch.arange(0, 8, 2, device=values.device) & 3
    words = [part.to(torch.int8).contiguous().view(torch.int32)[..., 0].long() for part in (high, low)]
    return words[0] & 0xFFFFFFFF | words[1] << 32


def _byte_planes(levels: Tensor) -> Tensor:
    """Four 16-bit values [..., 4] as two words [..., 2] int32: the low bytes, then the high bytes."""
    pairs = levels.contiguous().view(torch.uint8).unflatten(-1, (4, 2))
    return pairs.transpose(-1, -2).contiguous().view(torch.int32).squeeze(-1)
