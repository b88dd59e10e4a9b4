"""The indexer of one token: scores of all visible entries as sortable integers, and the exact choice of the best."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scores_kernel(
    queries_ptr,  # [HI, DI] bf16|f32
    weights_ptr,  # [HI] f32
    entries_ptr,  # [N + 1, DI] bf16|f32
    keys_ptr,  # [N] int32: uint32 bits that sort as the scores do; only those of visible entries are written
    position_ptr,  # int64
    N,
    HI: tl.constexpr,
    DI: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """score[i] = sum_h weights[h] * relu(queries[h] · entries[i])."""
    visible = tl.minimum((tl.load(position_ptr) + 1) // RATIO, N)
    first = tl.program_id(0) * BLOCK_N
    if first < visible:
        indices, heads, channels = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_H), tl.arange(0, DI)
        inside = indices < visible
        offsets = indices.to(tl.int64)[:, None] * DI + channels[None, :]
        entries = tl.load(entries_ptr + offsets, mask=inside[:, None], other=0.0)
        queries = tl.load(queries_ptr + heads[:, None] * DI + channels, mask=(heads < HI)[:, None], other=0.0)
        weights = tl.load(weights_ptr + heads, mask=heads < HI, other=0.0)
        if PORTABLE:
            entries, queries = entries.to(tl.float32), queries.to(tl.float32)
        products = tl.dot(entries, tl.trans(queries), input_precision="ieee")
        positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        scores = tl.sum(positive * weights[None, :], 1)
        scores = tl.where(scores == 0.0, 0.0, scores)  # -0 ties with +0
        bits = tl.where(scores == scores, scores.to(tl.int32, bitcast=True), 0x7FFFFFFF)  # NaN above all, as in a sort
        tl.store(keys_ptr + indices, bits ^ ((bits >> 31) | -0x80000000), mask=inside)


@triton.jit
def select_kernel(
    keys_ptr,  # [N] int32, uint32 bits; at the second level [number of chunks, TOPK]
    sources_ptr,  # [number of chunks, TOPK] int32: the entries of these keys; None at the first level
    keys_out_ptr,  # [number of chunks, TOPK] int32, or None where this is the last level
    out_ptr,  # [number of chunks, TOPK] int32, ascending in each chunk
    position_ptr,  # int64
    N,  # entries that fit in the context
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,  # keys of one program, at most 16384
    FIRST_CHUNK: tl.constexpr,  # CHUNK of the first level
    GROUPS: tl.constexpr,  # power of two from TOPK to CHUNK
    SECOND: tl.constexpr,
):
    """The min(TOPK, number of keys) largest keys of each chunk; among equal ones those of the lowest entries."""
    visible = tl.minimum((tl.load(position_ptr) + 1) // RATIO, N)
    lanes = tl.arange(0, CHUNK)
    places = tl.program_id(0) * CHUNK + lanes
    if SECOND:
        # how many a chunk of the first level wrote follows from the position
        inside = (places % TOPK < visible - (places // TOPK).to(tl.int64) * FIRST_CHUNK) & (
            places < tl.cdiv(N, FIRST_CHUNK) * TOPK
        )
    else:
        inside = places < visible
    keys = tl.load(keys_ptr + places, mask=inside, other=0).to(tl.uint32, bitcast=True)

    # of GROUPS >= TOPK groups each has a key as large as the least of their maxima, so TOPK keys reach that bound
    largest = tl.max(keys, 0)
    bound = tl.min(tl.max(tl.reshape(keys, [GROUPS, CHUNK // GROUPS]), 1), 0)
    unknown = bound ^ largest  # from its highest set bit down the threshold's bits are open
    unknown |= unknown >> 1
    unknown |= unknown >> 2
    unknown |= unknown >> 4
    unknown |= unknown >> 8
    unknown |= unknown >> 16

    # bit by bit the largest threshold that TOPK keys reach; a threshold that exactly TOPK reach ends the search
    reached = tl.sum(inside.to(tl.int32), 0)
    threshold = tl.where(reached > TOPK, largest - (largest & unknown), 0).to(tl.uint32)
    bit = unknown ^ (unknown >> 1)
    while (reached > TOPK) & (bit != 0):
        higher = threshold | bit
        count = tl.sum((keys >= higher).to(tl.int32), 0)
        threshold = tl.where(count >= TOPK, higher, threshold)
        reached = tl.where(count >= TOPK, count, reached)
        bit = bit >> 1

    above = inside & (keys > threshold)
    equal = inside & (keys == threshold)
    needed = TOPK - tl.sum(above.to(tl.int32), 0)
    own = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(own, 0) - own
    equal_before = before >> 16
    chosen = above | (equal & (equal_before < needed))
    to = tl.program_id(0) * TOPK + (before & 0xFFFF) + tl.minimum(equal_before, needed)
    sources = tl.load(sources_ptr + places, mask=inside, other=0) if SECOND else places
    tl.store(out_ptr + to, sources, mask=chosen)
    if keys_out_ptr is not None:
        tl.store(keys_out_ptr + to, keys.to(tl.int32, bitcast=True), mask=chosen)
