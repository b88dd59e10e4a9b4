"""Pieces that several kernels share: accurate angles, rotation, and the rounding rules B and C. Owns no launch."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cos_sin(angles):
    """Float32 cos and sin of float32 angles up to 2^22, to 2e-7: the GPU's own instructions lose all digits out there.

    The quarter turns are taken off in float64, exactly to 1e-10; the rest is a polynomial on ±π/4 (Cephes).
    """
    wide = angles.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    x = (wide - quarters * 1.5707963267948966).to(tl.float32)
    quadrant = quarters.to(tl.int32) & 3
    square = x * x
    sine = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    fourth = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
    cosine = 1.0 - 0.5 * square + square * square * fourth
    odd = (quadrant & 1) == 1
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    return tl.where(((quadrant + 1) & 2) != 0, -cos, cos), tl.where((quadrant & 2) != 0, -sin, sin)


@triton.jit
def rotate(x, first, position, frequencies_ptr, PAIRS: tl.constexpr, N: tl.constexpr, INVERSE: tl.constexpr):
    """x [N] with channels (2i, 2i+1) rotated by position * frequencies[first + i]; pairs outside 0 … PAIRS-1 stay."""
    pairs = first + tl.arange(0, N // 2)
    frequencies = tl.load(frequencies_ptr + pairs, mask=(pairs >= 0) & (pairs < PAIRS), other=0.0)
    cos, sin = cos_sin(position.to(tl.float32) * frequencies)
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, [N // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [N])


@triton.jit
def _scale_above(amax, MAX_FRACTION: tl.constexpr, MAX_EXPONENT: tl.constexpr):
    """2^ceil(log2(amax / max)) for max = (1 + MAX_FRACTION / 2^23) * 2^MAX_EXPONENT, from amax's bits: no division."""
    bits = amax.to(tl.int32, bitcast=True)
    exponents = (bits >> 23) - MAX_EXPONENT + ((bits & 0x7FFFFF) > MAX_FRACTION).to(tl.int32)
    return (exponents << 23).to(tl.float32, bitcast=True), ((254 - exponents) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x, kept, N: tl.constexpr, GROUP: tl.constexpr):
    """x [N] rounded to E4M3 under one power-of-two scale per GROUP (rule B); groups from channel `kept` on stay."""
    groups = tl.reshape(x, [N // GROUP, GROUP])
    amax = tl.maximum(tl.max(tl.abs(groups), 1), 1e-4)
    scale, inverse = _scale_above(amax, 0x600000, 8)
    scaled = groups * inverse[:, None]
    bits = scaled.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (scaled + 24576.0) - 24576.0  # below 2^-6 the codes are the multiples of 2^-9
    rounded = tl.where(tl.abs(scaled) < 0.015625, subnormal, normal) * scale[:, None]
    rounded = tl.where(groups == groups, rounded, groups)  # the integers would make a zero of NaN
    first = tl.arange(0, N // GROUP) * GROUP
    return tl.reshape(tl.where((first < kept)[:, None], rounded, groups), [N])


@triton.jit
def round_e2m1(x, N: tl.constexpr, GROUP: tl.constexpr):
    """x [N] after the Hadamard transform, rounded to E2M1 under one power-of-two scale per GROUP (rule C)."""
    rows = tl.arange(0, N)
    signs = rows[:, None] & rows[None, :]
    signs ^= signs >> 8
    signs ^= signs >> 4
    signs ^= signs >> 2
    signs ^= signs >> 1
    rotated = tl.sum(tl.where((signs & 1) == 1, -x[:, None], x[:, None]), 0) * (1.0 / N**0.5)
    groups = tl.reshape(rotated, [N // GROUP, GROUP])
    amax = tl.maximum(tl.max(tl.abs(groups), 1), 7.052966104933725e-38)  # 6 * 2^-126
    scale, inverse = _scale_above(amax, 0x400000, 2)
    scaled = groups * inverse[:, None]
    step = tl.where(tl.abs(scaled) < 2.0, 0.5, tl.where(tl.abs(scaled) < 4.0, 1.0, 2.0))
    per_step = tl.where(tl.abs(scaled) < 2.0, 2.0, tl.where(tl.abs(scaled) < 4.0, 1.0, 0.5))
    steps = (scaled * per_step + 12582912.0) - 12582912.0  # to the nearest integer, halves to even
    return tl.reshape(steps * step * scale[:, None], [N])
