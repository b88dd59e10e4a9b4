"""The Triton kernels of RMS norm (a program a row) and of the head for one token (a program a few rows)."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,  # rows `stride` apart
    weight_ptr,  # [D], or None
    out_ptr,  # [rows, D]
    stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = weight * x / sqrt(mean(x²) + eps). Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    if weight_ptr is not None:
        normed *= weight
    tl.store(out_ptr + row * D + column, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def head_kernel(x_ptr, weight_ptr, out_ptr, V, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out float32 [V] = weight [V, D] · x [D]. Grid: (groups of ROWS,).

    For one warp: x then has the layout of the weights and passes through no shared memory. A lane adds its columns in order,
    then a tree adds the lanes, so ROWS changes no bit.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        mask = start + column < D
        x = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        at = weight_ptr + row[:, None] * D + start + column[None, :]
        weight = tl.load(at, mask=(row[:, None] < V) & mask[None, :], other=0.0, eviction_policy="evict_first")
        total += weight.to(tl.float32) * x[None, :]
    tl.store(out_ptr + row, tl.sum(total, 1), mask=row < V)
