"""What the solvers share: an FP4 group as counts of its 16 codes, the best table row for it, and the change of code.

A group holds 32 weights of 16 possible values, so the error of any row is counts . costs, without touching weights again.
Counts are integers and costs are rounded to integers, so every sum is exact in float64 whatever its order: a CPU and a
GPU choose the same rows. Nothing here knows a format's table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.formats import E2M1_VALUES, GROUP_SIZE, Matrix, unpack_codes

MAX_ROWS = 256
MAX_SAMPLE = 2**19  # groups of 32: their counts add up to 2^24
COST_BITS = 34  # 32 weights (5 bits), the row's number (8) and its division by 32 (5) fit beside it in float64's 53
UNAVAILABLE = 2.0**COST_BITS - 1  # cost of a row that may not be chosen
CHUNK_CELLS = {"cpu": 2**19, "cuda": 2**27}  # scores held at once: a CPU's cache; 1 GiB of a GPU


def values_of_codes(device: torch.device | str = "cpu") -> Tensor:
    """[16] float64: the E2M1 value of each FP4 code, relative to its group's exponent."""
    return torch.tensor(E2M1_VALUES, dtype=torch.float64, device=device)


def refuse_nan_scales(scales: Tensor) -> None:
    """Returns if every group has a number for its scale.

    Raises:
        ValueError: A byte is 255, which is NaN in E8M0.
    """
    damaged = int((scales == 255).sum())
    if damaged:
        raise ValueError(f"FP4 scales: {damaged} groups have byte 255 (NaN), expected 0 to 254; the source is damaged")


def code_counts(codes: Tensor) -> Tensor:
    """[groups, 16] float32: how often each FP4 code occurs in each group of packed codes [..., K/2]."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=codes.device)[:, None]
    pairs = F.one_hot(unpack_codes(every_byte, 4).long(), 16).sum(1).float()
    return F.embedding_bag(codes.reshape(-1, GROUP_SIZE // 2).int(), pairs, mode="sum")


def power_of_two(exponents: Tensor) -> Tensor:
    """2^n as float64, exactly, of integers from -1022 to 1023."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def integer_costs(costs: Tensor) -> Tensor:
    """`costs` [..., R, 16] float64 as integers below 2^34 (in float64), one power-of-two unit per leading index.

    Costs that are multiples of 2^-28 of their largest stay exact; infinite ones become `UNAVAILABLE`.
    """
    finite = torch.where(costs.isfinite(), costs, 0)
    largest = finite.amax((-2, -1), keepdim=True)
    exponent = (largest.view(torch.int64) >> 52) - 1023  # floor(log2); zero gives -1023
    scaled = finite * power_of_two((COST_BITS - 2 - exponent).clamp(max=1023))
    return torch.where(costs.isfinite(), scaled.round(), UNAVAILABLE)


def best_rows(counts: Tensor, costs: Tensor) -> Tensor:
    """[G] int64: the row of least total cost for each group, the lowest such row.

    Args:
        counts: [G, 16], whole numbers that sum to 32.
        costs: [R <= 256, 16] float64 from `integer_costs`.
    """
    # a group's counts sum to 32, so this puts the row's number into the low 8 bits of its score
    numbered = costs * MAX_ROWS + torch.arange(len(costs), device=costs.device)[:, None] / GROUP_SIZE
    chunk = CHUNK_CELLS[costs.device.type] // len(costs)
    best = [(part.double() @ numbered.T).amin(1) for part in counts.split(chunk)]
    return torch.cat(best).long() & (MAX_ROWS - 1)


def classes_present(classes: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each class that occurs in [G] integers (0 to 255), ascending, with the indices of its groups."""
    for number in torch.bincount(classes.long(), minlength=1).nonzero()[:, 0].tolist():
        yield number, (classes == number).nonzero()[:, 0]


def recode(codes: Tensor, keys: Tensor, nibbles: Tensor) -> Tensor:
    """Packed 2-bit codes [..., N, K/4] for packed FP4 codes [..., N, K/2].

    Args:
        codes: uint8, two FP4 codes a byte.
        keys: [groups] integer, the row of `nibbles` each group uses.
        nibbles: [keys, 256] uint8, the two 2-bit codes for each byte.
    """
    index = (keys.int() << 8)[:, None] | codes.reshape(-1, GROUP_SIZE // 2)
    halves = nibbles.flatten().index_select(0, index.flatten()).view(-1, 2)
    return (halves[:, 0] | halves[:, 1] << 4).view(*codes.shape[:-1], -1)


def nibble_table(even: Tensor, odd: Tensor) -> Tensor:
    """[R, 256] uint8 for `recode`, from the 2-bit code of each FP4 code [R, 16] at even and at odd places."""
    return (even[:, None, :] | odd[:, :, None] << 2).flatten(1).to(torch.uint8)


def sample_groups(matrices: Matrix, limit: int, random: torch.Generator) -> Tensor:
    """[<= limit] int64 ascending: a random choice among the groups of FP4 matrices, on their device.

    Raises:
        ValueError: limit is above 2^19, so that a sum of counts could exceed float32's whole numbers.
    """
    if limit > MAX_SAMPLE:
        raise ValueError(f"groups: {limit}, expected at most {MAX_SAMPLE}")
    assert matrices.scales is not None
    chosen = torch.randperm(matrices.scales.numel(), generator=random)[:limit].sort().values
    return chosen.to(matrices.codes.device)
