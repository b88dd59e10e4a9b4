"""FP4 matrices to SPLIT: which 256 rows (exponent, partition, four levels) a layer and projection gets, and which a group takes.

Every exponent that occurs has a row, so every matrix splits exactly; the remaining rows go where they lower the base's error
most. Training runs on the CPU from counts and sums that are exact, so its device does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from kernels.formats import GROUP_SIZE, Matrix
from kernels.split import NUM_PARTITIONS, SplitTable, cells, split_fp4
from prep.solvers.groups import (
    MAX_ROWS,
    best_rows,
    classes_present,
    code_counts,
    integer_costs,
    power_of_two,
    refuse_nan_scales,
    sample_groups,
    values_of_codes,
)
from prep.solvers.grow import Rows, Sample, grow


class _Cells:
    """Rows of (exponent [R], partition [R], levels [R, 4] of float16 precision), relative to the exponent (`grow.Family`)."""

    def costs(self, rows: Rows) -> Tensor:
        _, partitions, levels = rows
        return _costs(partitions, levels)[:, None]

    def fit(self, rows: Rows, sums: Tensor) -> Rows:
        """For each row the partition and levels of least squared error; an empty cell's level is its middle."""
        cell, _ = cells()
        members = one_hot(cell.long(), NUM_PARTITIONS).double()  # [4 partitions, 16 codes, 4 cells]
        values, distinct = values_of_codes(), (torch.arange(16) != 8).double()
        counts = sums[:, 0]
        weight, total = counts @ members, (counts * values) @ members  # [4, R, 4], exact
        middle = ((values * distinct) @ members) / (distinct @ members)
        levels = torch.where(weight > 0, total / weight, middle[:, None])
        partitions = (total * levels).sum(-1).argmax(0)  # the error is the sum of squares less this
        return rows[0], partitions, levels[partitions, torch.arange(len(counts))].half().double()

    def weights(self, rows: Rows) -> Tensor:
        return power_of_two(2 * (rows[0] - rows[0].max()))


def exponents_present(scales: Tensor) -> Tensor:
    """[256] bool: which E8M0 bytes occur."""
    return torch.bincount(scales.flatten().long(), minlength=256) > 0


def solve_split(matrix: Matrix, table: SplitTable) -> tuple[Matrix, Matrix]:
    """Base and residual of FP4 matrices, each group with the row of least squared error of the base alone.

    Args:
        matrix: FP4 codes [..., N, K/2] and E8M0 bytes [..., N, K/32]; not modified.
        table: From `train_split`, with every exponent that occurs here.

    Raises:
        ValueError: A scale byte is 255, or an exponent has no row.
    """
    assert matrix.scales is not None
    refuse_nan_scales(matrix.scales)
    counts = code_counts(matrix.codes)
    costs = _costs(table.partitions.long(), table.levels.double())
    rows = torch.empty(len(counts), dtype=torch.uint8, device=counts.device)
    for exponent, members in classes_present(matrix.scales.flatten()):
        own = (table.exponents == exponent).nonzero()[:, 0]
        if not len(own):
            raise ValueError(f"SPLIT table: no row for exponent byte {exponent}; it was trained without this matrix")
        rows[members] = own[best_rows(counts[members], integer_costs(costs[own]))].to(torch.uint8)
    return split_fp4(matrix, rows.view(matrix.scales.shape), table)


def train_split(sample: Matrix, present: Tensor, groups: int = 2**15, rounds: int = 6, seed: int = 0) -> SplitTable:
    """The table of one layer and projection, on the sample's device.

    One row per exponent at first; then rows are halved, those first whose halves lower the error most, up to 256; at last
    k-means among the rows of each exponent.

    Args:
        sample: FP4 matrices [..., N, K] of this layer and projection.
        present: [256] bool, the exponents of *all* its matrices (`exponents_present`).
        groups: At most so many groups of the sample are used.
        rounds: Passes of k-means at the end.
        seed: Of the choice of groups and of the halving.

    Raises:
        ValueError: Byte 255 occurs.
    """
    assert sample.scales is not None
    refuse_nan_scales(sample.scales)
    refuse_nan_scales(present.nonzero())
    random, family = torch.Generator().manual_seed(seed), _Cells()
    chosen = sample_groups(sample, groups, random)
    counts = code_counts(sample.codes.reshape(-1, GROUP_SIZE // 2)[chosen].cpu())
    exponents = sample.scales.flatten()[chosen].cpu().long()
    drawn = Sample(counts, torch.zeros_like(exponents), 1)  # one class: all is relative to the exponent
    first = (present.cpu() | exponents_present(exponents)).nonzero()[:, 0]
    owners = torch.searchsorted(first, exponents)
    rows = family.fit((first,), drawn.sums(owners, len(first)))
    rows = grow(drawn, family, rows, owners, random)
    for _ in range(rounds):
        rows = family.fit(rows, drawn.sums(_assign(counts, exponents, rows), MAX_ROWS))
    table = SplitTable(rows[0].to(torch.uint8), rows[1].to(torch.uint8), rows[2].half())
    return SplitTable(*(part.to(sample.codes.device) for part in table))


def _costs(partitions: Tensor, levels: Tensor) -> Tensor:
    """[R, 16] float64: squared error of each FP4 value in the cell it falls into, relative to the row's exponent."""
    cell, _ = cells(partitions.device)
    return (values_of_codes(partitions.device) - levels.gather(1, cell[partitions].long())).square()


def _assign(counts: Tensor, exponents: Tensor, rows: Rows) -> Tensor:
    """[G] int64: the best row of its exponent for each group."""
    owners, costs = torch.empty_like(exponents), _Cells().costs(rows)[:, 0]
    for exponent, members in classes_present(exponents):
        own = (rows[0] == exponent).nonzero()[:, 0]
        owners[members] = own[best_rows(counts[members], integer_costs(costs[own]))]
    return owners
