"""What is measured: the settings of every experiment, all results of a model and a text, and the table of them.

Owns no method (`prep.experiments.methods`), no error (`prep.experiments.errors`) and no command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from prep.experiments.captured import (
    CALIBRATION_ROWS,
    ROW,
    KeptExperts,
    Run,
    exact_experts,
    open_sessions,
    read_rows,
    run_rows,
)
from prep.experiments.errors import Errors, code_errors, loss_against, outcome
from prep.experiments.methods import (
    Layer,
    Method,
    apply,
    build_layers,
    corrected,
    equalised,
    fed_back,
    joined,
    plain,
    sketched,
    weighted,
)
from runtime.artifact import ModelDirectory
from runtime.engine import Session
from runtime.models.experts import ExpertProvider
from runtime.resident import FP4, TWO_BIT
from runtime.tokenizer import load_tokenizer

EXPERT_STEP = 6  # the experiments take every so many-th expert of each layer
TOKENS = (128, 512, 2048, CALIBRATION_ROWS * ROW)  # for error feedback
DAMPS = (0.01, 0.1, 0.5)
ALPHAS = (0.25, 0.5, 1.0)
RANKS = (16, 32)  # 16 of 128 is the article's 256 of 2048
WINS = 0.95  # of the plain code's output error

_COLUMNS = ("weight", "w1", "w3", "w2", "expert")
_HEADINGS = "".join(f"{column:>8}" for column in _COLUMNS)


def measure(directory: Path, text: Path) -> dict[str, Any]:
    """All results; the table goes to stderr while they come."""
    with ModelDirectory(directory) as source:
        session, config = open_sessions(source), source.config
        tokenizer = load_tokenizer(directory)
        assert tokenizer is not None
        rows = read_rows(text, tokenizer, config.bos_token_id, config.eos_token_id)
        exact = exact_experts(source)
        calibration, fresh = (run_rows(session(exact), part) for part in rows)
        results: dict[str, Any] = {"calibration_tokens": rows[0][:, 1:].numel(), "fresh_tokens": rows[1][:, 1:].numel()}
        results["codes"] = code_errors(source, exact, fresh.seen)
        _say(f"{'all experts':62}{_HEADINGS}", *(f"{name:62}{_numbers(e)}" for name, e in results["codes"].items()))
        layers = build_layers(source, calibration.seen, fresh.seen, EXPERT_STEP)
        _say(f"{'every ' + str(EXPERT_STEP) + '-th expert':62}{_HEADINGS}  against plain")
        results["experiments"] = run_experiments(layers)
        results["loss"] = losses(source, session, rows[1], fresh, build_layers(source, calibration.seen, fresh.seen, 1))
    return results


def run_experiments(layers: Sequence[Layer]) -> dict[str, Any]:
    """Errors of every variant and their ratios to the plain code's; a whole expert's of at most WINS, for no more bytes, wins."""
    base = {code: outcome(layers, plain(code)) for code in ("int2", "quad2")}
    results: dict[str, Any] = {"plain": base}
    _say(*(f"{'plain':22}{code:40}{_numbers(errors)}" for code, errors in base.items()))
    for name, variants in experiments().items():
        results[name] = {}
        for variant, (code, method, added_bits) in variants.items():
            errors = outcome(layers, method)
            ratios = {f"{key}_ratio": errors[key] / base[code][key] for key in ("w1", "w3", "w2", "expert")}
            wins = ratios["expert_ratio"] <= WINS and added_bits <= 0
            results[name][variant] = errors | ratios | {"added_bits_per_weight": added_bits, "wins": wins}
            extra = f"  {added_bits:+.2f} bits" if added_bits else ""
            _say(f"{name:22}{variant:40}{_numbers(errors)}{ratios['expert_ratio']:9.3f}{extra}")
    return results


def losses(
    source: ModelDirectory,
    session: Callable[[ExpertProvider], Session],
    rows: Tensor,
    exact: Run,
    layers: Sequence[Layer],
) -> dict[str, Any]:
    """Held-out loss on the fresh rows with every routed expert at each precision, and with error feedback."""
    served = {
        "exact, from fp4": lambda: exact_experts(source),
        "exact, from split": lambda: KeptExperts(source, FP4, "split"),
        "int2": lambda: KeptExperts(source, TWO_BIT, "int2"),
        "quad2": lambda: KeptExperts(source, TWO_BIT, "quad2"),
        "split base": lambda: KeptExperts(source, TWO_BIT, "split"),
        "quad2, fed back": lambda: _replaced(source, layers, best_method()),
    }
    results = {}
    for name, provider in served.items():
        run = exact if name == "exact, from fp4" else run_rows(session(provider()), rows)
        results[name] = one = loss_against(run, exact)
        _say(f"{name:20}{one['nats_per_token']:8.4f} nats/token{one['difference']:+9.4f} ± {one['standard_error']:.4f}"
             f"{one['perplexity_ratio']:8.4f} of exact perplexity, bit-equal: {one['logits_bit_equal']}")  # fmt: skip
    return results


def _replaced(source: ModelDirectory, layers: Sequence[Layer], method: Method) -> KeptExperts:
    """A provider of every expert under a method; `layers` hold all experts."""
    experts = exact_experts(source)
    for layer in layers:
        coded = apply(layer, method)
        experts.kept |= {(layer.layer_idx, one): w for one, w in zip(layer.expert_ids, coded, strict=True)}
    return experts


# Settings


class Variant(NamedTuple):
    """A method, the plain code to compare it with, and the bits per weight it adds to that code's 2.25 in the demo's shapes."""

    code: str
    method: Method
    added_bits: float = 0.0


def experiments() -> dict[str, dict[str, Variant]]:
    """By experiment and name."""
    pairs = [(code, own) for code in ("int2", "quad2") for own in (False, True)]
    return {
        "weighted thresholds": {
            f"{code}, {'own' if own else 'layer'}": Variant(code, weighted(code, own)) for code, own in pairs
        },
        "equalised channels": {
            f"int2, alpha {alpha}": Variant("int2", equalised("int2", alpha)) for alpha in ALPHAS
        },
        "error feedback": _feedback_variants(),
        "low-rank sketch": {
            f"rank {rank}": Variant("quad2", sketched(rank), _sketch_bits(rank) - 2.25) for rank in RANKS
        },
        "low-rank correction": {
            f"quad2, rank {rank}": Variant("quad2", corrected("quad2", rank), _sketch_bits(rank)) for rank in RANKS
        },
    }  # fmt: skip


def _feedback_variants() -> dict[str, Variant]:
    most = TOKENS[-1]
    settings = [("quad2", tokens, damp) for tokens in TOKENS for damp in DAMPS] + [
        ("int2", most, damp) for damp in DAMPS
    ]
    found = {
        f"{code}, {tokens} tokens, damp {damp}": Variant(code, fed_back(code, tokens, damp))
        for code, tokens, damp in settings
    }
    layer_wide, name = fed_back("quad2", most, 0.1), f"quad2, {most} tokens, damp 0.1"
    return found | {
        f"{name}, own": Variant("quad2", fed_back("quad2", most, 0.1, own=True)),
        f"{name}, w2 plain": Variant("quad2", joined(layer_wide, plain("quad2"))),
        f"{name}, w2 weighted": Variant("quad2", best_method()),
    }


def best_method() -> Method:
    """What won at no added bytes: error feedback with the whole layer's moments for w1 and w3, weighted rows for w2."""
    return joined(fed_back("quad2", TOKENS[-1], 0.1), weighted("quad2", own=True))


def _sketch_bits(rank: int) -> float:
    """Bits per weight of two 16-bit factors of a matrix of the demo's 128 x 256."""
    return 16 * rank * (1 / 128 + 1 / 256)


# Table


def _numbers(errors: Errors) -> str:
    return "".join(f"{errors[column]:8.4f}" for column in _COLUMNS)


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - the table is this command's output for people
