"""What the solvers promise: never worse than round-to-nearest, exact splits of any matrix, the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tolerances
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.formats import (
    Matrix,
    dequantize_fp4,
    dequantize_int2,
    dequantize_quad2,
    pack_codes,
    quantize_fp4,
    unpack_codes,
)
from kernels.split import SplitTable, cells, dequantize_base, merge_split
from prep.solvers.clip import candidates, solve_absmax, solve_clip
from prep.solvers.groups import best_rows, code_counts, integer_costs, nibble_table, recode, values_of_codes
from prep.solvers.quad import matrix_rms, solve_quad, train_quad
from prep.solvers.split import exponents_present, solve_split, train_split
from prep.study import expert_errors, matrix_errors

pytestmark = pytest.mark.filterwarnings("error")


def gaussian(*shape: int, seed: int) -> Matrix:
    return quantize_fp4(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def random_fp4(*shape: int, exponents: Tensor, seed: int = 0) -> Matrix:
    """Uniform codes, exponents drawn from `exponents`."""
    random = torch.Generator().manual_seed(seed)
    *lead, columns = shape
    codes = torch.randint(256, (*lead, columns // 2), dtype=torch.uint8, generator=random)
    chosen = torch.randint(len(exponents), (*lead, columns // 32), generator=random)
    return Matrix(codes, exponents.to(torch.uint8)[chosen])


def with_zero_groups(matrix: Matrix) -> Matrix:
    """Every fifth group of codes set to 0, whatever its exponent."""
    groups = matrix.codes.clone().view(-1, 16)
    groups[::5] = 0
    return Matrix(groups.view(matrix.codes.shape), matrix.scales)


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def group_errors(got: Tensor, exact: Tensor) -> Tensor:
    return (got.double() - exact.double()).square().unflatten(-1, (-1, 32)).sum(-1)


def without_minus_zero(matrix: Matrix) -> Matrix:
    codes = unpack_codes(matrix.codes, 4)
    return Matrix(pack_codes(codes.where(codes != 8, 0), 4), matrix.scales)


def nearest_int2_errors(exact: Tensor, scales: Tensor) -> Tensor:
    """Squared error of each group of `exact` under float64 scales [..., K/32], each weight at its nearest level."""
    levels = scales[..., None, None] * torch.tensor([-1.5, -0.5, 0.5, 1.5], dtype=torch.float64)
    weights = exact.double().unflatten(-1, (-1, 32))
    return (weights[..., None] - levels).square().amin(-1).sum(-1)


def test_code_counts() -> None:
    matrix = random_fp4(2, 3, 96, exponents=torch.tensor([127]))
    groups = unpack_codes(matrix.codes, 4).view(-1, 32).long()
    expected = torch.stack([torch.bincount(group, minlength=16) for group in groups])
    assert torch.equal(code_counts(matrix.codes), expected.float())


def test_best_rows_are_the_first_of_the_best() -> None:
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (500, 32), generator=random)
    counts = torch.stack([torch.bincount(group, minlength=16) for group in codes]).float()
    costs = integer_costs(torch.rand(100, 16, generator=random, dtype=torch.float64)).repeat(2, 1)
    totals = costs[:, codes].sum(-1)  # [200, 500]
    assert torch.equal(best_rows(counts, costs), totals.argmin(0))
    assert int(best_rows(counts, costs).max()) < 100  # rows 100 to 199 only tie


def test_integer_costs_keep_what_is_representable() -> None:
    costs = torch.tensor([[[0.25, 36.0] + [0.0] * 14], [[torch.inf] * 16]], dtype=torch.float64)
    scaled = integer_costs(costs)
    assert torch.equal(scaled, scaled.round()) and float(scaled[0, 0, 1] / scaled[0, 0, 0]) == 144
    assert bool((scaled[1] > scaled[0].max()).all()) and float(scaled.max()) < 2**34


def test_recode() -> None:
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (2, 3, 64), generator=random).to(torch.uint8)
    even, odd = torch.randint(4, (2, 5, 16), generator=random)
    keys = torch.randint(5, (12,), generator=random)
    packed = recode(pack_codes(codes, 4), keys, nibble_table(even, odd))
    groups, rows = codes.view(12, 32).long(), keys[:, None]
    expected = torch.where(torch.arange(32) % 2 == 0, even[rows, groups], odd[rows, groups])
    assert torch.equal(unpack_codes(packed, 2).view(12, 32).long(), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 254), st.integers(0, 40), st.integers(1, 15))
def test_clip_is_never_worse_than_round_to_nearest(seed: int, lowest: int, spread: int, codes: int) -> None:
    """On every group of matrices with few or many codes and near or far exponents, also where E4M3 underflows."""
    exponents = torch.arange(lowest, min(lowest + spread, 250) + 1) if lowest <= 250 else torch.tensor([250])
    matrix = random_fp4(3, 4, 160, exponents=exponents, seed=seed)
    matrix = with_zero_groups(Matrix(pack_codes(unpack_codes(matrix.codes, 4) % (codes + 1), 4), matrix.scales))
    exact = dequantize_fp4(matrix)
    clip = solve_clip(matrix)
    errors = group_errors(dequantize_int2(*clip), exact)
    for divisor in (1.5, 2.0):
        largest = exact.abs().unflatten(-1, (-1, 32)).amax(-1)
        scales = (largest.double() / divisor / clip.normalisers.double()[:, None, None]).float()
        rounded = scales.to(torch.float8_e4m3fn).double() * clip.normalisers.double()[:, None, None]
        expected = nearest_int2_errors(exact, rounded)
        assert (errors <= expected).all()
        assert torch.equal(group_errors(dequantize_int2(*solve_absmax(matrix, divisor)), exact), expected)


def test_clip_tries_every_e4m3_scale_that_can_win() -> None:
    matrix = gaussian(16, 256, seed=3)
    clip = solve_clip(matrix)
    exact, best = dequantize_fp4(matrix), torch.inf
    for byte in range(127):
        scale = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).double() * clip.normalisers.double()
        best = torch.minimum(torch.as_tensor(best), nearest_int2_errors(exact, scale.expand(16, 8)))
    assert torch.equal(group_errors(dequantize_int2(*clip), exact), torch.as_tensor(best))
    assert len(candidates()) >= 24


def test_clip_zeros_add_no_bias() -> None:
    codes = torch.tensor([7, 8, 0, 8] * 8, dtype=torch.uint8)
    clip = solve_clip(Matrix(pack_codes(codes, 4)[None], torch.tensor([[127]], dtype=torch.uint8)))
    zeros = unpack_codes(clip.matrix.codes, 2)[0][codes != 7]
    assert (zeros == 1).sum() == 16 and (zeros == 2).sum() == 8  # odd places down, even places up


def test_split_needs_no_data_and_no_luck() -> None:
    """60 distinct exponents, all 255, zero groups, a matrix of zeros: every code and exponent comes back."""
    every = random_fp4(2, 32, 512, exponents=torch.arange(255))
    sixty = random_fp4(1, 8, 320, exponents=torch.arange(60) + 90)
    zeros = Matrix(torch.zeros(1, 4, 32, dtype=torch.uint8), torch.full((1, 4, 2), 254, dtype=torch.uint8))
    for matrix in (every, sixty, with_zero_groups(every), zeros):
        assert matrix.scales is not None
        table = train_split(matrix, exponents_present(matrix.scales))
        merged = merge_split(*solve_split(matrix, table), table)
        assert torch.equal(merged.codes, without_minus_zero(matrix).codes)
        assert merged.scales is not None and torch.equal(merged.scales, matrix.scales)


def test_split_covers_exponents_outside_the_sample() -> None:
    sample, other = gaussian(1, 32, 256, seed=0), random_fp4(1, 8, 320, exponents=torch.arange(60) + 90)
    assert sample.scales is not None and other.scales is not None
    narrow = train_split(sample, exponents_present(sample.scales))
    with pytest.raises(ValueError, match="no row for exponent byte 90"):
        solve_split(other, narrow)
    table = train_split(sample, exponents_present(other.scales))
    merged = merge_split(*solve_split(other, table), table)
    assert merged.scales is not None and torch.equal(merged.scales, other.scales)


@pytest.mark.parametrize("solve", [solve_clip, solve_absmax], ids=lambda solve: solve.__name__)
def test_int2_refuses_nan_scales(solve: Callable[[Matrix], object]) -> None:
    with pytest.raises(ValueError, match="1 groups have byte 255"):
        solve(Matrix(torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8)))


def test_trained_codes_refuse_nan_scales() -> None:
    good = gaussian(1, 8, 64, seed=0)
    assert good.scales is not None
    bad = Matrix(good.codes, good.scales.index_fill(2, torch.tensor([1]), 255))
    table, levels = train_split(good, exponents_present(good.scales)), train_quad(good)
    for refused in (
        lambda: train_quad(bad),
        lambda: solve_quad(bad, levels),
        lambda: solve_split(bad, table),
        lambda: train_split(bad, exponents_present(good.scales)),
        lambda: train_split(good, torch.arange(256) == 255),
    ):
        with pytest.raises(ValueError, match="byte 255"):
            refused()


def test_matrix_rms() -> None:
    matrix = random_fp4(3, 8, 96, exponents=torch.arange(110, 130))
    assert matrix.scales is not None
    matrix.codes[1] = 0
    expected = dequantize_fp4(matrix).double().square().mean((1, 2)).sqrt().float()
    got = matrix_rms(code_counts(matrix.codes), matrix.scales)
    assert torch.equal(got, expected.where(torch.arange(3) != 1, 1))


@pytest.fixture(scope="module")
def trained() -> dict[str, object]:
    """Tables trained on three Gaussian matrices, and one more to try them on."""
    sample, fresh = gaussian(3, 128, 1024, seed=1), gaussian(2, 128, 1024, seed=2)
    assert sample.scales is not None and fresh.scales is not None
    present = exponents_present(sample.scales) | exponents_present(fresh.scales)
    return {"fresh": fresh, "levels": train_quad(sample), "table": train_split(sample, present)}


def test_gaussian_weights(trained: dict) -> None:
    fresh, levels, table = trained["fresh"], trained["levels"], trained["table"]
    exact = dequantize_fp4(fresh)
    assert relative_error(dequantize_int2(*solve_clip(fresh)), exact) <= tolerances.CLIP_GAUSSIAN
    matrix, normalisers = solve_quad(fresh, levels)
    assert relative_error(dequantize_quad2(matrix, levels, normalisers), exact) <= tolerances.QUAD_GAUSSIAN
    base, _ = solve_split(fresh, table)
    assert relative_error(dequantize_base(base, table), exact) <= tolerances.SPLIT_GAUSSIAN
    worse = Matrix(base.codes, base.scales.roll(1, -1))
    assert relative_error(dequantize_base(worse, table), exact) > tolerances.SPLIT_GAUSSIAN  # the bound is not blind


def test_quad_takes_the_best_row_and_the_nearest_level(trained: dict) -> None:
    fresh, levels = trained["fresh"], trained["levels"]
    matrix, normalisers = solve_quad(fresh, levels)
    exact = dequantize_fp4(fresh).double() / normalisers.double()[:, None, None]
    groups = exact.unflatten(-1, (-1, 32))[0, :4]
    errors = (groups[..., None, :, None] - levels.double()[:, None]).square().amin(-1).sum(-1)  # [4, K/32, 256]
    got = group_errors(dequantize_quad2(matrix, levels, torch.ones(2)), exact)[0, :4]
    assert torch.allclose(got, errors.amin(-1), rtol=1e-6, atol=1e-6)


def test_split_takes_the_best_row(trained: dict) -> None:
    fresh, table = trained["fresh"], trained["table"]
    base, _ = solve_split(fresh, table)
    exact = dequantize_fp4(fresh)
    chosen = group_errors(dequantize_base(base, table), exact)
    for row in range(0, 256, 8):
        fits = fresh.scales == table.exponents[row]
        other = dequantize_base(base_with_row(fresh, table, row), table)
        assert (chosen <= group_errors(other, exact) * (1 + 1e-7))[fits].all()


def base_with_row(matrix: Matrix, table: SplitTable, row: int) -> Matrix:
    """The base in which every group takes `row`."""
    cell, _ = cells()
    codes = cell[int(table.partitions[row])][unpack_codes(matrix.codes, 4).int()]
    assert matrix.scales is not None
    return Matrix(pack_codes(codes, 2), torch.full_like(matrix.scales, row))


def test_minus_zero_is_zero_everywhere(trained: dict) -> None:
    """Requantising what base and residual restore gives the bytes of requantising the release."""
    matrix = random_fp4(2, 16, 320, exponents=torch.arange(118, 128))
    same = without_minus_zero(matrix)
    assert not torch.equal(matrix.codes, same.codes)
    assert all(map(torch.equal, solve_clip(matrix).matrix, solve_clip(same).matrix))
    quads = [solve_quad(one, trained["levels"]) for one in (matrix, same)]
    assert all(map(torch.equal, quads[0].matrix, quads[1].matrix))
    assert torch.equal(quads[0].normalisers, quads[1].normalisers)


def test_a_batch_is_its_matrices(trained: dict) -> None:
    fresh, levels, table = trained["fresh"], trained["levels"], trained["table"]
    for index in range(2):
        one = Matrix(fresh.codes[index], fresh.scales[index])
        for solve in (solve_clip, lambda m: solve_quad(m, levels)):
            whole, alone = solve(fresh), solve(one)
            assert torch.equal(whole.matrix.codes[index], alone.matrix.codes)
            assert torch.equal(whole.matrix.scales[index], alone.matrix.scales)
            assert torch.equal(whole.normalisers[index], alone.normalisers)
        for whole, alone in zip(solve_split(fresh, table), solve_split(one, table), strict=True):
            assert torch.equal(whole.codes[index], alone.codes)


def test_training_is_repeatable(trained: dict) -> None:
    sample = gaussian(3, 128, 1024, seed=1)
    assert torch.equal(train_quad(sample), trained["levels"])
    fresh = trained["fresh"]
    again = train_split(sample, exponents_present(sample.scales) | exponents_present(fresh.scales))
    assert all(map(torch.equal, again, trained["table"]))


def test_study_measures_what_it_says() -> None:
    random = torch.Generator().manual_seed(0)
    expert = (gaussian(64, 96, seed=1), gaussian(64, 96, seed=2), gaussian(96, 64, seed=3))
    x = torch.randn(32, 96, generator=random) * 1e-3  # so small that silu(gate) is gate / 2
    codes = {"exact": dequantize_fp4, "larger": lambda matrix: dequantize_fp4(matrix) * 1.01}
    errors = matrix_errors(expert[0], x, codes)
    assert errors["exact"] == {"weight": 0, "output": 0}
    assert errors["larger"] == pytest.approx({"weight": 0.01, "output": 0.01}, rel=1e-3)
    assert expert_errors(expert, x, (codes, codes, codes)) == pytest.approx(
        {"exact": 0, "larger": 1.01**3 - 1}, rel=1e-2
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exponents", [torch.arange(118, 128), torch.arange(255)], ids=["few", "all"])
def test_the_gpu_gives_the_same_bytes(exponents: Tensor) -> None:
    matrix = random_fp4(3, 64, 1024, exponents=exponents)
    there = Matrix(*(part.cuda() for part in matrix))
    present = exponents_present(matrix.scales)
    levels, table = train_quad(matrix), train_split(matrix, present)
    levels_there, table_there = train_quad(there), train_split(there, present.cuda())
    pairs = [
        (levels, levels_there),
        *zip(table, table_there, strict=True),
        *_flat_pairs(solve_clip(matrix), solve_clip(there)),
        *_flat_pairs(solve_absmax(matrix), solve_absmax(there)),
        *_flat_pairs(solve_quad(matrix, levels), solve_quad(there, levels_there)),
        *_flat_pairs(solve_split(matrix, table), solve_split(there, table_there)),
    ]
    assert all(torch.equal(here, gpu.cpu()) for here, gpu in pairs)


def _flat_pairs(here: tuple, there: tuple) -> list[tuple[Tensor, Tensor]]:
    """Corresponding tensors of two nested tuples, None left out."""
    if isinstance(here, Tensor):
        return [(here, there)]
    nested = [_flat_pairs(one, other) for one, other in zip(here, there, strict=True) if one is not None]
    return [pair for pairs in nested for pair in pairs]


def test_values_of_codes_are_relative_to_the_exponent() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    one = Matrix(pack_codes(codes, 4)[None], torch.tensor([[127]], dtype=torch.uint8))
    assert torch.equal(dequantize_fp4(one)[0, :16].double(), values_of_codes())
