"""The shapes of V4-Flash: one token first, eight, and a prefill of 512."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels.hyper_connections as op
from kernels.cases import ONE_ROUNDING, TWO_ROUNDINGS, Case
from kernels.hyper_connections import Mix, Mixer, reference
from kernels.sinkhorn import sinkhorn

HIDDEN = 4096


@dataclass(frozen=True, slots=True)
class Inputs:
    """A block's streams and output. `before` is the mix of the block before; `out` and `out_streams` take results."""

    streams: Tensor
    output: Tensor
    before: Mix
    mixer: Mixer
    head: Mixer
    norm_weight: Tensor
    scratch: Tensor
    out: Mix
    out_streams: Tensor

    def tensors(self) -> list[Tensor]:
        """Everything that a case reads, for a copy of one input's values into another."""
        mixers = [*self.mixer[:3], *self.head[:3]]
        return [self.streams, self.output, self.before.post, self.before.combination, *mixers, self.norm_weight]


def make_inputs(num_tokens: int, hidden: int, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    """Random streams of which no two are alike, and weights that leave the sigmoids and the Sinkhorn unsaturated."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(kind)

    def mixer(rows: int, scales: int) -> Mixer:
        fn = random(rows, 4 * hidden) / (4 * hidden) ** 0.5
        return Mixer(fn, random(rows), 1 + 0.1 * random(scales), 20, 1e-6, 1e-6)

    before = Mix(
        torch.empty(0, device=device),
        2 * torch.sigmoid(random(num_tokens, 4)),
        sinkhorn(random(num_tokens, 4, 4), 20, 1e-6),
    )
    return Inputs(
        streams=random(num_tokens, 4, hidden, kind=dtype),
        output=random(num_tokens, hidden, kind=dtype),
        before=before,
        mixer=mixer(op.MIXING_ROWS, 3),
        head=mixer(op.NUM_STREAMS, 1),
        norm_weight=1 + 0.1 * random(hidden, kind=dtype),
        scratch=op.new_scratch(min(num_tokens, 512), hidden, device),
        out=op.new_mix(num_tokens, hidden, dtype, device),
        out_streams=torch.empty(num_tokens, 4, hidden, dtype=dtype, device=device),
    )


def run_pre(inputs: Inputs) -> Tensor:
    return op.hc_pre(inputs.streams, inputs.mixer, inputs.scratch, inputs.out).mixed


def pre_definition(inputs: Inputs) -> Tensor:
    return reference.pre_reference(inputs.streams, *inputs.mixer)[0]


def run_post(inputs: Inputs) -> Tensor:
    return op.hc_post(inputs.output, inputs.streams, inputs.before, inputs.out_streams)


def post_definition(inputs: Inputs) -> Tensor:
    before = inputs.before
    return reference.post_reference(inputs.output, inputs.streams, before.post, before.combination)


def run_pre_and_post(inputs: Inputs) -> Tensor:
    """A block that hands its input through: pre, then post with what pre gave."""
    mix = op.hc_pre(inputs.streams, inputs.mixer, inputs.scratch, inputs.out)
    return op.hc_post(mix.mixed, inputs.streams, mix, inputs.out_streams)


def pre_and_post_definition(inputs: Inputs) -> Tensor:
    mixed, post, combination = reference.pre_reference(inputs.streams, *inputs.mixer)
    return reference.post_reference(mixed, inputs.streams, post, combination)


def run_post_pre_norm(inputs: Inputs) -> Tensor:
    """The whole way from one block's output to the next block's normed input."""
    return op.hc_post_pre(
        inputs.output,
        inputs.streams,
        inputs.before,
        inputs.out_streams,
        inputs.mixer,
        inputs.scratch,
        inputs.out,
        inputs.norm_weight,
    ).mixed


def post_pre_norm_definition(inputs: Inputs) -> Tensor:
    mixed, _, _ = reference.pre_reference(post_definition(inputs), *inputs.mixer)
    return reference.norm_reference(mixed, inputs.norm_weight, inputs.mixer.norm_eps)


def run_head_norm(inputs: Inputs) -> Tensor:
    return op.hc_head(inputs.streams, inputs.head, inputs.scratch, inputs.out.mixed, inputs.norm_weight)


def head_norm_definition(inputs: Inputs) -> Tensor:
    fn, base, scale, _, eps, norm_eps = inputs.head
    mixed = reference.head_reference(inputs.streams, fn, base, scale, eps, norm_eps)
    return reference.norm_reference(mixed, inputs.norm_weight, norm_eps)


def cases() -> list[Case]:
    """Decode first."""
    return [case for num_tokens in (1, 8, 512) for case in _cases(num_tokens)]


def _cases(num_tokens: int) -> list[Case]:
    streams, row = num_tokens * 4 * HIDDEN * 2, num_tokens * HIDDEN * 2
    fn = op.MIXING_ROWS * 4 * HIDDEN * 4
    return [
        _case("pre", num_tokens, run_pre, pre_definition, fn + streams, ONE_ROUNDING),
        _case("post", num_tokens, run_post, post_definition, streams + row, ONE_ROUNDING),
        _case("pre + post", num_tokens, run_pre_and_post, pre_and_post_definition, fn + streams, TWO_ROUNDINGS),
        _case(
            "post + pre + norm, fused",
            num_tokens,
            run_post_pre_norm,
            post_pre_norm_definition,
            fn + streams + row,
            TWO_ROUNDINGS,
        ),
        _case("head + norm", num_tokens, run_head_norm, head_norm_definition, fn // 6 + streams, TWO_ROUNDINGS),
    ]


def _case(
    name: str,
    num_tokens: int,
    run: Callable[[Inputs], Tensor],
    definition: Callable[[Inputs], Tensor],
    read_bytes: int,
    tolerance: float,
) -> Case:
    def make(seed: int, device: torch.device) -> Inputs:
        return make_inputs(num_tokens, HIDDEN, torch.bfloat16, seed, device)

    return Case("hyper_connections", f"{name} T={num_tokens}", make, run, definition, read_bytes, tolerance)
