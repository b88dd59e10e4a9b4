"""FP4 matrices to INT2: the article's clip search, and absmax round-to-nearest to compare with. No data, no training.

A scale is E4M3(byte) times the matrix's normaliser. The normaliser is a power of two, so relative to a group's exponent
the scales are the same few dozen numbers for every group, and the search tries every one of them: each candidate is a
scale after its own E4M3 rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import INT2_LEVELS, Matrix
from prep.solvers.groups import (
    best_rows,
    classes_present,
    code_counts,
    integer_costs,
    nibble_table,
    power_of_two,
    recode,
    refuse_nan_scales,
    values_of_codes,
)

TOP_EXPONENT = 6  # scales of the matrix's largest groups, up to 7 * 2^exponent, become E4M3 numbers up to 7 * 2^6 = 448
FULL_DEPTH = 10  # down to so many binades below the largest groups every candidate is an E4M3 number
EMPTY_DEPTH = 18  # from here on only the scale 0 is


class Int2(NamedTuple):
    """INT2 matrices: codes [..., N, K/4] and E4M3 bytes [..., N, K/32], and one float32 normaliser per matrix [...]."""

    matrix: Matrix
    normalisers: Tensor


def solve_clip(matrix: Matrix) -> Int2:
    """The INT2 of least squared error under a power-of-two normaliser: each group takes the best of 55 scales and zero.

    FP4's zero lies between two levels; it becomes +0.5 and -0.5 by turns along K, whatever its sign, so that zeros add no
    bias. `matrix` is FP4, codes [..., N, K/2] and E8M0 bytes [..., N, K/32], and is not modified.

    Raises:
        ValueError: A scale byte is 255.
    """
    counts, depths, normalisers = _prepare(matrix)
    device = counts.device
    costs = integer_costs(_costs(device).repeat(EMPTY_DEPTH + 1, 1, 1).where(_is_e4m3(device)[..., None], torch.inf))
    choice = torch.empty_like(depths)
    for depth, members in classes_present(depths.clamp(min=FULL_DEPTH)):
        choice[members] = best_rows(counts[members], costs[depth])
    return _encode(matrix, choice, depths, normalisers)


def solve_absmax(matrix: Matrix, divisor: float = 2.0) -> Int2:
    """Round-to-nearest INT2 with the scale largest/divisor rounded to E4M3: the baseline that needs no search.

    Divisor 1.5 gives the largest weight a level of its own, 2.0 cuts [-largest, largest] into four equal bins (better on
    Gaussian weights). Everything else as in `solve_clip`.
    """
    counts, depths, normalisers = _prepare(matrix)
    largest = ((counts > 0) * values_of_codes(counts.device).abs()).amax(1)
    scales = (largest / divisor * power_of_two(TOP_EXPONENT - depths)).float().to(torch.float8_e4m3fn)
    relative = scales.double() * power_of_two(depths - TOP_EXPONENT)
    return _encode(matrix, torch.searchsorted(candidates(counts.device), relative), depths, normalisers)


def candidates(device: torch.device | str = "cpu") -> Tensor:
    """[56] float64, ascending: the scales tried, relative to the group's exponent; 1/16 to 7 in steps of E4M3, and 0."""
    mantissas = torch.arange(8, 16, dtype=torch.float64) / 8
    scales = torch.cat([mantissas * 2.0**exponent for exponent in range(-4, 3)])[:-1]  # 7.5 would exceed E4M3's 448
    return torch.cat([torch.zeros(1, dtype=torch.float64), scales]).to(device)


def _prepare(matrix: Matrix) -> tuple[Tensor, Tensor, Tensor]:
    """Counts [G, 16], depth of each group below its matrix's largest exponent [G] int64, normalisers [...]."""
    assert matrix.scales is not None
    refuse_nan_scales(matrix.scales)
    counts = code_counts(matrix.codes)
    exponents = matrix.scales.flatten(-2).long()
    is_empty = (counts[:, 0] + counts[:, 8] == counts.sum(1)).view(exponents.shape)  # its exponent says nothing
    top = exponents.where(~is_empty, 0).amax(-1)
    depths = (top[..., None] - exponents).clamp(0, EMPTY_DEPTH).flatten()
    return counts, depths, power_of_two(top - 127 - TOP_EXPONENT).float()


def _encode(matrix: Matrix, choice: Tensor, depths: Tensor, normalisers: Tensor) -> Int2:
    """The matrices with candidate `choice` [G] as each group's scale."""
    assert matrix.scales is not None
    scales = candidates(choice.device)[choice] * power_of_two(TOP_EXPONENT - depths)
    bytes_ = scales.float().to(torch.float8_e4m3fn).view(torch.uint8).view(matrix.scales.shape)
    return Int2(Matrix(recode(matrix.codes, choice, _nibbles(choice.device)), bytes_), normalisers)


def _costs(device: torch.device) -> Tensor:
    """[56, 16] float64: squared error of each FP4 value under each candidate, relative to the group's exponent."""
    levels = candidates(device)[:, None] * torch.tensor(INT2_LEVELS, dtype=torch.float64, device=device)
    return (values_of_codes(device)[:, None] - levels[:, None, :]).square().amin(-1)


def _is_e4m3(device: torch.device) -> Tensor:
    """[19, 56] bool: whether a candidate at each depth is an E4M3 number."""
    depths = torch.arange(EMPTY_DEPTH + 1, device=device)
    scales = (candidates(device) * power_of_two(TOP_EXPONENT - depths)[:, None]).float()
    return scales.to(torch.float8_e4m3fn).float() == scales


def _nibbles(device: torch.device) -> Tensor:
    """[56, 256] uint8 for `recode`: the code of the nearest level; zeros take 2 (+0.5) at even places, 1 at odd ones."""
    values, scales = values_of_codes(device), candidates(device)[:, None]
    beyond = (values.abs() > scales).long()
    codes = torch.where(values > 0, 2 + beyond, 1 - beyond)
    is_zero = values == 0
    return nibble_table(codes.where(~is_zero, 2), codes.where(~is_zero, 1))
