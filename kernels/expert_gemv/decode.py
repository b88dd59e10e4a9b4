"""From code bits to dot products of 32 weights: each format once as PTX for packed half precision, once in plain Triton.

Activations come as pairs of float16 (k, k+4) of each eight, sixteen words a group, scaled so that the group's largest lies in
[2^9, 2^10). Weights are made as float16 by moving bits, multiplied and added two at a time over at most sixteen terms, and the
two halves added in float32. What a weight's float16 lacks to its value is a power of two, given as `*_SCALE`.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP4_SCALE = tl.constexpr(2.0**14)  # E2M1's bits in 11…9 of a float16 are its value times 2^-14, subnormals included
SPLIT_SCALE = tl.constexpr(2.0**4)  # cells hold values times 2^-4


def _ptx(lines: list[str], registers: str) -> str:
    """One asm block with `registers` declared, which ends by adding both halves of `acc` into $0."""
    body = "\n".join(lines)
    return f"""{{
.reg .b32 acc, {registers};
.reg .b16 first, second;
.reg .f32 low, high;
{body}
mov.b32 {{first, second}}, acc;
cvt.f32.f16 low, first;
cvt.f32.f16 high, second;
add.f32 $0, low, high;
}}"""


def _accumulate(pair: str, activations: str, is_first: bool) -> str:
    if is_first:
        return f"mul.rn.f16x2 acc, {pair}, {activations};"
    return f"fma.rn.f16x2 acc, {pair}, {activations}, acc;"


def _fp4_ptx() -> str:
    """$1…$4 are the codes, $5…$20 the activations."""
    lines: list[str] = []
    for word in range(4):
        for i in range(4):
            sign, magnitude = 12 - 4 * i, 9 - 4 * i
            lines += [
                f"shl.b32 t, ${1 + word}, {sign};",
                f"shl.b32 u, ${1 + word}, {magnitude};" if magnitude > 0 else f"shr.b32 u, ${1 + word}, {-magnitude};",
                "and.b32 u, u, 0x0E000E00;",
                "lop3.b32 t, t, 0x80008000, u, 0xEA;",
                _accumulate("t", f"${5 + 4 * word + i}", not lines),
            ]
    return _ptx(lines, "t, u")


_SUMMAND = 0x40404040 * pow(17, -1, 2**32) % 2**32


def _two_bit_ptx() -> str:
    """$1, $2 are the codes, $3 and $4 the row's low and high bytes, $5…$20 the activations.

    Of two codes in bytes 0 and 1, times 17 plus 0x4040 makes the selector of both bytes of both their float16. The sum is made
    beforehand, where it costs nothing: _SUMMAND times 17 is 0x40404040. A product that is wide by sixteen bits gives the same of
    bytes 2 and 3 without a shift, which the busier pipe would do.
    """
    lines: list[str] = []
    for word in range(2):
        for i in range(4):
            first = 5 + 8 * word + i
            lines += [
                f"shr.b32 t, ${1 + word}, {2 * i};",
                f"lop3.b32 t, t, 0x03030303, {_SUMMAND}, 0xEA;",  # (t & 0x03…) | summand
                "mul.lo.u32 u, t, 17;",
                "mul.wide.u32 wide, t, 0x110000;",
                "mov.b64 {t, v}, wide;",
                "prmt.b32 u, $3, $4, u;",
                _accumulate("u", f"${first}", not word and not i),
                "prmt.b32 v, $3, $4, v;",
                _accumulate("v", f"${first + 4}", False),
            ]
    return _ptx(lines, "t, u, v;\n.reg .b64 wide")


def _split_ptx() -> str:
    """$1, $2 are the base codes, $3, $4 the residual's, $5…$8 the cells' values as high bytes, $9…$24 the activations."""
    lines: list[str] = ["mov.b32 zero, 0;"]
    started = False
    for word in range(2):
        base, residual = f"${1 + word}", f"${3 + word}"
        lines += [
            f"shl.b32 even, {base}, 2;",
            f"lop3.b32 even, even, {residual}, 0xCCCCCCCC, 0xE4;",  # bits of the first where the mask is set
            f"shr.b32 t, {residual}, 2;",
            f"lop3.b32 odd, {base}, t, 0xCCCCCCCC, 0xE4;",
        ]
        for parity, codes in enumerate(("even", "odd")):
            lines += [
                f"and.b32 place, {codes}, 0x77777777;",
                f"shr.b32 side, {codes}, 1;",
                "lop3.b32 side, side, 0x44444444, 0x32103210, 0xEA;",  # (side & 0x4…) | 0x3210…
            ]
            for half in range(2):
                lines += [
                    "prmt.b32 lo, $5, $6, place;",
                    "prmt.b32 hi, $7, $8, place;",
                    "prmt.b32 hi, lo, hi, side;",
                ]
                for offset, selector in ((0, "0x2404"), (2, "0x3414")):
                    activation = 9 + 4 * (2 * word + half) + offset + parity
                    lines += [f"prmt.b32 t, hi, zero, {selector};", _accumulate("t", f"${activation}", not started)]
                    started = True
                if half == 0:
                    lines += ["shr.b32 place, place, 16;", "shr.b32 side, side, 16;"]
    return _ptx(lines, "t, even, odd, place, side, lo, hi, zero")


def _cell(start: int) -> tl.constexpr:
    """Four FP4 values in ascending order from number `start` on, times 2^-4, as the high bytes of their float16."""
    magnitudes = (0x00, 0x28, 0x2C, 0x2E, 0x30, 0x32, 0x34, 0x36)  # of 0, 0.5, 1, 1.5, 2, 3, 4, 6
    ordered = [0x80 | byte for byte in magnitudes[:0:-1]] + list(magnitudes)
    word = sum(byte << 8 * place for place, byte in enumerate(ordered[start : start + 4]))
    return tl.constexpr(word - (word >> 31 << 32))


# Cell c of a partition p begins at 4 * c, or one before that if the cell of three, number p, lies below it.
CELL_0, CELL_1, CELL_2, CELL_3 = (_cell(4 * cell) for cell in range(4))
EARLY_1, EARLY_2, EARLY_3 = (_cell(4 * cell - 1) for cell in range(1, 4))
FP4_PTX = tl.constexpr(_fp4_ptx())
TWO_BIT_PTX = tl.constexpr(_two_bit_ptx())
SPLIT_PTX = tl.constexpr(_split_ptx())
INPUTS_20 = tl.constexpr("=f" + ",r" * 20)
INPUTS_24 = tl.constexpr("=f" + ",r" * 24)


@triton.jit
def half_value(words, high: tl.constexpr):
    """One float16 of each word, as float32."""
    bits = (words >> (16 if high else 0)) & 0xFFFF
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_value(code):
    """The value of FP4 codes, float32."""
    exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * ((1 << exponent) >> 1).to(tl.float32))
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def _code(words, number: tl.constexpr, bits: tl.constexpr):
    """Code `number` of a group, out of the tuple of its words."""
    per_word: tl.constexpr = 32 // bits
    return (words[number // per_word] >> (number % per_word * bits)) & ((1 << bits) - 1)


@triton.jit
def fp4_dot(codes, x, FAST: tl.constexpr):
    """sum of E2M1(code) * x / FP4_SCALE over each group, float32; codes: 4 words a group, x: 16."""
    if FAST:
        total = tl.inline_asm_elementwise(FP4_PTX, INPUTS_20, codes + x, tl.float32, True, 1)
    else:
        total = tl.zeros_like(codes[0]).to(tl.float32)
        for k in tl.static_range(32):
            value = e2m1_value(_code(codes, k, 4)) / FP4_SCALE
            total += value * half_value(x[k // 8 * 4 + k % 4], k % 8 >= 4)
    return total


@triton.jit
def two_bit_dot(codes, row, x, FAST: tl.constexpr):
    """sum of level[code] * x over each group, float32; codes: 2 words a group, row: its low and high bytes, x: 16."""
    if FAST:
        total = tl.inline_asm_elementwise(TWO_BIT_PTX, INPUTS_20, codes + row + x, tl.float32, True, 1)
    else:
        total = tl.zeros_like(codes[0]).to(tl.float32)
        for k in tl.static_range(32):
            place = _code(codes, k, 2) * 8
            level = half_value(((row[0] >> place) & 0xFF) | (((row[1] >> place) & 0xFF) << 8), False)
            total += level * half_value(x[k // 8 * 4 + k % 4], k % 8 >= 4)
    return total


@triton.jit
def split_dot(base, residual, partition, x, FAST: tl.constexpr):
    """sum of value[cell, place] * x / SPLIT_SCALE over each group, float32; 2 words of each code, x: 16."""
    cells = (
        tl.full(partition.shape, CELL_0, tl.int32),
        tl.where(partition < 1, EARLY_1, CELL_1),
        tl.where(partition < 2, EARLY_2, CELL_2),
        tl.where(partition < 3, EARLY_3, CELL_3),
    )
    if FAST:
        total = tl.inline_asm_elementwise(SPLIT_PTX, INPUTS_24, base + residual + cells + x, tl.float32, True, 1)
    else:
        total = tl.zeros_like(base[0]).to(tl.float32)
        for k in tl.static_range(32):
            cell, place = _code(base, k, 2), _code(residual, k, 2)
            lower, upper = tl.where(cell == 0, cells[0], cells[1]), tl.where(cell == 2, cells[2], cells[3])
            byte = (tl.where(cell < 2, lower, upper) >> (8 * place)) & 0xFF
            total += half_value(byte << 8, False) * half_value(x[k // 8 * 4 + k % 4], k % 8 >= 4)
    return total
