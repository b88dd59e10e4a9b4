"""The grouped expert GEMV against its definition: interpreted here in plain Triton, compiled with inline assembly on a card."""

from __future__ import annotations

import pytest
import torch
from on_a_card import check_case
from ptx import sum_of_products
from torch import Tensor
from triton.language import constexpr

from kernels import tuning
from kernels.cases import ONE_ROUNDING, TWO_ROUNDINGS, Case, relative_rms
from kernels.expert_gemv import CONFIGS, add_picks, decode, expert_gemv, launch, launch_add
from kernels.expert_gemv.cases import Inputs, cases, make, reference, run
from kernels.expert_gemv.reference import add_picks_reference
from kernels.expert_gemv.slabs import SKIP, split_rows
from kernels.formats import E2M1_VALUES, PLANES, split_slab
from kernels.split import ORDERED_CODES, SplitTable, merge_split

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
ONE_CODE = [("fp4", "quad2"), ("int2", "fp4"), ("split", "base")]


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """High tiles where the interpreter runs: it takes its time by the operation, not by the element."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("kernels.expert_gemv.choose", lambda *_: {"ROWS": 64, "TILES": 1})


def interpret(inputs: Inputs) -> Tensor:
    inputs.out.fill_(torch.nan)
    return launch(inputs.x, inputs.picks, inputs.rows, inputs.limit, inputs.workspace, inputs.out, fast=False).clone()


def test_the_assembly_makes_every_weight_exactly() -> None:
    """Of random words, each weight by an activation of 1: the instructions themselves, run one by one."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(2**32, (8, 4), generator=generator).tolist()
    for group in words:
        _check_decoders(group, torch.randn(4, generator=generator).half())


@pytest.mark.parametrize(
    ("formats", "hidden", "width"),
    [*((formats, 96, 160) for formats in ONE_CODE), (("fp4", "quad2"), 64, 32), (("split",), 1120, 32)],
)
def test_equals_the_definition(formats: tuple[str, ...], hidden: int, width: int) -> None:
    inputs = make(1, CPU, formats, hidden=hidden, width=width, dtype=torch.float32)
    assert relative_rms(interpret(inputs), reference(inputs)) <= ONE_ROUNDING


def test_several_tiles_in_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(1, CPU, ("fp4",), hidden=96, width=64, dtype=torch.float32)
    expected = interpret(inputs)
    monkeypatch.setattr("kernels.expert_gemv.choose", lambda *_: {"ROWS": 32, "TILES": 2})
    assert relative_rms(interpret(inputs), expected) <= 1e-6


def test_both_planes_of_split_give_what_fp4_gives() -> None:
    inputs = make(2, CPU, ("split",), hidden=96, width=64, dtype=torch.float32)
    merged = make(2, CPU, ("fp4",), hidden=96, width=64, dtype=torch.float32)
    merged.slabs[0]["fp4"].copy_(_as_fp4(inputs))
    merged.x.copy_(inputs.x)
    merged.picks.weights.copy_(inputs.picks.weights)
    assert relative_rms(interpret(inputs), interpret(merged)) <= ONE_ROUNDING


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-12, 2.0**20, 2.0**60])
def test_activations_of_any_scale(scale: float) -> None:
    inputs = make(3, CPU, ("fp4", "quad2"), hidden=64, width=64, dtype=torch.float32)
    inputs.x.mul_(scale)
    inputs.limit = 10.0 * max(scale, 1.0)  # else all is clamped
    assert relative_rms(interpret(inputs), reference(inputs)) <= TWO_ROUNDINGS


def test_one_group_far_larger_than_the_others() -> None:
    inputs = make(4, CPU, ("fp4", "quad2"), hidden=128, width=64, dtype=torch.float32)
    inputs.x[:, 32:64] *= 2.0**-24
    inputs.x[:, 64:96] = 0.0
    assert relative_rms(interpret(inputs), reference(inputs)) <= ONE_ROUNDING


def test_the_clamp_bites_on_both_sides() -> None:
    inputs = make(5, CPU, ("fp4", "fp4"), hidden=96, width=64, dtype=torch.float32)
    inputs.limit = 0.25
    assert relative_rms(interpret(inputs), reference(inputs)) <= ONE_ROUNDING
    unclamped = reference(make(5, CPU, ("fp4", "fp4"), hidden=96, width=64, dtype=torch.float32))
    assert relative_rms(interpret(inputs), unclamped) > 0.1


def test_zero_activations_give_zeros() -> None:
    inputs = make(6, CPU, ("fp4", "quad2"), hidden=64, width=32, dtype=torch.float32)
    inputs.x.zero_()
    assert torch.equal(interpret(inputs), torch.zeros_like(inputs.out))


@pytest.mark.parametrize("name", ["x", "weights", "slab"])
def test_damage_of_one_per_cent_is_seen(name: str) -> None:
    inputs = make(7, CPU, ("fp4", "quad2"), hidden=96, width=64, dtype=torch.float32)
    expected = reference(inputs)
    if name == "x":
        inputs.x.mul_(1.01)
    elif name == "weights":
        inputs.picks.weights.mul_(1.01)
    else:
        slab = inputs.slabs[0]["fp4"]
        slab[: slab.numel() // 100].bitwise_xor_(0x77)
    assert relative_rms(interpret(inputs), expected) > TWO_ROUNDINGS


def test_a_pick_does_not_depend_on_its_company() -> None:
    tokens = (1, 0, 1)
    inputs = make(8, CPU, ("fp4", "quad2", "quad2"), hidden=64, width=32, tokens=tokens, dtype=torch.float32)
    together = interpret(inputs)
    assert torch.equal(interpret(inputs), together)
    for number in range(len(tokens)):
        alone = inputs.picks._make(part[number : number + 1].contiguous() for part in inputs.picks)
        out = torch.full((1, 64), torch.nan)
        launch(inputs.x, alone, inputs.rows, inputs.limit, inputs.workspace, out, fast=False)
        assert torch.equal(out[0], together[number]), number


def test_a_skipped_pick_keeps_its_row() -> None:
    inputs = make(9, CPU, ("fp4", "fp4"), hidden=64, width=32, dtype=torch.float32)
    inputs.picks.kinds[0] = SKIP
    out = interpret(inputs)
    assert out[0].isnan().all() and relative_rms(out[1], reference(inputs)[1]) <= ONE_ROUNDING


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
        ({"out": torch.zeros(2, 64, dtype=torch.bfloat16)}, "out is"),
        ({"x": torch.zeros(1, 48)}, "multiples of 32"),
        ({"x": torch.zeros(5, 64)}, "5 tokens"),
        ({}, "expected a CUDA device"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], found: str) -> None:
    inputs = make(10, CPU, ("fp4", "fp4"), hidden=64, width=32, dtype=torch.float32)
    call = {"x": inputs.x, "out": inputs.out} | change
    with pytest.raises(ValueError, match=found):
        expert_gemv(call["x"], inputs.picks, inputs.rows, inputs.limit, inputs.workspace, call["out"])


def test_a_damaged_table_is_refused() -> None:
    table = SplitTable(
        torch.full((256,), 255, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8), torch.zeros(256, 4).half()
    )
    with pytest.raises(ValueError, match="exponent byte 255"):
        split_rows((table, table, table))


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    check_case(case)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", ONE_CODE)
@pytest.mark.parametrize(("hidden", "width"), [(96, 160), (1120, 32), (4096, 2048)])
def test_assembly_equals_plain_triton(formats: tuple[str, ...], hidden: int, width: int) -> None:
    inputs = make(11, CUDA, formats, hidden=hidden, width=width)
    expected, fast = reference(inputs), run(inputs).clone()
    plain = launch(inputs.x, inputs.picks, inputs.rows, inputs.limit, inputs.workspace, inputs.out, fast=False)
    assert relative_rms(fast, expected) <= TWO_ROUNDINGS
    assert relative_rms(fast, plain) <= TWO_ROUNDINGS


@pytest.mark.gpu
@pytest.mark.parametrize("formats", ONE_CODE)
def test_assembly_makes_the_same_weights(formats: tuple[str, ...]) -> None:
    """With one activation of 1 and the others 0, no sum rounds: w1 and w3 come out bit for bit, whatever decodes them."""
    inputs = make(12, CUDA, formats, hidden=64, width=64)
    for column in range(64):
        inputs.x.zero_()[0, column] = 1.0
        run(inputs)
        fast = inputs.workspace.hidden.clone()
        launch(inputs.x, inputs.picks, inputs.rows, inputs.limit, inputs.workspace, inputs.out, fast=False)
        assert torch.equal(inputs.workspace.hidden, fast), column


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


@pytest.mark.gpu
def test_an_untuned_shape_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_table", lambda card: {})
    inputs = make(17, CUDA, ("fp4",), hidden=256, width=128)
    with pytest.raises(RuntimeError, match="not tuned yet"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(inputs)


def _as_fp4(inputs: Inputs) -> Tensor:
    """The fp4 slab that the pick's base and residual are."""
    hidden, width = inputs.x.shape[1], inputs.workspace.hidden.shape[1]
    slab = torch.zeros(PLANES["fp4"].slab_bytes(hidden, width), dtype=torch.uint8)
    parts = (split_slab(inputs.slabs[0][name], PLANES[name], hidden, width) for name in ("base", "residual"))
    for target, base, residual, table in zip(
        split_slab(slab, PLANES["fp4"], hidden, width), *parts, inputs.tables, strict=True
    ):
        merged = merge_split(base, residual, table)
        assert target.scales is not None and merged.scales is not None
        target.codes.copy_(merged.codes)
        target.scales.copy_(merged.scales)
    return slab


def _check_decoders(words: list[int], levels: Tensor) -> None:
    level_bytes = levels.view(torch.uint8).tolist()
    row = [sum(byte << 8 * place for place, byte in enumerate(level_bytes[half::2])) for half in range(2)]
    ordered = [E2M1_VALUES[code] for code in ORDERED_CODES]
    for k in range(32):
        pair = {number: (0x3C00 << 16 * (k % 8 // 4)) * (number == k // 8 * 4 + k % 4) for number in range(16)}
        fp4 = _run(decode.FP4_PTX, words, pair)
        assert fp4 * decode.FP4_SCALE.value == E2M1_VALUES[words[k // 8] >> k % 8 * 4 & 15], k
        base, residual = (words[plane + k // 16] >> k % 16 * 2 & 3 for plane in (0, 2))
        assert _run(decode.TWO_BIT_PTX, words[:2] + row, pair) == levels[base], k
        for partition in range(4):
            if base != partition or residual != 3:
                split = _run(decode.SPLIT_PTX, words + _cells(partition), pair)
                assert split * decode.SPLIT_SCALE.value == ordered[4 * base - (base > partition) + residual], k


def _cells(partition: int) -> list[int]:
    early = (None, decode.EARLY_1, decode.EARLY_2, decode.EARLY_3)
    late = (decode.CELL_0, decode.CELL_1, decode.CELL_2, decode.CELL_3)
    return [(early[cell] if cell > partition else late[cell]).value for cell in range(4)]  # type: ignore[union-attr]


def _run(assembly: constexpr, words: list[int], pairs: dict[int, int]) -> float:
    operands = dict(enumerate(words, 1)) | {len(words) + 1 + number: word for number, word in pairs.items()}
    return sum_of_products(assembly.value, operands)
