"""The definition of a layer's dense part: the operators' definitions one after another in float32, nothing rounded between them.

With S the streams, E the sum of the picks' outputs, and Attention and Shared as in `decode_attention` and `kernels.expert`:

    a = norm(pre_attn(S))     S' = post_attn(wo_b · wo_a · Attention(a), S)     x = norm(pre_ffn(S'))     picks = router(x)
    S'' = post_ffn(E + Shared(x), S')
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.decode_attention import Layer, Pool, allocate_workspace
from kernels.decode_attention.reference import attend_all, compressor_rows, prepare_all, select_all
from kernels.dense_layer import LayerWeights
from kernels.expert_gemv.reference import add_picks_reference
from kernels.fp8_linear.reference import fp8_grouped_linear_reference, fp8_linear_reference, fp8_swiglu_reference
from kernels.hyper_connections.reference import post_reference, pre_reference
from kernels.norm.reference import rms_norm_reference
from kernels.router.reference import router_reference, scores_reference


class Results(NamedTuple):
    """Attention's output and experts' input [1, D], scores [1, E], picks [1, K] twice, shared output [1, D], streams [1, 4, D]."""

    attended: Tensor
    x: Tensor
    scores: Tensor
    experts: Tensor
    route_weights: Tensor
    shared: Tensor
    streams: Tensor


def dense_layer_reference(
    weights: LayerWeights, memory: Layer, streams: Tensor, position: Tensor, token_ids: Tensor, outputs: Tensor
) -> Results:
    """All results in float32.

    Args:
        weights: Of the layer.
        memory: What the tokens before have left; not modified.
        streams: [1, 4, D], not modified.
        position: int64 scalar.
        token_ids: [1].
        outputs: [1, K, D], the routed experts' outputs.
    """
    mixed, post, combination = pre_reference(streams, *weights.attn_mixer)
    a = rms_norm_reference(mixed, weights.attn_norm, weights.attn_mixer.norm_eps)
    attended = _attention(weights, in_float32(memory), a, position)
    between = post_reference(attended, streams, post, combination)
    mixed, post, combination = pre_reference(between, *weights.ffn_mixer)
    x = rms_norm_reference(mixed, weights.ffn_norm, weights.ffn_mixer.norm_eps)
    scores = scores_reference(x, weights.router.weight)
    _, bias, table, topk, scaling = weights.router
    experts, route_weights = router_reference(scores, bias, table, token_ids, topk, scaling)
    shared = fp8_linear_reference(fp8_swiglu_reference(x, weights.w1, weights.w3, weights.limit), weights.w2)
    total = add_picks_reference(outputs, shared, torch.float32)
    last = post_reference(total, between, post, combination)
    return Results(attended, x, scores, experts, route_weights, shared, last)


def _attention(weights: LayerWeights, memory: Layer, a: Tensor, position: Tensor) -> Tensor:
    rank = fp8_linear_reference(a, weights.wq_a_wkv)
    q_lora_rank, size = weights.q_norm.shape[0], memory.num_heads * memory.width
    q_rank = rms_norm_reference(rank[:, :q_lora_rank], weights.q_norm, memory.norm_eps)
    both = fp8_linear_reference(q_rank, weights.wq_b)[0]
    queries = both[:size].view(memory.num_heads, -1)
    index_queries = both[size:].view(memory.index_heads, -1) if memory.selects else None
    workspace = allocate_workspace([memory])
    if weights.rows is not None:
        workspace.rows[: memory.num_rows] = compressor_rows(a[0], weights.rows)
    prepare_all(queries, rank[0, q_lora_rank:], index_queries, position, memory, workspace)
    if memory.selects:
        select_all(position, memory, workspace)
    heads = attend_all(workspace.queries, position, memory, workspace.indices)
    grouped = heads.view(1, -1, weights.wo_a.codes.shape[1])
    low = fp8_grouped_linear_reference(grouped, weights.wo_a)
    return fp8_linear_reference(low.view(1, -1), weights.wo_b)


def in_float32(memory: Layer) -> Layer:
    """A copy whose ring and entries are float32."""

    def copied(pool: Pool | None) -> Pool | None:
        if pool is None:
            return None
        values, gates, entries = pool.values.clone(), pool.gates.clone(), pool.entries.to(torch.float32, copy=True)
        return replace(pool, values=values, gates=gates, entries=entries)

    ring = memory.window_ring.to(torch.float32, copy=True)
    return replace(memory, window_ring=ring, pool=copied(memory.pool), index_pool=copied(memory.index_pool))
