"""The definition of hyper-connections in plain float32 torch (facts 3.2, 3.3, 3.11). Owns no memory.

With u the flattened streams, n = 4 and z = (fn · u) / sqrt(mean(u²) + norm_eps):

    pre    = sigmoid(z[:n] scale_0 + base[:n]) + eps                  mixed    = sum_j pre_j stream_j
    post   = 2 sigmoid(z[n:2n] scale_1 + base[n:2n])                  stream_k = post_k output + sum_j C_jk stream_j
    C      = sinkhorn(z[2n:] scale_2 + base[2n:], as [n, n])          (C's first index is summed)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.norm.reference import rms_norm_reference
from kernels.sinkhorn import sinkhorn


def pre_reference(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [T, D], post [T, n] and combination [T, n, n], all float32, of streams [T, n, D]."""
    n = streams.shape[1]
    z = _normed_product(streams, fn, norm_eps)
    pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (z[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return torch.einsum("tn,tnd->td", pre, streams.float()), post, sinkhorn(logits, iterations, eps)


def post_reference(output: Tensor, streams: Tensor, post: Tensor, combination: Tensor) -> Tensor:
    """The streams after a block, float32 [T, n, D]."""
    carried = torch.einsum("tjk,tjd->tkd", combination, streams.float())
    return carried + post[:, :, None] * output.float()[:, None]


def head_reference(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float) -> Tensor:
    """The streams collapsed before the final norm, float32 [T, D]: pre of an fn [n, nD] with one scale, mixed."""
    weights = torch.sigmoid(_normed_product(streams, fn, norm_eps) * scale + base) + eps
    return torch.einsum("tn,tnd->td", weights, streams.float())


def norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm taken along with a mix: x normed if there is a weight, else x itself; float32."""
    return x if weight is None else rms_norm_reference(x, weight, eps)


def _normed_product(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = streams.flatten(-2).float()
    return (flat @ fn.float().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
