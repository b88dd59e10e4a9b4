"""Hyper-connections against their definition: odd sizes, sharp Sinkhorns, tokens alone or together, and both halves fused.

The CPU interpreter rounds float32 to bfloat16 by cutting it off, so what is written here is float32; bfloat16 is the card's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from on_a_card import check_case, on_devices
from torch import Tensor

import kernels.hyper_connections as op
from kernels.cases import ONE_ROUNDING, Case, relative_rms
from kernels.hyper_connections import Mix, Mixer, reference
from kernels.hyper_connections.cases import Inputs, cases, make_inputs

CPU = torch.device("cpu")
FLOAT32_SUMS = 1e-5  # two float32 programs that differ in the order of sums: seen 3e-7


def poisoned(inputs: Inputs) -> Inputs:
    """The same inputs, all outputs and the scratch NaN."""
    for tensor in (*inputs.out, inputs.out_streams, inputs.scratch):
        tensor.fill_(torch.nan)
    return inputs


def small(num_tokens: int, hidden: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Inputs:
    """Three Sinkhorn iterations, since the interpreter is slow; test_sinkhorn has all twenty."""
    inputs = make_inputs(num_tokens, hidden, dtype, 0, device)
    return poisoned(replace(inputs, mixer=inputs.mixer._replace(iterations=3)))


def pre(inputs: Inputs, norm_weight: Tensor | None = None) -> Mix:
    return op.launch_pre(inputs.streams, inputs.mixer, inputs.scratch, inputs.out, norm_weight)


def post(inputs: Inputs) -> Tensor:
    return op.launch_post(inputs.output, inputs.streams, inputs.before, inputs.out_streams)


def expect_close(results: Mix, inputs: Inputs) -> None:
    for name, result, expected in zip(
        Mix._fields, results, reference.pre_reference(inputs.streams, *inputs.mixer), strict=True
    ):
        assert relative_rms(result, expected) < FLOAT32_SUMS, name


@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 256), (3, 64), (2, 100), (1, 33), (2, 1)])
def test_pre(num_tokens: int, hidden: int) -> None:
    inputs = small(num_tokens, hidden)
    expect_close(pre(inputs), inputs)


@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 256), (3, 100), (2, 1)])
def test_post(num_tokens: int, hidden: int) -> None:
    inputs = small(num_tokens, hidden)
    expected = reference.post_reference(inputs.output, inputs.streams, inputs.before.post, inputs.before.combination)
    assert relative_rms(post(inputs), expected) < FLOAT32_SUMS


def test_bfloat16_streams_are_read_exactly() -> None:
    inputs = small(2, 64, dtype=torch.bfloat16)
    inputs = replace(inputs, out=poisoned(replace(inputs, out=op.new_mix(2, 64, torch.float32, CPU))).out)
    expect_close(pre(inputs), inputs)


def test_the_norm_taken_along() -> None:
    inputs = small(2, 96)
    mixed = reference.pre_reference(inputs.streams, *inputs.mixer)[0]
    expected = reference.norm_reference(mixed, inputs.norm_weight, inputs.mixer.norm_eps)
    assert relative_rms(pre(inputs, inputs.norm_weight).mixed, expected) < FLOAT32_SUMS


@pytest.mark.parametrize("normed", [False, True])
def test_head(normed: bool) -> None:
    inputs = small(2, 100)
    fn, base, scale, _, eps, norm_eps = inputs.head
    weight = inputs.norm_weight if normed else None
    result = op.launch_head(inputs.streams, inputs.head, inputs.scratch, inputs.out.mixed, weight)
    mixed = reference.head_reference(inputs.streams, fn, base, scale, eps, norm_eps)
    assert relative_rms(result, reference.norm_reference(mixed, weight, norm_eps)) < FLOAT32_SUMS


def test_post_and_pre_fused_are_the_two_in_turn() -> None:
    inputs = small(3, 100)
    streams = post(inputs).clone()
    apart = pre(replace(inputs, streams=streams), inputs.norm_weight)
    kept = Mix(*(tensor.clone() for tensor in apart))
    poisoned(inputs)
    fused = op.launch_post_pre(
        inputs.output,
        inputs.streams,
        inputs.before,
        inputs.out_streams,
        inputs.mixer,
        inputs.scratch,
        inputs.out,
        inputs.norm_weight,
    )
    assert torch.equal(inputs.out_streams, streams)
    assert all(torch.equal(one, other) for one, other in zip(fused, kept, strict=True))


def test_in_place() -> None:
    inputs = small(2, 100)
    expected = post(inputs).clone()
    op.launch_post(inputs.output, inputs.streams, inputs.before, inputs.streams)
    assert torch.equal(inputs.streams, expected)


@on_devices
def test_a_token_is_the_same_alone_and_among_others(device: torch.device) -> None:
    """Eleven tokens go two to a program and, through a scratch for four, in three turns."""
    together = small(11, 40, device)
    together = replace(together, scratch=op.new_scratch(4, 40, device).fill_(torch.nan))
    results = pre(together)
    again = pre(poisoned(replace(together, out=op.new_mix(11, 40, torch.float32, device))))
    assert all(torch.equal(one, other) for one, other in zip(results, again, strict=True))
    alone = small(1, 40, device)
    for token in (0, 3, 10):
        one = pre(replace(alone, streams=together.streams[token : token + 1], mixer=together.mixer))
        assert all(torch.equal(a[0], b[token]) for a, b in zip(one, results, strict=True))


@on_devices
@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
def test_extreme_streams(scale: float, device: torch.device) -> None:
    inputs = small(2, 64, device)
    inputs.streams.mul_(scale)
    expect_close(pre(inputs), inputs)


@on_devices
def test_zero_streams(device: torch.device) -> None:
    inputs = small(2, 64, device)
    inputs.streams[0] = 0
    result = pre(inputs)
    assert bool((result.mixed[0] == 0).all())
    expect_close(result, inputs)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a sigmoid of -100 in NumPy
@on_devices
@pytest.mark.parametrize("sharpness", [0.0, 10.0, 100.0])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn(sharpness: float, iterations: int, device: torch.device) -> None:
    """Sharp logits leave softmaxes that are zero but for eps; one row's maximum then lies in another row's column."""
    inputs = small(2, 32, device)
    mixer = inputs.mixer._replace(base=inputs.mixer.base * sharpness, iterations=iterations)
    inputs = replace(inputs, mixer=mixer)
    combination = reference.pre_reference(inputs.streams, *mixer)[2]
    assert relative_rms(pre(inputs).combination, combination) < FLOAT32_SUMS


@on_devices
@pytest.mark.parametrize("damaged", ["streams", "base", "output", "post", "combination"])
def test_one_percent_of_damage_shows(damaged: str, device: torch.device) -> None:
    """In what either half writes: the tolerance would not hide it."""
    inputs = small(2, 64, device)
    results = [*(tensor.clone() for tensor in pre(inputs)), post(inputs).clone()]
    target = {
        "streams": inputs.streams[:, 0],
        "base": inputs.mixer.base,
        "output": inputs.output,
        "post": inputs.before.post,
        "combination": inputs.before.combination,
    }[damaged]
    target.mul_(1.01)
    after = [*pre(inputs), post(inputs)]
    assert max(relative_rms(one, other) for one, other in zip(after, results, strict=True)) > 100 * FLOAT32_SUMS


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@on_devices
def test_nan_stays_nan(device: torch.device) -> None:
    """Of a stream in all that its token's mix has; of an output in its channel."""
    inputs = small(2, 64, device)
    inputs.output[1, 3] = torch.nan
    assert post(inputs).isnan().nonzero().tolist() == [[1, stream, 3] for stream in range(4)]
    inputs.streams[1, 2, 5] = torch.nan
    head = op.launch_head(inputs.streams, inputs.head, inputs.scratch, inputs.out.mixed, None).clone()
    for result in (head, *pre(inputs), pre(inputs, inputs.norm_weight).mixed):
        assert result[1].isnan().all() and result[0].isfinite().all()


def test_on_a_cpu_the_definition_runs() -> None:
    inputs = small(2, 48)
    expect_close(op.hc_pre(inputs.streams, inputs.mixer, inputs.scratch, inputs.out), inputs)
    streams = op.hc_post(inputs.output, inputs.streams, inputs.before, inputs.out_streams).clone()
    mix = Mix(*(tensor.clone() for tensor in op.hc_pre(streams, inputs.mixer, inputs.scratch, inputs.out)))
    poisoned(inputs)
    args = (inputs.out_streams, inputs.mixer, inputs.scratch, inputs.out)
    fused = op.hc_post_pre(inputs.output, inputs.streams, inputs.before, *args)
    assert torch.equal(inputs.out_streams, streams)
    assert all(torch.equal(one, other) for one, other in zip(fused, mix, strict=True))


def test_the_public_head_is_the_launched_one() -> None:
    inputs = small(2, 48)
    launched = op.launch_head(inputs.streams, inputs.head, inputs.scratch, inputs.out.mixed, inputs.norm_weight).clone()
    defined = op.hc_head(inputs.streams, inputs.head, inputs.scratch, inputs.out.mixed, inputs.norm_weight)
    assert relative_rms(launched, defined) < FLOAT32_SUMS


def with_mixer(inputs: Inputs, mixer: Mixer) -> Inputs:
    return replace(inputs, mixer=mixer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: replace(i, streams=i.streams[:, :3]), r"got shape \[2, 3, 48\], expected \[T, 4, D\]"),
        (lambda i: replace(i, streams=i.streams[0, 0, 0]), r"got shape \[\], expected \[T, 4, D\]"),
        (lambda i: replace(i, streams=i.streams.half()), "float16, expected torch.bfloat16 or torch.float32"),
        (lambda i: replace(i, streams=i.streams.mT.contiguous().mT), "expected contiguous"),
        (lambda i: with_mixer(i, i.head), r"mixer.fn: got shape \[4, 192\], expected \[24, 192\]"),
        (lambda i: with_mixer(i, i.mixer._replace(iterations=0)), "iterations: got 0, expected at least 1"),
        (lambda i: replace(i, scratch=i.scratch[:, :1]), "make it with new_scratch"),
        (lambda i: replace(i, scratch=i.scratch[:0]), "make it with new_scratch"),
        (lambda i: replace(i, out=i.out._replace(post=i.out.post[:1])), r"out.post: got shape \[1, 4\]"),
    ],
    ids=["streams", "scalar", "dtype", "layout", "mixer", "iterations", "chunks", "no scratch", "post"],
)
def test_errors(change: object, message: str) -> None:
    inputs = change(small(2, 48))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        op.hc_pre(inputs.streams, inputs.mixer, inputs.scratch, inputs.out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    """As every case; and what a case writes beside its result."""
    inputs = check_case(case)
    streams = inputs.streams
    if case.name.startswith("post + pre"):
        before, streams = inputs.before, inputs.out_streams
        expected = reference.post_reference(inputs.output, inputs.streams, before.post, before.combination)
        assert relative_rms(streams, expected) <= ONE_ROUNDING
    if case.name.startswith(("pre", "post + pre")):
        _, post, combination = reference.pre_reference(streams, *inputs.mixer)
        assert relative_rms(inputs.out.post, post) <= FLOAT32_SUMS
        assert relative_rms(inputs.out.combination, combination) <= FLOAT32_SUMS


@on_devices
def test_more_tokens_than_a_grid_is_wide(device: torch.device) -> None:
    """65,536 tokens on a card, where only the first dimension of a grid has room for them."""
    num_tokens = 3 if device == CPU else 65_536
    inputs = make_inputs(num_tokens, 130, torch.float32, 0, device)
    expected = reference.post_reference(inputs.output, inputs.streams, inputs.before.post, inputs.before.combination)
    assert relative_rms(post(inputs), expected) < FLOAT32_SUMS


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [100, 256, 4096, 5120])
def test_all_of_a_mix_on_a_card(hidden: int) -> None:
    """post and combination too, float32, so that the reciprocal of the card alone is seen; and nine tokens as one by one."""
    inputs = poisoned(make_inputs(9, hidden, torch.float32, 0, torch.device("cuda")))
    results = op.hc_pre(inputs.streams, inputs.mixer, inputs.scratch, inputs.out)
    expect_close(results, inputs)
    for token in (0, 8):
        out = op.new_mix(1, hidden, torch.float32, inputs.streams.device)
        alone = op.hc_pre(inputs.streams[token : token + 1], inputs.mixer, inputs.scratch, out)
        assert all(torch.equal(a[0], b[token]) for a, b in zip(alone, results, strict=True))


@pytest.mark.gpu
def test_fused_and_in_place_on_a_card() -> None:
    """The fused kernel gives the streams of the two halves bit for bit, the mix but for the order of its sums; in place too."""
    inputs = poisoned(make_inputs(9, 4096, torch.bfloat16, 0, torch.device("cuda")))
    streams = op.hc_post(inputs.output, inputs.streams, inputs.before, inputs.out_streams).clone()
    apart = op.hc_pre(streams, inputs.mixer, inputs.scratch, op.new_mix(9, 4096, torch.bfloat16, streams.device))
    args = (inputs.mixer, inputs.scratch, inputs.out)
    fused = op.hc_post_pre(inputs.output, inputs.streams, inputs.before, inputs.streams, *args)
    assert torch.equal(inputs.streams, streams)
    assert relative_rms(fused.mixed, apart.mixed) <= ONE_ROUNDING
    assert relative_rms(fused.post, apart.post) <= 1e-6
    assert relative_rms(fused.combination, apart.combination) <= 1e-6
