"""FP8-block products of up to eight tokens on a GPU: weights go from memory straight to the registers of tensor cores.

The order of a sum along K is free as long as weights and x agree on it, so a lane loads 16 neighbouring codes and gives them
out as the pairs that fragments want of it: no weight passes shared memory, and a program's first loads are all under way at
once. Owns that order; codes are decoded as in `kernel.py`, whose `decode_kernel` is the twin that the interpreter can run.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.fp8_linear.kernel import DECODE_E4M3
from kernels.swiglu_kernel import clamped_swiglu_in_gluon

BLOCK = gl.constexpr(128)  # columns under one scale
RUNS, LANES, RUN = (
    gl.constexpr(2),
    gl.constexpr(4),
    gl.constexpr(16),
)  # a block: loads of a lane x lanes of a row x codes
TOKENS = gl.constexpr(8)  # columns of a fragment


@gluon.jit
def _columns(slices, layout: gl.constexpr):
    """Columns of a step's codes in their layout, [SPLIT, 1, RUNS, LANES, RUN]."""
    runs = gl.arange(0, RUNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout)))))
    lanes = gl.arange(
        0, LANES, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout))))
    )
    codes = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))))
    places = runs[None, None, :, None, None] * (RUN * LANES) + lanes[None, None, None, :, None] * RUN
    return slices * BLOCK + places + codes[None, None, None, None, :]


@gluon.jit
def _fragments(values):
    """[SPLIT, M, RUNS, LANES, RUN] as loaded -> [SPLIT, M, 128] as the tensor cores take it; no lane gives anything away."""
    outer: gl.constexpr = values.shape[1]
    pairs = values.reshape([values.shape[0], outer, RUNS, LANES, RUN // 4, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6])
    return pairs.reshape([values.shape[0], outer, BLOCK])


@gluon.jit
def _activations(values, layout: gl.constexpr):
    return gl.convert_layout(_fragments(values).permute([0, 2, 1]), layout, assert_trivial=True)


@gluon.jit
def _add_product(total, packed, x, byte, mma: gl.constexpr):
    """total + E4M3(packed) · x * 2^(byte-127), every slice its own block."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    decoded = gl.inline_asm_elementwise(DECODE_E4M3, "=r,=r,r", [packed], gl.bfloat16, is_pure=True, pack=4)
    weights = gl.convert_layout(_fragments(decoded), left, assert_trivial=True)
    zeros = gl.zeros(total.shape, gl.float32, layout=mma)
    if x.dtype == gl.float32:
        high = x.to(gl.bfloat16)
        low = (x - high.to(gl.float32)).to(gl.bfloat16)
        product = mma_v2(weights, _activations(low, right), mma_v2(weights, _activations(high, right), zeros))
    else:
        product = mma_v2(weights, _activations(x, right), zeros)
    exponent = byte.to(gl.int32)
    bits = gl.where(exponent == 0, 0x00400000, gl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return total + product * bits.to(gl.float32, bitcast=True)[:, None, None]


@gluon.jit
def _load(pointers, step: gl.constexpr, offset: gl.constexpr, slices, SPLIT: gl.constexpr, BLOCKS: gl.constexpr):
    """One step's values for all slices; zeros for a slice that has no block left."""
    if (step + 1) * SPLIT > BLOCKS:
        values = gl.load(pointers + step * offset, mask=step * SPLIT + slices < BLOCKS, other=0)
    else:
        values = gl.load(pointers + step * offset)
    return values


@gluon.jit
def stream_kernel(
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
    K: gl.constexpr,
    SWIGLU: gl.constexpr,
    SPLIT: gl.constexpr,  # every SPLIT-th block along K is one slice, a warp's work; slices are added at the end
    ROWS: gl.constexpr,
    DEPTH: gl.constexpr,  # steps whose weights are under way at the start
    ONE: gl.constexpr,  # whether T is 1: x goes through shared memory, and all of a fragment's columns are that token
    CHAINED: gl.constexpr,  # sm_90: launched before the kernel that writes x ends; weights are fetched meanwhile
):
    """ROWS outputs of up to eight tokens; one program reads its rows' weights once."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SPLIT, 1, 1], instr_shape=[1, 16, 8])
    loaded: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 16], [1, 8, 1, 4, 1], [SPLIT, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    outer: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, loaded))))
    first: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, loaded))))
    BLOCKS: gl.constexpr = K // BLOCK
    STEPS: gl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    FIRST: gl.constexpr = DEPTH if DEPTH < STEPS else STEPS
    STEP: gl.constexpr = SPLIT * BLOCK

    first_row = gl.program_id(0) * ROWS
    slices = gl.arange(0, SPLIT, layout=first)[:, None, None, None, None]
    columns = _columns(slices, loaded)
    offsets = gl.arange(0, ROWS, layout=outer)[None, :, None, None, None] * K + columns
    weights = codes + first_row.to(gl.int64) * K + offsets
    weights_up = codes_up + first_row.to(gl.int64) * K + offsets
    packed, packed_up, bytes_of, bytes_up = (), (), (), ()
    for step in gl.static_range(FIRST):
        packed += (_load(weights, step, STEP, slices, SPLIT, BLOCKS),)
        if SWIGLU:
            packed_up += (_load(weights_up, step, STEP, slices, SPLIT, BLOCKS),)
    own = gl.arange(0, SPLIT, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))
    first_block = first_row // BLOCK * BLOCKS
    for step in gl.static_range(STEPS):
        bytes_of += (_load(scales + first_block + own, step, SPLIT, own, SPLIT, BLOCKS),)
        if SWIGLU:
            bytes_up += (_load(scales_up + first_block + own, step, SPLIT, own, SPLIT, BLOCKS),)
    if CHAINED:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)

    x += first_row // rows_per_group * K
    tokens = gl.arange(0, TOKENS, layout=outer)[None, :, None, None, None]
    values = ()
    if ONE:
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [SPLIT], [0])
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        board = gl.allocate_shared_memory(x.dtype.element_ty, [STEPS, STEP], plain)
        at = gl.arange(0, STEP, layout=flat)
        for step in gl.static_range(STEPS):
            values += (_load(x + at, step, STEP, at // BLOCK, SPLIT, BLOCKS),)
        for step in gl.static_range(STEPS):
            board.index(step).store(values[step])
    pointers = x + (tokens * (rows_total // rows_per_group * K) + columns)
    present = (tokens < T) & (columns >= 0)

    total = gl.zeros([SPLIT, ROWS, TOKENS], gl.float32, layout=mma)
    total_up = gl.zeros([SPLIT, ROWS, TOKENS], gl.float32, layout=mma)
    for step in gl.static_range(STEPS):
        if ONE:
            row = board.index(step).reshape([SPLIT, RUNS, LANES, RUN]).load(gl.SliceLayout(1, loaded))
            activations, _ = gl.broadcast(row.expand_dims(1), tokens)
        else:
            live = present & (step * SPLIT + slices < BLOCKS)
            activations = gl.load(pointers + step * STEP, mask=live, other=0.0)
        total = _add_product(total, packed[step], activations, bytes_of[step], mma)
        if SWIGLU:
            total_up = _add_product(total_up, packed_up[step], activations, bytes_up[step], mma)
        if step + DEPTH < STEPS:
            packed += (_load(weights, step + DEPTH, STEP, slices, SPLIT, BLOCKS),)
            if SWIGLU:
                packed_up += (_load(weights_up, step + DEPTH, STEP, slices, SPLIT, BLOCKS),)

    result = gl.sum(total, 0)
    if SWIGLU:
        result = clamped_swiglu_in_gluon(result, gl.sum(total_up, 0), limit)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(0, mma)))[:, None] + first_row
    lines = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(0, mma)))[None, :]
    gl.store(out + (lines * rows_total + rows), result.to(out.dtype.element_ty), mask=lines < T)
