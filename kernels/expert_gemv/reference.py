"""The definition of the grouped expert GEMV, in plain float32 torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.expert import expert_ffn

Matrices = tuple[Tensor, Tensor, Tensor]  # w1, w3 [F, D], w2 [D, F], float32


def expert_gemv_reference(
    x: Tensor, experts: Sequence[Matrices], tokens: Tensor, weights: Tensor, limit: float
) -> Tensor:
    """out[p] = weight_p * w2_p · (silu(min(w1_p·x, limit)) * clamp(w3_p·x, ±limit)) with x of token_p; float32 [P, D].

    Args:
        x: [T, D].
        experts: The P picks' matrices.
        tokens: [P], rows of x.
        weights: [P] float32.
        limit: The clamp.
    """
    rows = x.float()[tokens.long()]
    outputs = [
        expert_ffn(row[None], *matrices, limit=limit, route_weights=weight[None])
        for row, matrices, weight in zip(rows, experts, weights, strict=True)
    ]
    return torch.cat(outputs)


def add_picks_reference(picks: Tensor, shared: Tensor, dtype: torch.dtype) -> Tensor:
    """((pick 0 + pick 1) + … + shared) of [T, K, D] and [T, D] in float32, rounded once to `dtype`."""
    total = picks[:, 0].float()
    for rank in range(1, picks.shape[1]):
        total = total + picks[:, rank].float()
    return (total + shared.float()).to(dtype)
