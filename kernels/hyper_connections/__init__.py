"""Hyper-connections on a card: four streams mixed into a block's input and spread again after it, two kernels each way at most.

`hc_pre` and `hc_post` are the two halves; `hc_post_pre` is hc_post of one block with hc_pre of the next, in two kernels: the
same streams, and a mix that differs by the order of its sums alone. The norm that follows a mix can be taken along.

Owns no memory: outputs and scratch are the caller's, so a captured graph allocates nothing. On a CPU the definition in
reference.py runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.checks import FLOAT32, FLOATS, expect
from kernels.hyper_connections.kernel import mix_kernel, products_kernel, spread_kernel
from kernels.hyper_connections.reference import head_reference, norm_reference, post_reference, pre_reference

NUM_STREAMS = 4
MIXING_ROWS = (2 + NUM_STREAMS) * NUM_STREAMS  # pre, post and the combination
SCRATCH_COLUMNS = 32
CHANNELS = 32  # of each stream, per program of the products: 128 programs at a hidden size of 4096
SPREAD_CHANNELS = 128
TOKEN_GROUPS = 8  # programs that share a part of fn; more tokens than this go through a program in turn
MAX_HIDDEN = 16_384  # a mixing program holds a token's four streams in registers


class Mixer(NamedTuple):
    """One hyper-connection's weights, float32: fn [24, 4D], base [24], scale [3]; of the head fn [4, 4D], base [4], scale [1].

    eps is added to pre and in the Sinkhorn steps; norm_eps goes into both RMS norms, of the streams and of the mixed input.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    iterations: int
    eps: float
    norm_eps: float


class Mix(NamedTuple):
    """What hc_pre gives: the block's input [T, D], and post float32 [T, 4] and combination float32 [T, 4, 4] for hc_post."""

    mixed: Tensor
    post: Tensor
    combination: Tensor


def new_scratch(num_tokens: int, hidden: int, device: torch.device) -> Tensor:
    """Room for the partial products of `num_tokens` at a time, float32 [num_tokens, chunks, 32]; 16 KiB a token at D = 4096."""
    return torch.empty(num_tokens, triton.cdiv(hidden, CHANNELS), SCRATCH_COLUMNS, device=device)


def new_mix(num_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Mix:
    """Outputs for hc_pre, uninitialised."""
    post = torch.empty(num_tokens, NUM_STREAMS, device=device)
    combination = torch.empty(num_tokens, NUM_STREAMS, NUM_STREAMS, device=device)
    return Mix(torch.empty(num_tokens, hidden, dtype=dtype, device=device), post, combination)


def hc_pre(streams: Tensor, mixer: Mixer, scratch: Tensor, out: Mix, norm_weight: Tensor | None = None) -> Mix:
    """The block's input and the mix that `hc_post` needs, in `out`.

    Args:
        streams: [T, 4, D], bfloat16 or float32, contiguous.
        mixer: With 24 rows.
        scratch: From `new_scratch`; more tokens than it has room for go through it in turn.
        out: Of T tokens; written whole.
        norm_weight: [D]; the mixed input leaves rounded to the streams' dtype, RMS-normed and multiplied by it.

    Raises:
        ValueError: A shape, dtype, device or layout is not as said here.
    """
    _check_pre(streams, mixer, scratch, out, norm_weight)
    if streams.is_cuda:
        return launch_pre(streams, mixer, scratch, out, norm_weight)
    return _store(out, streams.dtype, *pre_reference(streams, *mixer), norm_weight, mixer.norm_eps)


def hc_post(output: Tensor, streams: Tensor, mix: Mix, out: Tensor) -> Tensor:
    """The streams after a block in `out` [T, 4, D], which may be `streams` itself.

    Args:
        output: [T, D], the block's output.
        streams: [T, 4, D], those that `hc_pre` saw.
        mix: What `hc_pre` gave; `mixed` is not read.
        out: As `streams`.

    Raises:
        ValueError: A shape, dtype, device or layout is not as said here.
    """
    _check_post(output, streams, mix, out)
    if streams.is_cuda:
        return launch_post(output, streams, mix, out)
    return out.copy_(post_reference(output, streams, mix.post, mix.combination))


def hc_post_pre(
    output: Tensor,
    streams: Tensor,
    mix: Mix,
    out_streams: Tensor,
    mixer: Mixer,
    scratch: Tensor,
    out: Mix,
    norm_weight: Tensor | None = None,
) -> Mix:
    """hc_post into `out_streams`, then hc_pre of those into `out`, with one kernel less; `out` may be `mix`.

    Args and errors: as `hc_post` and `hc_pre`.
    """
    _check_post(output, streams, mix, out_streams)
    _check_pre(out_streams, mixer, scratch, out, norm_weight)
    if streams.is_cuda:
        return launch_post_pre(output, streams, mix, out_streams, mixer, scratch, out, norm_weight)
    out_streams.copy_(post_reference(output, streams, mix.post, mix.combination))
    return _store(out, streams.dtype, *pre_reference(out_streams, *mixer), norm_weight, mixer.norm_eps)


def hc_head(streams: Tensor, mixer: Mixer, scratch: Tensor, out: Tensor, norm_weight: Tensor | None = None) -> Tensor:
    """The streams collapsed to one, [T, D] in `out`, and normed if a weight is given; the head's mixer has 4 rows.

    Args and errors: as `hc_pre`; `mixer.iterations` is not read.
    """
    _check_mixer("hc_head", streams, mixer, NUM_STREAMS)
    _check_scratch("hc_head", streams, scratch, norm_weight)
    expect("hc_head", "out", out, (streams.shape[0], streams.shape[2]), FLOATS, streams.device)
    if streams.is_cuda:
        return launch_head(streams, mixer, scratch, out, norm_weight)
    mixed = head_reference(streams, mixer.fn, mixer.base, mixer.scale, mixer.eps, mixer.norm_eps).to(streams.dtype)
    return out.copy_(norm_reference(mixed.float(), norm_weight, mixer.norm_eps))


def launch_pre(streams: Tensor, mixer: Mixer, scratch: Tensor, out: Mix, norm_weight: Tensor | None) -> Mix:
    """hc_pre by the kernels, unchecked."""
    for tokens in _turns(streams, scratch):
        part = Mix(*(tensor[tokens] for tensor in out))
        _launch_products(streams[tokens], mixer, scratch, None)
        _launch_mix(streams[tokens], mixer, scratch, part, norm_weight)
    return out


def launch_post(output: Tensor, streams: Tensor, mix: Mix, out: Tensor) -> Tensor:
    """hc_post by the kernel, unchecked."""
    num_tokens, _, hidden = streams.shape
    if num_tokens:
        chunks = triton.cdiv(hidden, SPREAD_CHANNELS)
        spread_kernel[(num_tokens * chunks,)](
            output, streams, mix.post, mix.combination, out, hidden, SPREAD_CHANNELS, num_warps=4
        )
    return out


def launch_post_pre(
    output: Tensor,
    streams: Tensor,
    mix: Mix,
    out_streams: Tensor,
    mixer: Mixer,
    scratch: Tensor,
    out: Mix,
    norm_weight: Tensor | None,
) -> Mix:
    """hc_post_pre by the kernels, unchecked."""
    for tokens in _turns(streams, scratch):
        part = Mix(*(tensor[tokens] for tensor in out))
        last = _Spread(output[tokens], mix.post[tokens], mix.combination[tokens], out_streams[tokens])
        _launch_products(streams[tokens], mixer, scratch, last)
        _launch_mix(out_streams[tokens], mixer, scratch, part, norm_weight)
    return out


def launch_head(streams: Tensor, mixer: Mixer, scratch: Tensor, out: Tensor, norm_weight: Tensor | None) -> Tensor:
    """hc_head by the kernels, unchecked."""
    for tokens in _turns(streams, scratch):
        _launch_products(streams[tokens], mixer, scratch, None)
        _launch_mix(streams[tokens], mixer, scratch, Mix(out[tokens], scratch, scratch), norm_weight)
    return out


class _Spread(NamedTuple):
    output: Tensor
    post: Tensor
    combination: Tensor
    streams: Tensor


def _turns(streams: Tensor, scratch: Tensor) -> list[slice]:
    return [slice(start, start + scratch.shape[0]) for start in range(0, streams.shape[0], scratch.shape[0])]


def _columns(rows: int) -> int:
    """Scratch columns of an fn of `rows`: they and the sum of squares."""
    return triton.next_power_of_2(rows + 1)


def _launch_products(streams: Tensor, mixer: Mixer, scratch: Tensor, last: _Spread | None) -> None:
    num_tokens, _, hidden = streams.shape
    rows, each = mixer.fn.shape[0], triton.cdiv(num_tokens, TOKEN_GROUPS)
    grid = (triton.cdiv(hidden, CHANNELS), triton.cdiv(num_tokens, each))
    spread = last or _Spread(streams, scratch, scratch, streams)  # not touched without SPREAD
    products_kernel[grid](
        streams, *spread, mixer.fn, scratch, num_tokens, each,
        D=hidden, ROWS=rows, COLUMNS=_columns(rows), CHANNELS=CHANNELS, SPREAD=last is not None, num_warps=4,
    )  # fmt: skip


def _launch_mix(streams: Tensor, mixer: Mixer, scratch: Tensor, out: Mix, norm_weight: Tensor | None) -> None:
    num_tokens, _, hidden = streams.shape
    rows, chunks = mixer.fn.shape[0], triton.cdiv(hidden, CHANNELS)
    mix_kernel[(num_tokens, 2 if rows == MIXING_ROWS else 1)](
        streams, scratch, mixer.base, mixer.scale, norm_weight, *out, mixer.eps, mixer.norm_eps,
        ITERATIONS=mixer.iterations, D=hidden, D_BLOCK=triton.next_power_of_2(hidden), CHUNKS=chunks,
        CHUNK_BLOCK=triton.next_power_of_2(chunks), ROWS=rows, COLUMNS=_columns(rows), PORTABLE=not streams.is_cuda,
        num_warps=4 if hidden <= 4096 else 16,
    )  # fmt: skip


def _store(
    out: Mix,
    dtype: torch.dtype,
    mixed: Tensor,
    post: Tensor,
    combination: Tensor,
    weight: Tensor | None,
    norm_eps: float,
) -> Mix:
    rounded = mixed.to(dtype).float()  # as the model rounds it, before a norm
    out.mixed.copy_(norm_reference(rounded, weight, norm_eps))
    out.post.copy_(post)
    out.combination.copy_(combination)
    return out


def _check_pre(streams: Tensor, mixer: Mixer, scratch: Tensor, out: Mix, norm_weight: Tensor | None) -> None:
    _check_mixer("hc_pre", streams, mixer, MIXING_ROWS)
    _check_scratch("hc_pre", streams, scratch, norm_weight)
    expect("hc_pre", "out.mixed", out.mixed, (streams.shape[0], streams.shape[2]), FLOATS, streams.device)
    _check_mix("hc_pre", "out", streams, out)


def _check_post(output: Tensor, streams: Tensor, mix: Mix, out: Tensor) -> None:
    _check_streams("hc_post", streams)
    expect("hc_post", "output", output, (streams.shape[0], streams.shape[2]), FLOATS, streams.device)
    expect("hc_post", "out", out, tuple(streams.shape), (streams.dtype,), streams.device)
    _check_mix("hc_post", "mix", streams, mix)


def _check_streams(op: str, streams: Tensor) -> None:
    expect(op, "streams", streams, ("T", NUM_STREAMS, "D"), FLOATS, streams.device)
    if not 0 < streams.shape[2] <= MAX_HIDDEN:
        raise ValueError(f"{op}: streams have D = {streams.shape[2]}, expected 1 to {MAX_HIDDEN}; use the reference")


def _check_mixer(op: str, streams: Tensor, mixer: Mixer, rows: int) -> None:
    _check_streams(op, streams)
    device = streams.device
    expect(op, "mixer.fn", mixer.fn, (rows, NUM_STREAMS * streams.shape[2]), FLOAT32, device)
    expect(op, "mixer.base", mixer.base, (rows,), FLOAT32, device)
    expect(op, "mixer.scale", mixer.scale, (3 if rows == MIXING_ROWS else 1,), FLOAT32, device)
    if mixer.iterations < 1:
        raise ValueError(f"{op}: mixer.iterations: got {mixer.iterations}, expected at least 1; use the checkpoint's")


def _check_scratch(op: str, streams: Tensor, scratch: Tensor, norm_weight: Tensor | None) -> None:
    hidden, name = streams.shape[2], "scratch (make it with new_scratch)"
    shape = (1, triton.cdiv(hidden, CHANNELS), SCRATCH_COLUMNS)
    expect(op, name, scratch, shape, FLOAT32, streams.device, more_rows=True)
    if norm_weight is not None:
        expect(op, "norm_weight", norm_weight, (hidden,), FLOATS, streams.device)


def _check_mix(op: str, name: str, streams: Tensor, mix: Mix) -> None:
    tokens, device = streams.shape[0], streams.device
    expect(op, f"{name}.post", mix.post, (tokens, NUM_STREAMS), FLOAT32, device)
    expect(op, f"{name}.combination", mix.combination, (tokens, NUM_STREAMS, NUM_STREAMS), FLOAT32, device)
