"""Attention of one layer: one shared key-value head, a window ring, compressed entries, a sink, grouped output (facts 3.4, 3.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.models.deepseek_v4.compressor import Compressor, round_kv
from runtime.models.deepseek_v4.indexer import Indexer
from runtime.models.deepseek_v4.layers import Linear, Weight, apply_rope, dense, rms_norm, rope_angles
from runtime.models.deepseek_v4.state import LayerState


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention weights. `compressor` is None in window-only layers, `indexer` outside ratio 4."""

    wq_a: Linear
    q_norm: Tensor
    wq_b: Linear
    wkv: Linear
    kv_norm: Tensor
    sink: Tensor
    wo_a: Weight  # [groups * o_lora_rank, heads_per_group * head_dim]
    wo_b: Linear
    compressor: Compressor | None
    indexer: Indexer | None
    frequencies: Tensor
    num_heads: int
    num_groups: int
    norm_eps: float
    round_kv: bool

    def __call__(self, a: Tensor, state: LayerState, position: Tensor) -> Tensor:
        """[T, D] in a's dtype for tokens position … position+T-1; their rows are written into `state`."""
        positions = position + torch.arange(a.shape[0], device=a.device)
        rope = rope_angles(positions, self.frequencies)
        q_rank = rms_norm(self.wq_a(a), self.q_norm, self.norm_eps)
        queries = rms_norm(self.wq_b(q_rank).unflatten(-1, (self.num_heads, -1)), None, self.norm_eps)
        queries = apply_rope(queries, *rope)
        kv = apply_rope(rms_norm(self.wkv(a), self.kv_norm, self.norm_eps), *rope)
        if self.round_kv:
            kv = round_kv(kv, 2 * self.frequencies.shape[0])

        keys, allowed = _window(kv, state.window_ring, position, positions)
        if self.compressor is not None:
            entries, chosen = self._compressed(a, q_rank, rope, state, position, positions)
            keys, allowed = torch.cat([keys, entries]), torch.cat([allowed, chosen], 1)
        output = attend(queries, keys, allowed, self.sink)
        _write_ring(kv, state.window_ring, positions)
        cos, sin = rope
        return self._project(apply_rope(output.to(a.dtype), cos, -sin))

    def _compressed(
        self,
        a: Tensor,
        q_rank: Tensor,
        rope: tuple[Tensor, Tensor],
        state: LayerState,
        position: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """All entries [N, d] and which of them each token attends to, bool [T, N]; a token may see the entry it completes."""
        assert self.compressor is not None and state.compressor is not None
        self.compressor(a, state.compressor, position)
        entries = state.compressor.entries[:-1]
        count = (positions + 1) // state.compressor.ratio
        visible = torch.arange(entries.shape[0], device=a.device) < count[:, None]
        if self.indexer is None or state.indexer is None:
            return entries, visible
        self.indexer.compressor(a, state.indexer, position)
        return entries, self.indexer(a, q_rank, rope, state.indexer, visible)

    def _project(self, heads: Tensor) -> Tensor:
        """Grouped output projection of [T, H, d]: each group of heads to its own low rank, then all to [T, D]."""
        grouped = heads.flatten(1).unflatten(-1, (self.num_groups, -1))
        wo_a = dense(self.wo_a).unflatten(0, (self.num_groups, -1))
        return self.wo_b(torch.einsum("tgi,goi->tgo", grouped, wo_a).flatten(1))


def attend(queries: Tensor, keys: Tensor, allowed: Tensor, sink: Tensor) -> Tensor:
    """Attention of [T, H, d] queries over shared keys [S, d], which are the values too; float32 [T, H, d].

    The sink [H] adds exp(sink) to the denominator and no value; `allowed` is bool [T, S].
    """
    scores = torch.einsum("thd,sd->ths", queries.float(), keys.float()) * queries.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    sinks = sink.float()[:, None].expand(scores.shape[0], -1, 1)
    weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    return torch.einsum("ths,sd->thd", weights, keys.float())


def _window(kv: Tensor, ring: Tensor, position: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [W + T, d] of the ring as it was before this chunk and of the chunk, and bool [T, W + T] who may see them."""
    slots = torch.arange(ring.shape[0], device=kv.device)
    before = position - 1 - (position - 1 - slots) % ring.shape[0]  # the position whose row each slot holds
    key_positions = torch.cat([before, positions])
    age = positions[:, None] - key_positions
    return torch.cat([ring, kv]), (age >= 0) & (age < ring.shape[0]) & (key_positions >= 0)


def _write_ring(kv: Tensor, ring: Tensor, positions: Tensor) -> None:
    kept = min(kv.shape[0], ring.shape[0])
    ring.index_copy_(0, positions[-kept:] % ring.shape[0], kv[-kept:])
