"""One layer's dense part for one token: everything but its routed experts, from the streams to the picks and back.

Owns the order of the launches and their buffers; arithmetic is the operators'. Nothing allocates, synchronises or, after one
call, compiles, so each half can be captured as a graph that serves every step. Between two products values stay float32; what a
product takes is rounded to the buffers' dtype.

Launches: `before_experts` 16 in a layer with a window only, 17 with ratio 128, 19 with ratio 4 (20 beyond 65,536 tokens), or 17
where that has no choice to make; `after_experts` 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.decode_attention import Layer, Workspace, allocate_workspace, attend, compressor_rows, prepare, select
from kernels.expert_gemv import add_picks
from kernels.formats import Matrix
from kernels.fp8_linear import fp8_grouped_linear, fp8_linear, fp8_swiglu
from kernels.hyper_connections import Mix, Mixer, hc_post, hc_post_pre, hc_pre, new_mix, new_scratch
from kernels.norm import rms_norm
from kernels.router import Picks, RouterWeights, router


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a layer multiplies with; matrices are FP8 blocks [N, K].

    wq_a_wkv: Rows of wq_a, then those of wkv, which share their input. wq_b: Its rows, then those of the indexer's wq_b where
    the layer selects. rows: [R, D], the compressor's wkv and wgate, then the indexer's wkv, wgate and weights_proj; None without
    a compressor. wo_a: [groups * o_lora_rank, H * d / groups]. w1, w3, w2, limit: Of the shared expert.
    """

    attn_mixer: Mixer
    attn_norm: Tensor
    wq_a_wkv: Matrix
    q_norm: Tensor
    wq_b: Matrix
    rows: Tensor | None
    wo_a: Matrix
    wo_b: Matrix
    ffn_mixer: Mixer
    ffn_norm: Tensor
    router: RouterWeights
    w1: Matrix
    w3: Matrix
    w2: Matrix
    limit: float


@dataclass(frozen=True, slots=True)
class Buffers:
    """What passes between a layer's launches, uninitialised; layers of equal shapes that run one after another share it.

    mix: `mixed` is the attention's input, then the experts'. rank: float32 [1, q_lora_rank + d], wq_a's and wkv's output.
    q_rank: [1, q_lora_rank]. queries: float32 [1, H * d (+ HI * di)]. heads: [H, d]. low: [1, groups, o_lora_rank]. attended,
    shared, total: float32 [1, D], outputs of the attention, of the shared expert, and of all experts. scores: float32 [1, E].
    hidden: [1, F]. side: A stream for what can run beside the longest chain of launches; None: one after another.
    """

    mix: Mix
    scratch: Tensor
    rank: Tensor
    q_rank: Tensor
    queries: Tensor
    workspace: Workspace
    heads: Tensor
    low: Tensor
    attended: Tensor
    scores: Tensor
    picks: Picks
    hidden: Tensor
    shared: Tensor
    total: Tensor
    side: torch.cuda.Stream | None

    @classmethod
    def allocate(cls, layers: Sequence[tuple[LayerWeights, Layer]], dtype: torch.dtype) -> Buffers:
        """For all of `layers`, on their device.

        Args:
            layers: Each layer's weights and memory, of one model.
            dtype: Of what products take, bfloat16 or float32.
        """
        weights, memory = layers[0]
        device, hidden = memory.window_ring.device, weights.attn_norm.shape[0]
        q_lora_rank, topk = weights.q_norm.shape[0], weights.router.topk

        def empty(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        return cls(
            mix=new_mix(1, hidden, dtype, device),
            scratch=new_scratch(1, hidden, device),
            rank=empty(1, q_lora_rank + memory.width),
            q_rank=empty(1, q_lora_rank, kind=dtype),
            queries=empty(1, max(each.wq_b.codes.shape[0] for each, _ in layers)),
            workspace=allocate_workspace([each for _, each in layers]),
            heads=empty(memory.num_heads, memory.width, kind=dtype),
            low=empty(1, _groups(weights, memory), weights.wo_b.codes.shape[1] // _groups(weights, memory), kind=dtype),
            attended=empty(1, hidden),
            scores=empty(1, weights.router.weight.shape[0]),
            picks=Picks(empty(1, topk, kind=torch.int64), empty(1, topk)),
            hidden=empty(1, weights.w1.codes.shape[0], kind=dtype),
            shared=empty(1, hidden),
            total=empty(1, hidden),
            side=torch.cuda.Stream(device) if device.type == "cuda" else None,
        )


class Experts(NamedTuple):
    """What the routed experts need: their input [1, D] and the picks [1, K]. Buffers of the layer, until its next call."""

    x: Tensor
    picks: Picks


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer: weights, the memory that its tokens leave behind, and buffers that it may share with others."""

    weights: LayerWeights
    memory: Layer
    buffers: Buffers

    def before_experts(
        self, streams: Tensor, position: Tensor, token_ids: Tensor, host: Picks | None = None
    ) -> Experts:
        """The attention half, the router and the shared expert, whose output waits in `buffers.shared`.

        Args:
            streams: [1, 4, D] bfloat16 or float32, overwritten with those after the attention.
            position: int64 scalar on the device.
            token_ids: int32 or int64 [1] on the device; read in layers with a table.
            host: Pinned memory that the picks are written to as well.

        Raises:
            ValueError: A shape, dtype, device or layout is not as said here or in the operators.
        """
        weights, buffers = self.weights, self.buffers
        hc_pre(streams, weights.attn_mixer, buffers.scratch, buffers.mix, weights.attn_norm)
        self._attend(position)
        given = (weights.ffn_mixer, buffers.scratch, buffers.mix, weights.ffn_norm)
        hc_post_pre(buffers.attended, streams, buffers.mix, streams, *given)
        x = buffers.mix.mixed
        with _beside(buffers.side):
            router(x, weights.router, token_ids, buffers.scores, buffers.picks, host)
        fp8_swiglu(x, weights.w1, weights.w3, buffers.hidden, limit=weights.limit)
        fp8_linear(buffers.hidden, weights.w2, buffers.shared)
        _join(buffers.side)
        return Experts(x, buffers.picks)

    def after_experts(self, streams: Tensor, outputs: Tensor) -> Tensor:
        """The streams after the layer.

        Args:
            streams: As `before_experts` left them; overwritten.
            outputs: float32 [1, K, D], each pick's weighted output, the heaviest first.

        Returns:
            `streams`.
        """
        add_picks(outputs, self.buffers.shared, self.buffers.total)
        return hc_post(self.buffers.total, streams, self.buffers.mix, streams)

    def _attend(self, position: Tensor) -> None:
        """`buffers.attended` of the attention's input in `buffers.mix`."""
        weights, memory, buffers = self.weights, self.memory, self.buffers
        a, workspace = buffers.mix.mixed, buffers.workspace
        with _beside(buffers.side):
            if weights.rows is not None:
                compressor_rows(a[0], weights.rows, workspace.rows)
        queries, index_queries = self._queries(a)
        _join(buffers.side)
        kv = buffers.rank[0, weights.q_norm.shape[0] :]
        prepare(queries, kv, position, memory, workspace, index_queries)
        if memory.selects:
            select(position, memory, workspace)
        attend(position, memory, workspace, buffers.heads)
        fp8_grouped_linear(buffers.heads.view(1, buffers.low.shape[1], -1), weights.wo_a, buffers.low)
        fp8_linear(buffers.low.view(1, -1), weights.wo_b, buffers.attended)

    def _queries(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries [H, d] and, where the layer selects, the indexer's [HI, di]; the key-value head stays in `buffers.rank`."""
        weights, memory, buffers = self.weights, self.memory, self.buffers
        fp8_linear(a, weights.wq_a_wkv, buffers.rank)
        rms_norm(buffers.rank[:, : weights.q_norm.shape[0]], weights.q_norm, memory.norm_eps, buffers.q_rank)
        both = buffers.queries[:, : weights.wq_b.codes.shape[0]]
        fp8_linear(buffers.q_rank, weights.wq_b, both)
        size = memory.num_heads * memory.width
        queries, rest = both[0, :size].view(memory.num_heads, -1), both[0, size:]
        return queries, rest.view(memory.index_heads, -1) if memory.selects else None


def stack(*matrices: Matrix) -> Matrix:
    """Matrices of equal columns, one below the other, newly allocated; each has a multiple of 128 rows."""
    codes = torch.cat([matrix.codes.view(torch.uint8) for matrix in matrices])  # no cat of float8 on every device
    return Matrix(
        codes.view(torch.float8_e4m3fn), torch.cat([matrix.scales for matrix in matrices if matrix.scales is not None])
    )


def _groups(weights: LayerWeights, memory: Layer) -> int:
    return memory.num_heads * memory.width // weights.wo_a.codes.shape[1]


@contextmanager
def _beside(side: torch.cuda.Stream | None) -> Iterator[None]:
    """What is launched inside waits for what was launched before, and for nothing after it."""
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        yield


def _join(side: torch.cuda.Stream | None) -> None:
    """What is launched from here on waits for what was launched beside."""
    if side is not None:
        torch.cuda.current_stream(side.device).wait_stream(side)
