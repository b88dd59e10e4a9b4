"""The grouped expert GEMV on a GPU: codes go from memory straight to the registers of tensor cores, products are whole numbers.

A lane loads 16 bytes of a row's codes a step, the next step's while it works on this one's. `Plan.slices` warps share the groups
of a row and the end adds them up: their number is the same for every shape, so that neither tuning nor the number of picks changes
the order of a sum. Owns that stream and what lies in shared memory meanwhile: x, its scales and the rows' bytes.
`kernel.py` has the twin that the interpreter can run.
"""

# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.expert_gemv import decode, packing, slabs
from kernels.expert_gemv.group_products import add_group, columns_of
from kernels.expert_gemv.layouts import numbers_along
from kernels.swiglu_kernel import clamped_swiglu_in_gluon

FP4, TWO_BIT, SPLIT = (gl.constexpr(kind) for kind in slabs.KINDS)
MAGNITUDES, BLOCK_BYTES, ADDRESS_UNIT = decode.MAGNITUDES, packing.BLOCK_BYTES, gl.constexpr(slabs.ADDRESS_UNIT)
WAIT, LAUNCH = gl.constexpr("griddepcontrol.wait; // $0"), gl.constexpr("griddepcontrol.launch_dependents; // $0")
pair, store_pair = gluon.jit(packing.pair.fn), gluon.jit(packing.store_pair.fn)


@gluon.jit
def _load(pointers, mask, EVEN: gl.constexpr):
    if EVEN:
        loaded = gl.load(pointers)
    else:
        loaded = gl.load(pointers, mask=mask, other=0)
    return loaded


@gluon.jit
def _codes(plane, first_row, step, plan: gl.constexpr):
    """A step's words [slices, rows, lanes, lane_words] of a plane; zeros past a row's end."""
    ROW: gl.constexpr = plan.groups * plan.words
    slices, lanes = numbers_along(0, plan.slices, plan.codes, 4), numbers_along(2, plan.lanes, plan.codes, 4)
    first_word = ((step * plan.slices + slices) * plan.lanes + lanes) * plan.lane_words
    word = first_word + numbers_along(3, plan.lane_words, plan.codes, 4)
    row = first_row + numbers_along(1, plan.rows, plan.codes, 4)
    return _load(plane.to(gl.pointer_type(gl.int32)) + (row * ROW + word), (word < ROW) & (row >= 0), plan.even)


@gluon.jit
def _fetch(planes, first_row, step, plan: gl.constexpr):
    """`_codes` of each plane of each matrix."""
    codes = ()
    for plane in gl.static_range(len(planes)):
        codes += (_codes(planes[plane], first_row, step, plan),)
    return codes


@gluon.jit
def _bytes(begin, first_row, plan: gl.constexpr):
    """The byte of every group of a program's rows [room, rows, step_groups]."""
    group = numbers_along(0, plan.room, plan.byte_board, 3) * plan.step_groups
    group += numbers_along(2, plan.step_groups, plan.byte_board, 3)
    row = first_row + numbers_along(1, plan.rows, plan.byte_board, 3)
    mask = (group < plan.groups) & (row >= 0)
    return _load(begin + (row * plan.groups + group), mask, plan.room * plan.step_groups == plan.groups)


@gluon.jit
def _x_parts(packed, plan: gl.constexpr):
    """All of x [room * lane_groups * parts, slices * lanes * 2 * part_bytes]: a row holds what one product takes."""
    GROUPS: gl.constexpr = plan.lane_groups
    PAIR: gl.constexpr = 2 * plan.part_bytes
    row = numbers_along(0, plan.room * GROUPS * plan.parts, plan.x_board, 2)
    column = numbers_along(1, plan.slices * plan.lanes * PAIR, plan.x_board, 2)
    lane, step = column // PAIR, row // (GROUPS * plan.parts)
    group = (step * (plan.slices * plan.lanes) + lane) * GROUPS + row // plan.parts % GROUPS
    begin = gl.minimum(group, plan.groups) * BLOCK_BYTES + (0 if plan.kind == FP4 else 64)
    return gl.load(packed + (begin + row % plan.parts * PAIR + column % PAIR))


@gluon.jit
def _x_scales(scales, plan: gl.constexpr):
    """The scale of every group of x [room * lane_groups, slices * lanes], by the unit of the weights' whole numbers."""
    GROUPS: gl.constexpr = plan.lane_groups
    row = numbers_along(0, plan.room * GROUPS, plan.scale_board, 2)
    group = (
        row // GROUPS * (plan.slices * plan.lanes) + numbers_along(1, plan.slices * plan.lanes, plan.scale_board, 2)
    ) * GROUPS + row % GROUPS
    return gl.load(scales + gl.minimum(group, plan.groups)) * plan.unit


@gluon.jit
def _shared(tile):
    """A tile in shared memory, to be indexed by its first axis."""
    RANK: gl.constexpr = len(tile.shape)
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0] if RANK == 2 else [2, 1, 0])
    part: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0] if RANK == 2 else [1, 0])
    board = gl.allocate_shared_memory(tile.dtype, tile.shape, whole)
    board.store(tile)
    return board._reinterpret(tile.dtype, tile.shape, part)


@gluon.jit
def _words_of(codes, plan: gl.constexpr):
    """A lane's words [slices, rows, lanes, lane_words] as a tuple: a tensor for each of its groups."""
    if plan.lane_groups == 1:
        groups = (codes,)
    else:
        first, second = gl.split(
            codes.reshape([plan.slices, plan.rows, plan.lanes, 2, plan.words]).permute([0, 1, 2, 4, 3])
        )
        first = gl.convert_layout(first, plan.group_codes, assert_trivial=True)
        groups = (first, gl.convert_layout(second, plan.group_codes, assert_trivial=True))
    return groups


@gluon.jit
def _bytes_of(numbers, plan: gl.constexpr):
    """A lane's bytes [slices, rows, lanes, lane_groups], as `_words_of`."""
    if plan.lane_groups == 1:
        single = numbers.reshape([plan.slices, plan.rows, plan.lanes])
        groups = (gl.convert_layout(single, plan.row_groups, assert_trivial=True),)
    else:
        first, second = gl.split(numbers)
        first = gl.convert_layout(first, plan.row_groups, assert_trivial=True)
        groups = (first, gl.convert_layout(second, plan.row_groups, assert_trivial=True))
    return groups


@gluon.jit
def _step(totals, codes, step, boards, table, magnitudes, plan: gl.constexpr):
    """`totals` of each matrix and the products of one step."""
    MATRICES: gl.constexpr = len(totals)
    PLANES: gl.constexpr = len(codes) // MATRICES
    words, numbers = (), ()
    for plane in gl.static_range(len(codes)):
        words += (_words_of(codes[plane], plan),)
    for matrix in gl.static_range(MATRICES):
        board = boards[2 + matrix].index(step).reshape([plan.rows, plan.slices, plan.lanes, plan.lane_groups])
        numbers += (_bytes_of(board.permute([1, 0, 2, 3]).load(plan.lane_bytes), plan),)
    for group in gl.static_range(plan.lane_groups):
        number, added = step * plan.lane_groups + group, ()
        columns = columns_of(boards[0], number * plan.parts, plan)
        x_scale = boards[1].index(number).reshape([plan.slices, plan.lanes]).load(plan.column_groups).expand_dims(1)
        for matrix in gl.static_range(MATRICES):
            base, residual = words[matrix * PLANES][group], words[matrix * PLANES + PLANES - 1][group]
            row = numbers[matrix][group].to(gl.int32)
            if plan.kind != FP4:
                row = gl.load(table + (matrix * 256 + row))
            added += (add_group(totals[matrix], base, residual, row, x_scale, columns, magnitudes, plan),)
        totals = added
    return totals


@gluon.jit
def _products(
    slab, residual, packed, scales, tables, first_row, plan: gl.constexpr, CHAINED: gl.constexpr, EARLY: gl.constexpr
):
    """A program's rows of each matrix times x: float32 [rows] twice, the same tensor where there is one matrix."""
    MATRICES: gl.constexpr = 2 if plan.up else 1
    FIRST: gl.constexpr = 0 if plan.up else 2
    BYTES: gl.constexpr = plan.code_bytes
    planes, boards, totals = (), (), ()
    for matrix in gl.static_range(FIRST, FIRST + MATRICES):
        # A pointer made of a number is not known to be aligned; with this a lane loads its 16 bytes at once.
        begin = (slab + matrix * (BYTES + plan.height * plan.groups)).to(gl.pointer_type(gl.uint8))
        planes += (gl.multiple_of(begin, 16),)
        if plan.kind == SPLIT:
            planes += (gl.multiple_of((residual + matrix * BYTES).to(gl.pointer_type(gl.uint8)), 16),)
    PLANES: gl.constexpr = len(planes) // MATRICES
    codes = _fetch(planes, first_row, 0, plan)  # before the wait: nothing that a kernel of this call writes
    numbers = ()
    for matrix in gl.static_range(MATRICES):
        numbers += (_bytes(planes[matrix * PLANES] + BYTES, first_row, plan),)
    if CHAINED:
        if EARLY:
            gl.inline_asm_elementwise(LAUNCH, "=r", [], gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, is_pure=False, pack=1)
        if not EARLY:
            gl.inline_asm_elementwise(LAUNCH, "=r", [], gl.int32, is_pure=False, pack=1)
    parts, x_scales = _x_parts(packed, plan), _x_scales(scales, plan)
    boards = (_shared(parts), _shared(x_scales))
    for matrix in gl.static_range(MATRICES):
        boards += (_shared(numbers[matrix]),)
        totals += (gl.zeros([plan.slices, plan.rows, plan.lanes], gl.float32, layout=plan.row_groups),)
    magnitudes = MAGNITUDES
    if plan.kind == FP4:  # read where zeros lie: a constant would be moved to a register anew for each permute
        zeros = packed.to(gl.pointer_type(gl.int32)) + plan.groups * (BLOCK_BYTES // 4)
        magnitudes = gl.load(zeros + numbers_along(2, plan.lanes, plan.decoded, 5)) | MAGNITUDES
    table = tables[1 if plan.kind == SPLIT else 0] + FIRST * 256
    for step in range(0, plan.steps - 1):
        ahead = _fetch(planes, first_row, step + 1, plan)
        totals = _step(totals, codes, step, boards, table, magnitudes, plan)
        codes = ahead
    totals = _step(totals, codes, plan.steps - 1, boards, table, magnitudes, plan)
    first = gl.convert_layout(gl.sum(gl.sum(totals[0], 2), 0), plan.outputs, assert_trivial=True)
    if MATRICES == 1:
        second = first
    else:
        second = gl.convert_layout(gl.sum(gl.sum(totals[1], 2), 0), plan.outputs, assert_trivial=True)
    return first, second


@gluon.jit
def _store_packed(hidden, block, scale_at, plan: gl.constexpr):
    """One group of 32 values as `packing` has it."""
    largest = gl.max(hidden.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    high, low, scale = pair(hidden, largest)
    store_pair(block, gl.arange(0, 32, layout=plan.outputs), high, low, None)
    gl.store(scale_at, scale)


@gluon.jit
def stream_kernel(
    packed, scales, slabs, kinds, vectors, weights, normalisers, levels, split_selectors, out, out_scales, limit,
    FP4_PLAN: gl.constexpr, TWO_BIT_PLAN: gl.constexpr, SPLIT_PLAN: gl.constexpr, CHAINED: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Half of an expert for every pick: up, silu(min(w1·x, limit)) * clamp(w3·x, ±limit) as `packing` has it; else weight * w2·x.

    vectors: Which packed vector a pick takes; None for its own number. out: int8 blocks, or float32 [P, height].
    """
    pick, block = gl.program_id(1), gl.program_id(0)
    first_row, kind = block * FP4_PLAN.rows, gl.load(kinds + pick)
    vector = (pick if vectors is None else gl.load(vectors + pick)).to(gl.int64)
    slab, residual = gl.load(slabs + pick * 2) * ADDRESS_UNIT, gl.load(slabs + pick * 2 + 1) * ADDRESS_UNIT
    x, x_scales = packed + vector * ((FP4_PLAN.groups + 1) * BLOCK_BYTES), scales + vector * (FP4_PLAN.groups + 1)
    tables = (levels, split_selectors)
    gate = gl.zeros([FP4_PLAN.rows], gl.float32, layout=FP4_PLAN.outputs)
    up = gate
    if kind == FP4:
        gate, up = _products(slab, residual, x, x_scales, tables, first_row, FP4_PLAN, CHAINED, EARLY)
    elif kind == TWO_BIT:
        gate, up = _products(slab, residual, x, x_scales, tables, first_row, TWO_BIT_PLAN, CHAINED, EARLY)
    elif kind == SPLIT:
        gate, up = _products(slab, residual, x, x_scales, tables, first_row, SPLIT_PLAN, CHAINED, EARLY)
    elif CHAINED:
        gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, is_pure=False, pack=1)
    if (kind >= FP4) & (kind <= SPLIT):
        if FP4_PLAN.up:
            gate *= gl.load(normalisers + pick * 3)
            up *= gl.load(normalisers + pick * 3 + 1)
            at = pick.to(gl.int64) * (FP4_PLAN.height // 32 + 1) + block
            _store_packed(clamped_swiglu_in_gluon(gate, up, limit), out + at * BLOCK_BYTES, out_scales + at, FP4_PLAN)
        else:
            row = first_row + gl.arange(0, FP4_PLAN.rows, layout=FP4_PLAN.outputs)
            factor = gl.load(normalisers + pick * 3 + 2) * gl.load(weights + pick)
            gl.store(out + pick.to(gl.int64) * FP4_PLAN.height + row, gate * factor)
