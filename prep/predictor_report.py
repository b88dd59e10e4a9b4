"""What `prep train-predictor` tells of its outcome: a table, a JSON document, a picture. Trains and measures nothing."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from predictor.baselines import NextRouter
from predictor.evaluate import Recall, reference_k
from prep.train_predictor import MARGIN, Outcome, routed_layers
from runtime.files import replacing

PICTURE = "recall.png"
UNTRAINED = (NextRouter.kind, "previous-token", "frequency")
FAINT = "mlp-quarter"
COLORS = {"mlp": "C0", FAINT: "C0", "linear": "C1", NextRouter.kind: "C2", "previous-token": "C3", "frequency": "C4"}


def describe(outcome: Outcome) -> str:
    """Recall by k and lookahead of all, of the trained kind by layer, and what was kept."""
    return "\n".join([*_overview(outcome), "", *_by_layer(outcome), "", *_better_probe(outcome), verdict(outcome)])


def verdict(outcome: Outcome) -> str:
    """One line: which kind was written, and by how much it beats the best that needs no training."""
    k, layers = reference_k(outcome.shape), routed_layers(outcome.shape, outcome.num_hash_layers)
    mean = {name: recall.at(k, layers=layers) for name, recall in outcome.recall.items()}
    best = max(UNTRAINED, key=lambda name: mean[name])
    gain = f"{outcome.trained_kind} {mean[outcome.trained_kind]:.1%}, {best} {mean[best]:.1%} at recall@{k}"
    if outcome.saved_kind == NextRouter.kind:
        return f"{outcome.out}: next-router, which is as good without training ({gain}); it has no weights of its own"
    if mean[outcome.trained_kind] - mean[best] <= MARGIN:
        return f"{outcome.out}: {outcome.saved_kind}, which tells no more than {best} ({gain}); prefetch has little to gain from it"
    return f"{outcome.out}: {outcome.saved_kind} ({gain})"


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Everything measured, without anything that JSON cannot say."""
    k = reference_k(outcome.shape)
    return {
        "what": "train-predictor",
        "out": str(outcome.out),
        "trained_kind": outcome.trained_kind,
        "saved_kind": outcome.saved_kind,
        "model": asdict(outcome.shape) | {"num_hash_layers": outcome.num_hash_layers},
        "settings": outcome.settings,
        "tokens": dict(outcome.tokens),
        "seconds": round(outcome.seconds, 1),
        "reference_k": k,
        "chance": {str(k): min(1.0, k / outcome.shape.num_experts) for k in _first(outcome).ks},
        "recall": {name: _recall_json(outcome, recall, k) for name, recall in outcome.recall.items()},
        "checks": {name: [asdict(check) for check in checks] for name, checks in outcome.checks.items()},
    }


def draw(outcome: Outcome) -> str:
    """The picture beside the predictor, and a line about it; without matplotlib (the `plot` extra) the line alone."""
    path = outcome.out.parent / PICTURE
    if importlib.util.find_spec("matplotlib") is None:
        return f"{path}: not drawn, matplotlib is missing; run: pip install 'straw[plot]'"
    with replacing(path) as temporary:
        _draw(outcome, temporary)
    return f"{path}: recall against k"


def _draw(outcome: Outcome, path: Path) -> None:
    from matplotlib.figure import Figure

    first, layers = _first(outcome), routed_layers(outcome.shape, outcome.num_hash_layers)
    figure = Figure(figsize=(4.5 * len(first.lookaheads), 4.2), layout="constrained")
    panels = figure.subplots(1, len(first.lookaheads), sharey=True, squeeze=False)[0]
    for panel, lookahead in zip(panels, first.lookaheads, strict=True):
        for name, recall in outcome.recall.items():
            values = [recall.at(k, lookahead, layers) for k in recall.ks]
            look = {"color": COLORS[name], "alpha": 0.35 if name == FAINT else 1.0}
            panel.plot(recall.ks, values, marker="o", label=name, **look)
        chance = [min(1.0, k / outcome.shape.num_experts) for k in first.ks]
        panel.plot(first.ks, chance, color="grey", linestyle=":", label="chance")
        panel.set(title=f"{lookahead} layers ahead", xlabel="k", ylim=(0, 1), xticks=first.ks)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"recall@k of the router's {outcome.shape.num_picks}, held-out tokens")
    panels[-1].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=150)


def _overview(outcome: Outcome) -> Iterator[str]:
    first = _first(outcome)
    k, layers = reference_k(outcome.shape), routed_layers(outcome.shape, outcome.num_hash_layers)
    counts = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in outcome.tokens.items())
    yield f"recall@k on held-out tokens ({counts}), layers without hash routing; @{k} is 12 of 256 in proportion, at least K"
    yield f"{'':<22}" + "".join(f"{f'@{k}':>8}" for k in first.ks)
    for lookahead in first.lookaheads:
        for name, recall in outcome.recall.items():
            yield _row(f"+{lookahead} {name}", [recall.at(k, lookahead, layers) for k in first.ks])
    yield _row("chance", [min(1.0, k / outcome.shape.num_experts) for k in first.ks])
    hash_layers = range(min(first.lookaheads), outcome.num_hash_layers)
    if len(hash_layers):
        yield "hash layers, whose picks follow from the token id and need no prediction:"
        for name, recall in outcome.recall.items():
            yield _row(
                f"+{min(first.lookaheads)} {name}", [recall.at(k, min(first.lookaheads), hash_layers) for k in first.ks]
            )


def _by_layer(outcome: Outcome) -> Iterator[str]:
    recall = outcome.recall[outcome.trained_kind]
    yield f"{outcome.trained_kind} by the layer spoken of" + " (h: hash)" * (
        outcome.num_hash_layers > min(recall.lookaheads)
    )
    yield f"{'':<22}" + "".join(f"{f'@{k}':>8}" for k in recall.ks)
    for lookahead in recall.lookaheads:
        for layer_idx in range(lookahead, outcome.shape.num_layers):
            mark = "h" if layer_idx < outcome.num_hash_layers else ""
            yield _row(
                f"+{lookahead} layer {layer_idx}{mark}", [recall.at(k, lookahead, [layer_idx]) for k in recall.ks]
            )


def _better_probe(outcome: Outcome) -> Iterator[str]:
    """One line where a simpler kind did better than the one that was asked for."""
    k, layers = reference_k(outcome.shape), routed_layers(outcome.shape, outcome.num_hash_layers)
    kinds = (outcome.trained_kind, outcome.saved_kind, "linear")
    trained, saved, linear = (outcome.recall[name].at(k, layers=layers) for name in kinds)
    if linear > max(trained, saved):
        yield f"linear does better than {outcome.trained_kind} ({linear:.1%}, {trained:.1%} at recall@{k}); train longer, or keep it: --kind linear"


def _row(name: str, values: Sequence[float]) -> str:
    return f"{name:<22}" + "".join("       –" if math.isnan(value) else f"{value:>8.1%}" for value in values)


def _first(outcome: Outcome) -> Recall:
    """Any: all have the same k and lookaheads."""
    return next(iter(outcome.recall.values()))


def _recall_json(outcome: Outcome, recall: Recall, reference: int) -> dict[str, Any]:
    layers = routed_layers(outcome.shape, outcome.num_hash_layers)
    by_k = {la: {str(k): _number(recall.at(k, la, layers)) for k in recall.ks} for la in recall.lookaheads}
    rows = recall.shares[recall.ks.index(reference)].tolist()
    by_layer = {la: [_number(value) for value in row] for la, row in zip(recall.lookaheads, rows, strict=True)}
    return {
        "routed": {f"+{lookahead}": values for lookahead, values in by_k.items()},
        f"by_layer@{reference}": {f"+{lookahead}": values for lookahead, values in by_layer.items()},
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 5)
