"""The Triton kernels of hyper-connections for four streams: partial products, mixing, spreading.

A product over 4·D values is cut along D: each program takes the same channels of all four streams and writes its partial sums
to a scratch of its own place, and the mixing program adds those in a fixed order. So results depend neither on the order in
which programs run nor on the number of tokens. The scratch is [token, chunk, column]: a column per row of fn, then the sum of
squares; the columns after it are never read.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _stream_after(output, s0, s1, s2, s3, post_ptr, combination_ptr, token, stream: tl.constexpr):
    """post_k * output + sum_j C_jk * s_j of one token and stream k, float32."""
    row = combination_ptr + token * 16 + stream
    value = tl.load(post_ptr + token * 4 + stream) * output
    value += tl.load(row) * s0
    value += tl.load(row + 4) * s1
    value += tl.load(row + 8) * s2
    return value + tl.load(row + 12) * s3


@triton.jit
def _load_streams(streams_ptr, D: tl.constexpr, token, channel, inside):
    """The four streams of a token at `channel`, in their dtype."""
    at = streams_ptr + token * (4 * D) + channel
    s0 = tl.load(at, mask=inside, other=0.0)
    s1 = tl.load(at + D, mask=inside, other=0.0)
    s2 = tl.load(at + 2 * D, mask=inside, other=0.0)
    s3 = tl.load(at + 3 * D, mask=inside, other=0.0)
    return s0, s1, s2, s3


@triton.jit
def _spread(output_ptr, streams_ptr, post_ptr, combination_ptr, out_ptr, token, channel, inside, D: tl.constexpr):
    """Writes the four streams after a block, and returns them as written."""
    s0, s1, s2, s3 = _load_streams(streams_ptr, D, token, channel, inside)
    s0, s1, s2, s3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
    output = tl.load(output_ptr + token * D + channel, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    x0 = _stream_after(output, s0, s1, s2, s3, post_ptr, combination_ptr, token, 0).to(dtype)
    x1 = _stream_after(output, s0, s1, s2, s3, post_ptr, combination_ptr, token, 1).to(dtype)
    x2 = _stream_after(output, s0, s1, s2, s3, post_ptr, combination_ptr, token, 2).to(dtype)
    x3 = _stream_after(output, s0, s1, s2, s3, post_ptr, combination_ptr, token, 3).to(dtype)
    tl.debug_barrier()  # out may be streams, and several threads may hold one channel: all have read before one writes
    at = out_ptr + token * (4 * D) + channel
    tl.store(at, x0, mask=inside)
    tl.store(at + D, x1, mask=inside)
    tl.store(at + 2 * D, x2, mask=inside)
    tl.store(at + 3 * D, x3, mask=inside)
    return x0, x1, x2, x3


@triton.jit
def spread_kernel(output_ptr, streams_ptr, post_ptr, combination_ptr, out_ptr, D: tl.constexpr, CHANNELS: tl.constexpr):
    """out [T, 4, D] = post_k * output + sum_j C_jk * stream_j. Grid: (T * chunks of D,), for y ends at 65,535."""
    CHUNKS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    channel = program % CHUNKS * CHANNELS + tl.arange(0, CHANNELS)
    token = (program // CHUNKS).to(tl.int64)
    _spread(output_ptr, streams_ptr, post_ptr, combination_ptr, out_ptr, token, channel, channel < D, D)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_program"])
def products_kernel(
    streams_ptr,  # [T, 4, D]
    output_ptr,  # [T, D]; this and the next three are read and written only if SPREAD
    post_ptr,
    combination_ptr,
    spread_ptr,  # [T, 4, D]
    fn_ptr,  # float32 [ROWS, 4 * D]
    scratch_ptr,  # float32 [T, chunks, COLUMNS]
    num_tokens,
    tokens_per_program,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two above ROWS
    CHANNELS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Partial products of fn with the streams, or with the streams after a block, which it then writes too.

    Grid: (chunks of D, groups of tokens). The program's part of fn stays in registers over its tokens.
    """
    chunk = tl.program_id(0)
    channel = chunk * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < D
    row = tl.arange(0, COLUMNS)
    at = fn_ptr + row[:, None] * (4 * D) + channel[None, :]
    mask = (row[:, None] < ROWS) & inside[None, :]
    w0 = tl.load(at, mask=mask, other=0.0)
    w1 = tl.load(at + D, mask=mask, other=0.0)
    w2 = tl.load(at + 2 * D, mask=mask, other=0.0)
    w3 = tl.load(at + 3 * D, mask=mask, other=0.0)
    index = tl.program_id(1) * tokens_per_program
    last = tl.minimum(index + tokens_per_program, num_tokens)
    while index < last:  # a range of run-time bounds stops the interpreter under NumPy 2.4
        token = index.to(tl.int64)
        if SPREAD:
            x0, x1, x2, x3 = _spread(
                output_ptr, streams_ptr, post_ptr, combination_ptr, spread_ptr, token, channel, inside, D
            )
        else:
            x0, x1, x2, x3 = _load_streams(streams_ptr, D, token, channel, inside)
        x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        sums = tl.sum(w0 * x0[None, :] + w1 * x1[None, :] + w2 * x2[None, :] + w3 * x3[None, :], 1)
        squares = tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 0)
        out = scratch_ptr + (token * tl.num_programs(0) + chunk) * COLUMNS + row
        tl.store(out, tl.where(row == ROWS, squares, sums))
        index += 1


@triton.jit
def _mixing_logits(
    scratch_ptr,
    base_ptr,
    scale_ptr,
    norm_eps,
    token,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[COLUMNS] float32: z * scale + base of one token; what lies at ROWS and beyond has no meaning."""
    row, chunk = tl.arange(0, COLUMNS), tl.arange(0, CHUNK_BLOCK)
    at = scratch_ptr + (token * CHUNKS + chunk[:, None]) * COLUMNS + row[None, :]
    partial = tl.load(at, mask=chunk[:, None] < CHUNKS, other=0.0)
    base = tl.load(base_ptr + row, mask=row < ROWS, other=0.0)
    scale = tl.load(scale_ptr + tl.minimum(row // 4, 2), mask=row < ROWS, other=0.0)
    sums = tl.sum(partial, 0)
    squares = tl.sum(tl.where(row == ROWS, sums, 0.0), 0)
    return sums * tl.rsqrt(squares / (4 * D) + norm_eps) * scale + base


@triton.jit
def _at(values, row, index: tl.constexpr):
    """values[index] as a scalar."""
    return tl.sum(tl.where(row == index, values, 0.0), 0)


@triton.jit
def _reciprocal(x, PORTABLE: tl.constexpr):
    """1/x. Triton's division guards against numbers beyond 2^±126 with seven more instructions; sums of weights are none."""
    if PORTABLE:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _softmax(logits, row, first: tl.constexpr, eps):
    """softmax of the four logits from `first` on, + eps."""
    a, b = _at(logits, row, first), _at(logits, row, first + 1)
    c, d = _at(logits, row, first + 2), _at(logits, row, first + 3)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    factor = 1.0 / ((a + b) + (c + d))
    return a * factor + eps, b * factor + eps, c * factor + eps, d * factor + eps


@triton.jit
def _divisor(k0, k1, k2, k3, f0, f1, f2, f3, last, eps):
    """What a row or column has been divided by in all after one more step: k · f + eps * last; see `_sinkhorn`."""
    return (k0 * f0 + k1 * f1) + (k2 * f2 + (k3 * f3 + eps * last))


@triton.jit
def _sinkhorn(logits, row, out_ptr, eps, ITERATIONS: tl.constexpr, PORTABLE: tl.constexpr):
    """Writes the [4, 4] Sinkhorn of logits[8:24]: scalars alone, so that no step waits for another lane.

    After any number of steps c_ij = k_ij / (r_i s_j), k being the matrix at the start. A row step divides by
    sum_j c_ij + eps, which makes r_i into sum_j k_ij / s_j + eps * r_i; a column step likewise. That is 20 multiply-adds and
    four reciprocals a step, where dividing all of c takes 32 operations and longer.
    """
    a0, a1, a2, a3 = _softmax(logits, row, 8, eps)
    b0, b1, b2, b3 = _softmax(logits, row, 12, eps)
    c0, c1, c2, c3 = _softmax(logits, row, 16, eps)
    d0, d1, d2, d3 = _softmax(logits, row, 20, eps)
    one = tl.full((), 1.0, tl.float32)
    ra, rb, rc, rd = one, one, one, one
    fa, fb, fc, fd = one, one, one, one
    s0, s1, s2, s3 = a0 + b0 + c0 + d0 + eps, a1 + b1 + c1 + d1 + eps, a2 + b2 + c2 + d2 + eps, a3 + b3 + c3 + d3 + eps
    f0, f1 = _reciprocal(s0, PORTABLE), _reciprocal(s1, PORTABLE)
    f2, f3 = _reciprocal(s2, PORTABLE), _reciprocal(s3, PORTABLE)
    for _ in range(ITERATIONS - 1):
        ra = _divisor(a0, a1, a2, a3, f0, f1, f2, f3, ra, eps)
        rb = _divisor(b0, b1, b2, b3, f0, f1, f2, f3, rb, eps)
        rc = _divisor(c0, c1, c2, c3, f0, f1, f2, f3, rc, eps)
        rd = _divisor(d0, d1, d2, d3, f0, f1, f2, f3, rd, eps)
        fa, fb = _reciprocal(ra, PORTABLE), _reciprocal(rb, PORTABLE)
        fc, fd = _reciprocal(rc, PORTABLE), _reciprocal(rd, PORTABLE)
        s0 = _divisor(a0, b0, c0, d0, fa, fb, fc, fd, s0, eps)
        s1 = _divisor(a1, b1, c1, d1, fa, fb, fc, fd, s1, eps)
        s2 = _divisor(a2, b2, c2, d2, fa, fb, fc, fd, s2, eps)
        s3 = _divisor(a3, b3, c3, d3, fa, fb, fc, fd, s3, eps)
        f0, f1 = _reciprocal(s0, PORTABLE), _reciprocal(s1, PORTABLE)
        f2, f3 = _reciprocal(s2, PORTABLE), _reciprocal(s3, PORTABLE)
    _store_four(out_ptr, a0 * fa * f0, a1 * fa * f1, a2 * fa * f2, a3 * fa * f3)
    _store_four(out_ptr + 4, b0 * fb * f0, b1 * fb * f1, b2 * fb * f2, b3 * fb * f3)
    _store_four(out_ptr + 8, c0 * fc * f0, c1 * fc * f1, c2 * fc * f2, c3 * fc * f3)
    _store_four(out_ptr + 12, d0 * fd * f0, d1 * fd * f1, d2 * fd * f2, d3 * fd * f3)


@triton.jit
def _store_four(out_ptr, a, b, c, d):
    tl.store(out_ptr, a)
    tl.store(out_ptr + 1, b)
    tl.store(out_ptr + 2, c)
    tl.store(out_ptr + 3, d)


@triton.jit
def mix_kernel(
    streams_ptr,  # [T, 4, D]
    scratch_ptr,
    base_ptr,  # float32 [ROWS]
    scale_ptr,  # float32 [3]; [1] if ROWS is 4
    norm_weight_ptr,  # [D], or None
    mixed_ptr,  # [T, D]
    post_ptr,  # float32 [T, 4]; this and the next are written only if ROWS is 24
    combination_ptr,  # float32 [T, 4, 4]
    eps,
    norm_eps,
    ITERATIONS: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PORTABLE: tl.constexpr,  # no inline assembly
):
    """What the partial products say. Grid: (T, 2): one program mixes and norms, one makes post and combination beside it."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, COLUMNS)
    if tl.program_id(1) == 0:
        channel = tl.arange(0, D_BLOCK)
        inside = channel < D
        s0, s1, s2, s3 = _load_streams(streams_ptr, D, token, channel, inside)  # on their way while the sums are made
        if norm_weight_ptr is not None:
            weight = tl.load(norm_weight_ptr + channel, mask=inside, other=0.0)
        logits = _mixing_logits(
            scratch_ptr, base_ptr, scale_ptr, norm_eps, token, D, CHUNKS, CHUNK_BLOCK, ROWS, COLUMNS
        )
        pre = tl.sigmoid(logits) + eps
        mixed = _at(pre, row, 0) * s0.to(tl.float32) + _at(pre, row, 1) * s1.to(tl.float32)
        mixed += _at(pre, row, 2) * s2.to(tl.float32) + _at(pre, row, 3) * s3.to(tl.float32)
        if norm_weight_ptr is not None:
            mixed = mixed.to(streams_ptr.dtype.element_ty).to(tl.float32)  # as if the norm were an operator of its own
            mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / D + norm_eps) * weight.to(tl.float32)
        tl.store(mixed_ptr + token * D + channel, mixed.to(mixed_ptr.dtype.element_ty), mask=inside)
    else:
        logits = _mixing_logits(
            scratch_ptr, base_ptr, scale_ptr, norm_eps, token, D, CHUNKS, CHUNK_BLOCK, ROWS, COLUMNS
        )
        tl.store(post_ptr + token * 4 + row - 4, 2 * tl.sigmoid(logits), mask=(row >= 4) & (row < 8))
        _sinkhorn(logits, row, combination_ptr + token * 16, eps, ITERATIONS, PORTABLE)
