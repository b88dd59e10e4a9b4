"""The definition of the grouped expert GEMM in plain float32 torch: each pick's weighted output, by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.expert import expert_ffn

Matrices = tuple[Tensor, Tensor, Tensor]  # w1, w3 [F, D], w2 [D, F], float32


def expert_gemm_reference(
    x: Tensor, picks: Tensor, weights: Tensor, experts: Sequence[Matrices], limit: float
) -> Tensor:
    """out[t, k] = w2_e · (weight_tk * silu(min(w1_e·x_t, limit)) * clamp(w3_e·x_t, ±limit)), e = picks[t, k]; float32 [T, K, D].

    Args:
        x: [T, D].
        picks: [T, K], indices into `experts`; a negative one gives zeros.
        weights: [T, K] float32.
        experts: Their matrices.
        limit: The clamp.
    """
    out = torch.zeros(*picks.shape, x.shape[1], device=x.device)
    for index, (w1, w3, w2) in enumerate(experts):
        tokens, ranks = (picks == index).nonzero(as_tuple=True)
        routed = weights[tokens, ranks]
        out[tokens, ranks] = expert_ffn(x[tokens].float(), w1, w3, w2, limit=limit, route_weights=routed)
    return out
