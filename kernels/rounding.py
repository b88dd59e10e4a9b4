"""The activation rounding that the official code simulates (facts 3.9): values rounded to a format and kept in their dtype.

Owns the arithmetic only; which activations are rounded is the model's choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats import E4M3_MAX, e8m0_to_float32

E2M1_MAX = 6.0
E4M3_AMAX_FLOOR = 1e-4
E2M1_AMAX_FLOOR = E2M1_MAX * 2.0**-126


def _power_of_two_above(x: Tensor) -> Tensor:
    """2^ceil(log2(x)) of positive float32, exactly."""
    bits = x.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return e8m0_to_float32(exponents.clamp(0, 254).to(torch.uint8))


def round_to_e4m3(x: Tensor, group_size: int) -> Tensor:
    """x [..., K] rounded to E4M3 under one power-of-two scale per `group_size` along K, in x's dtype (rules A and B)."""
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = _power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_min(E4M3_AMAX_FLOOR) / E4M3_MAX)
    codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def round_to_e2m1(x: Tensor, group_size: int) -> Tensor:
    """x [..., K] rounded to E2M1 under one power-of-two scale per `group_size` along K, in x's dtype (rule C).

    E2M1's values are the multiples of 0.5 below 2, of 1 below 4 and of 2 up to 6; half-even on the multiple is half-even
    on the code.
    """
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = _power_of_two_above(groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_AMAX_FLOOR) / E2M1_MAX)
    scaled = (groups / scale).clamp(-E2M1_MAX, E2M1_MAX)
    step = torch.where(scaled.abs() < 2, 0.5, torch.where(scaled.abs() < 4, 1.0, 2.0))
    return (torch.round(scaled / step) * step * scale).flatten(-2).to(x.dtype)


def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """The orthonormal Sylvester-ordered Hadamard matrix, float32 [size, size].

    Raises:
        ValueError: `size` is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"hadamard_matrix: size {size}, expected a power of two")
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / size**0.5
