"""Expert matrices times the tokens that picked them, on tensor cores; weights become bfloat16 by integer operations on the way.

One kernel instance knows one kind of expert. Along K everything goes by blocks of 128, and in a block by the place p = 0…3 of
a code in its group of four: the codes of place p make one product with the activations k = 4j + p. Activations and hidden
values therefore lie "by place": block, then p, then j.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.expert_gemm.decode import (
    fp4_weights,
    merged_weights,
    plain_fp4,
    plain_merged,
    plain_two_bit,
    two_bit_weights,
)
from kernels.expert_gemv import slabs
from kernels.fp8_linear.kernel import round_to
from kernels.swiglu_kernel import clamped_swiglu

BLOCK = tl.constexpr(128)
GROUPS = tl.constexpr(4)  # bytes of 32 weights in a block
PLACES = tl.constexpr(4)
QUARTER = tl.constexpr(32)  # codes of one place in a block
FP4 = tl.constexpr(slabs.FP4)
TWO_BIT = tl.constexpr(slabs.TWO_BIT)
ADDRESS_UNIT = tl.constexpr(slabs.ADDRESS_UNIT)


@triton.jit
def _spread(groups, ROWS: tl.constexpr):
    """[ROWS, 4] values of groups -> [ROWS, 32], one for each code of a place."""
    return tl.reshape(tl.broadcast_to(groups[:, :, None], [ROWS, GROUPS, 8]), [ROWS, QUARTER])


@triton.jit
def _scale(exponent, ROWS: tl.constexpr):
    """[ROWS, 4] E8M0 bytes in int32 -> bfloat16 [ROWS, 32], moved as bits: bfloat16 holds every power."""
    bits = tl.where(exponent == 0, 0x0040, tl.where(exponent == 255, 0x7FC0, exponent << 7))
    return _spread(bits.to(tl.int16), ROWS).to(tl.bfloat16, bitcast=True)


@triton.jit
def _add_product(total, weights, x, present, PORTABLE: tl.constexpr):
    """total + weights · x of one place, x given by pointers."""
    values = tl.load(x, mask=present[None, :], other=0.0)
    if PORTABLE:
        total = tl.dot(weights, values.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(weights, values, total)
    return total


@triton.jit
def _multiplied(
    total,  # [ROWS, TOKENS]
    values,  # pointers to x of place 0, [32, TOKENS]
    whole,  # pointers to x of the block, [128, TOKENS]
    present,  # [TOKENS]
    codes,  # pointers [ROWS, 32] to the codes of the block, all places of a group of four in one element
    residual,  # likewise
    group_bytes,  # uint8 [ROWS, 4]
    levels,  # int32 [256, 2]
    split_rows,  # int32 [256]
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """total + weights · x over one block of 128 columns."""
    packed = tl.load(codes)
    rows = group_bytes.to(tl.int32)
    if KIND == FP4:
        scale = _scale(rows, ROWS)
    elif KIND == TWO_BIT:
        low = _spread(tl.load(levels + 2 * rows), ROWS)
        high = _spread(tl.load(levels + 2 * rows + 1), ROWS)
    else:
        split = tl.load(split_rows + rows)
        scale = _scale(split & 255, ROWS)
        complement = _spread((3 - (split >> 8)).to(tl.uint8), ROWS)
        places = tl.load(residual)
    if PORTABLE:
        for p in tl.static_range(PLACES):
            if KIND == FP4:
                weights = plain_fp4(packed, p) * scale.to(tl.float32)
            elif KIND == TWO_BIT:
                weights = plain_two_bit(packed, low, high, p)
            else:
                weights = plain_merged(packed, places, complement, p) * scale.to(tl.float32)
            total = _add_product(total, weights, values + p * QUARTER, present, PORTABLE)
    else:
        if KIND == FP4:
            first, second, third, fourth = fp4_weights(packed, scale)
        elif KIND == TWO_BIT:
            first, second, third, fourth = two_bit_weights(packed, low, high)
        else:
            first, second, third, fourth = merged_weights(packed, places, complement, scale)
        even, odd = tl.join(first, third), tl.join(second, fourth)
        weights = tl.join(even, odd).permute(0, 2, 3, 1).reshape([ROWS, BLOCK])  # by place, as x lies
        block = tl.load(whole, mask=present[None, :], other=0.0)
        total = tl.dot(weights, block, total)
    return total


@triton.jit
def _bytes_ahead(pointers, block, BLOCKS: tl.constexpr):
    """The bytes of the groups of the block after this one; the last block's again after the last."""
    return tl.load(pointers + tl.minimum(block + 1, BLOCKS - 1) * GROUPS)


@triton.jit
def _matrix(slabs, expert, rows, MATRIX: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr):
    """Pointers to the first block's codes, residual codes [ROWS, 32] and group bytes [ROWS, 4] of one of w1, w3, w2."""
    places = tl.arange(0, QUARTER)
    groups = tl.arange(0, GROUPS)
    code_offsets = rows[:, None] * (K // PLACES) + places[None, :]
    bytes_of_codes: tl.constexpr = N * K // 2 if KIND == FP4 else N * K // 4
    start: tl.constexpr = MATRIX * (bytes_of_codes + N * K // 32)
    slab = tl.load(slabs + 2 * expert) * ADDRESS_UNIT + start
    residual_slab = tl.load(slabs + 2 * expert + 1) * ADDRESS_UNIT + MATRIX * (N * K // 4)
    if KIND == FP4:
        codes = tl.multiple_of(slab.to(tl.pointer_type(tl.uint16)), 16) + code_offsets
    else:
        codes = tl.multiple_of(slab.to(tl.pointer_type(tl.uint8)), 16) + code_offsets
    residual = tl.multiple_of(residual_slab.to(tl.pointer_type(tl.uint8)), 16) + code_offsets
    group_bytes = (
        tl.multiple_of((slab + bytes_of_codes).to(tl.pointer_type(tl.uint8)), 16)
        + rows[:, None] * (K // 32)
        + groups[None, :]
    )
    return codes, residual, group_bytes


@triton.jit
def hidden_kernel(
    x,  # bfloat16 [T, D] by place
    order,  # int64 [T*K]
    tiles,  # int32 [M, 4]
    slabs,  # int64 [E, 2]
    normalisers,  # float32 [E, 3]
    levels,  # int32 [3, 256, 2], low and high bytes of four bfloat16
    split_rows,  # int32 [3, 256]
    route_weights,  # float32 [T*K]
    hidden,  # bfloat16 [T*K, F] in `order`, by place
    limit,
    picks_per_token,
    D: tl.constexpr,
    F: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """weight * silu(min(w1·x, limit)) * clamp(w3·x, ±limit) for one tile of one expert and ROWS of its F."""
    tile = tiles + tl.program_id(1) * 4
    if tl.load(tile) != KIND:
        return
    expert = tl.load(tile + 1)
    lanes = tl.load(tile + 2) + tl.arange(0, TOKENS)
    present = lanes < tl.load(tile + 3)
    pick = tl.load(order + lanes, mask=present, other=0)
    values = x + (pick // picks_per_token)[None, :] * D + tl.arange(0, QUARTER)[:, None]
    whole = x + (pick // picks_per_token)[None, :] * D + tl.arange(0, BLOCK)[:, None]
    # The tile's rows are taken in such an order that the hidden values lie by place where they are stored.
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = (places // BLOCK) * BLOCK + places % QUARTER * PLACES + places // QUARTER % PLACES
    codes, residual, group_bytes = _matrix(slabs, expert, rows, 0, F, D, KIND)
    codes_up, residual_up, group_bytes_up = _matrix(slabs, expert, rows, 1, F, D, KIND)
    gate = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    bytes_next, bytes_next_up = tl.load(group_bytes), tl.load(group_bytes_up)
    for block in range(0, D // BLOCK):
        at = block * QUARTER
        bytes_here, bytes_here_up = bytes_next, bytes_next_up
        bytes_next = _bytes_ahead(group_bytes, block, D // BLOCK)
        bytes_next_up = _bytes_ahead(group_bytes_up, block, D // BLOCK)
        gate = _multiplied(
            gate, values + block * BLOCK, whole + block * BLOCK, present, codes + at, residual + at, bytes_here,
            levels, split_rows, KIND, ROWS, PORTABLE,
        )  # fmt: skip
        up = _multiplied(
            up, values + block * BLOCK, whole + block * BLOCK, present, codes_up + at, residual_up + at, bytes_here_up,
            levels + 512, split_rows + 256, KIND, ROWS, PORTABLE,
        )  # fmt: skip
    if KIND == TWO_BIT:
        gate *= tl.load(normalisers + 3 * expert)
        up *= tl.load(normalisers + 3 * expert + 1)
    weights = tl.load(route_weights + pick, mask=present, other=0.0)
    result = clamped_swiglu(gate, up, limit) * weights[None, :]
    offsets = lanes.to(tl.int64)[None, :] * F + places[:, None]
    tl.store(hidden + offsets, round_to(result, tl.bfloat16, PORTABLE), mask=present[None, :])


@triton.jit
def output_kernel(
    hidden,
    order,
    tiles,
    slabs,
    normalisers,
    levels,
    split_rows,
    out,  # [T*K, D]
    D: tl.constexpr,
    F: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """w2 · hidden for one tile and ROWS of D, each pick's output in its own place; arguments as in `hidden_kernel`."""
    tile = tiles + tl.program_id(1) * 4
    if tl.load(tile) != KIND:
        return
    expert = tl.load(tile + 1)
    lanes = tl.load(tile + 2) + tl.arange(0, TOKENS)
    present = lanes < tl.load(tile + 3)
    pick = tl.load(order + lanes, mask=present, other=0)
    values = hidden + lanes.to(tl.int64)[None, :] * F + tl.arange(0, QUARTER)[:, None]
    whole = hidden + lanes.to(tl.int64)[None, :] * F + tl.arange(0, BLOCK)[:, None]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    codes, residual, group_bytes = _matrix(slabs, expert, rows, 2, D, F, KIND)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    bytes_next = tl.load(group_bytes)
    for block in range(0, F // BLOCK):
        at = block * QUARTER
        bytes_here = bytes_next
        bytes_next = _bytes_ahead(group_bytes, block, F // BLOCK)
        total = _multiplied(
            total, values + block * BLOCK, whole + block * BLOCK, present, codes + at, residual + at, bytes_here,
            levels + 1024, split_rows + 512, KIND, ROWS, PORTABLE,
        )  # fmt: skip
    if KIND == TWO_BIT:
        total *= tl.load(normalisers + 3 * expert + 2)
    offsets = pick[None, :] * D + rows[:, None]
    tl.store(out + offsets, round_to(total, out.dtype.element_ty, PORTABLE), mask=present[None, :])
