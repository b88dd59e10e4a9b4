"""FP8-block products: the interpreter runs the portable branch at small shapes, a GPU every case, branch and configuration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cases import ONE_ROUNDING, Case, relative_rms
from kernels.formats import Matrix, quantize_fp8_block
from kernels.fp8_linear import _launch, candidates, fp8_grouped_linear, fp8_linear, fp8_swiglu, launch_linear
from kernels.fp8_linear.cases import Inputs, cases
from kernels.fp8_linear.reference import fp8_grouped_linear_reference, fp8_linear_reference, fp8_swiglu_reference

EXACT = 1e-5  # float32 sums in another order; sixteen bits of a float32 input
PORTABLE = not torch.cuda.is_available()  # the interpreter has no inline assembly
DEVICE = torch.device("cpu" if PORTABLE else "cuda")
SHAPES = [(1, 1, 128, 128), (3, 1, 256, 640), (8, 2, 128, 384), (11, 1, 128, 256), (17, 3, 128, 128)]  # T, G, N, K


def _matrix(rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> Matrix:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    codes, scales = quantize_fp8_block(weight)
    assert scales is not None
    return Matrix(codes.to(DEVICE), scales.to(DEVICE))


def _x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, dtype)


def _run(x: Tensor, *matrices: Matrix, dtype: torch.dtype = torch.float32, limit: float = 0.0) -> Tensor:
    """The kernels' result [T, G, N] in a poisoned output."""
    rows = matrices[0].codes.shape[0] // x.shape[1]
    out = torch.full((*x.shape[:2], rows), torch.nan, dtype=dtype, device=DEVICE)
    return launch_linear(x, matrices, out, limit=limit, portable=PORTABLE)


@pytest.mark.parametrize(("tokens", "groups", "rows", "columns"), SHAPES)
def test_products(tokens: int, groups: int, rows: int, columns: int) -> None:
    x, matrix = _x(tokens, groups, columns), _matrix(groups * rows, columns)
    reference = fp8_grouped_linear_reference(x, matrix)
    assert relative_rms(_run(x, matrix), reference) <= EXACT
    if groups == 1:
        assert torch.allclose(reference[:, 0], fp8_linear_reference(x[:, 0], matrix), atol=1e-4)


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=["to bf16", "to f32"])
def test_float32_inputs(tokens: int, out: torch.dtype) -> None:
    """Two bfloat16 parts keep sixteen bits of them."""
    x, matrix = _x(tokens, 1, 256, dtype=torch.float32), _matrix(128, 256)
    error = relative_rms(_run(x, matrix, dtype=out), fp8_grouped_linear_reference(x, matrix))
    assert error <= (EXACT if out == torch.float32 else ONE_ROUNDING)


@pytest.mark.parametrize("tokens", [1, 8, 13])
def test_swiglu(tokens: int) -> None:
    """Weights so large that both clamps bite, and an x of zeros."""
    x, w1, w3 = _x(tokens, 1, 256), _matrix(128, 256, 1, 0.7), _matrix(128, 256, 2, 0.7)
    reference = fp8_swiglu_reference(x[:, 0], w1, w3, 10.0)
    gate, up = fp8_linear_reference(x[:, 0], w1), fp8_linear_reference(x[:, 0], w3)
    assert (gate > 10).any() and (gate < -10).any() and (up.abs() > 10).any()
    assert relative_rms(_run(x, w1, w3, limit=10.0)[:, 0], reference) <= EXACT
    assert torch.equal(_run(torch.zeros_like(x), w1, w3, limit=10.0), torch.zeros(tokens, 1, 128, device=DEVICE))


def test_every_code() -> None:
    """Every finite E4M3 code, subnormals and both zeros among them, comes through alone and exactly."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    codes[:, [0x7F, 0xFF]] = 0
    codes[1] = codes[0].roll(1)
    matrix = Matrix(codes.to(DEVICE), torch.full((1, 2), 127, dtype=torch.uint8, device=DEVICE))
    values = codes.view(torch.float8_e4m3fn).float()
    one_hot = torch.eye(256, dtype=torch.bfloat16, device=DEVICE)[:, None]
    assert torch.equal(_run(one_hot, matrix)[:, 0].cpu(), values.T)
    for place in (0, 128, 248):
        assert torch.equal(_run(one_hot[place : place + 8], matrix)[:, 0].cpu(), values.T[place : place + 8])


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("exponent", [0, 1, 60, 190, 240])
def test_extreme_scales(exponent: int, tokens: int) -> None:
    """Scales at both ends of E8M0, with inputs that bring the results back among the normal numbers."""
    codes, _ = _matrix(128, 128)
    matrix = Matrix(codes, torch.full((1, 1), exponent, dtype=torch.uint8, device=DEVICE))
    x = (_x(tokens, 1, 128).float() * 2.0 ** (min(max(127 - exponent, -50), 50))).bfloat16()
    assert relative_rms(_run(x, matrix), fp8_grouped_linear_reference(x, matrix)) <= EXACT


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_zero_rows_and_odd_scales(tokens: int) -> None:
    """Each block has its own scale; a row of zeros stays zero."""
    codes, _ = _matrix(256, 384)
    codes.view(torch.uint8)[5] = 0
    scales = (torch.arange(6, dtype=torch.uint8).view(2, 3) * 3 + 120).to(DEVICE)
    x, matrix = _x(tokens, 1, 384), Matrix(codes, scales)
    result = _run(x, matrix)
    assert relative_rms(result, fp8_grouped_linear_reference(x, matrix)) <= EXACT
    assert torch.equal(result[..., 5], torch.zeros(tokens, 1, device=DEVICE))


def test_damage_shows() -> None:
    x, matrix = _x(2, 1, 256), _matrix(128, 256)
    damaged = _run((x.float() * 1.01).bfloat16(), matrix)
    assert relative_rms(damaged, fp8_grouped_linear_reference(x, matrix)) > 2 * ONE_ROUNDING


@pytest.mark.parametrize(
    "sizes",
    [(8, 5, 1), pytest.param((300, 40, 23, 9), marks=pytest.mark.gpu)],  # numpy's order of sums depends on the tile
    ids=["decode", "prefill"],
)
def test_bits_do_not_depend_on_the_other_tokens_nor_on_the_run(sizes: tuple[int, ...]) -> None:
    x, matrix = _x(sizes[0], 1, 384), _matrix(128, 384)
    whole = _run(x, matrix)
    for tokens in sizes:
        assert torch.equal(_run(x[:tokens].contiguous(), matrix), whole[:tokens])


@pytest.mark.skipif(not PORTABLE, reason="the definition runs on a CPU")
def test_public_functions_on_a_cpu() -> None:
    x, w1, w3 = _x(3, 256), _matrix(256, 256, 1), _matrix(256, 256, 2)
    out = torch.full((3, 256), torch.nan)
    assert fp8_linear(x, w1, out) is out and torch.equal(out, fp8_linear_reference(x, w1))
    assert torch.equal(fp8_swiglu(x, w1, w3, out, limit=10.0), fp8_swiglu_reference(x, w1, w3, 10.0))
    grouped = fp8_grouped_linear(x.view(3, 2, 128), _matrix(256, 128), torch.empty(3, 2, 128))
    assert torch.equal(grouped, fp8_grouped_linear_reference(x.view(3, 2, 128), _matrix(256, 128)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, m, out: (x.half(), m, out), "expected bfloat16 or float32"),
        (lambda x, m, out: (x[:, :100], m, out), "multiples of 128"),
        (lambda x, m, out: (x, m, out[:1]), "expected \\[T, G, K\\]"),
        (lambda x, m, out: (x, Matrix(m.codes[:128], m.scales), out), "codes .*expected float8_e4m3fn \\[256, 256\\]"),
        (lambda x, m, out: (x, Matrix(m.codes, m.scales[:1]), out), "scales .*expected uint8 \\[2, 2\\]"),
        (lambda x, m, out: (x, Matrix(m.codes, None), out), "scales none"),
        (lambda x, m, out: (x, m, torch.empty(256, 3, device=DEVICE).T), "not contiguous"),
        (lambda x, m, out: (x[0], m, out), "expected \\[T, K\\]"),
    ],
)
def test_wrong_inputs(change: Callable[..., tuple[Tensor, Matrix, Tensor]], message: str) -> None:
    arguments = (_x(3, 256), _matrix(256, 256), torch.empty(3, 256, device=DEVICE))
    with pytest.raises(ValueError, match=message):
        fp8_linear(*change(*arguments))


def _results(case: Case, inputs: Inputs, portable: bool) -> list[Tensor]:
    """By every configuration, each in a poisoned output of its own."""
    x, out = inputs.x, inputs.out
    x, out = (x[:, None], out[:, None]) if x.ndim == 2 else (x, out)
    results = []
    for config in candidates(x, inputs.matrices):
        results.append(torch.full_like(out, torch.nan))
        _launch(x, inputs.matrices, results[-1], 10.0, portable, config)
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    inputs = case.make(0, DEVICE)
    inputs.out.fill_(torch.nan)
    first = case.run(inputs).clone()
    reference = case.reference(inputs)
    assert relative_rms(first, reference) <= case.tolerance
    assert torch.equal(case.run(inputs), first)
    assert all(torch.equal(result.view_as(first), first) for result in _results(case, inputs, portable=False))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name.endswith(("T1", "T64"))], ids=lambda case: case.name
)
def test_portable_branch(case: Case) -> None:
    """The branch that the interpreter tests gives the fast one's values but for the order of its sums."""
    inputs = case.make(1, DEVICE)
    reference = case.reference(inputs)
    portable = torch.full_like(inputs.out, torch.nan)
    x, out = (inputs.x[:, None], portable[:, None]) if inputs.x.ndim == 2 else (inputs.x, portable)
    sizes = {"TOKENS": 16, "COLUMNS": 64}
    if x.shape[0] <= 8:
        sizes = {"SPLIT": 4}
    config = {"ROWS": 16, "num_warps": 8, "num_stages": 1, **sizes}  # float32 tiles need more shared memory
    _launch(x, inputs.matrices, out, 10.0, True, config)
    assert relative_rms(portable, reference) <= ONE_ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in cases() if "T1" in case.name or "T8" in case.name], ids=lambda case: case.name
)
def test_graph(case: Case) -> None:
    """A captured call computes with what its inputs hold when it is replayed."""
    inputs, other = case.make(0, DEVICE), case.make(1, DEVICE)
    case.run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(inputs)
    inputs.x.copy_(other.x)
    inputs.out.fill_(torch.nan)
    graph.replay()
    replayed = inputs.out.clone()
    assert torch.equal(case.run(inputs), replayed)
    assert relative_rms(replayed, case.reference(inputs)) <= case.tolerance
