"""The grouped expert GEMV on the GPU: pack activations, gate and up, down, add. One output per pick.

With CHAINED (programmatic dependent launch, from compute capability 9 on) a kernel starts while the one before still runs and
fetches its first weights, which no kernel writes; only then it waits for that one's results.

Every row of a matrix is one warp's: lane g of a warp takes the g-th group of each 32, whatever the block's height and the number
of warps, so that neither tuning nor the number of picks changes the order of a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.expert_gemv.decode import FP4_SCALE, SPLIT_SCALE, fp4_dot, split_dot, two_bit_dot

PAIRS = tl.constexpr(16)  # words of activations a group
FP4, TWO_BIT, SPLIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # as in slabs.py


@triton.jit
def pack_kernel(x, packed, inverse_scales, num_groups, BLOCK_G: tl.constexpr, CHAINED: tl.constexpr):
    """Vectors [V, 32 * num_groups] as scaled float16 pairs: word p of group g of a vector at packed[V, p, g].

    A power of two brings each group's largest to [2^9, 2^10); its inverse goes to inverse_scales [V, num_groups].
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    vector = tl.program_id(1).to(tl.int64)
    group, k = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, 32)
    mask = group < num_groups
    offsets = vector * num_groups * 32 + group[:, None] * 32 + k[None, :]
    values = tl.load(x + offsets, mask=mask[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True)
    exponent = tl.maximum((largest >> 23) - 9, 1)  # of the inverse, biased
    scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    pair = (k // 8 * 4 + k % 4)[None, :] * num_groups + group[:, None]
    place = vector * num_groups * 32 + pair * 2 + (k % 8 // 4)[None, :]
    tl.store(packed + place, (values * scale[:, None]).to(tl.float16), mask=mask[:, None])
    inverse = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(inverse_scales + vector * num_groups + group, inverse, mask=mask)


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=mask, other=0)
    return loaded


@triton.jit
def _words(
    address, rows, valid, start, COUNT: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The COUNT words [N, G] of groups from `start` on in each row, as a tuple; address: int64 [N], of each row's matrix."""
    word = start * COUNT + tl.arange(0, BLOCK_G * COUNT)
    # A pointer made of a number is not known to be aligned; with this a lane loads one group's words at once.
    begin = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 4 * COUNT)
    pointers = begin[:, None] + ((rows * (GROUPS * COUNT))[:, None] + word[None, :])
    loaded = _load(pointers, valid[:, None] & (word < GROUPS * COUNT)[None, :], EVEN)
    if COUNT == 2:
        words = tl.split(tl.reshape(loaded, (rows.shape[0], BLOCK_G, 2)))
    else:
        even, odd = tl.split(tl.reshape(loaded, (rows.shape[0], BLOCK_G, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        words = first, second, third, fourth
    return words


@triton.jit
def _bytes(address, rows, group, mask, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """The byte [N, G] of each group in each row, as int32."""
    pointers = address.to(tl.pointer_type(tl.uint8))[:, None] + ((rows * GROUPS)[:, None] + group[None, :])
    return _load(pointers, mask, EVEN).to(tl.int32)


@triton.jit
def _activations(packed, group, inside, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """The sixteen words [1, G] of groups, as a tuple."""
    x: tl.tuple = ()  # type: ignore[assignment]
    for pair in tl.static_range(PAIRS):
        x = x + (_load(packed + pair * GROUPS + group, inside, EVEN)[None, :],)  # noqa: RUF005 - Triton's tuples only add
    return x


@triton.jit
def _gather(table, index):
    """table[index] of [N, G], as one flat load: a gather would be given lanes along rows, and all else with it."""
    flat = tl.reshape(index, (index.shape[0] * index.shape[1],))
    return tl.reshape(tl.load(table + flat), index.shape)


@triton.jit
def _exponent(byte):
    """2^(byte-127) of E8M0 bytes."""
    return tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _halves(pair):
    """Both words of int64 values, the lower one first."""
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def _fetch(
    slab, residual, matrix, rows, valid, start,
    KIND: tl.constexpr, WEIGHTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What one group of each row is made of, as a tuple: its byte, then its code words; `matrix` [N] numbers w1, w3, w2."""
    CODE_BYTES: tl.constexpr = WEIGHTS // (2 if KIND == FP4 else 4)
    begin = slab + matrix.to(tl.int64) * (CODE_BYTES + WEIGHTS // 32)
    group = start + tl.arange(0, BLOCK_G)
    mask = (group < GROUPS)[None, :] & valid[:, None]
    byte = _bytes(begin + CODE_BYTES, rows, group, mask, GROUPS, EVEN)
    if KIND == FP4:
        fetched = (byte,) + _words(begin, rows, valid, start, 4, GROUPS, BLOCK_G, EVEN)  # noqa: RUF005 - Triton's tuples only add
    elif KIND == TWO_BIT:
        fetched = (byte,) + _words(begin, rows, valid, start, 2, GROUPS, BLOCK_G, EVEN)  # noqa: RUF005
    else:
        base = _words(begin, rows, valid, start, 2, GROUPS, BLOCK_G, EVEN)
        second = residual + matrix.to(tl.int64) * CODE_BYTES
        fetched = (byte,) + base + _words(second, rows, valid, start, 2, GROUPS, BLOCK_G, EVEN)  # noqa: RUF005
    return fetched


@triton.jit
def _group_dots(fetched, x, row_offset, levels, split_rows, KIND: tl.constexpr, FAST: tl.constexpr):
    """Dot products [N, G] of fetched groups; row_offset: int32 [N], where the matrix's table begins."""
    if KIND == FP4:
        byte, w0, w1, w2, w3 = fetched
        dots = fp4_dot((w0, w1, w2, w3), x, FAST) * FP4_SCALE * _exponent(byte)
    elif KIND == TWO_BIT:
        byte, w0, w1 = fetched
        dots = two_bit_dot((w0, w1), _halves(_gather(levels, byte + row_offset[:, None])), x, FAST)
    else:
        byte, w0, w1, r0, r1 = fetched
        row = _gather(split_rows, byte + row_offset[:, None])
        dots = split_dot((w0, w1), (r0, r1), row >> 8, x, FAST) * SPLIT_SCALE * _exponent(row & 255)
    return dots


@triton.jit
def _scaled_dots(
    fetched, start, valid, packed, inverse_scales, row_offset, levels, split_rows,
    KIND: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`_group_dots` of the groups from `start` on, their activations' scale undone; zero outside."""
    group = start + tl.arange(0, BLOCK_G)
    inside = group < GROUPS
    x = _activations(packed, group, inside, GROUPS, EVEN)
    dots = _group_dots(fetched, x, row_offset, levels, split_rows, KIND, FAST)
    dots *= _load(inverse_scales + group, inside, EVEN)[None, :]
    if not EVEN:
        dots = tl.where(inside[None, :] & valid[:, None], dots, 0.0)
    return dots


@triton.jit
def row_dots(
    slab, residual, matrix, rows, valid, packed, inverse_scales, levels, split_rows,
    KIND: tl.constexpr, WEIGHTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    EVEN: tl.constexpr, FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Dot products [N] of matrix rows with one packed vector, but for the levels' scale and the normaliser.

    The next groups are under way while these are computed. slab, residual: Byte addresses. matrix, rows, valid: [N].
    """
    total = tl.zeros((rows.shape[0], BLOCK_G), tl.float32)
    offset = matrix * 256
    LAST: tl.constexpr = (GROUPS - 1) // BLOCK_G * BLOCK_G
    fetched = _fetch(slab, residual, matrix, rows, valid, 0, KIND, WEIGHTS, GROUPS, BLOCK_G, EVEN)
    if CHAINED:
        gdc_wait()
    for start in range(0, LAST, BLOCK_G):
        ahead = _fetch(slab, residual, matrix, rows, valid, start + BLOCK_G, KIND, WEIGHTS, GROUPS, BLOCK_G, EVEN)
        total += _scaled_dots(
            fetched, start, valid, packed, inverse_scales, offset, levels, split_rows, KIND, GROUPS, BLOCK_G, EVEN, FAST
        )  # fmt: skip
        fetched = ahead
    total += _scaled_dots(
        fetched, LAST, valid, packed, inverse_scales, offset, levels, split_rows, KIND, GROUPS, BLOCK_G, EVEN, FAST
    )  # fmt: skip
    return tl.sum(total, 1)


@triton.jit
def any_row_dots(
    slab, residual, matrix, rows, valid, packed, inverse_scales, levels, split_rows, kind, level_scales, normalisers,
    WEIGHTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """`row_dots` of a pick of any kind, whole: level_scales and normalisers point to those of w1, w3, w2."""
    if kind == FP4:
        dots = row_dots(
            slab, residual, matrix, rows, valid, packed, inverse_scales, levels, split_rows,
            FP4, WEIGHTS, GROUPS, BLOCK_G, EVEN, FAST, CHAINED,
        )  # fmt: skip
    elif kind == TWO_BIT:
        dots = row_dots(
            slab, residual, matrix, rows, valid, packed, inverse_scales, levels, split_rows,
            TWO_BIT, WEIGHTS, GROUPS, BLOCK_G, EVEN, FAST, CHAINED,
        )  # fmt: skip
        dots *= tl.load(level_scales + matrix) * tl.load(normalisers + matrix)
    else:
        dots = row_dots(
            slab, residual, matrix, rows, valid, packed, inverse_scales, levels, split_rows,
            SPLIT, WEIGHTS, GROUPS, BLOCK_G, EVEN, FAST, CHAINED,
        )  # fmt: skip
    return dots


@triton.jit
def gate_up_kernel(
    packed, inverse_scales, slabs, kinds, tokens, normalisers, level_scales, levels, split_rows,
    hidden,
    D: tl.constexpr, F: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_G: tl.constexpr, FAST: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """silu(min(w1·x, limit)) * clamp(w3·x, ±limit) of ROWS rows of one pick, float32."""
    if CHAINED:
        gdc_launch_dependents()
    pick, first = tl.program_id(1), tl.program_id(0) * ROWS
    kind, token = tl.load(kinds + pick), tl.load(tokens + pick).to(tl.int64)
    slab, residual = tl.load(slabs + pick * 2) * 16, tl.load(slabs + pick * 2 + 1) * 16
    if kind >= 0:
        number = tl.arange(0, 2 * ROWS)
        row = first + number % ROWS
        dots = any_row_dots(
            slab, residual, number // ROWS, row, row < F,
            packed + token * (D // 2), inverse_scales + token * (D // 32), levels, split_rows,
            kind, level_scales, normalisers + pick * 3,
            F * D, D // 32, BLOCK_G, (F % ROWS == 0) and (D // 32 % BLOCK_G == 0), FAST, CHAINED,
        )  # fmt: skip
        gate, up = tl.split(tl.trans(tl.reshape(dots, (2, ROWS))))
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        row = first + tl.arange(0, ROWS)
        tl.store(hidden + pick.to(tl.int64) * F + row, gate / (1 + tl.exp(-gate)) * up, mask=row < F)
    elif CHAINED:
        gdc_wait()  # so that whoever waits for this kernel has waited for the one before


@triton.jit
def down_kernel(
    packed, inverse_scales, slabs, kinds, weights, normalisers, level_scales, levels, split_rows, out,
    D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BLOCK_G: tl.constexpr, FAST: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """out[pick, rows] = route weight * w2·hidden, float32."""
    pick = tl.program_id(1)
    kind = tl.load(kinds + pick)
    slab, residual = tl.load(slabs + pick * 2) * 16, tl.load(slabs + pick * 2 + 1) * 16
    if kind >= 0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        dots = any_row_dots(
            slab, residual, row * 0 + 2, row, row < D,
            packed + pick.to(tl.int64) * (F // 2), inverse_scales + pick * (F // 32), levels, split_rows,
            kind, level_scales, normalisers + pick * 3,
            F * D, F // 32, BLOCK_G, (D % ROWS == 0) and (F // 32 % BLOCK_G == 0), FAST, CHAINED,
        )  # fmt: skip
        tl.store(out + pick.to(tl.int64) * D + row, dots * tl.load(weights + pick), mask=row < D)
    elif CHAINED:
        gdc_wait()


@triton.jit
def add_kernel(picks, shared, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out = ((pick 0 + pick 1) + … + shared), rounded once."""
    token, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    total = tl.load(picks + token * K * D + column, mask=mask).to(tl.float32)
    for rank in tl.static_range(1, K):
        total += tl.load(picks + (token * K + rank) * D + column, mask=mask).to(tl.float32)
    total += tl.load(shared + token * D + column, mask=mask).to(tl.float32)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=mask)
