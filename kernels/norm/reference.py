"""The definitions of RMS norm and of the head in plain float32 torch. Owns no memory."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x²) + eps) over the last dimension, float32."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight.float()


def head_reference(x: Tensor, weight: Tensor, rows: int = 16_384) -> Tensor:
    """weight · x, float32 [V] of x [D], `rows` of the weight upcast at a time (facts 3.11)."""
    return torch.cat([part.float() @ x.float() for part in weight.split(rows)])
