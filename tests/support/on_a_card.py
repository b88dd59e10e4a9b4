"""What every case of every operator must do on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.bench import error_of
from kernels.cases import Case

on_devices = pytest.mark.parametrize(
    "device", [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str
)


def check_numbers(case: Case, inputs: Any) -> Tensor:
    """The definition within tolerance into poisoned outputs, as in the benchmark, and the same bits twice; a copy of them."""
    assert error_of(case, inputs) <= case.tolerance
    first = case.run(inputs).clone()
    assert torch.equal(case.run(inputs), first)
    return first


def check_case(case: Case) -> Any:
    """`check_numbers`, nothing allocated after the first call, and the same bits from a graph that then sees other values; the
    inputs that the graph ran on last.
    """
    device = torch.device("cuda")
    inputs, others = case.make(0, device), case.make(1, device)
    first = check_numbers(case, inputs)
    allocated = num_allocations()
    second = case.run(inputs)
    assert num_allocations() == allocated
    assert torch.equal(second, first)
    expected, graph = case.run(others).clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case.run(inputs)
    for mine, other in zip(inputs.tensors(), others.tensors(), strict=True):
        mine.copy_(other)
    result.fill_(torch.nan if result.is_floating_point() else -1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
    return inputs


def num_allocations() -> int:
    """How many times the caching allocator has been asked for memory."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])
