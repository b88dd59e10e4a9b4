"""The definition of one expert: clamped SwiGLU between w1, w3 and w2, in plain torch. Owns no weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.formats import BLOCK_SIZE
from kernels.rounding import round_to_e4m3


def expert_ffn(
    x: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    *,
    limit: float,
    route_weights: Tensor | None = None,
    round_inputs: bool = False,
) -> Tensor:
    """w2 · (weight * silu(min(w1·x, limit)) * clamp(w3·x, ±limit)), in x's dtype.

    Args:
        x: [T, D] activations.
        w1: [F, D] gate matrix, x's dtype.
        w3: [F, D] up matrix.
        w2: [D, F] down matrix.
        limit: Clamp of the gate (upper side only) and of the up branch (both sides).
        route_weights: [T] float32, applied before w2; None for the shared expert.
        round_inputs: Round the inputs of the three products to E4M3 per 128 (rule A).

    Returns:
        [T, D], newly allocated.

    Source: facts 3.10; the product of gate and up is taken in float32.
    """
    if round_inputs:
        x = round_to_e4m3(x, BLOCK_SIZE)
    gate = F.linear(x, w1).float().clamp(max=limit)
    up = F.linear(x, w3).float().clamp(-limit, limit)
    hidden = F.silu(gate) * up
    if route_weights is not None:
        hidden = hidden * route_weights[:, None]
    hidden = hidden.to(x.dtype)
    if round_inputs:
        hidden = round_to_e4m3(hidden, BLOCK_SIZE)
    return F.linear(hidden, w2)
