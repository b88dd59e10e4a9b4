"""The grouped expert GEMM: every format and mixtures through the interpreter at the demo's shape, every case on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cases import TWO_ROUNDINGS, Case, relative_rms
from kernels.expert_gemm import Call, Experts, Routed, _launch, candidates, expert_gemm, launch_gemm
from kernels.expert_gemm.cases import KINDS, LIMIT, Inputs, cases, make_inputs, make_layer, reference, run
from kernels.expert_gemm.plan import plan_tiles
from kernels.expert_gemm.reference import expert_gemm_reference
from kernels.expert_gemv.slabs import SKIP
from kernels.formats import quantize_fp4

PORTABLE = not torch.cuda.is_available()  # the interpreter has no inline assembly
DEVICE = torch.device("cpu" if PORTABLE else "cuda")


def _inputs(precisions: tuple[str, ...], tokens: int = 5, topk: int = 2, exponent: int | None = None) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(3)
    return make_inputs(make_layer(precisions, 256, 128, generator, exponent), tokens, topk, generator)


def _run(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Tensor:
    """The kernels' result in a poisoned output, through a poisoned scratch."""
    out = torch.full(inputs.out.shape, torch.nan, dtype=dtype, device=DEVICE)
    layer, kinds = inputs.layer, {KINDS[precision] for precision in inputs.layer.precisions}
    hidden = torch.full_like(inputs.hidden, torch.nan)
    call = Call(inputs.x, inputs.routed, layer.experts, layer.rows, hidden, out, LIMIT)
    if PORTABLE:  # few large programs: the interpreter's time goes by programs
        _launch(call, sorted(kinds), True, {"ROWS": 128, "TOKENS": 16})
        return out
    return launch_gemm(call, kinds)


@pytest.mark.parametrize("precisions", [*((name,) for name in KINDS), ("fp4", "quad2"), ("base", "split")])
def test_formats(precisions: tuple[str, ...]) -> None:
    inputs = _inputs(precisions, topk=len(precisions))
    assert relative_rms(_run(inputs), reference(inputs)) <= TWO_ROUNDINGS


def test_output_in_bfloat16() -> None:
    inputs = _inputs(("fp4",), topk=1)
    assert relative_rms(_run(inputs, torch.bfloat16), reference(inputs)) <= TWO_ROUNDINGS


def test_merged_planes_are_the_fp4_values() -> None:
    """Base and residual give what the FP4 codes they were split from give, to the bit."""
    inputs = _inputs(("split",), tokens=3, topk=1)
    layer = inputs.layer
    fp4 = _fp4_slab(layer.matrices(0))
    experts = Experts(
        torch.tensor([[fp4.data_ptr() // 16, 0]], device=DEVICE),
        torch.tensor([KINDS["fp4"]], dtype=torch.int32, device=DEVICE),
        layer.experts.normalisers,
    )
    same = replace(inputs, layer=replace(layer, precisions=("fp4",), experts=experts, slabs=((fp4, None),)))
    assert torch.equal(_run(inputs), _run(same))


def _fp4_slab(matrices: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    packed = [quantize_fp4(matrix) for matrix in matrices]
    return torch.cat([part.flatten() for matrix in packed for part in matrix if part is not None])


@pytest.mark.parametrize(("exponent", "x_scale"), [(4, 2.0**121), (200, 2.0**-80)])
@pytest.mark.parametrize("precision", ["fp4", "split"])
def test_extreme_scales(precision: str, exponent: int, x_scale: float) -> None:
    """Exponent bytes near both ends; inputs that make gate and up normal numbers below the clamp, outputs likewise."""
    inputs = _inputs((precision,), tokens=2, topk=1, exponent=exponent)
    inputs = replace(inputs, x=(inputs.x.float() * x_scale).bfloat16())
    expected = reference(inputs)
    assert torch.isfinite(expected).all() and (expected != 0).any()
    assert relative_rms(_run(inputs), expected) <= TWO_ROUNDINGS


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's exp of a far negative gate, which is rightly infinite
def test_clamps_bite_and_zero_tokens_give_zeros() -> None:
    inputs = _inputs(("fp4",), topk=1)
    loud = replace(inputs, x=(inputs.x.float() * 30).bfloat16())
    loud.x[1] = 0
    result = _run(loud)
    assert relative_rms(result, reference(loud)) <= TWO_ROUNDINGS
    assert torch.equal(result[1], torch.zeros_like(result[1]))
    first, _, _ = loud.layer.matrices(0)
    assert ((loud.x.float() @ first.T) > LIMIT).any()


def test_damage_shows() -> None:
    inputs = _inputs(("quad2",), topk=1)
    damaged = replace(inputs, routed=Routed(inputs.routed.picks, inputs.routed.weights * 1.01))
    assert relative_rms(_run(damaged), reference(inputs)) > 2 * TWO_ROUNDINGS


def test_bits_do_not_depend_on_other_picks_and_those_outside_the_call_are_left_alone() -> None:
    inputs = _inputs(("fp4", "fp4"), tokens=4)
    whole = _run(inputs)
    assert torch.equal(whole, _run(inputs))
    dropped = inputs.routed.picks == 1
    part = replace(inputs, routed=Routed(torch.where(dropped, -1, inputs.routed.picks), inputs.routed.weights))
    result = _run(part)
    assert torch.equal(result[~dropped], whole[~dropped])
    assert result[dropped].isnan().all()
    assert _run(replace(part, routed=Routed(torch.full_like(part.routed.picks, -1), part.routed.weights))).isnan().all()


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
    inputs = _inputs(("fp4",), tokens=2, topk=1)
    outside = torch.full((2, 1), -1, device=DEVICE)
    result = expert_gemm_reference(inputs.x, outside, inputs.routed.weights, [inputs.layer.matrices(0)], LIMIT)
    assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: replace(i, x=i.x.half()), "x .*expected torch.float32"),
        (lambda i: replace(i, x=i.x[:, :100].contiguous()), "multiples of 128"),
        (lambda i: replace(i, hidden=i.hidden[1:]), "hidden .*expected torch.bfloat16 \\[10, 128\\]"),
        (lambda i: replace(i, out=i.out.transpose(0, 1).contiguous().transpose(0, 1)), "out not contiguous"),
        (lambda i: replace(i, routed=Routed(i.routed.picks, i.routed.weights[:, :1])), "weights .*expected"),
        (lambda i: i, "expected CUDA"),
    ],
)
def test_wrong_inputs(change: Callable[[Inputs], Inputs], message: str) -> None:
    inputs = _inputs(("fp4", "fp4"))
    if message == "expected CUDA" and not PORTABLE:
        pytest.skip("a GPU is there")
    with pytest.raises(ValueError, match=message):
        run(change(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    inputs = case.make(0, DEVICE)
    inputs.out.fill_(torch.nan)
    first = case.run(inputs).clone()
    assert relative_rms(first, case.reference(inputs)) <= case.tolerance
    assert torch.equal(case.run(inputs), first)
    average = inputs.routed.picks.numel() // len(inputs.layer.precisions)
    for config in candidates(1 << max(0, average - 1).bit_length(), DEVICE):
        assert torch.equal(_with(inputs, config, portable=False), first)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases()[:5], ids=lambda case: case.name)
def test_portable_branch(case: Case) -> None:
    """The branch that the interpreter tests is within the tolerance too, at the real shape."""
    inputs = case.make(1, DEVICE)
    config = {"ROWS": 32, "TOKENS": 16, "num_warps": 4, "num_stages": 1}  # float32 operands need more shared memory
    assert relative_rms(_with(inputs, config, portable=True), case.reference(inputs)) <= case.tolerance


def _with(inputs: Inputs, config: dict[str, int], portable: bool) -> Tensor:
    out, layer = torch.full_like(inputs.out, torch.nan), inputs.layer
    kinds = sorted({KINDS[precision] for precision in layer.precisions})
    call = Call(inputs.x, inputs.routed, layer.experts, layer.rows, inputs.hidden, out, LIMIT)
    _launch(call, kinds, portable, config)
    return out


@pytest.mark.gpu
def test_slabs_in_pinned_memory() -> None:
    """Slots of the RAM tier are read over PCIe with the same result."""
    inputs = _inputs(("fp4", "fp4"))
    pinned = [slab.cpu().pin_memory() for slab, _ in inputs.layer.slabs]
    addresses = torch.tensor([[slab.data_ptr() // 16, 0] for slab in pinned], device=DEVICE)
    layer = replace(inputs.layer, experts=inputs.layer.experts._replace(slabs=addresses))
    assert torch.equal(_run(replace(inputs, layer=layer)), _run(inputs))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_public_function() -> None:
    inputs = _inputs(("split", "base"))
    assert torch.equal(run(inputs), _run(inputs))
    assert (
        expert_gemm(
            inputs.x, inputs.routed, inputs.layer.experts, inputs.layer.rows, inputs.hidden, inputs.out, limit=LIMIT
        )
        is inputs.out
    )
