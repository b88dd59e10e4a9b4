"""The definition of the router in plain float32 torch (facts 3.10). Owns no memory."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def scores_reference(x: Tensor, weight: Tensor) -> Tensor:
    """sqrt(softplus(weight · x)), float32 [T, E]."""
    return F.softplus(x.float() @ weight.float().T).sqrt()


def router_reference(
    scores: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Picks int64 [T, K] and weights float32 [T, K] of scores [T, E], the heaviest pick first.

    Chosen are the K largest of scores + bias, of equal ones the lower index first, or table[token id]. The weights are the
    picked scores over their sum + 1e-20, times `scaling`; picks of equal weight keep the order in which they were chosen.
    """
    if table is None:
        biased = scores if bias is None else scores + bias
        chosen = biased.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    else:
        assert token_ids is not None
        chosen = table[token_ids.long()].long()
    weights, order = scores.gather(1, chosen).sort(dim=-1, descending=True, stable=True)
    return chosen.gather(1, order), weights * scaling / (weights.sum(-1, keepdim=True) + 1e-20)
