"""From code bits to weights, four places at a time: each format once as PTX on packed bits, once in plain Triton.

All give bfloat16 weights (the plain ones as float32) of four places p = 0…3 for [ROWS, 32] packed elements. The PTX takes
neighbouring elements in pairs and relies on both lying in one group of 32 weights, as any layout along K gives them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# E2M1 nibbles in the bits 15 and 8…6 of a bfloat16 are their value * 2^-126; two products, because the whole factor may
# be no bfloat16. $4 holds two elements of four nibbles, $5 their scales.
_FP4_PLACE = """
{left}
and.b32 m, m, 0x01C001C0;
lop3.b32 m, s, 0x80008000, m, 0xEA;
fma.rn.bf16x2 m, m, up, minus;
fma.rn.bf16x2 ${place}, m, $5, minus;"""
_FP4_SHIFTS = (
    "shl.b32 m, $4, 6;\nshl.b32 s, $4, 12;",
    "shl.b32 m, $4, 2;\nshl.b32 s, $4, 8;",
    "shr.u32 m, $4, 2;\nshl.b32 s, $4, 4;",
    "shr.u32 m, $4, 6;\nmov.b32 s, $4;",
)
_CONSTANTS = "mov.b32 up, 0x7E807E80;\nmov.b32 minus, 0x80008000;"  # 2^126, and the -0 that keeps a product's sign
FP4_PTX = tl.constexpr(
    "{\n.reg .b32 m, s, up, minus;\n"
    + _CONSTANTS
    + "".join(_FP4_PLACE.format(left=left, place=place) for place, left in enumerate(_FP4_SHIFTS))
    + "\n}"
)

# A byte of codes 4*(high byte) and (low byte) is the selector of one level: $9…$12 hold the low bytes of a row's levels,
# $13…$16 the high ones, for four elements in $8.
_TWO_BIT_PLACE = """
shr.u32 s, $8, {shift};
and.b32 s, s, 0x03030303;
mad.lo.u32 s, s, 0x11, 0x40404040;
prmt.b32 ${first}, $9, $13, s;
shr.u32 s, s, 16;
prmt.b32 ${second}, $11, $15, s;"""
TWO_BIT_PTX = tl.constexpr(
    "{\n.reg .b32 s;"
    + "".join(_TWO_BIT_PLACE.format(shift=2 * p, first=2 * p, second=2 * p + 1) for p in range(4))
    + "\n}"
)

# Four cells ($8), places ($9) and 3 - partition ($10) as bytes: n = 4 cell + place - (cell > partition) + 1 lies in 1…15
# with zero at 8; g is 1 below, where the magnitude is 8 - n. $11 and $12 are the scales.
_MERGED_PLACE = """
shr.u32 c, $8, {shift};
and.b32 c, c, 0x03030303;
shr.u32 n, $9, {shift};
and.b32 n, n, 0x03030303;
add.u32 g, c, $10;
shr.u32 g, g, 2;
and.b32 g, g, 0x01010101;
shl.b32 c, c, 2;
add.u32 n, n, c;
sub.u32 n, n, g;
add.u32 n, n, 0x01010101;
shr.u32 g, n, 3;
not.b32 g, g;
and.b32 g, g, 0x01010101;
mul.lo.u32 c, g, 7;
xor.b32 n, n, c;
add.u32 n, n, g;
and.b32 n, n, 0x07070707;
shl.b32 g, g, 3;
or.b32 n, n, g;
prmt.b32 c, n, 0, 0x4140;
prmt.b32 n, n, 0, 0x4342;
shl.b32 m, c, 6;
shl.b32 s, c, 12;
and.b32 m, m, 0x01C001C0;
lop3.b32 m, s, 0x80008000, m, 0xEA;
fma.rn.bf16x2 m, m, up, minus;
fma.rn.bf16x2 ${first}, m, $11, minus;
shl.b32 m, n, 6;
shl.b32 s, n, 12;
and.b32 m, m, 0x01C001C0;
lop3.b32 m, s, 0x80008000, m, 0xEA;
fma.rn.bf16x2 m, m, up, minus;
fma.rn.bf16x2 ${second}, m, $12, minus;"""
MERGED_PTX = tl.constexpr(
    "{\n.reg .b32 c, n, g, m, s, up, minus;\n"
    + _CONSTANTS
    + "".join(_MERGED_PLACE.format(shift=2 * p, first=2 * p, second=2 * p + 1) for p in range(4))
    + "\n}"
)
_FOUR = tl.constexpr((tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16))
_FP4_OPERANDS = tl.constexpr("=r,=r,=r,=r,r,r")
_TWO_BIT_OPERANDS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r")
_MERGED_OPERANDS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r")


@triton.jit
def fp4_weights(codes, scales):
    """codes uint16, four nibbles; scales bfloat16."""
    return tl.inline_asm_elementwise(FP4_PTX, _FP4_OPERANDS, [codes, scales], _FOUR, is_pure=True, pack=2)


@triton.jit
def two_bit_weights(codes, low, high):
    """codes uint8, four of two bits; low and high bytes of the row's bfloat16 levels, int32."""
    return tl.inline_asm_elementwise(TWO_BIT_PTX, _TWO_BIT_OPERANDS, [codes, low, high], _FOUR, is_pure=True, pack=4)


@triton.jit
def merged_weights(codes, residual, complement, scales):
    """codes and residual uint8, four of two bits each; complement uint8, 3 - partition; scales bfloat16."""
    return tl.inline_asm_elementwise(
        MERGED_PTX, _MERGED_OPERANDS, [codes, residual, complement, scales], _FOUR, is_pure=True, pack=4
    )


@triton.jit
def plain_fp4(codes, place: tl.constexpr):
    """E2M1 values of the nibbles at a place, without their scales."""
    return _e2m1((codes.to(tl.int32) >> (4 * place)) & 15)


@triton.jit
def plain_two_bit(codes, low, high, place: tl.constexpr):
    """Levels of the codes at a place."""
    shift = ((codes.to(tl.int32) >> (2 * place)) & 3) * 8
    bits = ((low >> shift) & 255) | (((high >> shift) & 255) << 8)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def plain_merged(codes, residual, complement, place: tl.constexpr):
    """E2M1 values of base and residual codes at a place: the ordered codes' middle, 7, is zero."""
    cell = (codes.to(tl.int32) >> (2 * place)) & 3
    order = 4 * cell + ((residual.to(tl.int32) >> (2 * place)) & 3) - ((cell + complement.to(tl.int32)) >> 2) - 7
    return _e2m1(tl.where(order < 0, 8 - order, order))


@triton.jit
def _e2m1(code):
    """Float32 values of E2M1 codes in int32: sign and bits 24…22 of a float32 are the value * 2^-126."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
