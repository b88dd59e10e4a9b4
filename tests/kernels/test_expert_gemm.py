"""The grouped expert GEMM: every format and mixtures through the interpreter at the demo's shape, every case on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from on_a_card import check_numbers
from ptx import bfloat16_outputs
from torch import Tensor

from kernels.cases import TWO_ROUNDINGS, Case, relative_rms
from kernels.expert_gemm import Call, Experts, Routed, _launch, candidates, expert_gemm
from kernels.expert_gemm.cases import KINDS, LIMIT, Inputs, cases, make_inputs, make_layer, reference, run
from kernels.expert_gemm.decode import FP4_PTX, MERGED_PTX, TWO_BIT_PTX
from kernels.expert_gemm.plan import plan_tiles
from kernels.expert_gemm.reference import expert_gemm_reference
from kernels.expert_gemv.slabs import SKIP, quad2_rows, split_rows
from kernels.formats import E2M1_VALUES, PLANES, quantize_fp4, split_slab
from kernels.split import ORDERED_CODES
from kernels.tuning import Config

CUDA = torch.device("cuda")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]  # the interpreter, which has no inline assembly, and a card
CONFIGS = {  # interpreted, few large programs: it takes its time by the program
    "cpu": {"ROWS": 128, "TOKENS": 16},
    "cuda": {"ROWS": 64, "TOKENS": 16, "num_warps": 4, "num_stages": 3},
}
VARIED = ["fp4 64 experts T8", *(f"{name} 64 experts T1024" for name in ("fp4", "split"))]


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the candidates: timing them all would compile them all."""
    monkeypatch.setattr("kernels.expert_gemm.choose", lambda op, key, candidates, *_: candidates[0])


def _inputs(
    device: str, precisions: tuple[str, ...], tokens: int = 5, topk: int = 2, exponent: int | None = None
) -> Inputs:
    generator = torch.Generator(device).manual_seed(3)
    return make_inputs(make_layer(precisions, 256, 128, generator, exponent), tokens, topk, generator)


def _run(inputs: Inputs, dtype: torch.dtype = torch.float32, config: Config | None = None) -> Tensor:
    """The kernels' result in a poisoned output, through a poisoned scratch."""
    device = inputs.x.device.type
    out = torch.full(inputs.out.shape, torch.nan, dtype=dtype, device=device)
    layer, kinds = inputs.layer, {KINDS[precision] for precision in inputs.layer.precisions}
    hidden = torch.full_like(inputs.hidden, torch.nan)
    call = Call(inputs.x, inputs.routed, layer.experts, layer.rows, hidden, out, LIMIT)
    _launch(call, sorted(kinds), device == "cpu", config or CONFIGS[device])
    return out


def test_the_assembly_decodes_every_code() -> None:
    """The instructions themselves, run one by one on random bits, against the tables of the formats."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randn(3, 256, 4, generator=generator).half()
    rows = quad2_rows(levels).bfloat16_levels[0].tolist()
    for number in range(64):
        codes, places = torch.randint(2**32, (2,), generator=generator).tolist()
        _check_fp4(codes, (number * 3, 252 - number))
        _check_two_bit(codes, levels[0, number], rows[number])
        _check_merged(codes, places, number % 4, (number * 3, 252 - number))


def _check_fp4(codes: int, exponents: tuple[int, int]) -> None:
    """Two elements of four codes, each element with a scale of its own."""
    found = bfloat16_outputs(FP4_PTX.value, {4: codes, 5: _scale_word(exponents)}, 4)
    for place, element in product(range(4), range(2)):
        value = E2M1_VALUES[codes >> 16 * element + 4 * place & 15] * _power(exponents[element])
        assert found[2 * place + element] == value, (codes, place, element)


def _check_two_bit(codes: int, levels: Tensor, words: list[int]) -> None:
    """Four elements of four codes under one row of the table."""
    operands = (
        {8: codes} | {9 + element: words[0] for element in range(4)} | {13 + element: words[1] for element in range(4)}
    )
    found, values = bfloat16_outputs(TWO_BIT_PTX.value, operands, 8), levels.bfloat16().tolist()
    for place, element in product(range(4), range(4)):
        assert found[4 * place + element] == values[codes >> 8 * element + 2 * place & 3], (codes, place, element)


def _check_merged(codes: int, residual: int, partition: int, exponents: tuple[int, int]) -> None:
    """Four elements of four pairs of codes; elements 0 and 1 have one scale in each half of its word, 2 and 3 another word."""
    first, second = _scale_word((exponents[0],) * 2), _scale_word((exponents[1],) * 2)
    operands = {8: codes, 9: residual, 10: (3 - partition) * 0x01010101, 11: first, 12: second}
    found = bfloat16_outputs(MERGED_PTX.value, operands, 8)
    for place, element in product(range(4), range(4)):
        cell, rest = (word >> 8 * element + 2 * place & 3 for word in (codes, residual))
        if cell != partition or rest != 3:  # the cell of three has no fourth
            value = E2M1_VALUES[ORDERED_CODES[4 * cell - (cell > partition) + rest]] * _power(exponents[element // 2])
            assert found[4 * place + element] == value, (codes, residual, partition, place, element)


def _scale_word(exponents: tuple[int, ...]) -> int:
    """Two E8M0 bytes as bfloat16, the first in the low half."""
    low, high = (exponent << 7 or 0x40 for exponent in exponents)
    return high << 16 | low


def _power(exponent: int) -> float:
    return 2.0 ** (exponent - 127)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precisions", [*((name,) for name in KINDS), ("fp4", "quad2"), ("base", "split")])
def test_formats(precisions: tuple[str, ...], device: str) -> None:
    inputs = _inputs(device, precisions, topk=len(precisions))
    assert relative_rms(_run(inputs), reference(inputs)) <= TWO_ROUNDINGS


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_outputs_and_float32_inputs(device: str) -> None:
    """Inputs are rounded to bfloat16, to the bit."""
    inputs = _inputs(device, ("fp4",), topk=1)
    assert relative_rms(_run(inputs, torch.bfloat16), reference(inputs)) <= TWO_ROUNDINGS
    wide = replace(inputs, x=inputs.x.float() * (1 + 2.0**-12))
    assert torch.equal(_run(wide), _run(inputs))


@pytest.mark.parametrize("device", DEVICES)
def test_merged_planes_are_the_fp4_values(device: str) -> None:
    """Base and residual give what the FP4 codes they were split from give, to the bit."""
    inputs = _inputs(device, ("split",), tokens=3, topk=1)
    layer = inputs.layer
    fp4 = _fp4_slab(layer.matrices(0))
    experts = Experts(
        torch.tensor([[fp4.data_ptr() // 16, 0]], device=device),
        torch.tensor([KINDS["fp4"]], dtype=torch.int32, device=device),
        layer.experts.normalisers,
    )
    same = replace(inputs, layer=replace(layer, precisions=("fp4",), experts=experts, slabs=((fp4, None),)))
    assert torch.equal(_run(inputs), _run(same))


def _fp4_slab(matrices: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    packed = [quantize_fp4(matrix) for matrix in matrices]
    return torch.cat([part.flatten() for matrix in packed for part in matrix if part is not None])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("exponent", "x_scale"), [(4, 2.0**121), (200, 2.0**-80)])
@pytest.mark.parametrize("precision", ["fp4", "split"])
def test_extreme_scales(precision: str, exponent: int, x_scale: float, device: str) -> None:
    """Exponent bytes near both ends; inputs that make gate and up normal numbers below the clamp, outputs likewise."""
    inputs = _inputs(device, (precision,), tokens=2, topk=1, exponent=exponent)
    inputs = replace(inputs, x=(inputs.x.float() * x_scale).bfloat16())
    expected = reference(inputs)
    assert torch.isfinite(expected).all() and (expected != 0).any()
    assert relative_rms(_run(inputs), expected) <= TWO_ROUNDINGS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["quad2", "base"])
def test_rows_of_a_table_far_below_its_largest(precision: str, device: str) -> None:
    """Matrices made of rows 2^-24 of the table's largest keep their precision."""
    inputs = _inputs(device, (precision,), tokens=3, topk=1)
    layer = inputs.layer
    for matrix in split_slab(layer.slabs[0][0], PLANES[precision], layer.hidden, layer.width):
        assert matrix.scales is not None
        matrix.scales.remainder_(128)
    layer.levels[:, :128] *= 2.0**-9
    layer.levels[:, 128:] *= 2.0**15
    layer.tables[0].exponents[128:] += 24  # one table serves all three
    rows = quad2_rows(layer.levels) if precision == "quad2" else split_rows(layer.tables)
    inputs = replace(inputs, layer=replace(layer, rows=rows))
    assert relative_rms(_run(inputs), reference(inputs)) <= TWO_ROUNDINGS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["x", "byte of w1", "byte of w3", "byte of w2"])
@pytest.mark.parametrize(("precision", "byte"), [("fp4", 255), ("int2", 0x7F)])
def test_what_is_no_number_stays_none(precision: str, byte: int, where: str, device: str) -> None:
    """NaN where the definition has it, and there only: a clamp that dropped it would make a wrong number of it."""
    inputs = _inputs(device, (precision, precision), tokens=4)
    if where == "x":
        inputs.x[1, 5] = torch.nan
    else:
        names, layer = ("byte of w1", "byte of w3", "byte of w2"), inputs.layer
        matrices = split_slab(layer.slabs[0][0], PLANES[precision], layer.hidden, layer.width)
        scales = matrices[names.index(where)].scales
        assert scales is not None
        scales[7, 0] = byte
    result, expected = _run(inputs), reference(inputs)
    assert expected.isnan().any() and not expected.isnan().all()
    assert torch.equal(result.isnan(), expected.isnan())
    assert relative_rms(result.nan_to_num(0.0), expected.nan_to_num(0.0)) <= TWO_ROUNDINGS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:overflow")  # numpy's exp of a far negative gate, which is rightly infinite
def test_clamps_bite_and_zero_tokens_give_zeros(device: str) -> None:
    inputs = _inputs(device, ("fp4",), topk=1)
    loud = replace(inputs, x=(inputs.x.float() * 30).bfloat16())
    loud.x[1] = 0
    result = _run(loud)
    assert relative_rms(result, reference(loud)) <= TWO_ROUNDINGS
    assert torch.equal(result[1], torch.zeros_like(result[1]))
    for matrix in loud.layer.matrices(0)[:2]:
        assert ((loud.x.float() @ matrix.T) > LIMIT).any() and ((loud.x.float() @ matrix.T) < -LIMIT).any()


@pytest.mark.parametrize("device", DEVICES)
def test_damage_shows(device: str) -> None:
    inputs = _inputs(device, ("quad2",), topk=1)
    damaged = replace(inputs, routed=Routed(inputs.routed.picks, inputs.routed.weights * 1.01))
    assert relative_rms(_run(damaged), reference(inputs)) > 2 * TWO_ROUNDINGS


@pytest.mark.parametrize("device", DEVICES)
def test_bits_do_not_depend_on_other_picks_and_those_outside_the_call_are_left_alone(device: str) -> None:
    inputs = _inputs(device, ("fp4", "fp4"), tokens=4)
    whole = _run(inputs)
    assert torch.equal(whole, _run(inputs))
    dropped = inputs.routed.picks == 1
    part = replace(inputs, routed=Routed(torch.where(dropped, -1, inputs.routed.picks), inputs.routed.weights))
    result = _run(part)
    assert torch.equal(result[~dropped], whole[~dropped])
    assert result[dropped].isnan().all()
    assert _run(replace(part, routed=Routed(torch.full_like(part.routed.picks, -1), part.routed.weights))).isnan().all()


@pytest.mark.gpu  # numpy's order of sums depends on the tile
def test_bits_do_not_depend_on_the_tile_nor_on_the_other_tokens() -> None:
    inputs = _inputs("cuda", ("fp4", "quad2"), tokens=150)
    whole = _run(inputs)
    for config in candidates(128, CUDA)[:2] + candidates(128, CUDA)[-2:]:
        assert torch.equal(_run(inputs, config=config), whole), config
    picks, weights = (part[140:].contiguous() for part in inputs.routed)
    few = replace(
        inputs,
        x=inputs.x[140:].contiguous(),
        routed=Routed(picks, weights),
        hidden=inputs.hidden[:20],
        out=inputs.out[140:],
    )
    assert torch.equal(_run(few), whole[140:])


def test_every_number_of_picks_has_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card with 99 KiB of shared memory a block (sm_86, sm_89)."""
    monkeypatch.setattr("kernels.expert_gemm.shared_bytes", lambda device: 97280)
    for exponent in range(16):
        assert candidates(2**exponent, torch.device("cpu")), exponent


@pytest.mark.parametrize("size", [16, 64])
def test_plan(size: int) -> None:
    """Every pick of a call lies in exactly one tile, of its expert and kind."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(-1, 5, (40, 3), generator=generator)
    kinds = torch.tensor([0, 2, 1, 0, 1, 0], dtype=torch.int32)
    order, tiles = plan_tiles(picks, kinds, size)
    seen = []
    for kind, expert, first, end in tiles.tolist():
        if kind != SKIP:
            assert kind == kinds[expert] and 0 < end - first <= size
            assert (picks.flatten()[order[first:end]] == expert).all()
            seen += order[first:end].tolist()
    assert sorted(seen) == (picks.flatten() >= 0).nonzero().flatten().tolist()


def test_reference_leaves_picks_outside_at_zero() -> None:
    inputs = _inputs("cpu", ("fp4",), tokens=2, topk=1)
    outside = torch.full((2, 1), -1)
    result = expert_gemm_reference(inputs.x, outside, inputs.routed.weights, [inputs.layer.matrices(0)], LIMIT)
    assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: replace(i, x=i.x.half()), "x: .*expected torch.bfloat16 or torch.float32"),
        (lambda i: replace(i, x=i.x[:, :100].contiguous()), "multiples of 128"),
        (lambda i: replace(i, hidden=i.hidden[1:]), "hidden: .*expected \\[10, 128\\]"),
        (lambda i: replace(i, out=i.out.transpose(0, 1).contiguous().transpose(0, 1)), "out: got strides"),
        (lambda i: replace(i, routed=Routed(i.routed.picks, i.routed.weights[:, :1])), "weights: .*expected"),
        (lambda i: replace(i, routed=i.routed._replace(picks=torch.tensor(0))), "expected \\[T, K\\] and \\[E\\]"),
        (lambda i: _with_experts(i, kinds=torch.tensor(0)), "expected \\[T, K\\] and \\[E\\]"),
        (lambda i: _with_experts(i, slabs=i.layer.experts.slabs[:1]), "slabs: .*expected"),
        (lambda i: replace(i, layer=replace(i.layer, rows=i.layer.rows._replace(split_rows=i.x))), "rows.split_rows"),
        (lambda i: i, "expected CUDA"),
    ],
)
def test_wrong_inputs(change: Callable[[Inputs], Inputs], message: str) -> None:
    inputs = _inputs("cpu", ("fp4", "fp4"))
    with pytest.raises(ValueError, match=message):
        run(change(inputs))


def _with_experts(inputs: Inputs, **fields: Tensor) -> Inputs:
    return replace(inputs, layer=replace(inputs.layer, experts=inputs.layer.experts._replace(**fields)))


def test_a_kind_that_is_none_is_refused() -> None:
    inputs = _inputs("cpu", ("fp4",), topk=1)
    call = (inputs.x, inputs.routed, inputs.layer.experts, inputs.layer.rows, inputs.hidden, inputs.out)
    with pytest.raises(ValueError, match="kinds \\[-1\\]"):
        expert_gemm(*call, limit=LIMIT, kinds=(SKIP,))


def test_picks_of_few_tokens_are_disjoint() -> None:
    """A case of 48 picks reads as many experts as it counts."""
    picks = make_inputs(make_layer(("fp4",) * 8, 128, 128, torch.Generator()), 4, 2, torch.Generator()).routed.picks
    assert picks.shape == (4, 2) and picks.unique().numel() == 8


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    check_numbers(case, case.make(0, CUDA))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in cases() if case.name in VARIED], ids=lambda case: case.name)
def test_every_configuration_gives_the_same_bits(case: Case) -> None:
    inputs = case.make(0, CUDA)
    average = inputs.routed.picks.numel() // len(inputs.layer.precisions)
    configs = candidates(1 << max(0, average - 1).bit_length(), CUDA)
    first = _run(inputs, config=configs[0])
    assert all(torch.equal(_run(inputs, config=config), first) for config in configs[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases()[:5], ids=lambda case: case.name)
def test_portable_branch(case: Case) -> None:
    """The branch that the interpreter tests is within the tolerance too, at the real shape."""
    inputs = case.make(1, CUDA)
    config = {"ROWS": 32, "TOKENS": 16, "num_warps": 4, "num_stages": 1}  # float32 operands need more shared memory
    out, layer = torch.full_like(inputs.out, torch.nan), inputs.layer
    kinds = sorted({KINDS[precision] for precision in layer.precisions})
    _launch(Call(inputs.x, inputs.routed, layer.experts, layer.rows, inputs.hidden, out, LIMIT), kinds, True, config)
    assert relative_rms(out, case.reference(inputs)) <= case.tolerance


@pytest.mark.gpu
def test_slabs_in_pinned_memory() -> None:
    """Slots of the RAM tier are read over PCIe with the same result."""
    inputs = _inputs("cuda", ("fp4", "fp4"))
    pinned = [slab.cpu().pin_memory() for slab, _ in inputs.layer.slabs]
    addresses = torch.tensor([[slab.data_ptr() // 16, 0] for slab in pinned], device=CUDA)
    layer = replace(inputs.layer, experts=inputs.layer.experts._replace(slabs=addresses))
    assert torch.equal(_run(replace(inputs, layer=layer)), _run(inputs))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_public_function() -> None:
    inputs = _inputs("cuda", ("split", "base"))
    assert torch.equal(run(inputs), _run(inputs))
    assert (
        expert_gemm(
            inputs.x, inputs.routed, inputs.layer.experts, inputs.layer.rows, inputs.hidden, inputs.out, limit=LIMIT
        )
        is inputs.out
    )
