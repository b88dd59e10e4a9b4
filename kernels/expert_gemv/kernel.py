"""The grouped expert GEMV in plain Triton, for the interpreter, and the sum over picks.

`expert_kernel` is the twin of `stream_kernel.py`'s: the same whole numbers, added up in the same order, without layouts, assembly
and tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.expert_gemv import slabs as addresses
from kernels.expert_gemv.decode import fp4_values, split_values, two_bit_values
from kernels.expert_gemv.packing import BLOCK_BYTES, pair, place, store_pair
from kernels.swiglu_kernel import clamped_swiglu

FP4, TWO_BIT, SPLIT = (tl.constexpr(kind) for kind in addresses.KINDS)
ADDRESS_UNIT = tl.constexpr(addresses.ADDRESS_UNIT)


@triton.jit
def _codes(plane, row, group, mask, GROUPS: tl.constexpr, BITS: tl.constexpr):
    """The codes [..., 32] of groups, int32; row, group and mask end with an axis of one."""
    k = tl.arange(0, 32)[None, None, None, :]
    begin = plane.to(tl.pointer_type(tl.uint8)) + (row * GROUPS + group) * (4 * BITS)
    return (tl.load(begin + k * BITS // 8, mask=mask, other=0).to(tl.int32) >> k * BITS % 8) & (15 if BITS == 4 else 3)


@triton.jit
def _x_bytes(packed, group, mask, TWO_BIT_ORDER: tl.constexpr):
    """High and low bytes [..., 32] of groups of x, int32."""
    high_at, low_at = place(tl.arange(0, 32)[None, None, None, :], TWO_BIT_ORDER)
    block = packed + group * BLOCK_BYTES
    high, low = tl.load(block + high_at, mask=mask, other=0), tl.load(block + low_at, mask=mask, other=0)
    return high.to(tl.int32), low.to(tl.int32)


@triton.jit
def _products(
    slab, residual, packed, scales, levels, split_selectors, first_row, MATRIX: tl.constexpr, PLAN: tl.constexpr
):
    """A program's rows of one matrix times x, float32 [rows]."""
    total = tl.zeros((PLAN.slices, PLAN.rows, 4), tl.float32)
    slices, lanes = tl.arange(0, PLAN.slices)[:, None, None], tl.arange(0, 4)[None, None, :]
    row = first_row + tl.arange(0, PLAN.rows)[None, :, None]
    plane = slab + MATRIX * (PLAN.code_bytes + PLAN.height * PLAN.groups)
    for step in range(PLAN.steps):
        for part in tl.static_range(PLAN.lane_groups):
            group = ((step * PLAN.slices + slices) * 4 + lanes) * PLAN.lane_groups + part
            inside = (group < PLAN.groups) & (row >= 0)
            begin = (plane + PLAN.code_bytes).to(tl.pointer_type(tl.uint8))
            byte = tl.load(begin + row * PLAN.groups + group, mask=inside, other=0).to(tl.int32)
            x_scale = tl.load(scales + group, mask=group < PLAN.groups, other=0.0)
            wide_row, wide_group, mask = row[:, :, :, None], group[:, :, :, None], inside[:, :, :, None]
            high, low = _x_bytes(packed, wide_group, (group < PLAN.groups)[:, :, :, None], PLAN.kind != FP4)
            codes = _codes(plane, wide_row, wide_group, mask, PLAN.groups, PLAN.words)
            if PLAN.kind == FP4:
                dots = tl.sum(fp4_values(codes) * (high * 256 + low), 3)
                scale = (byte * 0x00800000 + 1).to(tl.float32, bitcast=True)
            elif PLAN.kind == TWO_BIT:
                words = tl.load(levels + MATRIX * 256 + byte)
                first, second = words.to(tl.int32), (words >> 32).to(tl.int32)
                high_level, low_level = two_bit_values(codes, first[:, :, :, None], second[:, :, :, None])
                dots = tl.sum(high_level * (high * 256 + low) + low_level * high, 3)
                exponent = (((second & 0x03030303) * 0x00820820) >> 23) & 0xFF
                scale = ((exponent << 23) | 1).to(tl.float32, bitcast=True)
            else:
                words = tl.load(split_selectors + MATRIX * 256 + byte)
                first, second = words.to(tl.int32), (words >> 32).to(tl.int32)
                places = _codes(
                    residual + MATRIX * PLAN.code_bytes, wide_row, wide_group, mask, PLAN.groups, PLAN.words
                )
                values = split_values(codes, places, first[:, :, :, None], second[:, :, :, None])
                dots = tl.sum(values * (high * 256 + low), 3)
                scale = (((second >> 16) << 16) | 1).to(tl.float32, bitcast=True)
            factor = tl.where(x_scale == 0, 0.0, scale * (x_scale * PLAN.unit))  # past a row's end there is no byte
            total += dots.to(tl.float32) * factor
    return tl.sum(tl.sum(total, 2), 0)


@triton.jit
def expert_kernel(
    packed, scales, slabs, kinds, vectors, weights, normalisers, levels, split_selectors, out, out_scales, limit,
    FP4_PLAN: tl.constexpr, TWO_BIT_PLAN: tl.constexpr, SPLIT_PLAN: tl.constexpr,
):  # fmt: skip
    """As `stream_kernel`."""
    pick, block = tl.program_id(1), tl.program_id(0)
    kind = tl.load(kinds + pick)
    if kind == FP4:
        _expert(packed, scales, slabs, vectors, weights, normalisers, levels, split_selectors, out, out_scales, limit, pick, block, FP4_PLAN)  # fmt: skip
    elif kind == TWO_BIT:
        _expert(packed, scales, slabs, vectors, weights, normalisers, levels, split_selectors, out, out_scales, limit, pick, block, TWO_BIT_PLAN)  # fmt: skip
    elif kind == SPLIT:
        _expert(packed, scales, slabs, vectors, weights, normalisers, levels, split_selectors, out, out_scales, limit, pick, block, SPLIT_PLAN)  # fmt: skip


@triton.jit
def _expert(
    packed, scales, slabs, vectors, weights, normalisers, levels, split_selectors, out, out_scales, limit, pick, block,
    PLAN: tl.constexpr,
):  # fmt: skip
    vector = (pick if vectors is None else tl.load(vectors + pick)).to(tl.int64)
    slab, residual = tl.load(slabs + pick * 2) * ADDRESS_UNIT, tl.load(slabs + pick * 2 + 1) * ADDRESS_UNIT
    x, x_scales = packed + vector * ((PLAN.groups + 1) * BLOCK_BYTES), scales + vector * (PLAN.groups + 1)
    first_row = block * PLAN.rows
    if PLAN.up:
        gate = _products(slab, residual, x, x_scales, levels, split_selectors, first_row, 0, PLAN)
        up = _products(slab, residual, x, x_scales, levels, split_selectors, first_row, 1, PLAN)
        factors = normalisers + pick * 3
        hidden = clamped_swiglu(gate * tl.load(factors), up * tl.load(factors + 1), limit)
        largest = tl.max(hidden.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        high, low, scale = pair(hidden, largest)
        at = pick.to(tl.int64) * (PLAN.height // 32 + 1) + block
        store_pair(out + at * BLOCK_BYTES, tl.arange(0, 32), high, low, None)
        tl.store(out_scales + at, scale)
    else:
        result = _products(slab, residual, x, x_scales, levels, split_selectors, first_row, 2, PLAN)
        factor = tl.load(normalisers + pick * 3 + 2) * tl.load(weights + pick)
        tl.store(out + pick.to(tl.int64) * PLAN.height + first_row + tl.arange(0, PLAN.rows), result * factor)


@triton.jit
def add_kernel(picks, shared, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out = ((pick 0 + pick 1) + … + shared), rounded once."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    total = tl.load(picks + token * K * D + column, mask=mask).to(tl.float32)
    for rank in tl.static_range(1, K):
        total += tl.load(picks + (token * K + rank) * D + column, mask=mask).to(tl.float32)
    total += tl.load(shared + token * D + column, mask=mask).to(tl.float32)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=mask)
