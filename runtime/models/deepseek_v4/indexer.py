"""The indexer: which compressed entries a token of a ratio-4 layer attends to (facts 3.7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.models.deepseek_v4.compressor import Compressor, round_indexer
from runtime.models.deepseek_v4.layers import Linear, apply_rope, linear_float32
from runtime.models.deepseek_v4.state import CompressorState


@dataclass(frozen=True, slots=True)
class Indexer:
    """Weights wq_b [heads * head_dim, q_lora_rank] and weights_proj [heads, D], and its own compressor."""

    wq_b: Linear
    weights_proj: Tensor
    compressor: Compressor
    num_heads: int
    topk: int
    round_queries: bool

    def __call__(
        self, a: Tensor, q_rank: Tensor, rope: tuple[Tensor, Tensor], state: CompressorState, visible: Tensor
    ) -> Tensor:
        """Bool [T, N]: the best `topk` of the visible entries, all of them where fewer are visible.

        Args:
            a: [T, D] normalised activations.
            q_rank: [T, q_lora_rank] the queries' low-rank form.
            rope: cos and sin of the tokens' positions.
            state: The indexer's compressor state, already holding this chunk's entries.
            visible: bool [T, N], entries whose last token is not in the future.
        """
        if state.capacity <= self.topk:
            return visible
        scores = self._scores(a, q_rank, rope, state.entries[:-1]).masked_fill(~visible, -torch.inf)
        best = scores.topk(self.topk, dim=-1, sorted=False).indices
        return torch.zeros_like(visible).scatter_(1, best, True) & visible

    def _scores(self, a: Tensor, q_rank: Tensor, rope: tuple[Tensor, Tensor], entries: Tensor) -> Tensor:
        """sum_h w_h * relu(q_h · k_i), float32 [T, N]."""
        queries = apply_rope(self.wq_b(q_rank).unflatten(-1, (self.num_heads, -1)), *rope)
        if self.round_queries:
            queries = round_indexer(queries)
        weights = linear_float32(a, self.weights_proj) * (queries.shape[-1] * self.num_heads) ** -0.5
        products = torch.einsum("thd,nd->thn", queries.float(), entries.float())
        return torch.einsum("th,thn->tn", weights, products.relu())
