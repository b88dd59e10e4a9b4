"""What is compared with the exact model: an expert's weights and outputs under a code or a method, and the loss of a run.

Owns neither the methods (`prep.experiments.methods`) nor the choice of what is compared (`prep.experiments.measure`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.expert import expert_ffn
from kernels.formats import PLANES, dequantize_int2, split_slab
from prep.experiments.captured import KeptExperts, Run, Seen, Weights, hidden_of, with_tokens
from prep.experiments.methods import Layer, Method, apply
from prep.solvers.clip import solve_absmax
from prep.study import relative_error
from runtime.artifact import ModelDirectory
from runtime.resident import TWO_BIT

Errors = dict[str, float]


def expert_errors(exact: Weights, coded: Weights, x: Tensor, limit: float) -> Errors:
    """Relative errors of one expert: weights (all three matrices), outputs of w1, w3 and w2, output of the whole.

    x: [T, D], the tokens' router inputs. w2 alone is measured on the hidden activations of the exact w1 and w3.
    """
    hidden = hidden_of(x, exact[0], exact[1], limit)
    flat = [torch.cat([part.flatten() for part in weights]) for weights in (coded, exact)]
    errors = {"weight": relative_error(flat[0], flat[1])}
    for name, given, got, true in zip(("w1", "w3", "w2"), (x, x, hidden), coded, exact, strict=True):
        errors[name] = relative_error(given @ got.mT, given @ true.mT)
    whole = expert_ffn(x, *coded, limit=limit)
    return errors | {"expert": relative_error(whole, expert_ffn(x, *exact, limit=limit))}


def medians(errors: Sequence[Errors]) -> Errors:
    """The median of each error over experts, and the 5th and 95th percentile of the whole expert's."""
    result = {name: _quantile([one[name] for one in errors], 0.5) for name in errors[0]}
    whole = [one["expert"] for one in errors]
    return result | {"expert_p5": _quantile(whole, 0.05), "expert_p95": _quantile(whole, 0.95)}


def _quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def outcome(layers: Sequence[Layer], method: Method) -> Errors:
    """Median errors of a method on fresh tokens."""
    errors = []
    for layer in layers:
        for coded, exact, x in zip(apply(layer, method), zip(*layer.exact, strict=True), layer.fresh, strict=True):
            if len(x):
                errors.append(expert_errors(exact, coded, x, layer.limit))
    return medians(errors)


def code_errors(source: ModelDirectory, exact: KeptExperts, fresh: list[Seen]) -> dict[str, Any]:
    """Median errors of round-to-nearest and of each 2-bit code over all experts with enough fresh tokens."""
    codes = {"clip (int2)": "int2", "quad (quad2)": "quad2", "split base": "split"}
    providers = {name: KeptExperts(source, TWO_BIT, code) for name, code in codes.items()}
    errors, limit = dict[str, list[Errors]](), source.config.swiglu_limit
    for layer_idx, expert_id, x in with_tokens(source, fresh):
        coded = round_to_nearest(source, layer_idx, expert_id)
        coded |= {name: provider.weights(layer_idx, expert_id) for name, provider in providers.items()}
        for name, weights in coded.items():
            true = exact.weights(layer_idx, expert_id)
            errors.setdefault(name, []).append(expert_errors(true, weights, x, limit))
    return {name: medians(part) | {"experts": len(part)} for name, part in errors.items()}


def round_to_nearest(source: ModelDirectory, layer_idx: int, expert_id: int) -> dict[str, Weights]:
    """One expert under INT2 without a search, by divisor of the largest weight."""
    config = source.config
    slab = source.read_slab(layer_idx, expert_id)
    matrices = split_slab(slab, PLANES["fp4"], config.hidden_size, config.moe_intermediate_size)
    coded = {}
    for divisor in (1.5, 2.0):
        w1, w3, w2 = (dequantize_int2(*solve_absmax(matrix, divisor)) for matrix in matrices)
        coded[f"absmax / {divisor:g}"] = w1, w3, w2
    return coded


def loss_against(run: Run, exact: Run) -> dict[str, Any]:
    """Nats per token, the difference to exact with its standard error over rows, and the ratio of perplexities."""
    difference = (run.losses.double() - exact.losses.double()).mean(1)
    return {
        "tokens": run.losses.numel(),
        "nats_per_token": float(run.losses.double().mean()),
        "difference": float(difference.mean()),
        "standard_error": float(difference.std() / len(difference) ** 0.5),
        "perplexity_ratio": float(difference.mean().exp()),
        "logits_bit_equal": run.checksums == exact.checksums,
    }
