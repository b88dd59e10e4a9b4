"""The definition of the Sinkhorn steps of hyper-connections, which the model and the kernels' reference share (facts 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Nearly doubly stochastic [..., n, n] of logits: softmax over rows + eps, a column step, then iterations-1 full rounds."""
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c
