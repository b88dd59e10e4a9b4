"""From code bits to signed bytes, four codes at a time, each format once as PTX and once in plain Triton.

A byte permute takes four selectors of four bits and gives four bytes of a table of eight; where a selector's top bit is set it
repeats that byte's sign instead, which is zero in tables of magnitudes. So one permute gives the positive values among four codes
and one, with those bits flipped, the negative ones; their sums are subtracted. FP4's values are taken twice, hence whole.

Shifts by multiplication use another unit than the permutes, of which there are many.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDES = tl.constexpr(0x03020100)  # twice E2M1's, of codes 0 to 3
LARGE = "0x0C080604"  # of codes 4 to 7


def _asm(lines: list[str], registers: str) -> tl.constexpr:
    return tl.constexpr("\n".join(["{", f".reg .b32 {registers};", ".reg .b64 wide;", *lines, "}"]))


def _shift_right(target: str, source: str, bits: int) -> list[str]:
    return [f"mul.wide.u32 wide, {source}, {1 << 32 - bits};", f"mov.b64 {{low, {target}}}, wide;"]


def _even_and_odd(base: str, residual: str | None) -> list[str]:
    """A word's even and its odd 2-bit codes in `even` and `odd`, as selectors; with a residual, base code and residual code."""
    if residual is None:
        return [
            f"and.b32 even, {base}, 0x33333333;",
            *_shift_right("odd", base, 2),
            "and.b32 odd, odd, 0x33333333;",
        ]
    return [
        f"mul.lo.u32 even, {base}, 4;",
        f"lop3.b32 even, even, {residual}, 0xCCCCCCCC, 0xE4;",  # bits of the first where the mask is set
        *_shift_right("odd", residual, 2),
        f"lop3.b32 odd, {base}, odd, 0xCCCCCCCC, 0xE4;",
    ]


def _permutes(outputs: str, tables: tuple[str, str]) -> list[str]:
    """Sixteen codes: even ones of both half words, then odd ones."""
    selectors = ("even", "even_high", "odd", "odd_high")
    return [
        f"prmt.b32 ${output}, {tables[0]}, {tables[1]}, {selector};"
        for output, selector in zip(outputs, selectors, strict=True)
    ]


_HIGH_HALVES = [*_shift_right("even_high", "even", 16), *_shift_right("odd_high", "odd", 16)]

# $4 a word of eight codes, $8 MAGNITUDES. Out: positive values of the lower and the upper four, then negative ones'.
FP4_PTX = _asm(
    [
        *_shift_right("upper", "$4", 16),
        f"prmt.b32 $0, $8, {LARGE}, $4;",
        f"prmt.b32 $1, $8, {LARGE}, upper;",
        "xor.b32 flipped, $4, 0x88888888;",
        *_shift_right("upper", "flipped", 16),
        f"prmt.b32 $2, $8, {LARGE}, flipped;",
        f"prmt.b32 $3, $8, {LARGE}, upper;",
    ],
    "low, upper, flipped",
)

# $8 a word of sixteen codes, $12 the high bytes of its row's levels, $16 the low ones. Out: high bytes, then low bytes.
TWO_BIT_PTX = _asm(
    [
        *_even_and_odd("$8", None),
        *_HIGH_HALVES,
        *_permutes("0123", ("$12", "$12")),
        *_permutes("4567", ("$16", "$16")),
    ],
    "low, even, odd, even_high, odd_high",
)

# $8 a word of sixteen base codes, $12 the residual's, $16, $20, $24 the magnitudes of cells 1 to 3 (cell 0 has those of the four
# lowest values); no value of cells 0 and 1 is above zero and none of 2 and 3 below. Out: positive values, then negative ones'.
SPLIT_PTX = _asm(
    [
        *_even_and_odd("$8", "$12"),
        *_HIGH_HALVES,
        *_permutes("4567", ("0x0406080C", "$16")),
        "xor.b32 even, even, 0x88888888;",
        "xor.b32 odd, odd, 0x88888888;",
        *_HIGH_HALVES,
        *_permutes("0123", ("$20", "$24")),
    ],
    "low, even, odd, even_high, odd_high",
)

# $3 and $4 a row of `Rows.split_selectors`. Out: magnitudes of cells 1 to 3, from the first or the second of five values on.
CELLS_PTX = _asm(
    [
        "prmt.b32 $0, 0x01020304, 0, $3;",
        *_shift_right("second", "$3", 16),
        f"prmt.b32 $1, {MAGNITUDES.value}, 4, second;",
        f"prmt.b32 $2, {LARGE}, 0, $4;",
    ],
    "low, second",
)


@triton.jit
def fp4_values(codes):
    """Twice the values of FP4 codes, int32."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    magnitude = tl.where(exponent == 0, mantissa, ((2 + mantissa) << exponent) >> 1)
    return tl.where((codes & 8) != 0, -magnitude, magnitude)


@triton.jit
def two_bit_values(codes, high, low):
    """High and low byte of each code's level, as signed int32; high, low: the row's words."""
    high, low = (high >> codes * 8) & 0xFF, (low >> codes * 8) & 0xFC
    return high - 2 * (high & 0x80), low - 2 * (low & 0x80)


@triton.jit
def split_values(base, residual, first, second):
    """Twice the values of base and residual codes, int32; first, second: words of the row's selectors."""
    shifts = tl.where(base == 1, first & 1, tl.where(base == 2, (first >> 16) & 1, second & 1))
    number = 4 * base + residual + tl.where(base == 0, 0, shifts - 1) - 7  # from -7 to 7
    magnitude = fp4_values(tl.abs(number))
    return tl.where(number < 0, -magnitude, magnitude)
