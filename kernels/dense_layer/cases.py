"""A layer of each kind at V4-Flash's shapes, weights random: window and hash table, ratio 4, ratio 128."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cases import Case
from kernels.decode_attention.cases import make_layer
from kernels.decode_attention.layer import Layer
from kernels.dense_layer import Buffers, DenseLayer, LayerWeights, stack
from kernels.dense_layer.reference import dense_layer_reference
from kernels.formats import BLOCK_SIZE, Matrix
from kernels.fp8_linear.cases import make_matrix
from kernels.hyper_connections import MIXING_ROWS, Mixer
from kernels.hyper_connections.reference import pre_reference
from kernels.norm.reference import rms_norm_reference
from kernels.router import RouterWeights

LIMIT, SCALING, VOCAB = 10.0, 1.5, 129_280

# A value on the longest way is rounded to bfloat16 eight times: the attention's input, q_rank, queries, softmax weights, heads,
# low rank, the experts' input and the shared expert's hidden. Each rounding is 1.7e-3 of a Gaussian's RMS, they are independent,
# products of random matrices pass them on unchanged, and SwiGLU (1.5 times) is a part of the result: sqrt(8) * 1.7e-3 = 4.8e-3.
# The definitions with these roundings on a CPU (the public functions there): 3.6e-3 to 4.1e-3.
CHAIN = 5e-3


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model that the layer's memory does not tell."""

    hidden: int = 4096
    q_lora_rank: int = 1024
    groups: int = 8
    o_lora_rank: int = 1024
    width: int = 2048
    experts: int = 256
    topk: int = 6
    vocab: int = VOCAB


@dataclass(frozen=True, slots=True)
class Inputs:
    """One token in one layer. `given` are the streams before it, `streams` where the layer works."""

    layer: DenseLayer
    given: Tensor
    streams: Tensor
    position: Tensor
    token_ids: Tensor
    outputs: Tensor


def cases() -> list[Case]:
    """Every launch of a layer but the experts', at positions that complete no window."""
    return [
        _case("window, hash router", 0, 4096, 4093),
        _case("ratio 4, context 4096", 4, 4096, 4093),
        _case("ratio 4, context 4096, one stream", 4, 4096, 4093, one_stream=True),
        _case("ratio 128, context 65536", 128, 65_536, 65_530),
    ]


def run(inputs: Inputs) -> Tensor:
    """The streams after the layer, with the copy of its input that lets it run again."""
    inputs.streams.copy_(inputs.given)
    inputs.layer.before_experts(inputs.streams, inputs.position, inputs.token_ids)
    return inputs.layer.after_experts(inputs.streams, inputs.outputs)


def reference(inputs: Inputs) -> Tensor:
    """The same by the definition."""
    layer = inputs.layer
    given = (inputs.given, inputs.position, inputs.token_ids, inputs.outputs)
    return dense_layer_reference(layer.weights, layer.memory, *given).streams


def make(
    ratio: int, context: int, position: int, seed: int, device: torch.device, shape: Shape | None = None, **sizes: int
) -> Inputs:
    """Random weights that keep every activation near 1, and a memory like that of a long sequence.

    Args:
        ratio: The layer's; 0 has a hash router.
        context: Tokens that the memory has room for.
        position: The token's.
        seed: Of everything.
        device: Of everything.
        shape: None is V4-Flash.
        sizes: Of the attention, as in `make_layer`.
    """
    shape, generator = shape or Shape(), torch.Generator(device).manual_seed(seed + 2000)
    memory = make_layer(ratio, context, device, torch.bfloat16, seed, **sizes)
    weights = make_weights(shape, memory, generator)
    given = _random(generator, 1, 4, shape.hidden)
    if memory.selects:
        _make_choice_certain(weights, memory, given)
    return Inputs(
        layer=DenseLayer(weights, memory, Buffers.allocate([(weights, memory)], torch.bfloat16)),
        given=given,
        streams=torch.full_like(given, torch.nan),
        position=torch.tensor(position, device=device),
        token_ids=torch.tensor([seed % shape.vocab], device=device),
        outputs=_random(generator, 1, shape.topk, shape.hidden) * 0.4,
    )


def make_weights(shape: Shape, memory: Layer, generator: torch.Generator) -> LayerWeights:
    """Of a layer with this memory; every product has variance near 1."""
    hidden, heads = shape.hidden, memory.num_heads * memory.width
    bfloat16 = torch.bfloat16
    wq_b = make_matrix(heads, shape.q_lora_rank, generator)
    if memory.selects:
        wq_b = stack(wq_b, make_matrix(memory.index_heads * memory.index_width, shape.q_lora_rank, generator))
    rows = (_random(generator, memory.num_rows, hidden) * hidden**-0.5).to(bfloat16) if memory.ratio else None
    table = None
    if not memory.ratio:
        scores = torch.rand(shape.vocab, shape.experts, generator=generator, device=generator.device)
        table = scores.topk(shape.topk, 1).indices
    return LayerWeights(
        attn_mixer=_mixer(hidden, generator),
        attn_norm=_norm(hidden, generator),
        wq_a_wkv=make_matrix(shape.q_lora_rank + memory.width, hidden, generator),
        q_norm=_norm(shape.q_lora_rank, generator),
        wq_b=wq_b,
        rows=rows,
        wo_a=_amplified(make_matrix(shape.groups * shape.o_lora_rank, heads // shape.groups, generator), memory),
        wo_b=make_matrix(hidden, shape.groups * shape.o_lora_rank, generator),
        ffn_mixer=_mixer(hidden, generator),
        ffn_norm=_norm(hidden, generator),
        router=RouterWeights(
            (_random(generator, shape.experts, hidden) * hidden**-0.5).to(bfloat16),
            None if table is not None else 0.1 * _random(generator, shape.experts),
            table,
            shape.topk,
            SCALING,
        ),
        w1=make_matrix(shape.width, hidden, generator),
        w3=make_matrix(shape.width, hidden, generator),
        w2=make_matrix(hidden, shape.width, generator),
        limit=LIMIT,
    )


def read_bytes(shape: Shape, memory: Layer, position: int) -> int:
    """Weights once, of a table one row, and the ring and the entries that a token at `position` attends to or scores.

    Of `memory` only the sizes count, and those of its entries do not.
    """
    hidden, heads = shape.hidden, memory.num_heads * memory.width
    index = memory.index_heads * memory.index_width if memory.index_pool else 0
    fp8 = (shape.q_lora_rank + memory.width) * hidden + (heads + index) * shape.q_lora_rank
    fp8 += shape.o_lora_rank * heads + hidden * shape.groups * shape.o_lora_rank + 3 * shape.width * hidden
    bfloat16 = (shape.experts + memory.num_rows) * hidden
    float32 = 2 * MIXING_ROWS * 4 * hidden
    entries = (position + 1) // memory.ratio if memory.ratio else 0
    attended = min(entries, memory.index_topk) if index else entries
    state = (min(position + 1, memory.window_ring.shape[0]) + attended) * memory.width
    state += entries * memory.index_width if index else 0
    return fp8 + fp8 // BLOCK_SIZE**2 + 2 * (bfloat16 + state) + 4 * float32


def _case(name: str, ratio: int, context: int, position: int, *, one_stream: bool = False) -> Case:
    def make_case(seed: int, device: torch.device) -> Inputs:
        inputs = make(ratio, context, position, seed, device)
        if not one_stream:
            return inputs
        layer = replace(inputs.layer, buffers=replace(inputs.layer.buffers, side=None))
        return replace(inputs, layer=layer)

    sizes = make_layer(ratio, 512, torch.device("cpu"), torch.bfloat16, 0)
    return Case("dense_layer", name, make_case, run, reference, read_bytes(Shape(), sizes, position), CHAIN)


def _make_choice_certain(weights: LayerWeights, memory: Layer, given: Tensor) -> None:
    """Half of the visible entries score 0 and index_topk of them far more, so that rounding cannot change the choice.

    One entry chosen otherwise would change the attention's output by 5 %: with random weights a few of a thousand scores lie
    nearer to the last one chosen than a bfloat16 can tell.
    """
    assert memory.index_pool is not None and weights.rows is not None
    mixed = pre_reference(given, *weights.attn_mixer)[0]
    a = rms_norm_reference(mixed, weights.attn_norm, weights.attn_mixer.norm_eps)[0]
    weights.rows[-memory.index_heads :] = a / a.shape[0]  # every head's weight is near 1
    memory.index_pool.entries[2 * memory.index_topk :] = 0
    memory.index_pool.entries[1::2] = 0


def _amplified(matrix: Matrix, memory: Layer) -> Matrix:
    """wo_a times the power of two that brings a mean over the window's and the entries' keys back near 1."""
    assert matrix.scales is not None
    keys = memory.window_ring.shape[0] + memory.slots
    return matrix._replace(scales=matrix.scales + round(0.5 * torch.tensor(keys / 3).log2().item()))


def _mixer(hidden: int, generator: torch.Generator) -> Mixer:
    fn = _random(generator, MIXING_ROWS, 4 * hidden) / (4 * hidden) ** 0.5
    base, scale = _random(generator, MIXING_ROWS), 1 + 0.1 * _random(generator, 3)
    return Mixer(fn, base, scale, 20, 1e-6, 1e-6)


def _norm(width: int, generator: torch.Generator) -> Tensor:
    return (1 + 0.1 * _random(generator, width)).bfloat16()


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)
