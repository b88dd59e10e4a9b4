"""FP8-block products: the interpreter runs the portable branch at small shapes, a GPU every case, branch and configuration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from on_a_card import check_numbers
from ptx import bfloat16_outputs
from torch import Tensor
from triton.language import constexpr

from kernels.cases import ONE_ROUNDING, Case, relative_rms
from kernels.formats import Matrix, quantize_fp8_block
from kernels.fp8_linear import _launch, candidates, fp8_grouped_linear, fp8_linear, fp8_swiglu, launch_linear
from kernels.fp8_linear.cases import Inputs, cases
from kernels.fp8_linear.kernel import DECODE_E4M3, DECODE_SCALED
from kernels.fp8_linear.reference import fp8_grouped_linear_reference, fp8_linear_reference, fp8_swiglu_reference
from kernels.tuning import Config

EXACT = 1e-5  # float32 sums in another order; sixteen bits of a float32 input
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]  # the interpreter, which has no inline assembly, and a card
CUDA = torch.device("cuda")
SHAPES = [(1, 1, 128, 128), (3, 1, 256, 640), (8, 2, 128, 384), (11, 1, 128, 256), (17, 3, 128, 128)]  # T, G, N, K

VARIED = (  # few slices and many, one matrix and two, one token and more
    "wq_b 32768x1024 T1",
    "shared w1 w3 SwiGLU 2048x4096 T1",
    "wo_b 4096x8192 T8",
    "wq_b 32768x1024 T64",
    "wo_b 4096x8192 T4096",
    "shared w1 w3 SwiGLU 2048x4096 T4096",
)
PORTABLE = (
    "wo_b 4096x8192 T1",
    "wo_a 8x1024x4096 T1",
    "shared w1 w3 SwiGLU 2048x4096 T1",
    "wq_b 32768x1024 T64",
)


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the candidates, for timing them all would compile them all; interpreted, few large programs, which take less."""

    def first(op: str, key: str, candidates: list[Config], run: object, device: torch.device) -> Config:
        return candidates[0] if device.type == "cuda" else candidates[0] | {"ROWS": 128}

    monkeypatch.setattr("kernels.fp8_linear.choose", first)


def _matrix(device: str, rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> Matrix:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    codes, scales = quantize_fp8_block(weight)
    assert scales is not None
    return Matrix(codes.to(device), scales.to(device))


def _x(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(device, dtype)


def _run(x: Tensor, *matrices: Matrix, dtype: torch.dtype = torch.float32, limit: float = 0.0) -> Tensor:
    """The kernels' result [T, G, N] in a poisoned output."""
    return launch_linear(x, matrices, _poisoned(x, matrices, dtype), limit=limit, portable=not x.is_cuda)


def _poisoned(x: Tensor, matrices: tuple[Matrix, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    rows = matrices[0].codes.shape[0] // x.shape[1]
    return torch.full((*x.shape[:2], rows), torch.nan, dtype=dtype, device=x.device)


def test_the_assembly_decodes_every_code() -> None:
    """The instructions themselves, run one by one: exact values, also times the powers of the scales below the largest."""
    for first in range(0, 256, 4):
        codes = torch.arange(first, first + 4, dtype=torch.uint8)
        word, values = codes.view(torch.int32).item(), codes.view(torch.float8_e4m3fn).float()
        values[codes & 0x7F == 0x7F] = torch.tensor([480.0 if first < 128 else -480.0])  # no NaN: as documented
        assert torch.equal(_decoded(DECODE_E4M3, {2: word}), values), first
        for below in (0, 1, 57, 110):
            factor = ((247 - below) << 7) * 0x10001
            assert torch.equal(_decoded(DECODE_SCALED, {2: word, 3: factor}), values * 2.0**-below), (first, below)


def _decoded(assembly: constexpr, operands: dict[int, int]) -> Tensor:
    return torch.tensor(bfloat16_outputs(assembly.value, operands, 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "groups", "rows", "columns"), SHAPES)
def test_products(tokens: int, groups: int, rows: int, columns: int, device: str) -> None:
    x, matrix = _x(device, tokens, groups, columns), _matrix(device, groups * rows, columns)
    reference = fp8_grouped_linear_reference(x, matrix)
    assert relative_rms(_run(x, matrix), reference) <= EXACT
    if groups == 1:
        assert torch.allclose(reference[:, 0], fp8_linear_reference(x[:, 0], matrix), atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=["to bf16", "to f32"])
def test_float32_inputs(tokens: int, out: torch.dtype, device: str) -> None:
    """Two bfloat16 parts keep sixteen bits of them."""
    x, matrix = _x(device, tokens, 1, 256, dtype=torch.float32), _matrix(device, 128, 256)
    error = relative_rms(_run(x, matrix, dtype=out), fp8_grouped_linear_reference(x, matrix))
    assert error <= (EXACT if out == torch.float32 else ONE_ROUNDING)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 8, 13])
def test_swiglu(tokens: int, device: str) -> None:
    """Weights so large that both clamps bite, and an x of zeros."""
    x, w1, w3 = _x(device, tokens, 1, 256), _matrix(device, 128, 256, 1, 0.7), _matrix(device, 128, 256, 2, 0.7)
    reference = fp8_swiglu_reference(x[:, 0], w1, w3, 10.0)
    gate, up = fp8_linear_reference(x[:, 0], w1), fp8_linear_reference(x[:, 0], w3)
    assert (gate > 10).any() and (gate < -10).any() and (up.abs() > 10).any()
    assert relative_rms(_run(x, w1, w3, limit=10.0)[:, 0], reference) <= EXACT
    assert torch.equal(_run(torch.zeros_like(x), w1, w3, limit=10.0), torch.zeros(tokens, 1, 128, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("place", ["x", "scale of w1", "scale of w3"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_no_number_stays_none(place: str, tokens: int, device: str) -> None:
    """NaN where the definition has it, and there only: a clamp that dropped it would make a wrong number of it."""
    x, w1, w3 = _x(device, tokens, 1, 256), _matrix(device, 256, 256, 1), _matrix(device, 256, 256, 2)
    scales = w3.scales if place == "scale of w3" else w1.scales
    assert scales is not None
    if place == "x":
        x[tokens // 2, 0, 5] = torch.nan
    else:
        scales[1, 0] = 255
    single, both = fp8_linear_reference(x[:, 0], w1), fp8_swiglu_reference(x[:, 0], w1, w3, 10.0)
    assert both.isnan().any() and (tokens == 1 or not both.isnan().all())
    for result, expected in ((_run(x, w1), single), (_run(x, w1, w3, limit=10.0), both)):
        assert torch.equal(result[:, 0].isnan(), expected.isnan())
        assert torch.allclose(result[:, 0], expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_every_code(device: str) -> None:
    """Every finite E4M3 code, subnormals and both zeros among them, comes through alone and exactly."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    codes[:, [0x7F, 0xFF]] = 0
    codes[1] = codes[0].roll(1)
    matrix = Matrix(codes.to(device), torch.full((1, 2), 127, dtype=torch.uint8, device=device))
    values = codes.view(torch.float8_e4m3fn).float()
    one_hot = torch.eye(256, dtype=torch.bfloat16, device=device)[:, None]
    assert torch.equal(_run(one_hot, matrix)[:, 0].cpu(), values.T)
    for place in (0, 128, 248):
        assert torch.equal(_run(one_hot[place : place + 8], matrix)[:, 0].cpu(), values.T[place : place + 8])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("exponent", [0, 1, 60, 190, 240])
def test_extreme_scales(exponent: int, tokens: int, device: str) -> None:
    """Scales at both ends of E8M0, with inputs that bring the results back among the normal numbers."""
    codes, _ = _matrix(device, 128, 256)
    matrix = Matrix(codes, torch.full((1, 2), exponent, dtype=torch.uint8, device=device))
    x = (_x(device, tokens, 1, 256).float() * 2.0 ** (min(max(127 - exponent, -50), 50))).bfloat16()
    assert relative_rms(_run(x, matrix), fp8_grouped_linear_reference(x, matrix)) <= EXACT


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_zero_rows_and_odd_scales(tokens: int, device: str) -> None:
    """Each block has its own scale; a row of zeros stays zero."""
    codes, _ = _matrix(device, 384, 256)
    codes.view(torch.uint8)[5] = 0
    scales = (torch.arange(6, dtype=torch.uint8).view(3, 2) * 3 + 120).to(device)
    x, matrix = _x(device, tokens, 1, 256), Matrix(codes, scales)
    result = _run(x, matrix)
    assert relative_rms(result, fp8_grouped_linear_reference(x, matrix)) <= EXACT
    assert torch.equal(result[..., 5], torch.zeros(tokens, 1, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [2, 9])
def test_damage_shows(tokens: int, device: str) -> None:
    x, matrix = _x(device, tokens, 1, 256), _matrix(device, 128, 256)
    damaged = _run((x.float() * 1.01).bfloat16(), matrix)
    assert relative_rms(damaged, fp8_grouped_linear_reference(x, matrix)) > 2 * ONE_ROUNDING


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_bits_of_a_few_tokens_do_not_depend_on_the_others_nor_on_the_run(dtype: torch.dtype, device: str) -> None:
    x, matrix = _x(device, 8, 1, 256, dtype=dtype), _matrix(device, 128, 256)
    whole = _run(x, matrix)
    for tokens in (8, 5, 2, 1):
        assert torch.equal(_run(x[:tokens].contiguous(), matrix), whole[:tokens])


@pytest.mark.gpu  # numpy's order of sums depends on the tile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_bits_of_many_tokens_do_not_depend_on_the_others_nor_on_the_tile(dtype: torch.dtype) -> None:
    x, matrices, seen = _x("cuda", 300, 1, 256, dtype=dtype), (_matrix("cuda", 128, 256),), set()
    whole = _run(x, *matrices)
    for tokens in (300, 100, 40, 23, 9):
        part = x[:tokens].contiguous()
        for config in candidates(part, matrices):
            result = _poisoned(part, matrices)
            _launch(part, matrices, result, 0.0, False, config)
            assert torch.equal(result, whole[:tokens]), (tokens, config)
            seen.add(config["TOKENS"])
    assert seen >= {16, 32, 64}  # and wider ones on cards with more shared memory


@pytest.mark.parametrize("matrices", [1, 2], ids=["linear", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_every_number_of_tokens_has_a_configuration(
    dtype: torch.dtype, matrices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card with 99 KiB of shared memory a block (sm_86, sm_89)."""
    monkeypatch.setattr("kernels.fp8_linear.shared_bytes", lambda device: 97280)
    matrix = _matrix("cpu", 128, 128)
    for tokens in range(1, 4097):
        assert candidates(torch.empty(tokens, 1, 128, dtype=dtype), (matrix,) * matrices), tokens


def test_public_functions_on_a_cpu() -> None:
    x, w1, w3 = _x("cpu", 3, 256), _matrix("cpu", 256, 256, 1), _matrix("cpu", 256, 256, 2)
    out = torch.full((3, 256), torch.nan)
    assert fp8_linear(x, w1, out) is out and torch.equal(out, fp8_linear_reference(x, w1))
    assert torch.equal(fp8_swiglu(x, w1, w3, out, limit=10.0), fp8_swiglu_reference(x, w1, w3, 10.0))
    x, matrix = x.view(3, 2, 128), _matrix("cpu", 256, 128)
    grouped = fp8_grouped_linear(x, matrix, torch.empty(3, 2, 128))
    assert torch.equal(grouped, fp8_grouped_linear_reference(x, matrix))


def test_codes_may_be_bytes() -> None:
    x, matrix = _x("cpu", 3, 256), _matrix("cpu", 256, 256)
    as_bytes = Matrix(matrix.codes.view(torch.uint8), matrix.scales)
    expected = fp8_linear(x, matrix, torch.empty(3, 256))
    assert torch.equal(fp8_linear(x, as_bytes, torch.empty(3, 256)), expected)
    assert torch.equal(
        fp8_swiglu(x, as_bytes, matrix, expected.clone(), limit=1.0), fp8_swiglu_reference(x, matrix, matrix, 1.0)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, m, out: (x.half(), m, out), "expected bfloat16 or float32"),
        (lambda x, m, out: (x[:, :100], m, out), "multiples of 128"),
        (lambda x, m, out: (x, m, out[:1]), "expected \\[T, G, K\\]"),
        (lambda x, m, out: (x, Matrix(m.codes[:128], m.scales), out), "codes .*expected float8_e4m3fn \\[256, 256\\]"),
        (lambda x, m, out: (x, Matrix(m.codes, m.scales[:1]), out), "scales .*expected uint8 \\[2, 2\\]"),
        (lambda x, m, out: (x, Matrix(m.codes, None), out), "scales none"),
        (lambda x, m, out: (x, m, torch.empty(256, 3).T), "not contiguous"),
        (lambda x, m, out: (x[0], m, out), "expected \\[T, K\\]"),
    ],
)
def test_wrong_inputs(change: Callable[..., tuple[Tensor, Matrix, Tensor]], message: str) -> None:
    arguments = (_x("cpu", 3, 256), _matrix("cpu", 256, 256), torch.empty(3, 256))
    with pytest.raises(ValueError, match=message):
        fp8_linear(*change(*arguments))


@pytest.mark.parametrize("shape", [(3, 0, 256), (3, 2, 0)])
def test_nothing_to_multiply(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="none zero"):
        fp8_grouped_linear(torch.empty(shape), _matrix("cpu", 256, 256), torch.empty(*shape[:2], 128))


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    check_numbers(case, case.make(0, CUDA))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in cases() if case.name in VARIED], ids=lambda case: case.name)
def test_every_configuration_gives_the_same_bits(case: Case) -> None:
    inputs = case.make(0, CUDA)
    x, out = _grouped(inputs)
    results = []
    for config in candidates(x, inputs.matrices):
        results.append(torch.full_like(out, torch.nan))
        _launch(x, inputs.matrices, results[-1], 10.0, False, config)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in cases() if case.name in PORTABLE], ids=lambda case: case.name)
def test_portable_branch(case: Case) -> None:
    """The branch that the interpreter tests gives the fast one's values but for the order of its sums."""
    inputs = case.make(1, CUDA)
    x, out = _grouped(inputs)
    out.fill_(torch.nan)
    sizes = {"SPLIT": 4} if x.shape[0] <= 8 else {"TOKENS": 16, "COLUMNS": 64}
    config = {"ROWS": 16, "num_warps": 8, "num_stages": 1, **sizes}  # float32 tiles need more shared memory
    _launch(x, inputs.matrices, out, 10.0, True, config)
    assert relative_rms(inputs.out, case.reference(inputs)) <= ONE_ROUNDING


def _grouped(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """x and out with a dimension of groups, of the same memory."""
    return (inputs.x[:, None], inputs.out[:, None]) if inputs.x.ndim == 2 else (inputs.x, inputs.out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name.endswith(("T1", "T8"))], ids=lambda case: case.name
)
def test_graph(case: Case) -> None:
    """A captured call computes with what its inputs hold when it is replayed."""
    inputs, other = case.make(0, CUDA), case.make(1, CUDA)
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
