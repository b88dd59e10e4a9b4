"""What a sequence leaves behind: rings, open compressor windows, compressed entries, the position. Preallocated, never grown.

Rings are indexed by position modulo length, so nothing shifts. The position is a device scalar and whatever depends on it is
a mask, so that one captured graph can serve every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CompressorState:
    """One compressor's memory.

    `values` and `gates` float32 [span, C] hold the last span tokens, token t in row t mod span (span = pooled tokens).
    `entries` [N + 1, e] hold entry i in row i; the last row takes writes of windows that are not complete and is never read.
    """

    ratio: int
    values: Tensor
    gates: Tensor
    entries: Tensor

    @property
    def capacity(self) -> int:
        """Entries that fit in the context."""
        return self.entries.shape[0] - 1

    def reset(self) -> None:
        """An empty sequence: a gate of -inf keeps the window before the first out of every pool."""
        self.values.zero_()
        self.gates.fill_(-math.inf)


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's memory: window_ring [W, head_dim] with token t in row t mod W, and its compressors if it has any."""

    window_ring: Tensor
    compressor: CompressorState | None
    indexer: CompressorState | None

    def compressors(self) -> list[CompressorState]:
        """Those that exist."""
        return [c for c in (self.compressor, self.indexer) if c is not None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a State at `length`, independent of whatever happens to that State afterwards."""

    length: int
    tensors: tuple[Tensor, ...]


class State:
    """The state of one sequence of at most `context` tokens on one device."""

    def __init__(self, config: ModelConfig, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.context = context
        self.length = 0  # the host's copy of `position`
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.layers = [_layer_state(config, ratio, context, dtype, device) for ratio in config.layer_ratios]
        self.reset()

    def reset(self) -> None:
        """Forgets the sequence. Rings and entries need no clearing: their masks follow the position."""
        self._set_length(0)
        for layer in self.layers:
            for compressor in layer.compressors():
                compressor.reset()

    def advance(self, num_tokens: int) -> None:
        """Moves the position behind tokens whose state every layer has written."""
        self._set_length(self.length + num_tokens)

    def snapshot(self) -> Snapshot:
        """A copy that `restore` accepts at any later time."""
        return Snapshot(self.length, tuple(tensor.clone() for tensor in self._live(self.length)))

    def mark(self) -> Snapshot:
        """A light copy: without the compressed entries, which a sequence only adds to. For `rewind`, while it goes on.

        V4-Flash: 17.8 MB in bfloat16, whatever the length.
        """
        return Snapshot(self.length, tuple(tensor.clone() for tensor in self._moving()))

    def rewind(self, mark: Snapshot) -> None:
        """Back to a mark of this same sequence, bit for bit: every entry before it must still be the one it had then."""
        for target, saved in zip(self._moving(), mark.tensors, strict=True):
            target.copy_(saved)
        self._set_length(mark.length)

    def restore(self, snapshot: Snapshot) -> None:
        """Back to the moment of the snapshot, bit for bit; the snapshot stays usable."""
        for target, saved in zip(self._live(snapshot.length), snapshot.tensors, strict=True):
            target.copy_(saved)
        self._set_length(snapshot.length)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.position.fill_(length)

    def _live(self, length: int) -> list[Tensor]:
        """Views of everything that a sequence of `length` tokens has written."""
        compressors = [c for layer in self.layers for c in layer.compressors()]
        return [*self._moving(), *(c.entries[: length // c.ratio] for c in compressors)]

    def _moving(self) -> list[Tensor]:
        """What later tokens overwrite: rings and open windows."""
        views: list[Tensor] = []
        for layer in self.layers:
            views.append(layer.window_ring)
            for c in layer.compressors():
                views += [c.values, c.gates]
        return views


def _layer_state(config: ModelConfig, ratio: int, context: int, dtype: torch.dtype, device: torch.device) -> LayerState:
    def compressor(width: int) -> CompressorState:
        overlap = 2 if ratio == 4 else 1
        rows = torch.empty(2, overlap * ratio, overlap * width, device=device)
        entries = torch.zeros(context // ratio + 1, width, dtype=dtype, device=device)
        return CompressorState(ratio, rows[0], rows[1], entries)

    return LayerState(
        window_ring=torch.zeros(config.sliding_window, config.head_dim, dtype=dtype, device=device),
        compressor=compressor(config.head_dim) if ratio else None,
        indexer=compressor(config.index_head_dim) if ratio == 4 else None,
    )
