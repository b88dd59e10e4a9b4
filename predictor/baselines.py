"""What a predictor must beat: a linear probe, the next router on the current hidden state, the previous token's picks, use frequency.

Owns their scores. The probe is trained like the predictor (`predictor.train`); the others are not trained at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from predictor.batches import Batch, in_order
from predictor.trace_files import TraceShape
from predictor.traces import Trace

COUNT_TOKENS = 8192  # whose picks are counted at once

Scorer = Callable[[int, Batch], Tensor]  # layer and batch to scores float32 [n, number of lookaheads, E]


class RouterWeights(NamedTuple):
    """What a layer's router chooses by: the best of sqrt(softplus(weight x)) + bias."""

    weight: Tensor  # [E, D]
    bias: Tensor  # float32 [E]


class LinearProbe(nn.Module):
    """One matrix a layer from the normalised hidden state to the logits of every lookahead."""

    kind = "linear"
    width = 0

    def __init__(self, shape: TraceShape, lookaheads: tuple[int, ...], random: torch.Generator | None = None) -> None:
        """Zero weights, and logits that say K of E: nothing is drawn, `random` is there for the predictor's sake."""
        super().__init__()
        self.shape, self.lookaheads = shape, lookaheads
        rows = len(lookaheads) * shape.num_experts
        self.weight = nn.Parameter(torch.zeros(shape.num_layers, rows, shape.hidden_size))
        self.bias = nn.Parameter(torch.full((shape.num_layers, rows), chance_logit(shape)))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [n, L, number of lookaheads, E] of hidden states [n, L, D]."""
        x = normalised(hidden, self.weight.dtype)
        logits = torch.einsum("nld,lrd->nlr", x, self.weight) + self.bias
        return logits.unflatten(-1, (len(self.lookaheads), self.shape.num_experts))

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        """Logits float32 [T, number of lookaheads, E] of one layer's hidden states [T, D]."""
        logits = F.linear(normalised(x, self.weight.dtype), self.weight[layer_idx], self.bias[layer_idx])
        return logits.float().unflatten(-1, (len(self.lookaheads), self.shape.num_experts))


class NextRouter:
    """The router of layer l + lookahead applied to the hidden state of layer l. Owns no weights: it holds the model's."""

    kind = "next-router"
    width = 0

    def __init__(self, shape: TraceShape, lookaheads: tuple[int, ...], routers: Sequence[RouterWeights | None]) -> None:
        """`routers` by layer, None where a layer picks by token id; ValueError if they are not of all layers."""
        if len(routers) != shape.num_layers:
            raise ValueError(f"routers: got {len(routers)}, expected one or None for each of {shape.num_layers} layers")
        self.shape, self.lookaheads, self.routers = shape, lookaheads, tuple(routers)

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        """What each router would choose by, float32 [T, number of lookaheads, E]; zeros where there is none. No logits."""
        return torch.stack([self._of(layer_idx + lookahead, x) for lookahead in self.lookaheads], dim=1)

    def _of(self, layer_idx: int, x: Tensor) -> Tensor:
        router = self.routers[layer_idx] if layer_idx < len(self.routers) else None
        if router is None:
            return x.new_zeros(len(x), self.shape.num_experts, dtype=torch.float32)
        return F.softplus(F.linear(x.float(), router.weight.float())).sqrt() + router.bias


class Frequency:
    """Each layer's uses of its experts, whatever the token."""

    def __init__(self, shares: Tensor, lookaheads: tuple[int, ...]) -> None:
        """`shares`: float32 [L, E], of the tokens that picked the expert."""
        self.shares, self.lookaheads = shares, lookaheads

    def __call__(self, layer_idx: int, batch: Batch) -> Tensor:
        rows = [of_layer(self.shares, layer_idx + lookahead) for lookahead in self.lookaheads]
        return torch.stack(rows).expand(len(batch.ids), -1, -1)


class PreviousToken:
    """The picks of the document's previous token in the layer spoken of, the more used first; then the rest by use."""

    def __init__(self, frequency: Frequency) -> None:
        self.frequency = frequency

    def __call__(self, layer_idx: int, batch: Batch) -> Tensor:
        scores = self.frequency(layer_idx, batch).clone()
        for place, lookahead in enumerate(self.frequency.lookaheads):
            ids = of_layer(batch.previous.transpose(0, 1), layer_idx + lookahead)
            bonus = (ids >= 0).float() * 2  # a share of use is at most 1
            scores[:, place].scatter_add_(1, ids.clamp(min=0), bonus)
        return scores


def of_layer(by_layer: Tensor, layer_idx: int) -> Tensor:
    """The row of a layer; of one behind the last layer the last one's, to be masked by whoever asks."""
    return by_layer[min(layer_idx, len(by_layer) - 1)]


def use_shares(trace: Trace, tokens: Tensor) -> Tensor:
    """The share of these tokens that picked each expert: float32 [L, E]."""
    counts = torch.zeros(trace.shape.num_layers, trace.shape.num_experts)
    for part in in_order(tokens, COUNT_TOKENS):
        ids = trace.ids(part).transpose(0, 1).flatten(1)
        counts.scatter_add_(1, ids, torch.ones(ids.shape))
    return counts / len(tokens)


def normalised(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` at root mean square 1 along its last dimension, computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:]).to(dtype)


def chance_logit(shape: TraceShape) -> float:
    """The logit of K / E, where training begins; of a share below 1 if every expert is picked."""
    share = min(shape.num_picks / shape.num_experts, 0.99)
    return math.log(share / (1 - share))
