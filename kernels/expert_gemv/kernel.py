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
from kernels.expert_gemv.slabs import KINDS
from kernels.swiglu_kernel import clamped_swiglu

PAIRS = tl.constexpr(16)  # words of activations a group
FP4, TWO_BIT, SPLIT = (tl.constexpr(kind) for kind in KINDS)


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
    largest = tl.max(tl.abs(values), 1).to(
        tl.int32, bitcast=True
    )  # a NaN may pass it: its own float16 is one whatever the scale
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
    x: tl.tuple = ()
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
    """2^(byte-127) of E8M0 bytes, NaN of 255."""
    bits = tl.where(byte == 255, 0x7FC00000, tl.maximum(byte << 23, 0x00400000))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _halves(pair):
    """Both words of int64 values, the lower one first."""
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def _tile_rows(tile, UP: tl.constexpr, ROWS: tl.constexpr):
    """Matrix (0 to 2: w1, w3, w2) and row in it of each of a tile's ROWS rows; w1 and w3 take half of them each."""
    number = tl.arange(0, ROWS)
    if UP:
        matrix, row = number // (ROWS // 2), tile * (ROWS // 2) + number % (ROWS // 2)
    else:
        matrix, row = number * 0 + 2, tile * ROWS + number
    return matrix, row


@triton.jit
def _fetch(
    slab, residual, first_tile, step,
    KIND: tl.constexpr, UP: tl.constexpr, HEIGHT: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_G: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What one group of each row of a step's tile is made of, as a tuple: its byte, then its code words."""
    STEPS: tl.constexpr = (GROUPS + BLOCK_G - 1) // BLOCK_G
    CODE_BYTES: tl.constexpr = HEIGHT * GROUPS * (16 if KIND == FP4 else 8)
    matrix, rows = _tile_rows(first_tile + step // STEPS, UP, ROWS)
    start, valid = step % STEPS * BLOCK_G, rows < HEIGHT
    begin = slab + matrix.to(tl.int64) * (CODE_BYTES + HEIGHT * GROUPS)
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
def _group_dots(fetched, x, inverse, row_offset, levels, scales, split_rows, KIND: tl.constexpr, FAST: tl.constexpr):
    """Dot products [N, G] of fetched groups.

    inverse: [1, G], of the activations' scale. row_offset: int32 [N], where the matrix's table begins. The factors follow one
    another so that none of the products overflows or vanishes where the last one does not.
    """
    if KIND == FP4:
        byte, w0, w1, w2, w3 = fetched
        dots = fp4_dot((w0, w1, w2, w3), x, FAST) * inverse * _exponent(byte) * FP4_SCALE
    elif KIND == TWO_BIT:
        byte, w0, w1 = fetched
        number = byte + row_offset[:, None]
        dots = two_bit_dot((w0, w1), _halves(_gather(levels, number)), x, FAST) * inverse * _gather(scales, number)
    else:
        byte, w0, w1, r0, r1 = fetched
        row = _gather(split_rows, byte + row_offset[:, None])
        dots = split_dot((w0, w1), (r0, r1), row >> 8, x, FAST) * inverse * _exponent(row & 255) * SPLIT_SCALE
    return dots


@triton.jit
def _step_dots(
    fetched, first_tile, step, packed, inverse_scales, levels, scales, split_rows,
    KIND: tl.constexpr, UP: tl.constexpr, HEIGHT: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_G: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """`_group_dots` of a step, its activations' scale undone; zero outside."""
    STEPS: tl.constexpr = (GROUPS + BLOCK_G - 1) // BLOCK_G
    matrix, rows = _tile_rows(first_tile + step // STEPS, UP, ROWS)
    group = step % STEPS * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = group < GROUPS
    x = _activations(packed, group, inside, GROUPS, EVEN)
    inverse = _load(inverse_scales + group, inside, EVEN)[None, :]
    dots = _group_dots(fetched, x, inverse, matrix * 256, levels, scales, split_rows, KIND, FAST)
    if not EVEN:
        dots = tl.where(inside[None, :] & (rows < HEIGHT)[:, None], dots, 0.0)
    return dots


@triton.jit
def _finish(
    total, tile, normalisers, weight, out,
    KIND: tl.constexpr, UP: tl.constexpr, HEIGHT: tl.constexpr, ROWS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Stores a tile's results: the clamped SwiGLU of w1 and w3, or w2's rows times the route weight."""
    matrix, row = _tile_rows(tile, UP, ROWS)
    dots = tl.sum(total, 1)
    if KIND == TWO_BIT:
        dots *= tl.load(normalisers + matrix)
    if UP:
        gate, up = tl.split(tl.trans(tl.reshape(dots, (2, ROWS // 2))))
        row = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        tl.store(out + row, clamped_swiglu(gate, up, LIMIT), mask=row < HEIGHT)
    else:
        tl.store(out + row, dots * weight, mask=row < HEIGHT)


@triton.jit
def _tiles(
    slab, residual, first_tile, packed, inverse_scales, levels, scales, split_rows, normalisers, weight, out,
    KIND: tl.constexpr, UP: tl.constexpr, HEIGHT: tl.constexpr, GROUPS: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_G: tl.constexpr, FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one pick, one after the other; the next step's weights are under way while one step is computed."""
    STEPS: tl.constexpr = (GROUPS + BLOCK_G - 1) // BLOCK_G
    EVEN: tl.constexpr = (GROUPS % BLOCK_G == 0) and (HEIGHT % (ROWS // 2 * TILES if UP else ROWS * TILES) == 0)
    fetched = _fetch(slab, residual, first_tile, 0, KIND, UP, HEIGHT, GROUPS, ROWS, BLOCK_G, EVEN)
    if CHAINED:
        gdc_wait()
    total = tl.zeros((ROWS, BLOCK_G), tl.float32)
    for step in range(0, TILES * STEPS - 1):
        ahead = _fetch(slab, residual, first_tile, step + 1, KIND, UP, HEIGHT, GROUPS, ROWS, BLOCK_G, EVEN)
        total += _step_dots(
            fetched, first_tile, step, packed, inverse_scales, levels, scales, split_rows,
            KIND, UP, HEIGHT, GROUPS, ROWS, BLOCK_G, EVEN, FAST,
        )  # fmt: skip
        if step % STEPS == STEPS - 1:
            tile = first_tile + step // STEPS
            _finish(total, tile, normalisers, weight, out, KIND, UP, HEIGHT, ROWS, LIMIT)
            total = tl.zeros((ROWS, BLOCK_G), tl.float32)
        fetched = ahead
    total += _step_dots(
        fetched, first_tile, TILES * STEPS - 1, packed, inverse_scales, levels, scales, split_rows,
        KIND, UP, HEIGHT, GROUPS, ROWS, BLOCK_G, EVEN, FAST,
    )  # fmt: skip
    _finish(total, first_tile + TILES - 1, normalisers, weight, out, KIND, UP, HEIGHT, ROWS, LIMIT)


@triton.jit
def expert_kernel(
    packed, inverse_scales, slabs, kinds, vectors, weights, normalisers, levels, scales, split_rows, out,
    UP: tl.constexpr, HEIGHT: tl.constexpr, GROUPS: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK_G: tl.constexpr, FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Half of an expert for every pick: UP, silu(min(w1·x, limit)) * clamp(w3·x, ±limit), else route weight * w2·x.

    vectors: Which packed vector a pick takes; None for its own number. out: float32 [P, HEIGHT]. GROUPS: Columns / 32.
    """
    if CHAINED:
        gdc_launch_dependents()
    pick, first_tile = tl.program_id(1), tl.program_id(0) * TILES
    kind, weight = tl.load(kinds + pick), tl.load(weights + pick)
    vector = (pick if vectors is None else tl.load(vectors + pick)).to(tl.int64)
    slab, residual = tl.load(slabs + pick * 2) * 16, tl.load(slabs + pick * 2 + 1) * 16
    x, inverse = packed + vector * (GROUPS * PAIRS), inverse_scales + vector * GROUPS
    factors, row_out = normalisers + pick * 3, out + pick.to(tl.int64) * HEIGHT
    if kind == FP4:
        _tiles(
            slab, residual, first_tile, x, inverse, levels, scales, split_rows, factors, weight, row_out,
            FP4, UP, HEIGHT, GROUPS, LIMIT, ROWS, TILES, BLOCK_G, FAST, CHAINED,
        )  # fmt: skip
    elif kind == TWO_BIT:
        _tiles(
            slab, residual, first_tile, x, inverse, levels, scales, split_rows, factors, weight, row_out,
            TWO_BIT, UP, HEIGHT, GROUPS, LIMIT, ROWS, TILES, BLOCK_G, FAST, CHAINED,
        )  # fmt: skip
    elif kind == SPLIT:
        _tiles(
            slab, residual, first_tile, x, inverse, levels, scales, split_rows, factors, weight, row_out,
            SPLIT, UP, HEIGHT, GROUPS, LIMIT, ROWS, TILES, BLOCK_G, FAST, CHAINED,
        )  # fmt: skip
    elif CHAINED:
        gdc_wait()  # so that whoever waits for this kernel has waited for the one before


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
