"""The kernels' benchmark: what is wrong gets no number. Nothing is timed here."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from kernels.bench import OPS, Row, error_of, measure, table
from kernels.cases import Case

CPU = torch.device("cpu")


def make(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    return x, torch.empty_like(x)


def double(inputs: tuple[Tensor, Tensor], factor: float = 2.0) -> Tensor:
    return torch.mul(inputs[0], factor, out=inputs[1])


RIGHT = Case("op", "case", make, double, lambda inputs: inputs[0] * 2, read_bytes=400, tolerance=2e-3)


def half_written(inputs: tuple[Tensor, Tensor]) -> Tensor:
    inputs[1][:50] = inputs[0][:50] * 2
    return inputs[1]


def test_a_right_result_has_a_small_error() -> None:
    assert error_of(RIGHT, make(0, CPU)) == 0.0


@pytest.mark.parametrize("run", [lambda inputs: double(inputs, 2.02), half_written], ids=["1 % off", "half written"])
def test_a_wrong_result_has_no_number(run: object) -> None:
    row = measure(replace(RIGHT, run=run), CPU)  # type: ignore[arg-type]
    assert row.us is None and row.gb_per_s is None
    assert "wrong: expected an error of at most 0.002, no number" in table([row])[1]
    assert json.loads(json.dumps(asdict(row), allow_nan=False))["us"] is None


def test_a_row_says_what_was_measured() -> None:
    row = Row("op", "case", 1e-3, 2e-3, 4000, 10.0, 0.4, 7.0, 0.7, 1000.0, "torch", 20.0)
    assert table([row])[1].split() == ["op", "case", "1.0e-03", "10.0", "0", "70%", "100.0", "torch", "2.00", "x"]


@pytest.mark.parametrize("op", OPS)
def test_cases_have_names_of_their_own(op: str) -> None:
    cases = import_module(f"kernels.{op}.cases").cases()
    assert len({case.name for case in cases}) == len(cases) and {case.op for case in cases} == {op}
    assert all(case.read_bytes > 0 and case.tolerance <= 5e-3 for case in cases)
