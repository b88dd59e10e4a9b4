"""The compressor: pools each window of `ratio` tokens into one entry with learned gates (facts 3.6).

Ratio 4 overlaps: entry i pools the A halves of window i-1 and the B halves of window i. Works on a chunk of any length at
any position: the windows that a chunk of T tokens may complete are a fixed number, those that are not complete are masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rounding import hadamard_matrix, round_to_e2m1, round_to_e4m3
from runtime.models.deepseek_v4.layers import apply_rope, linear_float32, rms_norm, rope_angles
from runtime.models.deepseek_v4.state import CompressorState

KV_ROUNDING_GROUP = 64
INDEXER_ROUNDING_GROUP = 32


@dataclass(frozen=True, slots=True)
class Compressor:
    """One compressor's weights: wkv, wgate [C, D], ape float32 [ratio, C], norm [e]; C = 2e where windows overlap, else e."""

    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor
    frequencies: Tensor
    norm_eps: float
    round_kv: bool = False
    round_indexer: bool = False

    def __call__(self, a: Tensor, state: CompressorState, position: Tensor) -> None:
        """Writes the chunk's rows and the entries it completes into `state`.

        Args:
            a: [T, D] normalised activations of tokens position … position+T-1.
            state: Modified in place.
            position: int64 device scalar.
        """
        tokens, ratio, span = a.shape[0], state.ratio, state.values.shape[0]
        steps = torch.arange(tokens, device=a.device)
        values = linear_float32(a, self.wkv)
        gates = linear_float32(a, self.wgate) + self.ape[(position + steps) % ratio]

        windows = position // ratio + torch.arange((tokens + ratio - 1) // ratio, device=a.device)
        rows = _pooled_rows(windows, position, tokens, ratio, span)
        pooled = self._pool(torch.cat([state.values, values])[rows], torch.cat([state.gates, gates])[rows])
        entries = self._finish(pooled.to(a.dtype), windows * ratio)
        complete = (windows + 1) * ratio <= position + tokens
        state.entries.index_copy_(0, torch.where(complete, windows, state.capacity), entries)

        kept = min(tokens, span)
        slots = (position + steps[tokens - kept :]) % span
        state.values.index_copy_(0, slots, values[tokens - kept :])
        state.gates.index_copy_(0, slots, gates[tokens - kept :])

    def _pool(self, values: Tensor, gates: Tensor) -> Tensor:
        """Gated mean [n, e] of rows [n, span, C]; with overlap the older half of the rows gives its A channels."""
        width = self.norm.shape[0]
        if values.shape[-1] == 2 * width:
            older = values.shape[1] // 2
            values = torch.cat([values[:, :older, :width], values[:, older:, width:]], 1)
            gates = torch.cat([gates[:, :older, :width], gates[:, older:, width:]], 1)
        return (torch.softmax(gates, 1) * values).sum(1)

    def _finish(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Entries as the attention reads them: normed, rotated at their window's first token, rounded where chosen."""
        entries = rms_norm(pooled, self.norm, self.norm_eps)
        entries = apply_rope(entries, *rope_angles(positions, self.frequencies))
        if self.round_kv:
            entries = round_kv(entries, 2 * self.frequencies.shape[0])
        return round_indexer(entries) if self.round_indexer else entries


def _pooled_rows(windows: Tensor, position: Tensor, tokens: int, ratio: int, span: int) -> Tensor:
    """Row [n, span] of each pooled token in [ring rows; chunk rows]: older tokens lie in the ring, others in the chunk."""
    pooled = windows[:, None] * ratio + torch.arange(ratio - span, ratio, device=windows.device)
    in_chunk = span + (pooled - position).clamp(max=tokens - 1)
    return torch.where(pooled < position, pooled % span, in_chunk)


def round_kv(kv: Tensor, rope_width: int) -> Tensor:
    """kv [T, d] with its channels before the RoPE tail rounded to E4M3 (rule B)."""
    return torch.cat([round_to_e4m3(kv[..., :-rope_width], KV_ROUNDING_GROUP), kv[..., -rope_width:]], -1)


def round_indexer(x: Tensor) -> Tensor:
    """x [..., 128] after the Hadamard transform, rounded to E2M1 (rule C). Without rounding the transform would cancel."""
    rotated = (x.float() @ hadamard_matrix(x.shape[-1], x.device)).to(x.dtype)
    return round_to_e2m1(rotated, INDEXER_ROUNDING_GROUP)
