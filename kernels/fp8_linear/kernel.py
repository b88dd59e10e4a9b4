"""FP8-block products of many tokens on tensor cores, and the portable twin of `stream_kernel.py`, which serves few.

E4M3 becomes bfloat16 by integer operations, exactly. Weights are the left operand: they go from shared memory to registers
once, are decoded there and multiplied. Their scales are powers of two, applied while decoding, relative to the largest of a
row of blocks, so that sums never leave the tensor cores. A bfloat16 activation is exact, a float32 one is the sum of two
bfloat16 parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.swiglu_kernel import clamped_swiglu

BLOCK = tl.constexpr(128)  # columns under one scale: one step along K

# Four codes -> four bfloat16. A code `s eeee mmm` in sign bit 15 and bits 10..4 of a bfloat16 is its value * 2^-120,
# subnormals included; the last two lines multiply that power away.
DECODE_E4M3 = tl.constexpr("""
{
.reg .b32 a, b, s, t;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 s, a, 4;
shr.u32 t, b, 4;
and.b32 s, s, 0x07F007F0;
and.b32 t, t, 0x07F007F0;
lop3.b32 a, a, 0x80008000, s, 0xEA;
lop3.b32 b, b, 0x80008000, t, 0xEA;
mov.b32 s, 0x7B807B80;
mov.b32 t, 0x80008000;
fma.rn.bf16x2 $0, a, s, t;
fma.rn.bf16x2 $1, b, s, t;
}
""")


# The same times a power of two: $3 is 2^(120 - d) twice, so that a value * 2^-d comes out (d up to 110 exactly).
DECODE_SCALED = tl.constexpr(DECODE_E4M3.value.replace("mov.b32 s, 0x7B807B80;", "mov.b32 s, $3;"))


@triton.jit
def decode_e4m3(codes):
    """Float32 values of E4M3 codes (uint8), exactly; the two NaN codes become ±480."""
    code = codes.to(tl.int32)
    return (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def decode_e8m0(byte):
    """2^(byte-127) in float32: byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_to(x, dtype: tl.constexpr, PORTABLE: tl.constexpr):
    """Float32 x in `dtype`, rounded to nearest even, NaN kept; the interpreter would truncate to bfloat16."""
    if PORTABLE and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, float("nan"))  # a NaN of all ones would round to -0
    return x.to(dtype)


@triton.jit
def _product(codes, x):
    """E4M3(codes) · x in float32 for [..., rows, 128] codes and [..., 128, tokens] x."""
    return tl.dot(decode_e4m3(codes), x.to(tl.float32), input_precision="ieee")


@triton.jit
def decode_kernel(
    x,  # [T, G, K]
    codes,  # uint8 [G*N, K]
    scales,  # uint8 [G*N/128, K/128]
    codes_up,  # of w3 in a SwiGLU, else unused
    scales_up,
    out,  # [T, G*N]
    limit,
    T,
    rows_total,  # G*N
    rows_per_group,  # N
    K: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLIT: tl.constexpr,  # every SPLIT-th block along K is one slice, a warp's work; slices are added at the end
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """ROWS outputs of up to TOKENS tokens: what `stream_kernel.py` computes, as the interpreter can run it."""
    first_row = tl.program_id(0) * ROWS
    group = first_row // rows_per_group
    rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    tokens = tl.arange(0, TOKENS)
    slices = tl.arange(0, SPLIT)
    blocks: tl.constexpr = K // BLOCK
    token_stride = rows_total // rows_per_group * K

    code_offsets = slices[:, None, None] * BLOCK + rows[None, :, None] * K + columns[None, None, :]
    x_offsets = slices[:, None, None] * BLOCK + columns[None, :, None] + tokens[None, None, :] * token_stride
    x += group * K
    scale_offsets = (first_row // BLOCK).to(tl.int64) * blocks + slices
    total = tl.zeros([SPLIT, ROWS, TOKENS], tl.float32)
    total_up = tl.zeros([SPLIT, ROWS, TOKENS], tl.float32)
    for step in range(0, tl.cdiv(blocks, SPLIT)):
        live = step * SPLIT + slices < blocks
        shift = step * (SPLIT * BLOCK)
        x_mask = live[:, None, None] & (tokens < T)[None, None, :]
        values = tl.load(x + shift + x_offsets, mask=x_mask, other=0.0)
        packed = tl.load(codes + shift + code_offsets, mask=live[:, None, None], other=0)
        scale = decode_e8m0(tl.load(scales + step * SPLIT + scale_offsets, mask=live, other=0))
        total += _product(packed, values) * scale[:, None, None]
        if SWIGLU:
            packed = tl.load(codes_up + shift + code_offsets, mask=live[:, None, None], other=0)
            scale = decode_e8m0(tl.load(scales_up + step * SPLIT + scale_offsets, mask=live, other=0))
            total_up += _product(packed, values) * scale[:, None, None]

    result = tl.sum(total, 0)
    if SWIGLU:
        result = clamped_swiglu(result, tl.sum(total_up, 0), limit)
    out_offsets = tokens[None, :] * rows_total + rows[:, None]
    tl.store(out + out_offsets, round_to(result, out.dtype.element_ty, True), mask=(tokens < T)[None, :])


@triton.jit
def _largest(scales, blocks: tl.constexpr):
    """The largest of a row's scale bytes, int32."""
    places = tl.arange(0, triton.next_power_of_2(blocks))
    return tl.max(tl.load(scales + places, mask=places < blocks, other=0).to(tl.int32), 0)


@triton.jit
def _add_scaled(total, codes, x, below, PORTABLE: tl.constexpr):
    """total + E4M3(codes) * 2^-below · x; exact up to 110 below the largest scale, nothing is left of weights from 130 on."""
    if PORTABLE:
        weights = decode_e4m3(codes) * (tl.maximum(127 - below, 0) << 23).to(tl.float32, bitcast=True)
        total = tl.dot(weights, x.to(tl.float32), total, input_precision="ieee")
    else:
        factor = (tl.maximum(247 - below, 0) << 7) * 0x10001
        weights = tl.inline_asm_elementwise(
            DECODE_SCALED, "=r,=r,r,r,r,r,r", [codes, factor], tl.bfloat16, is_pure=True, pack=4
        )
        if x.dtype == tl.float32:
            high = x.to(tl.bfloat16)
            low = (x - high.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(weights, low, tl.dot(weights, high, total))
        else:
            total = tl.dot(weights, x, total)
    return total


@triton.jit
def prefill_kernel(
    x,
    codes,
    scales,
    codes_up,
    scales_up,
    out,
    limit,
    T,
    rows_total,
    rows_per_group,
    K: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a step: 128 or a part of it
    PORTABLE: tl.constexpr,
):
    """A tile of ROWS outputs x TOKENS tokens; arguments as in `decode_kernel`, but any T. Token tiles of one weight tile are neighbours."""
    first_row = tl.program_id(1) * ROWS
    group = first_row // rows_per_group
    rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    blocks: tl.constexpr = K // BLOCK
    token_stride = rows_total // rows_per_group * K

    code_offsets = rows[:, None] * K + columns[None, :]
    x_offsets = columns[:, None] + tokens[None, :] * token_stride
    x += group * K
    scales += (first_row // BLOCK).to(tl.int64) * blocks
    scales_up += (first_row // BLOCK).to(tl.int64) * blocks
    top = _largest(scales, blocks)
    top_up = _largest(scales_up, blocks)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    total_up = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in range(0, K // COLUMNS):
        values = tl.load(x + step * COLUMNS + x_offsets, mask=(tokens < T)[None, :], other=0.0)
        packed = tl.load(codes + step * COLUMNS + code_offsets)
        below = top - tl.load(scales + step * COLUMNS // BLOCK).to(tl.int32)
        total = _add_scaled(total, packed, values, below, PORTABLE)
        if SWIGLU:
            packed = tl.load(codes_up + step * COLUMNS + code_offsets)
            below = top_up - tl.load(scales_up + step * COLUMNS // BLOCK).to(tl.int32)
            total_up = _add_scaled(total_up, packed, values, below, PORTABLE)

    total *= decode_e8m0(top)
    if SWIGLU:
        total = clamped_swiglu(total, total_up * decode_e8m0(top_up), limit)
    out_offsets = tokens[None, :] * rows_total + rows[:, None]
    tl.store(out + out_offsets, round_to(total, out.dtype.element_ty, PORTABLE), mask=(tokens < T)[None, :])
