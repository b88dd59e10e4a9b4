"""RMS norm and the head's product against their definitions.

The CPU interpreter rounds float32 to bfloat16 by cutting it off, so what is written here is float32; bfloat16 is the card's.
"""

from __future__ import annotations

import pytest
import torch
from on_a_card import check_case, on_devices
from torch import Tensor

import kernels.norm as op
from kernels.cases import Case, relative_rms
from kernels.norm import reference
from kernels.norm.cases import EPS, cases, make_head, make_rows

CPU = torch.device("cpu")
FLOAT32_SUMS = 1e-5  # two float32 programs that differ in the order of sums: seen 3e-7


def launch(x: Tensor, weight: Tensor | None) -> Tensor:
    """The kernel's result in a poisoned float32 output."""
    return op.launch_rms_norm(x, weight, EPS, torch.full(x.shape, torch.nan, device=x.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 100), (5, 1), (2, 129)])
def test_rms_norm(rows: int, width: int, weighted: bool, dtype: torch.dtype) -> None:
    inputs = make_rows(rows, width, weighted, dtype, 0, CPU)
    result = launch(inputs.x, inputs.weight)
    assert relative_rms(result, reference.rms_norm_reference(inputs.x, inputs.weight, EPS)) < FLOAT32_SUMS
    assert torch.equal(launch(inputs.x, inputs.weight), result)


@on_devices
def test_a_row_is_the_same_alone_and_among_others(device: torch.device) -> None:
    inputs = make_rows(5, 64, True, torch.float32, 0, device)
    assert torch.equal(launch(inputs.x[3:4], inputs.weight)[0], launch(inputs.x, inputs.weight)[3])


def test_rows_apart_and_heads() -> None:
    """Rows cut out of wider ones, and [T, H, d]."""
    wide = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    cut = wide[:, 16:80]
    assert torch.equal(launch(cut, None), launch(cut.contiguous(), None))
    heads = cut.contiguous().view(2, 2, 64)
    assert torch.equal(launch(heads, None).view(4, 64), launch(cut, None))


@on_devices
@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1e6, 1e15])
def test_extreme_rows(scale: float, device: torch.device) -> None:
    inputs = make_rows(2, 64, True, torch.float32, 0, device)
    x = inputs.x * scale
    assert relative_rms(launch(x, inputs.weight), reference.rms_norm_reference(x, inputs.weight, EPS)) < FLOAT32_SUMS


@on_devices
def test_a_zero_row_stays_zero(device: torch.device) -> None:
    inputs = make_rows(2, 64, True, torch.float32, 0, device)
    inputs.x[0] = 0
    assert bool((launch(inputs.x, inputs.weight)[0] == 0).all())


@on_devices
def test_nan_stays_nan(device: torch.device) -> None:
    """In its row, and in a logit that it is a part of."""
    inputs, head = make_rows(2, 64, True, torch.float32, 0, device), make_head(9, 300, torch.float32, 0, device)
    inputs.x[1, 3] = torch.nan
    result = launch(inputs.x, inputs.weight)
    assert result[1].isnan().all() and result[0].isfinite().all()
    assert head.weight is not None
    head.weight[4, 290] = torch.nan
    assert op.launch_head(head.x, head.weight, head.out).isnan().nonzero().tolist() == [[4]]
    head.x[7] = torch.nan
    assert op.launch_head(head.x, head.weight, head.out).isnan().all()


def test_in_place() -> None:
    inputs = make_rows(3, 100, True, torch.float32, 0, CPU)
    expected = launch(inputs.x, inputs.weight)
    assert torch.equal(op.launch_rms_norm(inputs.x, inputs.weight, EPS, inputs.x), expected)


@on_devices
def test_one_percent_of_damage_shows(device: torch.device) -> None:
    inputs = make_rows(2, 64, True, torch.float32, 0, device)
    expected = reference.rms_norm_reference(inputs.x, inputs.weight, EPS)
    assert inputs.weight is not None
    assert relative_rms(launch(inputs.x, inputs.weight * 1.01), expected) > 100 * FLOAT32_SUMS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "hidden"), [(9, 512), (5, 300), (3, 7)])
def test_head(vocab: int, hidden: int, dtype: torch.dtype) -> None:
    """Every configuration gives the same bits."""
    inputs = make_head(vocab, hidden, dtype, 0, CPU)
    assert inputs.weight is not None
    expected = reference.head_reference(inputs.x, inputs.weight)
    results = []
    for config in op.HEAD_CANDIDATES:
        out = torch.full((vocab,), torch.nan)
        op.launch_head_with(config, inputs.x, inputs.weight, out)
        results.append(out)
    assert relative_rms(results[0], expected) < FLOAT32_SUMS
    assert relative_rms(results[0] * 1.01, expected) > 100 * FLOAT32_SUMS
    assert all(torch.equal(result, results[0]) for result in results)


def test_on_a_cpu_the_definition_runs() -> None:
    rows, head = make_rows(3, 48, True, torch.float32, 0, CPU), make_head(9, 48, torch.float32, 0, CPU)
    assert torch.equal(
        op.rms_norm(rows.x, rows.weight, EPS, rows.out), reference.rms_norm_reference(rows.x, rows.weight, EPS)
    )
    assert head.weight is not None
    assert torch.equal(op.head(head.x, head.weight, head.out), reference.head_reference(head.x, head.weight))


@pytest.mark.parametrize(
    ("x", "weight", "out", "message"),
    [
        (torch.ones(2, 8), torch.ones(9), torch.ones(2, 8), r"weight: got shape \[9\], expected \[8\]"),
        (torch.ones(2, 8), None, torch.ones(2, 9), r"out: got shape \[2, 9\]"),
        (torch.ones(2, 8).half(), None, torch.ones(2, 8), "float16, expected torch.bfloat16 or torch.float32"),
        (torch.ones(8, 2).T, None, torch.ones(2, 8), r"strides \(1, 2\)"),
        (torch.ones(2, 20_000), None, torch.ones(2, 20_000), "last dimension of 1 to 16384"),
        (torch.tensor(1.0), None, torch.tensor(1.0), r"x has shape \[\], expected"),
    ],
    ids=["weight", "out", "dtype", "layout", "width", "scalar"],
)
def test_errors(x: Tensor, weight: Tensor | None, out: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op.rms_norm(x, weight, EPS, out)


def test_head_errors() -> None:
    with pytest.raises(ValueError, match=r"head: x: got shape \[7\], expected \[8\]"):
        op.head(torch.ones(7), torch.ones(3, 8), torch.ones(3))
    with pytest.raises(ValueError, match=r"head: weight: got shape \[8\], expected \[V, D\]"):
        op.head(torch.ones(8), torch.ones(8), torch.ones(3))
    with pytest.raises(ValueError, match=r"head: out: got torch\.bfloat16, expected torch\.float32"):
        op.head(torch.ones(8), torch.ones(3, 8), torch.ones(3).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    check_case(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_configurations_agree_on_a_card(dtype: torch.dtype) -> None:
    inputs = make_head(1001, 4096, dtype, 0, torch.device("cuda"))
    assert inputs.weight is not None
    results = []
    for config in op.HEAD_CANDIDATES:
        op.launch_head_with(config, inputs.x, inputs.weight, inputs.out.fill_(torch.nan))
        results.append(inputs.out.clone())
    assert all(torch.equal(result, results[0]) for result in results)
