"""Attention of one token over the window ring and the compressed entries, split along the keys, and the combination."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode_attention.math_kernel import rotate


@triton.jit
def _counts(position_ptr, W: tl.constexpr, RATIO: tl.constexpr, SLOTS: tl.constexpr):
    """Position, filled rows of the ring, and compressed keys: the entries visible, at most SLOTS of them."""
    position = tl.load(position_ptr)
    window = tl.minimum(position + 1, W)
    compressed = position * 0
    if RATIO > 0:
        compressed = tl.minimum((position + 1) // RATIO, SLOTS)
    return position, window, compressed


@triton.jit
def attend_kernel(
    queries_ptr,  # [H, D] bf16|f32, prepared
    ring_ptr,  # [W, D] bf16|f32
    entries_ptr,  # [N + 1, D], or None
    indices_ptr,  # [SLOTS] int32 entries to read, or None: the first ones
    position_ptr,  # int64
    sums_ptr,  # [splits, H, D] f32: sum of exp2(score - max) * key
    maxima_ptr,  # [splits, H] f32: largest score times log2(e)
    weights_ptr,  # [splits, H] f32: sum of exp2(score - max)
    scale,  # D^-0.5 * log2(e)
    H: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW_SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,  # of BLOCK_K keys in one split
    PORTABLE: tl.constexpr,
):
    """Partial sums of one split of the keys and BLOCK_H heads; a split without keys writes nothing."""
    split = tl.program_id(0)
    _, window, compressed = _counts(position_ptr, W, RATIO, SLOTS)
    base, count, first = ring_ptr, window, split * (BLOCK_K * BLOCKS)
    if RATIO > 0:  # noqa: SIM102 - known when compiled
        if split >= WINDOW_SPLITS:
            base, count, first = entries_ptr, compressed, (split - WINDOW_SPLITS) * (BLOCK_K * BLOCKS)
    if first < count:
        heads, channels = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, D)
        offsets = heads[:, None] * D + channels[None, :]
        queries = tl.load(queries_ptr + offsets, mask=(heads < H)[:, None], other=0.0)
        if PORTABLE:
            queries = queries.to(tl.float32)
        maxima = tl.full([BLOCK_H], float("-inf"), tl.float32)
        weights = tl.zeros([BLOCK_H], tl.float32)
        sums = tl.zeros([BLOCK_H, D], tl.float32)
        for block in range(BLOCKS):
            slots = first + block * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = slots < count
            rows = slots
            if indices_ptr is not None:
                picked = tl.load(indices_ptr + slots, mask=inside & (split >= WINDOW_SPLITS), other=0)
                rows = tl.where(split >= WINDOW_SPLITS, picked, slots)
            place = rows.to(tl.int64)[:, None] * D + channels[None, :]
            keys = tl.load(base + place, mask=inside[:, None], other=0.0)
            if PORTABLE:
                keys = keys.to(tl.float32)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            above = tl.maximum(maxima, tl.max(scores, 1))
            factors = tl.exp2(scores - above[:, None])
            kept = tl.exp2(maxima - above)
            weights = weights * kept + tl.sum(factors, 1)
            sums = sums * kept[:, None] + tl.dot(factors.to(keys.dtype), keys, input_precision="ieee")
            maxima = above
        partial = split * H + heads
        tl.store(sums_ptr + partial.to(tl.int64)[:, None] * D + channels[None, :], sums, mask=(heads < H)[:, None])
        tl.store(maxima_ptr + partial, maxima, mask=heads < H)
        tl.store(weights_ptr + partial, weights, mask=heads < H)


@triton.jit
def combine_kernel(
    sums_ptr,  # [splits, H, D] f32, as attend_kernel writes them
    maxima_ptr,  # [splits, H] f32
    weights_ptr,  # [splits, H] f32
    sink_ptr,  # [H] f32
    frequencies_ptr,  # [TAIL / 2] f32
    position_ptr,  # int64
    out_ptr,  # [H, D] bf16|f32
    H: tl.constexpr,
    D: tl.constexpr,
    TAIL: tl.constexpr,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW_SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # at least the number of splits
    BLOCK_D: tl.constexpr,
):
    """BLOCK_D channels of one head: all splits in order, the sink in the denominator, the inverse RoPE."""
    head, start = tl.program_id(0), tl.program_id(1) * BLOCK_D
    position, window, compressed = _counts(position_ptr, W, RATIO, SLOTS)
    splits, channels = tl.arange(0, BLOCK_S), start + tl.arange(0, BLOCK_D)
    in_window = splits < WINDOW_SPLITS
    first = tl.where(in_window, splits, splits - WINDOW_SPLITS) * SPLIT_KEYS
    written = first < tl.where(in_window, window, compressed)

    partial = splits * H + head
    place = partial.to(tl.int64)[:, None] * D + channels[None, :]
    sums = tl.load(sums_ptr + place, mask=written[:, None], other=0.0)
    maxima = tl.load(maxima_ptr + partial, mask=written, other=float("-inf"))
    weights = tl.load(weights_ptr + partial, mask=written, other=0.0)
    sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
    highest = tl.maximum(tl.max(maxima, 0), sink)
    factors = tl.exp2(maxima - highest)
    total = tl.sum(factors * weights, 0) + tl.exp2(sink - highest)
    x = tl.sum(sums * factors[:, None], 0) / total
    if start + BLOCK_D > D - TAIL:
        x = rotate(x, (start - (D - TAIL)) // 2, position, frequencies_ptr, TAIL // 2, BLOCK_D, True)
    tl.store(out_ptr + head * D + channels, x)
