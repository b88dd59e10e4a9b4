"""Activations as integers: 14 bits and a sign in two signed bytes under one power of two a group of 32, in the order tensor cores take them.

A group's block of 128 bytes holds both bytes of each value twice: first in the order in which FP4 codes are decoded, then in that
of 2-bit codes (`place`). A vector ends with one block of zeros more than it has groups, for whoever reads past its end.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.formats import GROUP_SIZE

BLOCK_BYTES = tl.constexpr(128)
Packed = tuple[Tensor, Tensor]  # blocks int8 [V, N/32 + 1, 128] and their scales float32 [V, N/32 + 1]


def allocate_packed(vectors: int, columns: int, device: torch.device) -> Packed:
    """Room for so many vectors of so many columns, all zero.

    Raises:
        ValueError: The columns are no whole groups.
    """
    if columns % GROUP_SIZE:
        raise ValueError(f"expert_gemv: vectors of {columns}, expected a multiple of {GROUP_SIZE}; pad the expert")
    blocks = columns // GROUP_SIZE + 1
    data = torch.zeros(vectors, blocks, BLOCK_BYTES.value, dtype=torch.int8, device=device)
    return data, torch.zeros(vectors, blocks, device=device)


@triton.jit
def pair(values, largest):
    """High and low byte (int32) of float32 values, and their scale: value = (256 * high + low) * scale.

    largest: int32, the bits of the greatest magnitude of each value's group. Scaled and rounded it is at most 2^14, so that
    neither byte overflows, and at least 2^13 if it is a normal number. Infinite or NaN, it makes its group's scale NaN.
    """
    exponent = tl.maximum((largest >> 23) - 13, -12)  # of the scale, biased; not above 0 where the scale is subnormal
    is_number, is_small = largest < 0x7F800000, exponent <= 0
    lifted = tl.where(is_small, values * 16777216.0, values)
    scaled = lifted * ((254 - exponent - tl.where(is_small, 24, 0)) << 23).to(tl.float32, bitcast=True)
    rounded = tl.where(is_number, tl.where(scaled < 0, scaled - 0.5, scaled + 0.5), 0.0).to(tl.int32)
    high = (rounded + 128) >> 8
    bits = tl.where(is_small, 0x00400000 >> tl.maximum(-exponent, 0), exponent << 23)
    scale = tl.where(is_number, bits, 0x7FC00000).to(tl.float32, bitcast=True)
    return high, rounded - high * 256, scale


@triton.jit
def place(k, TWO_BIT: tl.constexpr):
    """Where in its block the high byte and the low byte of value k of a group lie.

    FP4: four codes of half a word are decoded at once, word after word, then those of the other halves. 2-bit: four even codes of
    half a word, those of the other half, then the odd ones.
    """
    if TWO_BIT:
        high = 64 + (k % 2 * 2 + k // 8 % 2) * 16 + k // 16 * 4 + k // 2 % 4
        low = high + 8
    else:
        high = k // 4 % 2 * 32 + k // 8 * 4 + k % 4
        low = high + 16
    return high, low


@triton.jit
def store_pair(block, k, high, low, mask):
    """Both bytes of values k of a group to its block, in both orders."""
    for two_bit in tl.static_range(2):
        high_at, low_at = place(k, two_bit)
        tl.store(block + high_at, high.to(tl.int8), mask=mask)
        tl.store(block + low_at, low.to(tl.int8), mask=mask)


@triton.jit
def pack_kernel(x, packed, scales, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, CHAINED: tl.constexpr):
    """Vectors x [V, 32 * GROUPS] into `Packed`; CHAINED: who comes next may start, and waits for this kernel itself."""
    if CHAINED:
        gdc_launch_dependents()
    vector = tl.program_id(1).to(tl.int64)
    group, k = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, 32)
    mask = group < GROUPS
    values = tl.load(x + vector * GROUPS * 32 + group[:, None] * 32 + k[None, :], mask=mask[:, None], other=0.0)
    values = values.to(tl.float32)
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    high, low, scale = pair(values, largest[:, None])
    block = packed + (vector * (GROUPS + 1) + group[:, None]) * BLOCK_BYTES
    store_pair(block, k, high, low, mask[:, None])
    tl.store(scales + vector * (GROUPS + 1) + group[:, None], scale, mask=mask[:, None])
