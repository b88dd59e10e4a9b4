"""A layer's dense part: the definitions in the layer's order here, every kernel at full size, eager and captured, on a card.

The kernels in the interpreter, a layer of each kind on demo weights: tests/end_to_end/test_kernels_demo.py.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from on_a_card import num_allocations
from torch import Tensor

from kernels.cases import Case, relative_rms
from kernels.dense_layer import Buffers, DenseLayer, stack
from kernels.dense_layer.cases import CHAIN, Inputs, Shape, cases, make, read_bytes, run
from kernels.dense_layer.reference import Results, dense_layer_reference, in_float32
from kernels.formats import Matrix, dequantize_fp8_block, quantize_fp8_block
from kernels.router import Picks
from kernels.router.reference import router_reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="add_picks on a CPU needs the interpreter")
SMALL = Shape(hidden=256, q_lora_rank=128, groups=8, o_lora_rank=128, width=128, experts=19, vocab=50)
KINDS = [(0, 256, 200), (4, 64, 61), (128, 512, 400)]  # ratio, context, position
# Of the values on the way; SwiGLU multiplies two values whose errors are one, the scores' softplus is flatter than its input.
TOLERANCES = {"attended": CHAIN, "x": CHAIN, "scores": CHAIN / 2, "shared": 2 * CHAIN, "streams": CHAIN}


def small(ratio: int, context: int, position: int, seed: int = 0) -> Inputs:
    return make(ratio, context, position, seed, CPU, SMALL, width=128, index_heads=16, index_topk=8)


def expected(inputs: Inputs) -> Results:
    layer = inputs.layer
    given = (inputs.given, inputs.position, inputs.token_ids, inputs.outputs)
    return dense_layer_reference(layer.weights, layer.memory, *given)


def found(inputs: Inputs) -> dict[str, Tensor]:
    """Results of a run by their names in the definition's."""
    buffers = inputs.layer.buffers
    values = {"attended": buffers.attended, "x": buffers.mix.mixed, "scores": buffers.scores, "shared": buffers.shared}
    return {"streams": run(inputs), **values, "experts": buffers.picks.experts, "route_weights": buffers.picks.weights}


def poison(inputs: Inputs) -> None:
    buffers = inputs.layer.buffers
    for field in fields(buffers):
        part = getattr(buffers, field.name)
        for tensor in part if isinstance(part, tuple) else (part,):
            if isinstance(tensor, Tensor):
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


@INTERPRETED
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("ratio", "context", "position"), KINDS)
def test_float32_is_the_definition(ratio: int, context: int, position: int, seed: int) -> None:
    """Nothing is rounded then, so that the two agree to the last digits; memory too."""
    inputs = small(ratio, context, position, seed)
    layer, theirs = inputs.layer, expected(inputs)
    memory = in_float32(layer.memory)
    buffers = Buffers.allocate([(layer.weights, memory)], torch.float32)
    inputs = replace(inputs, layer=DenseLayer(layer.weights, memory, buffers))
    poison(inputs)
    ours = found(inputs)
    for name in TOLERANCES:
        assert relative_rms(ours[name], getattr(theirs, name)) <= 1e-6, name
    assert torch.equal(ours["experts"], theirs.experts)
    assert torch.allclose(ours["route_weights"], theirs.route_weights)


@INTERPRETED
@pytest.mark.parametrize(("ratio", "context", "position"), KINDS)
def test_rounding_stays_within_the_bound(ratio: int, context: int, position: int) -> None:
    """The same roundings as the kernels', by torch: what the bound was measured with."""
    inputs = small(ratio, context, position)
    theirs = expected(inputs)
    poison(inputs)
    ours = found(inputs)
    for name, tolerance in TOLERANCES.items():
        assert relative_rms(ours[name], getattr(theirs, name)) <= tolerance, name


@INTERPRETED
@pytest.mark.parametrize("name", ["ffn_norm", "wo_b", "rows", "outputs"])
def test_damage_is_seen(name: str) -> None:
    """A norm by 1 %, the last bit of an eighth of a matrix, another choice of entries, the experts' outputs by 5 %."""
    inputs = small(4, 64, 61)
    theirs = expected(inputs)
    if name == "outputs":
        inputs.outputs.mul_(1.05)
    elif name == "wo_b":
        codes = inputs.layer.weights.wo_b.codes.view(torch.uint8)
        codes[:, ::8] ^= 1
    elif name == "rows":
        assert inputs.layer.weights.rows is not None
        inputs.layer.weights.rows.neg_()
    else:
        inputs.layer.weights.ffn_norm.mul_(1.01)
    ours = found(inputs)
    assert any(relative_rms(ours[key], getattr(theirs, key)) > bound for key, bound in TOLERANCES.items())


@INTERPRETED
def test_layers_share_buffers() -> None:
    """Three layers of different kinds in one set of buffers give what each gives in its own."""
    inputs = [small(*kind) for kind in KINDS]
    shared = Buffers.allocate([(each.layer.weights, each.layer.memory) for each in inputs], torch.bfloat16)
    alone = [run(each).clone() for each in inputs]
    together = [run(replace(each, layer=replace(each.layer, buffers=shared))) for each in inputs]
    assert all(map(torch.equal, alone, together))


def test_stacked_matrices_keep_their_values() -> None:
    matrices = [quantize_fp8_block(torch.randn(rows, 256) * scale) for rows, scale in ((128, 1.0), (384, 100.0))]
    stacked = stack(*matrices)
    assert torch.equal(dequantize_fp8_block(stacked), torch.cat([dequantize_fp8_block(each) for each in matrices]))


@pytest.mark.parametrize(("ratio", "context", "position"), KINDS)
def test_the_bytes_are_those_of_the_weights(ratio: int, context: int, position: int) -> None:
    """And of the state, 33 kB at most here; norms and biases, 2 kB, are not counted."""
    inputs = small(ratio, context, position)
    weights = inputs.layer.weights
    parts = [getattr(weights, field.name) for field in fields(weights)]
    large = [part[0] if isinstance(part, Matrix) else part for part in (*parts[:10], *parts[11:])]
    tensors = [part[0] if isinstance(part, tuple) else part for part in (*large, weights.router.weight)]
    held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
    assert held <= read_bytes(SMALL, inputs.layer.memory, position) + 2000 <= held + 36_000


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    """Every value on the way, picks that follow from the scores, the same bits from run to run, and nothing allocated."""
    inputs = case.make(0, CUDA)
    run(inputs)  # tunes, which runs kernels more than once
    theirs = expected(inputs)
    poison(inputs)
    ours = {name: value.clone() for name, value in found(inputs).items()}
    for name, tolerance in TOLERANCES.items():
        assert relative_rms(ours[name], getattr(theirs, name)) <= tolerance, name
    _, bias, table, topk, scaling = inputs.layer.weights.router
    experts, route_weights = router_reference(ours["scores"], bias, table, inputs.token_ids, topk, scaling)
    assert torch.equal(ours["experts"], experts)
    assert torch.allclose(ours["route_weights"], route_weights, rtol=1e-5)
    allocated = num_allocations()
    again = found(inputs)
    assert num_allocations() == allocated
    assert all(torch.equal(value, ours[name]) for name, value in again.items())


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_graph(case: Case) -> None:
    """A layer captured once, at other positions and with other streams and tokens, picks in pinned memory too."""
    inputs = case.make(0, CUDA)
    layer = inputs.layer
    host = Picks(torch.empty(1, 6, dtype=torch.int64).pin_memory(), torch.empty(1, 6).pin_memory())

    def step() -> Tensor:
        inputs.streams.copy_(inputs.given)
        layer.before_experts(inputs.streams, inputs.position, inputs.token_ids, host)
        return layer.after_experts(inputs.streams, inputs.outputs)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(1, 4):
        inputs.position.sub_(number)
        inputs.token_ids.add_(number)
        inputs.given.normal_(generator=torch.Generator(CUDA).manual_seed(number))
        inputs.streams.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        replayed, picks = inputs.streams.clone(), layer.buffers.picks
        assert torch.equal(host.experts, picks.experts.cpu()) and torch.equal(host.weights, picks.weights.cpu())
        assert torch.equal(step(), replayed)


@pytest.mark.gpu
def test_the_side_stream_changes_nothing() -> None:
    inputs = cases()[1].make(0, CUDA)
    layer = inputs.layer
    alone = replace(inputs, layer=replace(layer, buffers=replace(layer.buffers, side=None)))
    first = run(alone).clone()
    assert all(torch.equal(run(inputs), first) for _ in range(20))
