"""The compressors' products of one token, and `prepare`: everything between the projections and the attention."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode_attention.math_kernel import rotate, round_e2m1, round_e4m3


@triton.jit
def rows_kernel(
    a_ptr,  # [D] bf16|f32
    weight_ptr,  # [R, D] bf16|f32
    out_ptr,  # [R] f32
    R,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[r] = sum_d weight[r, d] * a[d] in float32; the order of the sum does not depend on ROWS."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        mask = (rows < R)[:, None] & (columns < D)[None, :] if D % BLOCK_D else (rows < R)[:, None]
        a = tl.load(a_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :], mask=mask, other=0.0)
        sums += weight.to(tl.float32) * a[None, :]
    tl.store(out_ptr + rows, tl.sum(sums, 1), mask=rows < R)


@triton.jit
def _normed_query(x_ptr, out_ptr, position, frequencies_ptr, eps, N: tl.constexpr, TAIL: tl.constexpr):
    """One head: RMS norm without a weight, then RoPE of the tail."""
    channels, tail = tl.arange(0, N), N - TAIL + tl.arange(0, TAIL)
    x = tl.load(x_ptr + channels).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(out_ptr + channels, x * inverse, mask=channels < N - TAIL)
    rotated = rotate(
        tl.load(x_ptr + tail).to(tl.float32) * inverse, 0, position, frequencies_ptr, TAIL // 2, TAIL, False
    )
    tl.store(out_ptr + tail, rotated)


@triton.jit
def _normed_row(x, norm_ptr, position, frequencies_ptr, eps, N: tl.constexpr, TAIL: tl.constexpr, RULE: tl.constexpr):
    """x [N] f32 -> RMS norm with weight, RoPE of the tail, rounded by RULE "B" or "C", or not where it is ""."""
    norm = tl.load(norm_ptr + tl.arange(0, N)).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * norm
    x = rotate(x, (TAIL - N) // 2, position, frequencies_ptr, TAIL // 2, N, False)
    if RULE == "B":
        x = round_e4m3(x, N - TAIL, N, 64)
    if RULE == "C":
        x = round_e2m1(x, N, 32)
    return x


@triton.jit
def _pooled(
    rows_ptr, ape_ptr, values_ptr, gates_ptr, position, E: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr
):
    """Gated mean [E] of the window that ends at `position`; the newest token's row is still in `rows`, not in the ring."""
    C: tl.constexpr = OVERLAP * E
    SPAN: tl.constexpr = OVERLAP * RATIO
    BLOCK: tl.constexpr = min(SPAN, 8)
    channels = tl.arange(0, E)
    newest = (OVERLAP - 1) * E + channels
    value = tl.load(rows_ptr + newest)
    gate = tl.load(rows_ptr + C + newest) + tl.load(ape_ptr + (RATIO - 1) * C + newest)
    highest = gate
    weights = tl.full([E], 1.0, tl.float32)
    sums = value
    for start in range(0, SPAN, BLOCK):
        ages = start + tl.arange(0, BLOCK)  # 0 is the oldest pooled token
        slots = (position + 1 + ages) % SPAN
        half = tl.where(ages >= RATIO, E, 0) if OVERLAP == 2 else ages * 0
        offsets = (slots * C + half)[:, None] + channels[None, :]
        older = (ages < SPAN - 1)[:, None] & (channels >= 0)[None, :]
        gates = tl.load(gates_ptr + offsets, mask=older, other=float("-inf"))
        values = tl.load(values_ptr + offsets, mask=older, other=0.0)
        above = tl.maximum(highest, tl.max(gates, 0))
        factors = tl.exp(gates - above[None, :])
        kept = tl.exp(highest - above)
        weights = weights * kept + tl.sum(factors, 0)
        sums = sums * kept + tl.sum(factors * values, 0)
        highest = above
    return sums / weights


@triton.jit
def _compress(
    rows_ptr,  # [2C] f32 values and gates of this token
    ape_ptr,  # [RATIO, C] f32
    norm_ptr,  # [E] bf16|f32
    values_ptr,  # [SPAN, C] f32, row position % SPAN is written
    gates_ptr,  # [SPAN, C] f32, likewise
    entries_ptr,  # [N + 1, E] bf16|f32, row position // RATIO is written where the token completes its window
    frequencies_ptr,
    position,
    N,
    eps,
    E: tl.constexpr,
    TAIL: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    RULE: tl.constexpr,
):
    """One compressor's memory after the token, and the entry that it completes, unless that lies beyond the N that fit."""
    C: tl.constexpr = OVERLAP * E
    channels = tl.arange(0, C)
    if ((position + 1) % RATIO == 0) & (position // RATIO < N):
        pooled = _pooled(rows_ptr, ape_ptr, values_ptr, gates_ptr, position, E, RATIO, OVERLAP)
        entry = _normed_row(pooled, norm_ptr, position + 1 - RATIO, frequencies_ptr, eps, E, TAIL, RULE)
        tl.store(entries_ptr + position // RATIO * E + tl.arange(0, E), entry)
    row = position % (OVERLAP * RATIO) * C + channels
    tl.store(values_ptr + row, tl.load(rows_ptr + channels))
    ape = tl.load(ape_ptr + position % RATIO * C + channels)
    tl.store(gates_ptr + row, tl.load(rows_ptr + C + channels) + ape)


@triton.jit
def prepare_kernel(
    queries_ptr,  # [H, D] bf16|f32
    queries_out_ptr,  # [H, D]
    kv_ptr,  # [D] bf16|f32
    kv_norm_ptr,  # [D]
    ring_ptr,  # [W, D], row position % W is written
    rows_ptr,  # [2C + 2CI + HI] f32
    ape_ptr,
    norm_ptr,
    values_ptr,
    gates_ptr,
    entries_ptr,  # the compressor's, see _compress; None without one
    index_queries_ptr,  # [HI, DI]
    index_queries_out_ptr,  # [HI, DI]
    index_ape_ptr,
    index_norm_ptr,
    index_values_ptr,
    index_gates_ptr,
    index_entries_ptr,  # the indexer's compressor's
    frequencies_ptr,  # [TAIL / 2] f32
    position_ptr,  # int64
    N,  # entries that fit in the context, of either compressor
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    TAIL: tl.constexpr,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    DI: tl.constexpr,
    RULE_KV: tl.constexpr,
    RULE_ENTRIES: tl.constexpr,
    RULE_INDEX_ENTRIES: tl.constexpr,
    RULE_INDEX_QUERIES: tl.constexpr,
    HAS_INDEX_QUERIES: tl.constexpr,
):
    """Program 0 … H-1: a query head. H: the kv row. Then the compressor, the indexer's compressor, the indexer's heads."""
    program = tl.program_id(0)
    position = tl.load(position_ptr)
    OVERLAP: tl.constexpr = 2 if RATIO == 4 else 1
    if program < H:
        offset = program * D
        _normed_query(queries_ptr + offset, queries_out_ptr + offset, position, frequencies_ptr, eps, D, TAIL)
    elif program == H:
        x = tl.load(kv_ptr + tl.arange(0, D)).to(tl.float32)
        row = _normed_row(x, kv_norm_ptr, position, frequencies_ptr, eps, D, TAIL, RULE_KV)
        tl.store(ring_ptr + position % W * D + tl.arange(0, D), row)
    elif program == H + 1:
        if RATIO > 0:
            _compress(
                rows_ptr, ape_ptr, norm_ptr, values_ptr, gates_ptr, entries_ptr, frequencies_ptr, position,
                N, eps, D, TAIL, RATIO, OVERLAP, RULE_ENTRIES,
            )  # fmt: skip
    elif program == H + 2:
        if DI > 0:
            _compress(
                rows_ptr + 2 * OVERLAP * D, index_ape_ptr, index_norm_ptr, index_values_ptr, index_gates_ptr,
                index_entries_ptr, frequencies_ptr, position, N, eps, DI, TAIL, RATIO, OVERLAP, RULE_INDEX_ENTRIES,
            )  # fmt: skip
    else:
        if HAS_INDEX_QUERIES:
            base = (program - H - 3) * DI
            channels = tl.arange(0, DI)
            x = tl.load(index_queries_ptr + base + channels).to(tl.float32)
            x = rotate(x, (TAIL - DI) // 2, position, frequencies_ptr, TAIL // 2, DI, False)
            if RULE_INDEX_QUERIES == "C":
                x = round_e2m1(x, DI, 32)
            tl.store(index_queries_out_ptr + base + channels, x)
