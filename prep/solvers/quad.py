"""FP4 matrices to QUAD2: 256 rows of four trained levels per layer and projection, each group takes its best row.

No scale: a matrix is divided by its RMS, and the rows themselves cover the groups' spread.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import GROUP_SIZE, INT2_LEVELS, Matrix
from prep.solvers.groups import (
    MAX_ROWS,
    best_rows,
    classes_present,
    code_counts,
    integer_costs,
    nibble_table,
    power_of_two,
    recode,
    refuse_nan_scales,
    sample_groups,
    values_of_codes,
)
from prep.solvers.grow import Rows, Sample, grow

FIRST_ROUNDS = 4  # of fitting the one row that all others grow from
FLOAT32_MAX = torch.finfo(torch.float32).max


class Quad2(NamedTuple):
    """QUAD2 matrices: codes [..., N, K/4] and row bytes [..., N, K/32], and one float32 normaliser per matrix [...]."""

    matrix: Matrix
    normalisers: Tensor


class _Levels:
    """Rows of four levels over classes with the given points [Q, 16] float64 (`grow.Family`)."""

    def __init__(self, points: Tensor) -> None:
        self.points = points

    def costs(self, rows: Rows) -> Tensor:
        (levels,) = rows
        return _costs(self.points.flatten(), levels).unflatten(1, (-1, 16))

    def fit(self, rows: Rows, sums: Tensor) -> Rows:
        """Each level moved to the mean of the points nearest to it; a level without points stays."""
        (levels,) = rows
        middles = (levels[:, 1:] + levels[:, :-1]) / 2
        points, sums = self.points.flatten(), sums.flatten(1)
        nearest = (points > middles[..., None]).sum(1)
        weight = torch.zeros_like(levels).scatter_add_(1, nearest, sums)
        total = torch.zeros_like(levels).scatter_add_(1, nearest, sums * points)
        return (torch.where(weight > 0, total / weight, levels).sort(1).values,)

    def weights(self, rows: Rows) -> Tensor:
        return torch.ones(len(rows[-1]), dtype=torch.float64)


def solve_quad(matrix: Matrix, levels: Tensor) -> Quad2:
    """The QUAD2 of least squared error under the given rows; costs are rounded to 2^-33 of the largest.

    Args:
        matrix: FP4 codes [..., N, K/2] and E8M0 bytes [..., N, K/32]; not modified.
        levels: [256, 4] float16 from `train_quad`.

    Raises:
        ValueError: A scale byte is 255.
    """
    assert matrix.scales is not None
    refuse_nan_scales(matrix.scales)
    rows, columns = matrix.scales.shape[-2:]
    codes, scales = matrix.codes.reshape(-1, rows, matrix.codes.shape[-1]), matrix.scales.reshape(-1, rows, columns)
    parts = [_solve_one(*one, levels.double()) for one in zip(codes, scales, strict=True)]
    packed, chosen, normalisers = (torch.stack(part) for part in zip(*parts, strict=True))
    shape = matrix.codes.shape[:-2]
    return Quad2(
        Matrix(packed.view(*shape, *packed.shape[1:]), chosen.view(matrix.scales.shape)), normalisers.view(shape)
    )


def train_quad(sample: Matrix, groups: int = 2**15, rounds: int = 6, seed: int = 0) -> Tensor:
    """Levels [256, 4] float16, ascending in each row, on the sample's device: grown by halving, then k-means.

    Args:
        sample: FP4 matrices [..., N, K] of one layer and projection.
        groups: At most so many groups of them are used.
        rounds: Passes of k-means.
        seed: Of the choice of groups and of the halving.

    Raises:
        ValueError: A scale byte is 255.
    """
    assert sample.scales is not None
    refuse_nan_scales(sample.scales)
    random = torch.Generator().manual_seed(seed)
    chosen, points = _draw(sample, groups, random)
    family = _Levels(points)
    owners = torch.zeros_like(chosen.classes)
    rows: Rows = (torch.tensor([INT2_LEVELS], dtype=torch.float64),)
    for _ in range(FIRST_ROUNDS):
        rows = family.fit(rows, chosen.sums(owners, 1))
    rows = grow(chosen, family, rows, owners, random)
    for _ in range(rounds):
        costs = family.costs(rows)
        for number, members in classes_present(chosen.classes):
            owners[members] = best_rows(chosen.counts[members], integer_costs(costs[:, number]))
        rows = family.fit(rows, chosen.sums(owners, MAX_ROWS))
    return rows[-1].half().to(sample.codes.device)


def matrix_rms(counts: Tensor, scales: Tensor) -> Tensor:
    """Root mean square of FP4 matrices, [...] float32, 1 for a matrix of zeros; the same bits on every device.

    counts: [groups of all matrices, 16]; scales: [..., N, K/32] uint8. Sums are exact per exponent and then correctly rounded.
    """
    exponents = scales.reshape(-1, scales.shape[-2] * scales.shape[-1]).long()
    squares = counts.double() @ (2 * values_of_codes(counts.device)).square()
    sums = torch.zeros(len(exponents), 256, dtype=torch.int64, device=counts.device)
    sums.scatter_add_(1, exponents, squares.long().view(exponents.shape))
    terms = sums.cpu().double() * power_of_two(2 * (torch.arange(256) - 127) - 2)
    size = exponents.shape[1] * GROUP_SIZE
    rms = [min(math.sqrt(math.fsum(row) / size), FLOAT32_MAX) or 1.0 for row in terms.tolist()]
    return torch.tensor(rms, dtype=torch.float32).view(scales.shape[:-2]).to(counts.device)


def _points(exponents: Tensor, rms: Tensor) -> Tensor:
    """[Q, 16] float64: the normalised values of the 16 codes, for exponents [Q] in matrices of RMS [Q]."""
    return values_of_codes(rms.device) * (power_of_two(exponents.long() - 127) / rms.double())[:, None]


def _costs(points: Tensor, levels: Tensor) -> Tensor:
    """[R, P] float64: squared distance of each point [P] from the nearest level of each row [R, 4]."""
    squares = ((points - level[:, None]).square() for level in levels.T)
    return reduce(torch.minimum, squares)


def _solve_one(codes: Tensor, scales: Tensor, levels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, row bytes and normaliser of one FP4 matrix [N, K]; levels [256, 4] float64."""
    counts = code_counts(codes)
    rms = matrix_rms(counts, scales)
    rows = torch.empty(len(counts), dtype=torch.int64, device=codes.device)
    keys, tables = torch.empty_like(rows), list[Tensor]()
    for exponent, members in classes_present(scales.flatten()):
        points = _points(torch.tensor([exponent], device=codes.device), rms[None])[0]
        rows[members] = best_rows(counts[members], integer_costs(_costs(points, levels)))
        keys[members] = rows[members] + len(tables) * MAX_ROWS
        nearest = (points[:, None] - levels[:, None, :]).square().argmin(-1)
        tables.append(nibble_table(nearest, nearest))
    return recode(codes, keys, torch.cat(tables)), rows.to(torch.uint8).view(scales.shape), rms


def _draw(sample: Matrix, limit: int, random: torch.Generator) -> tuple[Sample, Tensor]:
    """A random choice of the sample's groups, and the points [Q, 16] of their classes: exponents in matrices."""
    assert sample.scales is not None
    chosen = sample_groups(sample, limit, random)
    rms = matrix_rms(code_counts(sample.codes), sample.scales).flatten()
    matrix_groups = sample.scales.shape[-2] * sample.scales.shape[-1]
    keys = (chosen // matrix_groups << 8) + sample.scales.flatten()[chosen]
    present, classes = keys.cpu().unique(return_inverse=True)
    counts = code_counts(sample.codes.reshape(-1, GROUP_SIZE // 2)[chosen])
    return Sample(counts.cpu(), classes, len(present)), _points(present & 255, rms.cpu()[present >> 8])
