"""The definition of the FP8-block products in plain float32: y = W·x with W = E4M3(code) * 2^(byte-127) of its 128 x 128 block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.formats import Matrix, dequantize_fp8_block


def fp8_linear_reference(x: Tensor, matrix: Matrix) -> Tensor:
    """y[t, n] = Σ_k W[n, k] · x[t, k], float32 [T, N]."""
    return F.linear(x.float(), _weight(matrix))


def fp8_grouped_linear_reference(x: Tensor, matrix: Matrix) -> Tensor:
    """y[t, g, n] = Σ_k W[g·N + n, k] · x[t, g, k], float32 [T, G, N]; W is [G·N, K]."""
    weight = _weight(matrix).unflatten(0, (x.shape[1], -1))
    return torch.einsum("tgk,gnk->tgn", x.float(), weight)


def fp8_swiglu_reference(x: Tensor, w1: Matrix, w3: Matrix, limit: float) -> Tensor:
    """silu(min(W1·x, limit)) · clamp(W3·x, ±limit), float32 [T, F]: facts 3.10 up to w2 (`kernels.expert.expert_ffn`)."""
    gate = fp8_linear_reference(x, w1).clamp(max=limit)
    return F.silu(gate) * fp8_linear_reference(x, w3).clamp(-limit, limit)


def _weight(matrix: Matrix) -> Tensor:
    """W in float32; codes given as bytes are E4M3 all the same."""
    return dequantize_fp8_block(Matrix(matrix.codes.view(torch.float8_e4m3fn), matrix.scales))
