"""The Triton kernels of the router: scores of all experts, then the choice of one token's picks and their weights."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _log1p(e):
    """log(1 + e) of 0 <= e <= 1 to a few units in the last place: 2 artanh(e / (2 + e)), its series up to the 15th power.

    The hardware's logarithm has an absolute error only, which would spoil the scores of experts far from the token.
    """
    s = e / (2.0 + e)
    square = s * s
    series = square * (1.0 / 15) + 1.0 / 13
    series = square * series + 1.0 / 11
    series = square * series + 1.0 / 9
    series = square * series + 1.0 / 7
    series = square * series + 1.0 / 5
    series = square * series + 1.0 / 3
    return 2.0 * s * (square * series + 1.0)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_program"])
def scores_kernel(
    x_ptr,  # [T, D]
    weight_ptr,  # [E, D]
    scores_ptr,  # float32 [T, E]
    num_tokens,
    tokens_per_program,
    E: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """scores = sqrt(softplus(weight · x)). Grid: (groups of experts, groups of tokens); the weights stay in registers."""
    expert, column = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.arange(0, D_BLOCK)
    inside = column < D
    at = weight_ptr + expert[:, None] * D + column[None, :]
    weight = tl.load(at, mask=(expert[:, None] < E) & inside[None, :], other=0.0).to(tl.float32)
    index = tl.program_id(1) * tokens_per_program
    last = tl.minimum(index + tokens_per_program, num_tokens)
    while index < last:
        token = index.to(tl.int64)
        x = tl.load(x_ptr + token * D + column, mask=inside, other=0.0).to(tl.float32)
        logits = tl.sum(weight * x[None, :], 1)  # NaN passes through the second term: a maximum drops it on a card
        softplus = tl.maximum(logits, 0.0) + _log1p(tl.exp(-tl.abs(logits)))
        tl.store(scores_ptr + token * E + expert, tl.sqrt(softplus), mask=expert < E)
        index += 1


@triton.jit
def _ordered(x):
    """Integers that compare as the float32 x do; NaN of either sign is the largest, as in torch's sort."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _largest(keys, expert, k, K: tl.constexpr, K_BLOCK: tl.constexpr, LOWEST: tl.constexpr):
    """[K_BLOCK] the indices of the K largest keys, of equal ones the lower index first; `k` is arange(K_BLOCK)."""
    picks = tl.zeros((K_BLOCK,), tl.int32)
    for rank in tl.static_range(K):
        top = tl.max(keys, 0)
        pick = tl.min(tl.where(keys == top, expert, 0x7FFFFFFF), 0)
        picks = tl.where(k == rank, pick, picks)
        keys = tl.where(expert == pick, LOWEST, keys)
    return picks


@triton.jit
def select_kernel(
    scores_ptr,  # float32 [T, E]
    bias_ptr,  # float32 [E], or None
    table_ptr,  # [vocab, K], or None
    token_ids_ptr,  # [T], read with the table
    scaling,
    picks_ptr,  # [T, K]
    weights_ptr,  # float32 [T, K]
    host_picks_ptr,  # [T, K] in pinned host memory, or None
    host_weights_ptr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """The picks of a token and their weights, the heaviest first. Grid: (T,). What it wrote to host memory is there when it has ended."""
    LOWEST: tl.constexpr = -0x80000000
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, K_BLOCK)
    if table_ptr is not None:
        at = table_ptr + tl.load(token_ids_ptr + token).to(tl.int64) * K + k
        chosen = tl.load(at, mask=k < K, other=0).to(tl.int32)
    else:
        expert = tl.arange(0, E_BLOCK)
        biased = tl.load(scores_ptr + token * E + expert, mask=expert < E, other=0.0)
        if bias_ptr is not None:
            biased += tl.load(bias_ptr + expert, mask=expert < E, other=0.0)
        keys = tl.where(expert < E, _ordered(biased), LOWEST)
        chosen = _largest(keys, expert, k, K, K_BLOCK, LOWEST)
    weights = tl.load(scores_ptr + token * E + chosen, mask=k < K, other=0.0)
    keys = tl.where(k < K, _ordered(weights), LOWEST)
    place = tl.zeros((K_BLOCK,), tl.int32)  # how many picks go before this one
    for other in tl.static_range(K):
        key = tl.max(tl.where(k == other, keys, LOWEST), 0)
        place += ((key > keys) | ((key == keys) & (other < k))).to(tl.int32)
    weights = weights * scaling / (tl.sum(weights, 0) + 1e-20)
    at = token * K + place
    tl.store(picks_ptr + at, chosen.to(picks_ptr.dtype.element_ty), mask=k < K)
    tl.store(weights_ptr + at, weights, mask=k < K)
    if host_picks_ptr is not None:
        tl.store(host_picks_ptr + at, chosen.to(host_picks_ptr.dtype.element_ty), mask=k < K)
    if host_weights_ptr is not None:
        tl.store(host_weights_ptr + at, weights, mask=k < K)
