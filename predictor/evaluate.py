"""Recall of predictors on held-out tokens: the share of the router's picks that lies among the predictor's k best.

Owns the measure; draws and prints nothing. Equal scores are worth the mean over all their orders, so that one who cannot
tell experts apart gets exactly chance, k / E, and no order of ids helps anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from predictor.baselines import Scorer
from predictor.batches import in_order, load_batch
from predictor.model import Predictor
from predictor.trace_files import TraceShape
from predictor.traces import Trace

KS = (6, 8, 12, 16, 24)
REFERENCE = (12, 256)  # the article's k and E
BATCH_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Recall:
    """Mean recall by k, lookahead and the layer spoken of; the means over layers are exact, since all have the same tokens."""

    ks: tuple[int, ...]
    lookaheads: tuple[int, ...]
    shares: Tensor  # float64 [len(ks), len(lookaheads), L]; NaN where no layer lies so far before that one

    def at(self, k: int, lookahead: int | None = None, layers: Iterable[int] | None = None) -> float:
        """Recall@k in these layers (default: all) at this lookahead (default: the mean over all); NaN where there is none."""
        rows = self.shares[self.ks.index(k)]
        rows = rows if lookahead is None else rows[[self.lookaheads.index(lookahead)]]
        return float(rows[:, list(range(rows.shape[1]) if layers is None else layers)].nanmean())


def reference_k(shape: TraceShape) -> int:
    """The article's 12 of 256 in proportion to E, at least K."""
    k, num_experts = REFERENCE
    return max(shape.num_picks, round(k / num_experts * shape.num_experts))


def measured_ks(shape: TraceShape) -> tuple[int, ...]:
    """The k to measure, ascending: those of KS below E, and the reference."""
    return tuple(sorted({k for k in KS if k < shape.num_experts} | {reference_k(shape)}))


def recall_sums(scores: Tensor, ids: Tensor, ks: Sequence[int]) -> Tensor:
    """The sum over tokens of recall@k: float64 [len(ks)], from scores [n, E] and true picks int64 [n, K].

    A pick that b experts beat, one of e equals with itself, is among the k best in clamp((k − b) / e, 0, 1) of all orders.
    A score that is no number beats all and is beaten by all.
    """
    own = scores.gather(1, ids)[..., None]
    worse, equal = (scores[:, None] < own).sum(-1), (scores[:, None] == own).sum(-1)
    better = scores.shape[1] - worse - equal
    inside = [((k - better) / equal.clamp(min=1)).clamp(0, 1).double().mean(-1).sum() for k in ks]
    return torch.stack(inside)


def from_hidden(predictor: Predictor) -> Scorer:
    """The predictor as a scorer of batches."""
    return lambda layer_idx, batch: predictor.scores(layer_idx, batch.hidden[:, layer_idx])


@torch.inference_mode()
def evaluate(
    scorers: Mapping[str, Scorer],
    trace: Trace,
    tokens: Tensor,
    lookaheads: tuple[int, ...],
    device: torch.device,
    on_tokens: Callable[[int], None],
) -> dict[str, Recall]:
    """The recall of every scorer over these token indices, read once; `on_tokens` hears how many more are done."""
    shape, ks = trace.shape, measured_ks(trace.shape)
    size = (len(ks), len(lookaheads), shape.num_layers)
    sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name in scorers}
    for part in in_order(tokens, BATCH_TOKENS):
        batch = load_batch(trace, part, device)
        for name, scorer in scorers.items():
            for layer_idx in range(shape.num_layers - min(lookaheads)):
                scores = scorer(layer_idx, batch)
                for place, target in _targets(lookaheads, layer_idx, shape.num_layers):
                    sums[name][:, place, target] += recall_sums(scores[:, place], batch.ids[:, target], ks)
        on_tokens(len(part))
    absent = torch.arange(shape.num_layers) < torch.tensor(lookaheads)[:, None]
    means = {name: (total.cpu() / len(tokens)).masked_fill(absent, torch.nan) for name, total in sums.items()}
    return {name: Recall(ks, lookaheads, shares) for name, shares in means.items()}


def _targets(lookaheads: tuple[int, ...], layer_idx: int, num_layers: int) -> list[tuple[int, int]]:
    """(place of the lookahead, layer spoken of) where that layer exists."""
    ahead = [(place, layer_idx + lookahead) for place, lookahead in enumerate(lookaheads)]
    return [(place, target) for place, target in ahead if target < num_layers]
