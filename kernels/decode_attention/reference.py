"""The definition of one token's attention in plain float32 torch. Slow on purpose; reads the position on the host.

With p the position, m the ratio, d the head's width and f the RoPE frequencies (facts of DeepSeek-V4-Flash, 3.4 to 3.7):

    q_h = rope(q_h / rms(q_h), p)            kv = rope(norm * kv / rms(kv), p), row p mod W of the ring
    entry_i = rope(norm * r_i / rms(r_i), i*m), r_i = sum_t softmax_t(gate_t + ape_{t mod m}) value_t over its window, per channel
    I_i = sum_h w_h relu(qI_h · kI_i)        the best index_topk of the entries i < (p+1) // m, lowest first among equal ones
    o_h = rope(sum_k exp(s_hk) K_k / (sum_k exp(s_hk) + exp(sink_h)), -p), s_hk = q_h · K_k / sqrt(d)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode_attention.layer import Layer, Pool, Workspace
from kernels.norm.reference import rms_norm_reference
from kernels.rounding import hadamard_matrix, round_to_e2m1, round_to_e4m3


def compressor_rows(a: Tensor, weight: Tensor) -> Tensor:
    """weight [R, D] · a [D], float32 [R]."""
    return weight.float() @ a.float()


def rope(x: Tensor, position: int, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """x [..., d] float32, channels (2i, 2i+1) of its tail turned by the float32 angle position * f_i."""
    angles = torch.tensor(position, dtype=torch.float32, device=x.device) * frequencies
    cos, sin = angles.double().cos().float(), angles.double().sin().float() * (-1 if inverse else 1)
    before = x.shape[-1] - 2 * frequencies.shape[0]
    even, odd = x[..., before::2], x[..., before + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :before], turned], -1)


def prepare(
    queries: Tensor, kv: Tensor, index_queries: Tensor | None, position: Tensor, layer: Layer
) -> dict[str, Tensor]:
    """float32 queries [H, d] and index_queries [HI, di] as the attention uses them; the layer's memory is written."""
    p = int(position)
    result = {"queries": rope(rms_norm_reference(queries, None, layer.norm_eps), p, layer.frequencies)}
    row = rope(rms_norm_reference(kv, layer.kv_norm, layer.norm_eps), p, layer.frequencies)
    layer.window_ring[p % layer.window_ring.shape[0]] = _rounded_kv(row, layer) if layer.round_kv else row
    if index_queries is not None:
        turned = rope(index_queries.float(), p, layer.frequencies)
        result["index_queries"] = _rounded_index(turned) if layer.round_index else turned
    return result


def compress(rows: Tensor, position: Tensor, layer: Layer, pool: Pool) -> None:
    """Writes a token's values and gates [2C] float32, and the entry it completes if there is room for it, into `pool`."""
    p, span, channels = int(position), pool.values.shape[0], pool.values.shape[1]
    pool.values[p % span] = rows[:channels]
    pool.gates[p % span] = rows[channels:] + pool.ape[p % pool.ratio]
    if (p + 1) % pool.ratio or p // pool.ratio >= pool.capacity:
        return
    window = torch.arange(p + 1 - span, p + 1, device=rows.device) % span
    values, gates, width = pool.values[window], pool.gates[window], pool.norm.shape[0]
    if channels == 2 * width:
        values = torch.cat([values[: span // 2, :width], values[span // 2 :, width:]])
        gates = torch.cat([gates[: span // 2, :width], gates[span // 2 :, width:]])
    pooled = (gates.softmax(0) * values).sum(0)
    entry = rope(rms_norm_reference(pooled, pool.norm, layer.norm_eps), p + 1 - pool.ratio, layer.frequencies)
    if pool.rounding:
        entry = _rounded_index(entry) if pool is layer.index_pool else _rounded_kv(entry, layer)
    pool.entries[p // pool.ratio] = entry


def scores(index_queries: Tensor, weights: Tensor, entries: Tensor) -> Tensor:
    """sum_h weights[h] * relu(queries[h] · entries[i]), float32 [N]."""
    return weights @ (index_queries.float() @ entries.float().T).relu()


def select(values: Tensor, topk: int) -> Tensor:
    """Ascending indices of the min(topk, N) largest of `values` [N]; among equal ones the lowest."""
    return values.sort(descending=True, stable=True).indices[:topk].sort().values


def attend(queries: Tensor, keys: Tensor, sink: Tensor) -> Tensor:
    """Attention of queries [H, d] over keys [S, d], which are the values too, with a sink [H]; float32 [H, d]."""
    scaled = queries.float() @ keys.float().T * queries.shape[-1] ** -0.5
    weights = torch.cat([scaled, sink.float()[:, None]], 1).softmax(1)[:, :-1]
    return weights @ keys.float()


def visible_entries(position: Tensor, pool: Pool) -> int:
    """Entries whose last token is not in the future."""
    return min((int(position) + 1) // pool.ratio, pool.capacity)


def prepare_all(
    queries: Tensor, kv: Tensor, index_queries: Tensor | None, position: Tensor, layer: Layer, workspace: Workspace
) -> None:
    """`prepare` and both compressors, as the public function does them."""
    for name, value in prepare(queries, kv, index_queries, position, layer).items():
        getattr(workspace, name)[: value.shape[0], : value.shape[1]] = value
    rows = workspace.rows
    for pool in (layer.pool, layer.index_pool):
        if pool is not None:
            compress(rows[: pool.num_rows], position, layer, pool)
            rows = rows[pool.num_rows :]


def select_all(position: Tensor, layer: Layer, workspace: Workspace) -> None:
    """The public `select`."""
    assert layer.index_pool is not None
    weights = workspace.rows[layer.num_rows - layer.index_heads : layer.num_rows]
    entries = layer.index_pool.entries[: visible_entries(position, layer.index_pool)]
    best = select(scores(workspace.index_queries, weights, entries), layer.index_topk)
    workspace.indices[: best.shape[0]] = best


def attend_all(queries: Tensor, position: Tensor, layer: Layer, indices: Tensor) -> Tensor:
    """The public `attend`, float32 [H, d]."""
    keys = layer.window_ring[: int(position) + 1]
    if layer.pool is not None:
        count = min(visible_entries(position, layer.pool), layer.slots)
        entries = layer.pool.entries[indices[:count].long()] if layer.selects else layer.pool.entries[:count]
        keys = torch.cat([keys, entries])
    return rope(attend(queries, keys, layer.sink), int(position), layer.frequencies, inverse=True)


def _rounded_kv(x: Tensor, layer: Layer) -> Tensor:
    return torch.cat([round_to_e4m3(x[: -layer.tail], 64), x[-layer.tail :]])


def _rounded_index(x: Tensor) -> Tensor:
    return round_to_e2m1(x @ hadamard_matrix(x.shape[-1], x.device), 32)
