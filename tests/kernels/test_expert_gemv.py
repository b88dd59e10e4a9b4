"""The grouped expert GEMV against its definition: its plain twin interpreted here, tensor cores on a card."""

from __future__ import annotations

import pytest
import torch
from on_a_card import check_case
from torch import Tensor

from kernels.cases import Case, relative_rms
from kernels.expert_gemv import CONFIGS, Workspace, add_picks, expert_gemv, launch, launch_add
from kernels.expert_gemv.cases import LEVELS, Inputs, cases, make, reference, run
from kernels.expert_gemv.reference import add_picks_reference
from kernels.expert_gemv.slabs import SKIP, quad2_rows, split_rows
from kernels.formats import PLANES, split_slab
from kernels.split import merge_split

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
ONE_CODE = [("fp4", "quad2"), ("int2", "fp4"), ("split", "base")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def one_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tuned here."""
    monkeypatch.setattr("kernels.expert_gemv.choose", lambda *_: CONFIGS[0])


def compute(inputs: Inputs) -> Tensor:
    """By the kernels: those for this card, or interpreted."""
    inputs.out.fill_(torch.nan)
    portable = not inputs.x.is_cuda
    call = (inputs.x, inputs.picks, inputs.rows, inputs.limit, inputs.workspace, inputs.out)
    return launch(*call, portable=portable).clone()


def small(
    seed: int, device: str, formats: tuple[str, ...], hidden: int = 64, width: int = 32, **options: object
) -> Inputs:
    return make(seed, torch.device(device), formats, hidden=hidden, width=width, dtype=torch.float32, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("formats", "hidden", "width"),
    [
        *((formats, 96, 160) for formats in ONE_CODE),
        (("fp4", "quad2"), 64, 32),
        (("split",), 1120, 32),
        (("quad2",), 1056, 32),
    ],
)
def test_equals_the_definition(formats: tuple[str, ...], hidden: int, width: int) -> None:
    inputs = small(1, "cpu", formats, hidden, width)
    assert relative_rms(compute(inputs), reference(inputs)) <= LEVELS


@pytest.mark.parametrize("device", DEVICES)
def test_both_planes_of_split_give_what_fp4_gives(device: str) -> None:
    inputs, merged = small(2, device, ("split",), 96, 64), small(2, device, ("fp4",), 96, 64)
    merged.slabs[0]["fp4"].copy_(_as_fp4(inputs))
    merged.x.copy_(inputs.x)
    merged.picks.weights.copy_(inputs.picks.weights)
    assert torch.equal(compute(inputs), compute(merged))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [2.0**-48, 2.0**-12, 2.0**60])
def test_activations_of_any_scale(scale: float, device: str) -> None:
    inputs = small(3, device, ("fp4", "quad2"))
    inputs.x.mul_(scale)
    inputs.limit = 10.0 * max(scale, 1.0)  # else all is clamped
    assert relative_rms(compute(inputs), reference(inputs)) <= LEVELS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("byte", "scale"), [(250, 2.0**-122), (4, 2.0**119)])
def test_weights_of_any_scale(byte: int, scale: float, device: str) -> None:
    """Activations and weights far from 1, products near it."""
    inputs = small(3, device, ("fp4",))
    w1, w3, _ = split_slab(inputs.slabs[0]["fp4"], PLANES["fp4"], 64, 32)
    assert w1.scales is not None and w3.scales is not None
    w1.scales.fill_(byte)
    w3.scales.fill_(byte)
    inputs.x.mul_(scale)
    assert relative_rms(compute(inputs), reference(inputs)) <= LEVELS


@pytest.mark.parametrize("device", DEVICES)
def test_one_group_far_larger_than_the_others(device: str) -> None:
    inputs = small(4, device, ("fp4", "quad2"), 128, 64)
    inputs.x[:, 32:64] *= 2.0**-24
    inputs.x[:, 64:96] = 0.0
    assert relative_rms(compute(inputs), reference(inputs)) <= LEVELS


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_no_group_names_does_not_matter(device: str) -> None:
    """Past a row's end the kernels read row 0, as if of weights."""
    inputs = small(4, device, ("quad2",), 96, 64)
    for matrix in split_slab(inputs.slabs[0]["quad2"], PLANES["quad2"], 96, 64):
        assert matrix.scales is not None
        matrix.scales.clamp_(min=1)
    expected = compute(inputs)
    inputs.levels[:, 0] = torch.nan
    inputs.rows = quad2_rows(inputs.levels)
    assert torch.equal(compute(inputs), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exponent", [60, 9])
def test_rows_of_a_table_far_below_its_largest(exponent: int, device: str) -> None:
    """A matrix made of small rows alone keeps its precision, whatever other rows the table has."""
    inputs = small(4, device, ("base",), 96, 64)
    for table in inputs.tables:
        table.exponents[:200] = exponent
    for matrix in split_slab(inputs.slabs[0]["base"], PLANES["base"], 96, 64):
        assert matrix.scales is not None
        matrix.scales.remainder_(200)
    inputs.rows = split_rows(inputs.tables)  # type: ignore[arg-type]
    inputs.x.mul_(2.0 ** (120 - exponent))
    inputs.picks.weights.mul_(2.0 ** (120 - exponent))
    assert relative_rms(compute(inputs), reference(inputs)) <= LEVELS


@pytest.mark.parametrize("device", DEVICES)
def test_the_clamp_bites_on_both_sides(device: str) -> None:
    inputs = small(5, device, ("fp4", "fp4"), 96, 64)
    unclamped = reference(inputs)
    inputs.limit = 0.25
    result = compute(inputs)
    assert relative_rms(result, reference(inputs)) <= LEVELS
    assert relative_rms(result, unclamped) > 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_zero_activations_give_zeros(device: str) -> None:
    inputs = small(6, device, ("fp4", "quad2"))
    inputs.x.zero_()
    assert torch.equal(compute(inputs), torch.zeros_like(inputs.out))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["x", "byte of w1", "byte of w2"])
def test_what_is_no_number_stays_none(where: str, device: str) -> None:
    """A clamp that dropped it would make a wrong number of it."""
    inputs = small(6, device, ("fp4", "fp4"))
    if where == "x":
        inputs.x[0, 5] = torch.nan
    else:
        matrix = split_slab(inputs.slabs[0]["fp4"], PLANES["fp4"], 64, 32)[0 if where == "byte of w1" else 2]
        assert matrix.scales is not None
        matrix.scales[7, 0] = 255
    assert torch.equal(compute(inputs).isnan(), reference(inputs).isnan())
    assert inputs.out.isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["x", "weights", "slab"])
def test_damage_of_one_per_cent_is_seen(name: str, device: str) -> None:
    inputs = small(7, device, ("fp4", "quad2"), 96, 64)
    expected = reference(inputs)
    if name == "x":
        inputs.x.mul_(1.01)
    elif name == "weights":
        inputs.picks.weights.mul_(1.01)
    else:
        slab = inputs.slabs[0]["fp4"]
        slab[: slab.numel() // 100].bitwise_xor_(0x77)
    assert relative_rms(compute(inputs), expected) > LEVELS


@pytest.mark.parametrize("device", DEVICES)
def test_a_pick_does_not_depend_on_its_company(device: str) -> None:
    tokens = (1, 0, 1)
    inputs = small(8, device, ("fp4", "quad2", "quad2"), tokens=tokens)
    together = compute(inputs)
    assert torch.equal(compute(inputs), together)
    for number in range(len(tokens)):
        alone = inputs.picks._make(part[number : number + 1].contiguous() for part in inputs.picks)
        out = torch.full((1, 64), torch.nan, device=device)
        launch(inputs.x, alone, inputs.rows, inputs.limit, inputs.workspace, out, portable=device == "cpu")
        assert torch.equal(out[0], together[number]), number


@pytest.mark.parametrize("device", DEVICES)
def test_a_skipped_pick_keeps_its_row(device: str) -> None:
    inputs = small(9, device, ("fp4", "fp4"))
    expected = reference(inputs)
    inputs.picks.kinds[0] = SKIP
    out = compute(inputs)
    assert out[0].isnan().all() and relative_rms(out[1], expected[1]) <= LEVELS


def test_the_sum_is_in_rank_order() -> None:
    generator = torch.Generator().manual_seed(1)
    picks, shared = torch.randn(3, 6, 100, generator=generator), torch.randn(3, 100, generator=generator)
    out = torch.full((3, 100), torch.nan)
    expected = add_picks_reference(picks, shared, torch.float32)
    assert torch.equal(launch_add(picks, shared, out), expected)
    assert torch.equal(add_picks(picks, shared, out.fill_(torch.nan)), expected)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"out": torch.zeros(2, 64, dtype=torch.bfloat16)}, "out: got torch.bfloat16"),
        ({"out": torch.zeros(64)}, "expected .T, D. of 16- or 32-bit floats"),
        ({"x": torch.zeros(1, 64, dtype=torch.float64)}, "torch.float64"),
        ({"x": torch.zeros(1, 48)}, "multiple of 32"),
        ({"x": torch.zeros(5, 64)}, "5 tokens"),
        ({"x": torch.zeros(1, 128)[:, ::2]}, "x: got strides"),
        ({"slabs": torch.zeros(2, 2, dtype=torch.int64).T}, "slabs: got strides"),
        ({"normalisers": torch.ones(1, 3).expand(2, 3)}, "normalisers: got strides"),
        ({"kinds": torch.zeros(2, dtype=torch.int64)}, "kinds: got torch.int64"),
        ({}, "expected a CUDA device"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], found: str) -> None:
    inputs = small(10, "cpu", ("fp4", "fp4"))
    call = {"x": inputs.x, "out": inputs.out} | change
    picks = inputs.picks._replace(**{name: value for name, value in change.items() if name in inputs.picks._fields})
    with pytest.raises(ValueError, match=found):
        expert_gemv(call["x"], picks, inputs.rows, inputs.limit, inputs.workspace, call["out"])


def test_a_sum_of_what_does_not_fit_is_refused() -> None:
    picks, shared = torch.zeros(1, 2, 8), torch.zeros(1, 8)
    for bad in (picks[0], picks[:, :0], picks.transpose(1, 2), picks.double()):
        with pytest.raises(ValueError, match="add_picks: "):
            add_picks(bad, shared, torch.empty(1, 8))


def test_an_expert_that_is_no_whole_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="vectors of 48, expected a multiple of 32"):
        Workspace.allocate(1, 1, 64, 48, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    check_case(case)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "width"), [(96, 64), (1120, 32), (1024, 512)])
@pytest.mark.parametrize("formats", ONE_CODE)
def test_tensor_cores_equal_plain_triton(formats: tuple[str, ...], hidden: int, width: int) -> None:
    """The same whole numbers, scaled and added up in the same order but for the last four lanes and warps."""
    inputs = make(11, CUDA, formats, hidden=hidden, width=width)
    call = (inputs.x, inputs.picks, inputs.rows, inputs.limit, inputs.workspace, inputs.out)
    fast = run(inputs).clone()
    assert relative_rms(fast, reference(inputs)) <= LEVELS
    assert relative_rms(fast, launch(*call, portable=True)) <= 1e-5
    column = hidden - 3  # with one activation of 1 and the others 0 no sum rounds: w1 and w3 come out bit for bit
    inputs.x.zero_()[0, column] = 1.0
    run(inputs)
    hidden_blocks = inputs.workspace.hidden[0].clone()
    launch(*call, portable=True)
    assert torch.equal(inputs.workspace.hidden[0], hidden_blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", ONE_CODE)  # one compilation serves all: the kind is read in the kernel
def test_every_configuration_gives_the_same_bits(formats: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, results = make(13, CUDA, formats), []
    for config in CONFIGS:
        monkeypatch.setattr("kernels.expert_gemv.choose", lambda *_, config=config: config)
        results.append(run(inputs).clone())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.gpu
def test_a_slot_beyond_two_gib() -> None:
    inputs = make(16, CUDA, ("fp4",), hidden=1024, width=512)
    expected = run(inputs).clone()
    slab = inputs.slabs[0]["fp4"]
    pool = torch.zeros(2**31 + 2**28, dtype=torch.uint8, device=CUDA)
    pool[-slab.numel() :].copy_(slab)
    inputs.picks.slabs[0, 0] = pool[-slab.numel() :].data_ptr() // 16
    slab.zero_()
    assert torch.equal(run(inputs), expected)


def _as_fp4(inputs: Inputs) -> Tensor:
    """The fp4 slab that the pick's base and residual are."""
    *_, hidden, width = inputs.workspace.sizes
    slab = torch.zeros(PLANES["fp4"].slab_bytes(hidden, width), dtype=torch.uint8, device=inputs.x.device)
    parts = (split_slab(inputs.slabs[0][name], PLANES[name], hidden, width) for name in ("base", "residual"))
    for target, base, residual, table in zip(
        split_slab(slab, PLANES["fp4"], hidden, width), *parts, inputs.tables, strict=True
    ):
        merged = merge_split(base, residual, table)
        assert target.scales is not None and merged.scales is not None
        target.codes.copy_(merged.codes)
        target.scales.copy_(merged.scales)
    return slab
