"""The forward pass of one token made of the kernels, for tests: what the model computes, without its code. All experts resident.

On a CPU the experts are the runtime's: Triton's interpreter takes seconds for six.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kernels.decode_attention as attention
import kernels.expert_gemm as gemm
import kernels.expert_gemv as gemv
import kernels.hyper_connections as hyper
import kernels.router as routing
from kernels import norm
from kernels.dense_layer import Buffers, DenseLayer, LayerWeights, stack
from kernels.expert_gemv.slabs import ADDRESS_UNIT, FP4, TWO_BIT, Picks, Rows, quad2_rows
from kernels.formats import PLANES, Matrix
from kernels.hyper_connections import Mixer
from runtime import resident
from runtime.artifact import ModelDirectory
from runtime.models.deepseek_v4.attention import Attention
from runtime.models.deepseek_v4.build import build_model
from runtime.models.deepseek_v4.compressor import Compressor
from runtime.models.deepseek_v4.hyper_connections import HyperConnection, HyperHead
from runtime.models.deepseek_v4.layers import Fp8Matrix, Weight
from runtime.models.deepseek_v4.model import Block, DeepseekV4
from runtime.models.deepseek_v4.state import CompressorState, LayerState, State
from runtime.models.rounding import ActivationRounding
from runtime.resident import ResidentExperts

PRECISIONS = {"fp4": resident.FP4, "quad2": resident.TWO_BIT}
KINDS = {"fp4": FP4, "quad2": TWO_BIT}


class DefinedExperts:
    """The runtime's experts of a few layers, on a CPU."""

    def __init__(self, source: ModelDirectory, layer_ids: Sequence[int], dtype: torch.dtype, precision: str) -> None:
        self._layer_ids = layer_ids
        self._experts = ResidentExperts(source, dtype, torch.device("cpu"), False, precision=precision)

    def __call__(self, number: int, x: Tensor, chosen: routing.Picks) -> Tensor:
        """float32 [1, K, D]: the picks' outputs in the layer that is `number` of those held."""
        return self._experts(self._layer_ids[number], x, *chosen)


class GatheredExperts:
    """Every expert of a few layers in one plane on the device, and what a call of the GEMV takes for a device-side pick."""

    def __init__(self, source: ModelDirectory, layer_ids: Sequence[int], plane: str, device: torch.device) -> None:
        """Reads each expert once."""
        config = source.config
        self.limit, topk = config.swiglu_limit, config.num_experts_per_tok
        hidden, width = config.hidden_size, config.moe_intermediate_size
        ids = range(config.n_routed_experts)
        assert PLANES[plane].slab_bytes(hidden, width) % ADDRESS_UNIT == 0
        slabs = [torch.stack([source.read_slab(layer, expert, plane) for expert in ids]) for layer in layer_ids]
        self.slabs = [layer.to(device) for layer in slabs]
        self.addresses = [_addresses(layer) for layer in self.slabs]
        tables = {name: tensor.to(device) for name, tensor in source.read_tables().items()}
        self.normalisers, self.rows = _tables(tables, layer_ids, plane, len(ids), device)
        self.picks = Picks(
            slabs=torch.zeros(topk, 2, dtype=torch.int64, device=device),
            kinds=torch.full((topk,), KINDS[plane], dtype=torch.int32, device=device),
            tokens=torch.zeros(topk, dtype=torch.int32, device=device),
            weights=torch.zeros(topk, device=device),
            normalisers=torch.ones(topk, 3, device=device),
        )
        self.workspace = gemv.Workspace.allocate(1, topk, hidden, width, device)
        self.out = torch.zeros(topk, hidden, device=device)

    def __call__(self, number: int, x: Tensor, chosen: routing.Picks) -> Tensor:
        """float32 [1, K, D]: the picks' outputs in the layer that is `number` of those held."""
        picks, experts = self.picks, chosen.experts[0]
        picks.slabs[:, 0].copy_(self.addresses[number][experts])
        picks.normalisers.copy_(self.normalisers[number][experts])
        picks.weights.copy_(chosen.weights[0])
        call = (x, picks, self.rows[number], self.limit, self.workspace, self.out)
        return (gemv.expert_gemv(*call) if x.is_cuda else gemv.launch(*call, portable=True))[None]

    def by_gemm(self, number: int, x: Tensor, chosen: routing.Picks) -> Tensor:
        """The same by the operator for many tokens, in the interpreter, from all the layer's experts."""
        addresses = self.addresses[number]
        slabs = torch.stack([addresses, torch.zeros_like(addresses)], 1)
        experts = gemm.Experts(slabs, self.picks.kinds[:1].repeat(len(slabs)), self.normalisers[number])
        hidden = torch.zeros(chosen.experts.numel(), self.workspace.sizes[3], dtype=torch.bfloat16)
        out = torch.zeros(*chosen.experts.shape, x.shape[1])
        routed = gemm.Routed(chosen.experts, chosen.weights)
        kinds = self.picks.kinds[:1].tolist()
        call = gemm.Call(x, routed, experts, self.rows[number], hidden, out, self.limit)
        return gemm.launch_gemm(call, kinds, portable=True)


@dataclass(frozen=True)
class KernelForward:
    """Some layers of a model on a state that its own forward could take over at any token."""

    model: DeepseekV4
    layers: tuple[DenseLayer, ...]
    experts: DefinedExperts | GatheredExperts
    state: State
    streams: Tensor
    token_ids: Tensor
    mixed: Tensor
    logits: Tensor

    @classmethod
    def open(
        cls,
        source: ModelDirectory,
        device: torch.device,
        dtype: torch.dtype,
        *,
        plane: str = "fp4",
        layer_ids: Sequence[int] | None = None,
        context: int = 512,
    ) -> KernelForward:
        """The layers `layer_ids` (all) of a model directory as a model of their own, on an empty state."""
        config = source.config
        ids = list(range(config.num_hidden_layers)) if layer_ids is None else list(layer_ids)
        whole = build_model(source, dtype, device, ActivationRounding(), keep_fp8=True)
        model = replace(whole, embed=whole.embed.to(device), blocks=tuple(whole.blocks[each] for each in ids))
        state = State(config, context, dtype, device)
        state.layers = [state.layers[each] for each in ids]
        parts = [layer_parts(block, memory) for block, memory in zip(model.blocks, state.layers, strict=True)]
        buffers = Buffers.allocate(parts, dtype)
        experts = (
            DefinedExperts(source, ids, dtype, PRECISIONS[plane])
            if device.type == "cpu"
            else GatheredExperts(source, ids, plane, device)
        )
        return cls(
            model=model,
            layers=tuple(DenseLayer(weights, memory, buffers) for weights, memory in parts),
            experts=experts,
            state=state,
            streams=torch.zeros(1, config.hc_mult, config.hidden_size, device=device),
            token_ids=torch.zeros(1, dtype=torch.int64, device=device),
            mixed=torch.zeros(1, config.hidden_size, dtype=dtype, device=device),
            logits=torch.zeros(config.vocab_size, device=device),
        )

    def launch(self) -> None:
        """`logits` after the token in `token_ids` at the state's position, which moves on; nothing waits for the device."""
        self.streams.copy_(self.model.embed[self.token_ids][:, None].expand_as(self.streams))
        for number, layer in enumerate(self.layers):
            given = layer.before_experts(self.streams, self.state.position, self.token_ids)
            layer.after_experts(self.streams, self.experts(number, given.x, given.picks))
        scratch, mixer = self.layers[0].buffers.scratch, head_mixer(self.model.hyper_head)
        hyper.hc_head(self.streams, mixer, scratch, self.mixed, self.model.norm)
        norm.head(self.mixed[0], self.model.head, self.logits)
        self.state.position.add_(1)

    def step(self, token_id: int) -> Tensor:
        """float32 [V], newly allocated: the logits after one more token."""
        self.token_ids.fill_(token_id)
        self.launch()
        self.state.length += 1
        return self.logits.clone()

    def capture(self) -> torch.cuda.CUDAGraph:
        """`launch` as a graph, the state empty afterwards; what compiles and tunes has done so."""
        self.launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch()
        self.state.reset()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph, token_ids: Tensor) -> Tensor:
        """float32 [T, V]: the logits after each token of a new sequence, token_ids int64 [T] on the device."""
        self.state.reset()
        logits = []
        for token in token_ids.split(1):
            self.token_ids.copy_(token)
            graph.replay()
            logits.append(self.logits.clone())
        return torch.stack(logits)


def layer_parts(block: Block, state: LayerState) -> tuple[LayerWeights, attention.Layer]:
    """The runtime's weights and memory of one layer as the kernels take them; the memory is the same, not a copy."""
    ours, moe = block.attention, block.moe
    memory = _memory(ours, state)
    wq_b, indexer = _matrix(ours.wq_b.weight), ours.indexer
    if memory.selects:
        assert indexer is not None
        wq_b = stack(wq_b, _matrix(indexer.wq_b.weight))
    router = moe.router
    weights = LayerWeights(
        attn_mixer=_mixer(block.attn_hc),
        attn_norm=block.attn_norm,
        wq_a_wkv=stack(_matrix(ours.wq_a.weight), _matrix(ours.wkv.weight)),
        q_norm=ours.q_norm,
        wq_b=wq_b,
        rows=_rows(ours),
        wo_a=_matrix(ours.wo_a),
        wo_b=_matrix(ours.wo_b.weight),
        ffn_mixer=_mixer(block.ffn_hc),
        ffn_norm=block.ffn_norm,
        router=routing.RouterWeights(router.weight, router.bias, router.token_to_experts, router.topk, router.scaling),
        w1=_matrix(moe.w1),
        w3=_matrix(moe.w3),
        w2=_matrix(moe.w2),
        limit=moe.limit,
    )
    return weights, memory


def head_mixer(head: HyperHead) -> Mixer:
    """The mixer of the streams' end."""
    return Mixer(head.fn, head.base, head.scale, 1, head.eps, head.norm_eps)


def _memory(ours: Attention, state: LayerState) -> attention.Layer:
    indexer = ours.indexer
    return attention.Layer(
        kv_norm=ours.kv_norm,
        sink=ours.sink,
        frequencies=ours.frequencies,
        window_ring=state.window_ring,
        norm_eps=ours.norm_eps,
        pool=_pool(ours.compressor, state.compressor),
        index_pool=_pool(indexer.compressor if indexer else None, state.indexer),
        index_heads=indexer.num_heads if indexer else 0,
        index_topk=indexer.topk if indexer else 0,
        round_kv=ours.round_kv,
        round_index=indexer.round_queries if indexer else False,
    )


def _pool(weights: Compressor | None, memory: CompressorState | None) -> attention.Pool | None:
    if weights is None or memory is None:
        return None
    rounding = weights.round_kv or weights.round_indexer
    return attention.Pool(
        memory.ratio, weights.ape, weights.norm, memory.values, memory.gates, memory.entries, rounding
    )


def _rows(ours: Attention) -> Tensor | None:
    if ours.compressor is None:
        return None
    parts = [ours.compressor.wkv, ours.compressor.wgate]
    if ours.indexer is not None:
        parts += [ours.indexer.compressor.wkv, ours.indexer.compressor.wgate, ours.indexer.weights_proj]
    return torch.cat(parts)


def _matrix(weight: Weight) -> Matrix:
    assert isinstance(weight, Fp8Matrix)
    return weight.packed


def _mixer(ours: HyperConnection) -> Mixer:
    return Mixer(ours.fn, ours.base, ours.scale, ours.sinkhorn_iters, ours.eps, ours.norm_eps)


def _addresses(slabs: Tensor) -> Tensor:
    """int64 [E]: where each of slabs [E, bytes] begins, in the kernels' unit."""
    first, step = slabs.data_ptr(), slabs.stride(0)
    assert first % ADDRESS_UNIT == 0 and step % ADDRESS_UNIT == 0
    return (torch.arange(slabs.shape[0], device=slabs.device) * step + first) // ADDRESS_UNIT


def _tables(
    tables: dict[str, Tensor], layer_ids: Sequence[int], plane: str, experts: int, device: torch.device
) -> tuple[list[Tensor], list[Rows]]:
    """Normalisers [E, 3] and table rows of each layer; where the plane has none, ones, and rows that are not read."""
    if plane == "quad2":
        normalisers = [tables["quad2.normalisers"][layer] for layer in layer_ids]
        return normalisers, [quad2_rows(tables["quad2.levels"][layer]) for layer in layer_ids]
    ones, unread = torch.ones(experts, 3, device=device), quad2_rows(torch.ones(3, 256, 4, device=device).half())
    return [ones] * len(layer_ids), [unread] * len(layer_ids)
