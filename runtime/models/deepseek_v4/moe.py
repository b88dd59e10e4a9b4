"""Router and mixture of experts of one layer (facts 3.10). The routed experts come from an ExpertProvider."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kernels.expert import expert_ffn
from runtime.models.deepseek_v4.layers import Weight, dense, linear_float32
from runtime.models.experts import ExpertProvider, RouterObserver


@dataclass(frozen=True, slots=True)
class Router:
    """Scores and picks experts: weight [E, D]; a bias float32 [E] for the choice alone, or a table token id -> K experts."""

    weight: Tensor
    bias: Tensor | None
    token_to_experts: Tensor | None  # int64 [vocab, K], on hash layers
    topk: int
    scaling: float

    def __call__(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Picks int64 [T, K] and weights float32 [T, K], the heaviest pick first."""
        scores = F.softplus(linear_float32(x, self.weight)).sqrt()
        if self.token_to_experts is not None:
            ids = self.token_to_experts[token_ids]
        else:
            assert self.bias is not None
            ids = (scores + self.bias).topk(self.topk, dim=-1).indices
        picked = scores.gather(1, ids)
        weights, order = picked.sort(dim=-1, descending=True, stable=True)
        weights = weights * self.scaling / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids.gather(1, order), weights


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """One layer's router and shared expert (w1, w3 [F, D], w2 [D, F])."""

    layer_idx: int
    router: Router
    w1: Weight
    w3: Weight
    w2: Weight
    limit: float
    round_inputs: bool

    def __call__(
        self, x: Tensor, token_ids: Tensor, experts: ExpertProvider, observer: RouterObserver | None
    ) -> Tensor:
        """[T, D] in x's dtype: the picks' outputs added in rank order, then the shared expert's."""
        ids, weights = self.router(x, token_ids)
        if observer is not None:
            observer(self.layer_idx, x, ids, weights)
        picks = experts(self.layer_idx, x, ids, weights)
        total = picks[:, 0]
        for rank in range(1, picks.shape[1]):
            total = total + picks[:, rank]
        w1, w3, w2 = dense(self.w1), dense(self.w3), dense(self.w2)
        shared = expert_ffn(x, w1, w3, w2, limit=self.limit, round_inputs=self.round_inputs)
        return (total + shared.float()).to(x.dtype)
