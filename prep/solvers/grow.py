"""Training of a table's rows by halving: few rows at first, and those are halved whose halves lower the error most.

The error falls where it is largest, so frequent and heavy groups get many rows and rare ones few. Everything runs on the
CPU from exact counts, so the device the weights are on does not matter. What a row is, its format's solver says.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from prep.solvers.groups import MAX_ROWS, integer_costs

SPREAD = 0.1  # relative distance of a row's halves before they are fitted
FITTING_ROUNDS = 4  # of the halves

Rows = tuple[Tensor, ...]  # each [R, ...]; the last is the levels [R, 4] float64, ascending


class Sample(NamedTuple):
    """Groups to train on, on the CPU: counts [G, 16] float32 and class [G] int64 of each, below num_classes.

    Not more than `groups.MAX_SAMPLE`, so that sums are exact in float32. Groups of one class have the same values for their codes.
    """

    counts: Tensor
    classes: Tensor
    num_classes: int

    def sums(self, owners: Tensor, number: int) -> Tensor:
        """[number, classes, 16] float64, whole: how often the groups of each owner hold each value of each class."""
        keys, order = (owners * self.num_classes + self.classes).sort()
        starts = torch.searchsorted(keys, torch.arange(number * self.num_classes))
        # several times faster than index_add
        return embedding_bag(order, self.counts, starts, mode="sum").double().view(number, -1, 16)


class Family(Protocol):
    """What rows of a format are."""

    def costs(self, rows: Rows) -> Tensor:
        """[R, classes, 16] float64: squared error of each value of each class under each row."""

    def fit(self, rows: Rows, sums: Tensor) -> Rows:
        """Rows of no greater error over what they hold, [R, classes, 16] counts."""

    def weights(self, rows: Rows) -> Tensor:
        """[R] float64: what a row's squared error counts against another's."""


def grow(sample: Sample, family: Family, rows: Rows, owners: Tensor, random: torch.Generator) -> Rows:
    """256 rows grown from `rows`, whose groups are given by `owners` [G] int64."""
    while (number := len(rows[-1])) < MAX_ROWS:
        halves, sides, sums = _halve(sample, family, rows, owners, random)
        whole = sums.view(number, 2, -1, 16).sum(1)
        gains = _errors(family, rows, whole) - _errors(family, halves, sums).view(number, 2).sum(1)
        best = gains.topk(min(MAX_ROWS - number, max(1, number // 2))).indices.sort().values
        best = best[gains[best] > 0]
        if not len(best):  # fewer different groups than rows
            return tuple(part[torch.arange(MAX_ROWS) % number] for part in rows)
        rows, owners = _accept(rows, halves, owners, sides, best)
    return rows


def _halve(
    sample: Sample, family: Family, rows: Rows, owners: Tensor, random: torch.Generator
) -> tuple[Rows, Tensor, Tensor]:
    """Two rows for each row (2r and 2r+1), fitted to the two sides of its groups; side [G] of each group; the halves' sums."""
    levels = rows[-1]
    noise = 1 + SPREAD * torch.randn(levels.shape, generator=random, dtype=torch.float64)
    apart = torch.stack([levels * noise, levels / noise], 1).flatten(0, 1).sort(1).values
    halves: Rows = (*(part.repeat_interleave(2, 0) for part in rows[:-1]), apart)
    for _ in range(FITTING_ROUNDS):
        costs = integer_costs(family.costs(halves).flatten(1)).view(len(levels), 2, -1, 16)
        difference = (costs[:, 1] - costs[:, 0])[owners, sample.classes]
        sides = ((sample.counts * difference).sum(1) < 0).long()
        sums = sample.sums(2 * owners + sides, 2 * len(levels))
        halves = family.fit(halves, sums)
    return halves, sides, sums


def _errors(family: Family, rows: Rows, sums: Tensor) -> Tensor:
    """[R] float64: weighted sum of squared errors of what each row holds, counts [R, classes, 16]."""
    return (sums * family.costs(rows)).sum((1, 2)) * family.weights(rows)


def _accept(rows: Rows, halves: Rows, owners: Tensor, sides: Tensor, best: Tensor) -> tuple[Rows, Tensor]:
    """The rows `best` replaced by their first halves, their second ones added at the end; owners follow."""
    number = len(rows[-1])
    moved = torch.full((number,), -1).index_put_((best,), torch.arange(number, number + len(best)))[owners]
    pairs = zip(rows, halves, strict=True)
    grown = tuple(torch.cat([row.index_copy(0, best, half[2 * best]), half[2 * best + 1]]) for row, half in pairs)
    return grown, torch.where((moved >= 0) & (sides == 1), moved, owners)
