"""Hyper-connections: four residual streams, mixed into one input before a block and spread again after it (facts 3.2, 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sinkhorn import sinkhorn
from runtime.models.deepseek_v4.layers import linear_float32


class Mix(NamedTuple):
    """What one block needs to return to the streams: post float32 [T, n], combination float32 [T, n, n]."""

    post: Tensor
    combination: Tensor


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """The mixing before and after one block. Weights are float32: fn [(2+n)n, nD], base [(2+n)n], scale [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    num_streams: int
    sinkhorn_iters: int
    eps: float
    norm_eps: float

    def pre(self, streams: Tensor) -> tuple[Tensor, Mix]:
        """The block's input [T, D] in the streams' dtype, and the Mix that `post` needs; streams are [T, n, D]."""
        n = self.num_streams
        z = _normed_product(streams, self.fn, self.norm_eps)
        pre = torch.sigmoid(z[:, :n] * self.scale[0] + self.base[:n]) + self.eps
        post = 2 * torch.sigmoid(z[:, n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
        raw = (z[:, 2 * n :] * self.scale[2] + self.base[2 * n :]).unflatten(-1, (n, n))
        mixed = torch.einsum("tn,tnd->td", pre, streams.float())
        return mixed.to(streams.dtype), Mix(post, sinkhorn(raw, self.sinkhorn_iters, self.eps))


def spread(output: Tensor, streams: Tensor, mix: Mix) -> Tensor:
    """The streams after a block, [T, n, D]: stream k = post_k * output + sum_j C_jk * stream_j (C's first index is summed)."""
    carried = torch.einsum("tjk,tjd->tkd", mix.combination, streams.float())
    return (carried + mix.post[:, :, None] * output.float()[:, None]).to(streams.dtype)


@dataclass(frozen=True, slots=True)
class HyperHead:
    """Collapses the streams before the final norm (facts 3.11): fn float32 [n, nD], base [n], scale [1]."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    eps: float
    norm_eps: float

    def __call__(self, streams: Tensor) -> Tensor:
        """[T, D] in the streams' dtype."""
        weights = torch.sigmoid(_normed_product(streams, self.fn, self.norm_eps) * self.scale + self.base) + self.eps
        return torch.einsum("tn,tnd->td", weights, streams.float()).to(streams.dtype)


def _normed_product(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """(fn · u) / sqrt(mean(u²) + eps) of the flattened streams u, stream 0 first; float32."""
    flat = streams.flatten(-2).float()
    return linear_float32(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
