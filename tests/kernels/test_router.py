"""The router against its definition: order, ties, tables, odd numbers of experts, and inputs that are no numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from on_a_card import check_case, on_devices

import kernels.router as op
from kernels.cases import Case, relative_rms
from kernels.router import Picks, reference
from kernels.router.cases import TOPK, Inputs, cases, definition, make_inputs, run

CPU = torch.device("cpu")
FLOAT32_SUMS = 1e-5  # two float32 programs that differ in the order of sums: seen 3e-7


def poisoned(inputs: Inputs) -> Inputs:
    """The same inputs, all outputs NaN or -1."""
    inputs.scores.fill_(torch.nan)
    for picks in (inputs.out, inputs.host):
        picks.experts.fill_(-1)
        picks.weights.fill_(torch.nan)
    return inputs


def small(
    num_tokens: int, shape: tuple[int, int], hashed: bool = False, device: torch.device = CPU, **kind: torch.dtype
) -> Inputs:
    return poisoned(make_inputs(num_tokens, shape, hashed, 0, device, **kind))


def launch(inputs: Inputs) -> Picks:
    return op.launch_router(inputs.x, inputs.router, inputs.token_ids, inputs.scores, inputs.out, inputs.host)


def select(scores: list[float], bias: list[float], topk: int) -> tuple[list[int], list[float]]:
    """What the second kernel makes of one token's scores."""
    weights = op.RouterWeights(torch.empty(0), torch.tensor(bias), None, topk, 1.0)
    out = Picks(torch.full((1, topk), -1), torch.full((1, topk), torch.nan))
    op.launch_select(torch.tensor([scores]), weights, None, out, None)
    return out.experts[0].tolist(), out.weights[0].tolist()


def expected_picks(inputs: Inputs) -> Picks:
    weight, bias, table, topk, scaling = inputs.router
    scores = reference.scores_reference(inputs.x, weight)
    return Picks(*reference.router_reference(scores, bias, table, inputs.token_ids, topk, scaling))


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "shape", "index_dtype"),
    [(1, (64, 256), torch.int64), (9, (16, 64), torch.int32), (3, (7, 33), torch.int64), (2, (6, 1), torch.int32)],
)
def test_router(
    num_tokens: int, shape: tuple[int, int], index_dtype: torch.dtype, dtype: torch.dtype, hashed: bool
) -> None:
    """Picks exactly, weights to the last digits, and the same in the second place; twice the same bits."""
    inputs = small(num_tokens, shape, hashed, dtype=dtype, index_dtype=index_dtype)
    result, expected = launch(inputs), expected_picks(inputs)
    assert torch.equal(result.experts.long(), expected.experts)
    assert relative_rms(result.weights, expected.weights) < FLOAT32_SUMS
    assert torch.equal(inputs.host.experts, result.experts) and torch.equal(inputs.host.weights, result.weights)
    weights = result.weights.clone()
    assert torch.equal(launch(poisoned(inputs)).weights, weights)


def test_without_a_second_place_or_a_bias() -> None:
    inputs = small(2, (9, 16))
    inputs = replace(inputs, router=inputs.router._replace(bias=None))
    expected = expected_picks(inputs)
    op.launch_router(inputs.x, inputs.router, None, inputs.scores, inputs.out)
    assert torch.equal(inputs.out.experts, expected.experts)
    assert bool(inputs.host.weights.isnan().all())


def test_of_equal_experts_the_lower_index_comes_first() -> None:
    assert select([1.0] * 8, [0.0] * 8, 3)[0] == [0, 1, 2]
    assert select([1.0, 2.0, 1.0, 2.0, 2.0], [0.0] * 5, 4)[0] == [1, 3, 4, 0]


def test_the_bias_chooses_and_the_scores_weigh() -> None:
    """Chosen 3, 0, 2; by weight 0, 2, 3. Equal weights keep the order of the choice."""
    experts, weights = select([4.0, 5.0, 3.0, 1.0], [0.0, -9.0, 0.5, 9.0], 3)
    assert experts == [0, 2, 3]
    assert weights == pytest.approx([0.5, 0.375, 0.125])
    assert select([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, -1.0, 2.0], 3)[0] == [3, 1, 0]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan])
def test_nan_of_either_sign_is_the_largest(bad: float) -> None:
    """As in the definition's sort, so that it cannot hide behind numbers."""
    experts, weights = select([1.0, bad, 2.0, bad, 3.0], [0.0] * 5, 3)
    assert experts == [1, 3, 4] and all(weight != weight for weight in weights)


def test_scores_below_zero_with_their_bias() -> None:
    assert select([1.0, 1.0, 1.0, 1.0], [-5.0, -3.0, -4.0, -2.0], 2)[0] == [3, 1]


@pytest.mark.parametrize("topk", range(1, 9))
def test_every_number_of_picks(topk: int) -> None:
    generator = torch.Generator().manual_seed(topk)
    scores, bias = torch.rand(1, 13, generator=generator), torch.rand(13, generator=generator)
    experts, weights = reference.router_reference(scores, bias, None, None, topk, 1.0)
    result = select(scores[0].tolist(), bias.tolist(), topk)
    assert result[0] == experts[0].tolist()
    assert result[1] == pytest.approx(weights[0].tolist(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_picks_are_distinct_experts_whatever_comes(bad: float) -> None:
    """Broken numbers surface as broken weights, not as an expert that does not exist."""
    for scores in ([bad] * 9, [1.0, bad, 2.0, bad, 3.0, 0.0, 1.0, bad, bad]):
        experts, _ = select(scores, [0.0] * 9, 6)
        assert len(set(experts)) == 6 and set(experts) <= set(range(9))


@on_devices
def test_scores_far_from_zero(device: torch.device) -> None:
    """softplus is log1p(exp) below and x above: both ends keep their relative precision."""
    logits = torch.tensor([-80.0, -30.0, -12.0, -3.0, -1e-3, 0.0, 1e-3, 2.0, 15.0, 25.0, 1e4], device=device)
    scores = torch.full((1, 11), torch.nan, device=device)
    op.launch_scores(torch.ones(1, 1, device=device), logits[:, None], scores)
    expected = reference.scores_reference(torch.ones(1, 1, device=device), logits[:, None])
    assert bool(((scores / expected - 1).abs() < 1e-5).all())


@on_devices
def test_a_token_is_the_same_alone_and_among_others(device: torch.device) -> None:
    """Eleven tokens go two to a program."""
    inputs = small(11, (12, 40), device=device)
    together = launch(inputs)
    for token in (0, 3, 10):
        alone = small(1, (12, 40), device=device)
        alone = replace(alone, x=inputs.x[token : token + 1], router=inputs.router)
        result = launch(alone)
        assert torch.equal(result.experts[0], together.experts[token])
        assert torch.equal(result.weights[0], together.weights[token])


@on_devices
def test_one_percent_of_damage_shows(device: torch.device) -> None:
    inputs = small(4, (16, 64), device=device, dtype=torch.float32)
    expected = expected_picks(inputs).weights
    inputs.router.weight[::2].mul_(1.01)
    assert relative_rms(launch(inputs).weights, expected) > 10 * FLOAT32_SUMS


@pytest.mark.parametrize("hashed", [False, True])
def test_on_a_cpu_the_definition_runs(hashed: bool) -> None:
    inputs = small(3, (16, 32), hashed)
    expected = expected_picks(inputs)
    assert torch.equal(run(inputs), expected.weights)
    assert torch.equal(inputs.host.experts, expected.experts)
    assert torch.equal(definition(inputs), expected.weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: replace(i, x=i.x[:, :5]), r"x: got shape \[2, 5\], expected \[T, 8\]"),
        (lambda i: replace(i, x=i.x[0, 0]), r"x: got shape \[\], expected \[T, 8\]"),
        (lambda i: replace(i, router=i.router._replace(topk=9)), "topk 9 of 16 experts, expected 1 to 8"),
        (lambda i: replace(i, scores=i.scores[:1]), r"scores \(scratch\): got shape \[1, 16\], expected \[>= 2, 16\]"),
        (lambda i: replace(i, token_ids=None), "with a table got no token_ids"),
        (lambda i: replace(i, token_ids=i.token_ids.float()), "float32, expected torch.int32 or torch.int64"),
        (lambda i: replace(i, out=i.out._replace(weights=i.out.weights.double())), "float64, expected torch.float32"),
        (lambda i: replace(i, host=i.host._replace(experts=i.host.experts[:1])), r"host.experts: got shape \[1, 6\]"),
    ],
    ids=["x", "scalar", "topk", "scratch", "no ids", "ids", "weights", "host"],
)
def test_errors(change: object, message: str) -> None:
    inputs = change(small(2, (16, 8), hashed=True))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        run(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    """As every case, and the picks are those of the definition; the host sees them too."""
    inputs = check_case(case)
    assert torch.equal(inputs.out.experts, expected_picks(inputs).experts)
    assert torch.equal(inputs.host.experts, inputs.out.experts.cpu())
    assert torch.equal(inputs.host.weights, inputs.out.weights.cpu())


@pytest.mark.gpu
def test_pageable_memory_is_refused() -> None:
    inputs = make_inputs(1, (16, 64), False, 0, torch.device("cuda"))
    pageable = Picks(torch.empty(1, TOPK, dtype=torch.int64), torch.empty(1, TOPK))
    with pytest.raises(ValueError, match="expected pinned"):
        op.router(inputs.x, inputs.router, None, inputs.scores, inputs.out, pageable)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 256), (48, 100), (384, 5120)])
def test_tokens_together_and_other_shapes_on_a_card(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = poisoned(make_inputs(17, shape, False, 0, torch.device("cuda"), dtype))
    together, expected = launch(inputs), expected_picks(inputs)
    assert torch.equal(together.experts, expected.experts)
    assert relative_rms(together.weights, expected.weights) < FLOAT32_SUMS
    for token in (0, 16):
        alone = poisoned(make_inputs(1, shape, False, 0, torch.device("cuda"), dtype))
        result = launch(replace(alone, x=inputs.x[token : token + 1], router=inputs.router))
        assert torch.equal(result.weights[0], together.weights[token])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@on_devices
@pytest.mark.parametrize("hashed", [False, True])
def test_nan_stays_nan(hashed: bool, device: torch.device) -> None:
    """Of a token all weights; of an expert it is picked first. Picks are those of the definition."""
    inputs = small(2, (16, 40), hashed, device)
    inputs.x[0, 5] = torch.nan
    result = launch(inputs)
    assert result.weights[0].isnan().all() and result.weights[1].isfinite().all()
    assert torch.equal(result.experts, expected_picks(inputs).experts)
    if not hashed:
        inputs.router.weight[7, 3] = torch.nan
        result = launch(inputs)
        assert result.experts[1, 0] == 7 and result.weights[1].isnan().all()
        assert torch.equal(result.experts, expected_picks(inputs).experts)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_inputs_on_a_card_pick_experts_that_exist(bad: float) -> None:
    inputs = poisoned(make_inputs(2, (64, 256), False, 0, torch.device("cuda")))
    inputs.x[0, 5] = bad
    experts = launch(inputs).experts.tolist()
    assert all(len(set(row)) == TOPK and set(row) <= set(range(64)) for row in experts)
