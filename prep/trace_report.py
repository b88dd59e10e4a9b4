"""`prep trace --report`: what a trace says about caching and speculation, as a table, a JSON document and a picture.

Owns the figures only; the trace is `predictor.traces`', the replay against a pool of slots `runtime.store.replay`'s.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from predictor.traces import Trace
from runtime.store import replay
from runtime.store.policies import DECAY_TOKENS

WINDOWS = (2, 3, 4)  # consecutive tokens that one speculative step would verify
REPLAYED_TOKENS = 4096  # the replay is plain Python: about 10 s for each million picks and pool
DOCUMENT_TOKENS = 4096  # of a longer document, read in pieces of so many
HEAT_PICTURE = "heat.png"


class Tally:
    """Sums over tokens that the figures are made of, per layer; flat memory, one piece of a document at a time."""

    def __init__(self, trace: Trace) -> None:
        """Goes through the whole trace."""
        shape = trace.shape
        self.weights = torch.zeros(shape.num_layers, shape.num_picks, dtype=torch.float64)
        self.num_pairs = 0
        self.repeats = torch.zeros(shape.num_layers, dtype=torch.int64)
        self.num_windows = dict.fromkeys(WINDOWS, 0)
        self.unions = {size: torch.zeros(shape.num_layers, dtype=torch.int64) for size in WINDOWS}
        for tokens in _pieces(trace):
            weights = trace.weights(tokens).double()
            self.weights += (weights / weights.sum(-1, keepdim=True)).sum(0)
            self._add_picks(trace.ids(tokens), shape.num_experts)

    def _add_picks(self, ids: Tensor, num_experts: int) -> None:
        num_tokens = len(ids)
        self.num_pairs += num_tokens - 1
        for size in WINDOWS:
            self.num_windows[size] += max(0, num_tokens - size + 1)
        for layer_idx in range(ids.shape[1]):
            is_picked = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
            is_picked.scatter_(1, ids[:, layer_idx], True)
            self.repeats[layer_idx] += (is_picked[1:] & is_picked[:-1]).sum()
            union = is_picked
            for size in WINDOWS:
                union = union[:-1] | is_picked[size - 1 :]
                self.unions[size][layer_idx] += union.sum()


def _pieces(trace: Trace) -> Iterator[Tensor]:
    """Indices of consecutive tokens of one document."""
    for document in trace.documents:
        yield from torch.arange(document.first_token, document.first_token + document.num_tokens).split(DOCUMENT_TOKENS)


def report(directory: Path) -> dict[str, Any]:
    """The figures of the trace in `directory`; a list has one entry a layer.

    Keys: `tokens`; `documents`; `repeat`, the share of a token's picks that the previous token had in that layer; `union`,
    distinct experts of 2, 3, 4 consecutive tokens over those of one; `weight_by_rank`, mean share of a token's weight;
    `hit_rate`, LFU as the store has it, over the slots for each share of all experts, first touches left out.

    Raises:
        PredictorError: The trace is missing, damaged or unfinished.
    """
    trace = Trace.open(directory)
    tally, num_picks = Tally(trace), trace.shape.num_picks
    repeat = tally.repeats / max(1, tally.num_pairs * num_picks)
    unions = {size: tally.unions[size] / max(1, tally.num_windows[size] * num_picks) for size in WINDOWS}
    return {
        "trace": str(directory),
        "tokens": trace.num_tokens,
        "documents": len(trace.documents),
        "repeat": _figures(repeat),
        "union": {str(size): _figures(union) for size, union in unions.items()},
        "weight_by_rank": _rounded(tally.weights.mean(0) / trace.num_tokens),
        "weight_by_layer_and_rank": [_rounded(row) for row in tally.weights / trace.num_tokens],
        "uses_of_the_hottest_tenth": _figures(_hottest_share(trace.uses())),
        "replayed_tokens": min(REPLAYED_TOKENS, trace.num_tokens),
        "hit_rate": _hit_rates(trace),
    }


def _figures(by_layer: Tensor) -> dict[str, Any]:
    return {"all": round(float(by_layer.double().mean()), 4), "layers": _rounded(by_layer)}


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _hottest_share(uses: Tensor) -> Tensor:
    """Share of each layer's uses that its most used tenth of experts has: [L]."""
    ordered = uses.sort(dim=-1, descending=True).values.double()
    return ordered[:, : max(1, uses.shape[1] // 10)].sum(-1) / ordered.sum(-1)


def _hit_rates(trace: Trace) -> list[dict[str, float]]:
    routing = replay.from_recorded(trace, REPLAYED_TOKENS)
    total = trace.shape.num_layers * trace.shape.num_experts
    pools = sorted({max(trace.shape.num_picks, round(share * total)) for share in replay.SHARES})
    rates = []
    for num_slots in pools:
        tokens = replay.replay(routing, replay.Lfu(DECAY_TOKENS), num_slots)
        warm = tokens[int(replay.WARM_UP * len(tokens)) :]
        rates.append({"resident": round(num_slots / total, 4), "lfu": round(replay.hit_rate(warm), 4)})
    return rates


def table(figures: dict[str, Any]) -> str:
    """The figures of `report` for people."""
    sizes = list(figures["union"])
    lines = [f"{figures['trace']}: {figures['tokens']:,} tokens in {figures['documents']:,} documents"]
    lines.append("layer   repeat  hottest tenth" + "".join(f"  union of {size}" for size in sizes))
    columns = [figures["repeat"], figures["uses_of_the_hottest_tenth"], *(figures["union"][size] for size in sizes)]
    labels = [str(layer_idx) for layer_idx in range(len(columns[0]["layers"]))]
    rows = zip([*labels, "all"], *([*column["layers"], column["all"]] for column in columns), strict=True)
    lines += [
        f"{label:>5}{repeat:>9.1%}{hottest:>15.1%}" + "".join(f"{union:>12.2f}" for union in unions)
        for label, repeat, hottest, *unions in rows
    ]
    lines.append("weight by rank   " + " ".join(f"{share:.3f}" for share in figures["weight_by_rank"]))
    lines.append(
        f"hit rate, LFU over the first {figures['replayed_tokens']:,} tokens, the first fifth of them left out"
    )
    lines += [f"{pool['resident']:>9.1%} of the experts resident{pool['lfu']:>9.1%}" for pool in figures["hit_rate"]]
    return "\n".join(lines)


def draw_heat(directory: Path) -> str:
    """Draws HEAT_PICTURE, use frequency by layer and expert, beside the trace; a line that says so, or why not."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"{HEAT_PICTURE}: not drawn, matplotlib is not installed; pip install straw[plot]"
    from matplotlib.figure import Figure

    trace = Trace.open(directory)
    figure = Figure(figsize=(12, 1.5 + 0.12 * trace.shape.num_layers), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow((trace.uses() / trace.num_tokens).numpy(), aspect="auto", interpolation="nearest")
    axes.set(xlabel="expert", ylabel="layer", title=f"share of {trace.num_tokens:,} tokens that use an expert")
    figure.colorbar(image)
    figure.savefig(directory / HEAT_PICTURE, dpi=120)
    return f"{directory / HEAT_PICTURE}: drawn"


def print_lines(directory: Path) -> Iterator[str]:
    """What `prep trace --report` prints, the JSON document last."""
    figures = report(directory)
    yield table(figures)
    yield draw_heat(directory)
    yield json.dumps(figures)
