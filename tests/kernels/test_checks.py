"""The one check of a tensor: every fault in its words, and nothing said about what fits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.checks import FLOAT32, FLOATS, expect

CPU = torch.device("cpu")


@pytest.mark.parametrize("tensor", [torch.ones(3, 8), torch.ones(0, 8).bfloat16(), torch.ones(1, 9)[:, :8]])
def test_what_fits(tensor: Tensor) -> None:
    expect("op", "x", tensor, ("T", 8), FLOATS, CPU)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3, 7), "got shape [3, 7], expected [T, 8]; pass a tensor of that shape"),
        (torch.tensor(1.0), "got shape [], expected [T, 8]; pass a tensor of that shape"),
        (torch.ones(3, 8).half(), "got torch.float16, expected torch.bfloat16 or torch.float32; convert it"),
        (torch.ones(3, 8, device="meta"), "got a tensor on meta, expected cpu; move it there"),
        (torch.ones(8, 3).T, "got strides (1, 3), expected contiguous; pass .contiguous()"),
    ],
    ids=["size", "scalar", "dtype", "device", "layout"],
)
def test_what_does_not(tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError) as error:
        expect("op", "x", tensor, ("T", 8), FLOATS, CPU)
    assert str(error.value) == f"op: x: {message}"


def test_more_rows() -> None:
    for rows in (2, 5):
        expect("op", "scratch", torch.ones(rows, 8), (2, 8), FLOAT32, CPU, more_rows=True)
    for wrong in (torch.ones(1, 8), torch.ones(5, 9), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"expected \[>= 2, 8\]"):
            expect("op", "scratch", wrong, (2, 8), FLOAT32, CPU, more_rows=True)
