"""SPLIT: an FP4 matrix as a 2-bit base, good alone, and a 2-bit residual; both together are the FP4 values, -0 as 0.

The 15 distinct FP4 values in order are cut into four cells, one of 3 and three of 4; the base code is the cell, the residual
code the place inside it. The byte of a group chooses a row of the layer's and projection's table: an exponent, a partition,
and four levels for use without the residual. Choosing rows is `prep.solvers.split`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import GROUP_SIZE, Matrix, dequantize_fp4, e8m0_to_float32, look_up_rows, pack_codes, unpack_codes

ORDERED_CODES = (15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7)  # FP4 codes from -6 to 6
NUM_PARTITIONS = 4  # partition p has its cell of 3 at place p


class SplitTable(NamedTuple):
    """The rows of one layer and projection.

    exponents: [256] uint8, E8M0 of the row. partitions: [256] uint8, below 4.
    levels: [256, 4] float16, the base's values relative to 2^(exponent-127).
    """

    exponents: Tensor
    partitions: Tensor
    levels: Tensor


def cells(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cell and place in the cell of every FP4 code: two [4 partitions, 16 codes] uint8; code 8 (-0) is treated as 0."""
    order = torch.zeros(16, dtype=torch.int64)
    order[list(ORDERED_CODES)] = torch.arange(15)
    order[8] = order[0]
    starts = torch.tensor([[4 * cell - (cell > p) for cell in range(4)] for p in range(NUM_PARTITIONS)])
    cell = (order[None, :, None] >= starts[:, None, :]).sum(-1) - 1
    place = order - starts.gather(1, cell)
    return cell.to(device, torch.uint8), place.to(device, torch.uint8)


def check_table(table: SplitTable) -> None:
    """Returns if every row is usable.

    Raises:
        ValueError: A row has exponent 255 (NaN in E8M0) or a partition above 3: the table is damaged.
    """
    if bool((table.exponents == 255).any()):
        raise ValueError("SPLIT table: exponent byte 255, expected 0 to 254; the table is damaged")
    if bool((table.partitions >= NUM_PARTITIONS).any()):
        raise ValueError(f"SPLIT table: partition {int(table.partitions.max())}, expected 0 to 3; the table is damaged")


def split_fp4(matrix: Matrix, rows: Tensor, table: SplitTable) -> tuple[Matrix, Matrix]:
    """Base (codes and row bytes) and residual (codes) of FP4 matrices; `merge_split` restores them.

    Args:
        matrix: FP4 codes [..., N, K/2] and E8M0 bytes [..., N, K/32].
        rows: [..., N, K/32] uint8, the row each group takes.
        table: Of this layer and projection.

    Raises:
        ValueError: The table is damaged, or a group's row has another exponent than the group.
    """
    assert matrix.scales is not None
    check_table(table)
    wrong = table.exponents[rows.int()] != matrix.scales
    if bool(wrong.any()):
        raise ValueError(f"SPLIT: {int(wrong.sum())} groups have a row of another exponent, expected none")
    cell, place = (_pair_up(part, bits=2) for part in cells(matrix.codes.device))
    both = _recode((cell | place << 4).flatten(), table.partitions[rows.int()], matrix.codes)
    return Matrix(pack_codes(both & 15, 4), rows), Matrix(pack_codes(both >> 4, 4), None)


def merge_split(base: Matrix, residual: Matrix, table: SplitTable) -> Matrix:
    """The FP4 matrices that were split: codes [..., N, K/2] (code 8 as 0) and E8M0 bytes [..., N, K/32].

    Raises:
        ValueError: The table is damaged, or a residual names a fourth place in a cell of three.
    """
    assert base.scales is not None
    check_table(table)
    rows = base.scales.int()
    pairs = unpack_codes(base.codes, 4) | unpack_codes(residual.codes, 4) << 4
    codes = _recode(_merged_pairs(base.codes.device), table.partitions[rows], pairs)
    if bool((codes < 0).any()):
        raise ValueError(f"SPLIT: {int((codes < 0).sum())} residual codes beyond their cell, expected none: damaged")
    return Matrix(codes.to(torch.uint8), table.exponents[rows])


def dequantize_base(matrix: Matrix, table: SplitTable, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., N, K] of the base alone: levels[byte, code] * 2^(exponents[byte]-127).

    Raises:
        ValueError: The table is damaged.
    """
    check_table(table)
    rows = table.levels.float() * e8m0_to_float32(table.exponents)[:, None]
    return look_up_rows(rows, matrix).to(dtype)


def dequantize_split(base: Matrix, residual: Matrix, table: SplitTable, dtype: torch.dtype = torch.float32) -> Tensor:
    """The exact FP4 values [..., N, K] of base and residual, -0 as 0; raises as `merge_split`."""
    return dequantize_fp4(merge_split(base, residual, table), dtype)


def _recode(pairs: Tensor, partitions: Tensor, packed: Tensor) -> Tensor:
    """pairs[partition * 256 + byte] for packed bytes [..., N, K/2] of groups with partitions [..., N, K/32]."""
    index = (partitions.int() << 8)[..., None] | packed.unflatten(-1, (-1, GROUP_SIZE // 2))
    return pairs.index_select(0, index.flatten()).view(packed.shape)


def _pair_up(codes: Tensor, bits: int) -> Tensor:
    """[P, n] codes -> [P, n*n]: for two n-ary digits, the first the low one, their codes side by side."""
    count = codes.shape[-1]
    return codes.repeat(1, count) | codes.repeat_interleave(count, 1) << bits


def _merged_pairs(device: torch.device) -> Tensor:
    """[4 * 256] int16: two FP4 codes of (base nibble | residual nibble << 4), or -1 where a place lies beyond its cell."""
    cell, place = cells()
    single = torch.full((NUM_PARTITIONS, 16), -1, dtype=torch.int16)  # by base | residual << 2
    codes = torch.tensor(ORDERED_CODES)
    single.scatter_(
        1, (cell | place << 2)[:, codes].long(), codes.to(torch.int16).expand(NUM_PARTITIONS, -1).contiguous()
    )
    byte = torch.arange(256)
    low = (byte & 3) | (byte >> 4 & 3) << 2
    high = (byte >> 2 & 3) | (byte >> 6) << 2
    first, second = single[:, low], single[:, high]
    return torch.where((first < 0) | (second < 0), -1, first | second << 4).flatten().to(device)
