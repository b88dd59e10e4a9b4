"""The small pieces every part is built from: RMS norm, a linear that may round its input, interleaved partial RoPE."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.formats import BLOCK_SIZE, Matrix, dequantize_fp8_block
from kernels.rounding import round_to_e4m3
from runtime.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x²) + eps) over the last dimension, float32 inside, in x's dtype."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ in float32, whatever the dtype of either."""
    return F.linear(x.float(), weight.float())


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A released FP8-block matrix [N, K] as it lies on disk; `dense` gives its exact values in `dtype`."""

    packed: Matrix
    dtype: torch.dtype


Weight = Tensor | Fp8Matrix


def dense(weight: Weight) -> Tensor:
    """The values [N, K]: the tensor itself, or those of an FP8 matrix, newly allocated."""
    return weight if isinstance(weight, Tensor) else dequantize_fp8_block(weight.packed, weight.dtype)


@dataclass(frozen=True, slots=True)
class Linear:
    """y = weight · x for an FP8 matrix [N, K]; rounds its input to E4M3 if `round_input` (rule A)."""

    weight: Weight
    round_input: bool

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(round_to_e4m3(x, BLOCK_SIZE) if self.round_input else x, dense(self.weight))


def rope_frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """Angle per position of each pair, float32 [qk_rope_head_dim / 2], on the CPU.

    Window layers use `rope_theta` plainly; layers with a compressor use `compress_rope_theta` with YaRN at every length and
    amplitude 1 (facts 1.3).
    """
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    scaling = config.rope_scaling
    if not compressed or scaling is None:
        return plain

    def turning_dim(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(turning_dim(scaling.beta_fast)), 0)
    high = min(math.ceil(turning_dim(scaling.beta_slow)), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each float32 [T, qk_rope_head_dim / 2], of integer positions [T]."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with channels (2i, 2i+1) of its tail rotated by angle i; the channels before stay; pass -sin for the inverse.

    Args:
        x: [T, d] or [T, H, d].
        cos: [T, r] float32; the tail is 2r channels wide.
        sin: [T, r] float32.
    """
    tail = 2 * cos.shape[-1]
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., -tail:].float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :-tail], rotated.to(x.dtype)], -1)
