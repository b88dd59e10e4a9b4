"""What a lane does with one group of each of its rows: bytes out of codes, their exact sums with x on tensor cores, its scale.

Tensor cores would add up the four lanes of a row, which hold different groups. So each lane's group has two of the eight columns
of x to itself, one for the high bytes of its values and one for the low ones; there all other lanes have zeros.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.expert_gemv import decode, slabs
from kernels.expert_gemv.layouts import numbers_along

FP4, TWO_BIT, SPLIT = (gl.constexpr(kind) for kind in slabs.KINDS)
FP4_PTX, TWO_BIT_PTX, SPLIT_PTX, CELLS_PTX = decode.FP4_PTX, decode.TWO_BIT_PTX, decode.SPLIT_PTX, decode.CELLS_PTX
FOUR, EIGHT, CELLS = gl.constexpr((gl.int8,) * 4), gl.constexpr((gl.int8,) * 8), gl.constexpr((gl.int32,) * 3)
OUT_4, OUT_8 = gl.constexpr(",".join(["=&r"] * 4)), gl.constexpr(",".join(["=&r"] * 8))
IN = gl.constexpr(",r,r,r,r")  # a word that is the same for the four bytes of an output


@gluon.jit
def _operand(values, NUMBER: gl.constexpr, plan: gl.constexpr):
    """Bytes [slices, rows or columns, lanes, words, 4] as an operand of K = 16 * words; no lane gives anything away."""
    flat = values.permute([0, 1, 3, 2, 4]).reshape([values.shape[0], values.shape[1], 16 * plan.words])
    if NUMBER == 0:
        operand = gl.convert_layout(flat, plan.left, assert_trivial=True)
    else:
        operand = gl.convert_layout(flat.permute([0, 2, 1]), plan.right, assert_trivial=True)
    return operand


@gluon.jit
def columns_of(x_board, first, plan: gl.constexpr):
    """The right operands of one group a lane: `parts` of them, from row `first` of the board on."""
    layout: gl.constexpr = plan.columns
    own = gl.where(numbers_along(1, plan.lanes, layout, 5) == numbers_along(3, plan.lanes, layout, 5), -1, 0)
    operands = ()
    for part in gl.static_range(plan.parts):
        board = x_board.index(first + part).reshape([plan.slices, plan.lanes, 2, plan.part_bytes]).permute([0, 2, 1, 3])
        x = board.load(gl.SliceLayout(1, layout)).expand_dims(1)
        x = gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r" + IN, [x, own], gl.int8, is_pure=True, pack=4)
        operands += (_operand(x.reshape([plan.slices, 8, plan.lanes, plan.words, 4]), 1, plan),)
    return operands


@gluon.jit
def _sums(bytes_, columns, plan: gl.constexpr):
    """sum of bytes * x over each lane's group: int32 [slices, rows, 8], the columns of the lane's group by high and low byte."""
    sums = gl.zeros([plan.slices, plan.rows, 8], gl.int32, layout=plan.mma)
    for part in gl.static_range(plan.parts):
        sums = mma_v2(_operand(bytes_[part], 0, plan), columns[part], sums)
    return sums


@gluon.jit
def _by_group(sums, plan: gl.constexpr):
    """Columns of high and low bytes as values of each lane's group [slices, rows, lanes]."""
    high, low = gl.split(sums.reshape([plan.slices, plan.rows, plan.lanes, 2]))
    high = gl.convert_layout(high, plan.row_groups, assert_trivial=True)
    return high, gl.convert_layout(low, plan.row_groups, assert_trivial=True)


@gluon.jit
def _wide(words, plan: gl.constexpr):
    """[slices, rows, lanes, words or 1], once for each byte of an output."""
    like = gl.zeros([plan.slices, plan.rows, plan.lanes, plan.words, 4], gl.int32, layout=plan.decoded)
    return gl.broadcast(words.expand_dims(4), like)[0]


@gluon.jit
def _factor(scale, x_scale, plan: gl.constexpr):
    """scale * x_scale; zero past a row's end, where x's scale is and the weights' need not be a number."""
    factor = scale * x_scale
    if not plan.even:
        factor = gl.where(x_scale == 0, 0.0, factor)
    return factor


@gluon.jit
def _add_fp4(total, codes, byte, x_scale, columns, magnitudes, plan: gl.constexpr):
    a, b, c, d = gl.inline_asm_elementwise(
        FP4_PTX, OUT_4 + IN + IN, [_wide(codes, plan), magnitudes], FOUR, is_pure=True, pack=4
    )
    high, low = _by_group(_sums((a, b), columns, plan) - _sums((c, d), columns, plan), plan)
    # 2^(byte-127) but for a last bit, which makes 255 NaN; 0 counts as zero.
    scale = (byte * 0x00800000 + 1).to(gl.float32, bitcast=True)
    return total + (high * 256 + low).to(gl.float32) * _factor(scale, x_scale, plan)


@gluon.jit
def _add_two_bit(total, codes, row, x_scale, columns, plan: gl.constexpr):
    """row: int64, of `Rows.levels`. Both low bytes' product is left out: about 2^-13 of the whole, as much as the
    levels' rounding."""
    word = (row >> 32).to(gl.int32)
    high = _wide(row.to(gl.int32).expand_dims(3), plan)
    low = _wide((word & -0x03030304).expand_dims(3), plan)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        TWO_BIT_PTX, OUT_8 + IN + IN + IN, [_wide(codes, plan), high, low], EIGHT, is_pure=True, pack=4
    )
    high_high, high_low = _by_group(_sums((a, b, c, d), columns, plan), plan)
    low_high, _ = _by_group(_sums((e, f, g, h), columns, plan), plan)
    exponent = (word & 0x03030303) * 0x00820820  # its four pairs of bits side by side, in 30…23
    scale = ((exponent & 0x7F800000) | 1).to(gl.float32, bitcast=True)
    return total + (high_high * 256 + high_low + low_high).to(gl.float32) * _factor(scale, x_scale, plan)


@gluon.jit
def _add_split(total, base, residual, row, x_scale, columns, plan: gl.constexpr):
    """row: int64, of `Rows.split_selectors`."""
    word = (row >> 32).to(gl.int32)
    p, q, r = gl.inline_asm_elementwise(
        CELLS_PTX, "=&r,=&r,=&r,r,r", [row.to(gl.int32), word], CELLS, is_pure=True, pack=1
    )
    p, q, r = _wide(p.expand_dims(3), plan), _wide(q.expand_dims(3), plan), _wide(r.expand_dims(3), plan)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        SPLIT_PTX, OUT_8 + IN + IN + IN + IN + IN,
        [_wide(base, plan), _wide(residual, plan), p, q, r], EIGHT, is_pure=True, pack=4,
    )  # fmt: skip
    high, low = _by_group(_sums((a, b, c, d), columns, plan) - _sums((e, f, g, h), columns, plan), plan)
    scale = ((word & -0x10000) | 1).to(gl.float32, bitcast=True)  # as FP4 has it, but 2^-127 for byte 0
    return total + (high * 256 + low).to(gl.float32) * _factor(scale, x_scale, plan)


@gluon.jit
def add_group(total, base, residual, row, x_scale, columns, magnitudes, plan: gl.constexpr):
    """`total` [slices, rows, lanes] and the products of a group a lane; row: FP4's byte, else the row of the table it names."""
    if plan.kind == FP4:
        added = _add_fp4(total, base, row, x_scale, columns, magnitudes, plan)
    elif plan.kind == TWO_BIT:
        added = _add_two_bit(total, base, row, x_scale, columns, plan)
    else:
        added = _add_split(total, base, residual, row, x_scale, columns, plan)
    return added
