"""What 2-bit codes do to a real model that fits in memory, and which use of calibration text would better them.

`python -m prep.experiments MODEL --text FILE` takes a model directory with FP4 and all three 2-bit codes. One half of the
text's documents calibrates, the other half is fresh: every error and loss is measured on the fresh half, each expert on the
tokens routed to it. The experiments are small and in plain torch; none writes a model. Owns no code's definition
(`kernels.formats`), no production solver (`prep.solvers`) and no errors on synthetic weights (`prep.study`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from kernels.expert import expert_ffn
from kernels.formats import GROUP_SIZE, INT2_LEVELS, PLANES, dequantize_int2, split_slab
from prep.solvers.clip import solve_absmax
from prep.study import relative_error
from runtime.artifact import ModelDirectory
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.models.deepseek_v4.build import build_model
from runtime.models.deepseek_v4.state import State
from runtime.models.experts import ExpertProvider
from runtime.models.rounding import ActivationRounding
from runtime.resident import FP4, TWO_BIT, ResidentExperts
from runtime.tokenizer import load_tokenizer

ROW = 1024  # tokens of one forward, as in the demo's training record
DOCUMENT_TOKENS = 1024  # taken of each document, so that a few long ones do not make up either half
CALIBRATION_ROWS, FRESH_ROWS = 16, 10
LEAST_TOKENS, MOST_TOKENS = 32, 256  # of one expert: with fewer its error says little, more do not move it
EXPERT_STEP = 6  # the experiments take every so many-th expert of each layer
TOKENS = (128, 512, 2048, CALIBRATION_ROWS * ROW)  # for error feedback
DAMPS = (0.01, 0.1, 0.5)
ALPHAS = (0.25, 0.5, 1.0)
RANKS = (16, 32)  # 16 of 128 is the article's 256 of 2048
WINS = 0.95  # of the plain code's output error
MANY_VALUES = 1024  # from here on a gather is faster than a product with a mostly empty matrix
CPU = torch.device("cpu")

Weights = tuple[Tensor, Tensor, Tensor]  # w1, w3, w2 of one expert
Errors = dict[str, float]


# Text and activations


class Seen(NamedTuple):
    """What one layer's router saw and chose: x [T, D] float32, ids [T, K] int64."""

    x: Tensor
    ids: Tensor

    def of(self, expert_id: int) -> Tensor:
        """[n, D]: the inputs of the tokens routed to one expert."""
        return self.x[(self.ids == expert_id).any(1)]

    def spread(self, tokens: int) -> Seen:
        """About so many of the tokens, evenly over the whole text."""
        step = max(1, len(self.x) // tokens)
        return Seen(self.x[::step][:tokens], self.ids[::step][:tokens])


class Run(NamedTuple):
    """One pass over the text: loss of each token [R, ROW], CRC-32 of each row's logits, what the routers saw."""

    losses: Tensor
    checksums: list[int]
    seen: list[Seen]


class KeptExperts:
    """The experts of a ResidentExperts as an ExpertProvider that dequantises each once and not for every chunk.

    `kept` may be filled with other weights.
    """

    def __init__(self, source: ModelDirectory, precision: str, code: str) -> None:
        """precision and code: as in ResidentExperts; FP4 comes from the fp4 files unless code is "split"."""
        self._stored = ResidentExperts(source, torch.float32, CPU, False, precision=precision, code=code)
        self._limit = source.config.swiglu_limit
        self.kept: dict[tuple[int, int], Weights] = {}

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Each pick's weighted output, float32 [T, K, D]."""
        output = torch.empty(*topk_ids.shape, x.shape[-1])
        for expert_id in topk_ids.unique().tolist():
            tokens, ranks = (topk_ids == expert_id).nonzero(as_tuple=True)
            w1, w3, w2 = self.weights(layer_idx, expert_id)
            route_weights = topk_weights[tokens, ranks]
            output[tokens, ranks] = expert_ffn(x[tokens], w1, w3, w2, limit=self._limit, route_weights=route_weights)
        return output

    def weights(self, layer_idx: int, expert_id: int) -> Weights:
        """w1, w3 and w2 of one expert, float32; shared between calls."""
        key = layer_idx, expert_id
        if key not in self.kept:
            self.kept[key] = self._stored.weights(layer_idx, expert_id)
        return self.kept[key]


def exact_experts(source: ModelDirectory) -> KeptExperts:
    """Every expert as released, from the fp4 files."""
    return KeptExperts(source, FP4, "quad2")


def read_rows(path: Path, tokenizer: Tokenizer, bos: int, eos: int) -> tuple[Tensor, Tensor]:
    """Calibration and fresh rows [R, ROW + 1] int64, from the documents at even and at odd places of a JSON-lines file.

    Raises:
        StrawError: A half has too little text.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    ids = [tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids for line in lines]
    halves = []
    for first, rows in ((0, CALIBRATION_ROWS), (1, FRESH_ROWS)):
        stream = [token for one in ids[first::2] for token in (bos, *one[:DOCUMENT_TOKENS], eos)]
        if len(stream) <= rows * ROW:
            raise StrawError(f"{path}: {len(stream):,} tokens in half {first}, expected {rows * ROW + 1:,}; add text")
        halves.append(torch.tensor(stream[: rows * ROW + 1]).unfold(0, ROW + 1, ROW))
    return halves[0], halves[1]


def run_rows(session: Session, rows: Tensor) -> Run:
    """The model on each row by itself."""
    parts: list[list[Seen]] = [[] for _ in range(session.config.num_hidden_layers)]

    def observe(layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        parts[layer_idx].append(Seen(x.clone(), topk_ids.clone()))

    session.observer, losses, checksums = observe, [], []
    for row in rows:
        logits = session.logits(row[:-1].tolist())
        losses.append(cross_entropy(logits, row[1:], reduction="none"))
        checksums.append(zlib.crc32(logits.numpy().tobytes()))
    seen = [Seen(torch.cat([one.x for one in part]), torch.cat([one.ids for one in part])) for part in parts]
    return Run(torch.stack(losses), checksums, seen)


def open_sessions(source: ModelDirectory) -> Callable[[ExpertProvider], Session]:
    """A function from a provider to a Session on the one model and state that all of them share."""
    model = build_model(source, torch.float32, CPU, ActivationRounding())
    state = State(source.config, ROW, torch.float32, CPU)
    tokenizer = load_tokenizer(source.directory)
    return lambda experts: Session(model, experts, state, tokenizer, source.directory)


# Errors


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


def hidden_of(x: Tensor, w1: Tensor, w3: Tensor, limit: float) -> Tensor:
    """[T, F]: what w2 is multiplied with, router weights left out."""
    return expert_ffn(x, w1, w3, torch.eye(len(w1)), limit=limit)


def medians(errors: Sequence[Errors]) -> Errors:
    """The median of each error over experts, and the 5th and 95th percentile of the whole expert's."""
    result = {name: _quantile([one[name] for one in errors], 0.5) for name in errors[0]}
    whole = [one["expert"] for one in errors]
    return result | {"expert_p5": _quantile(whole, 0.05), "expert_p95": _quantile(whole, 0.95)}


def _quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def code_errors(source: ModelDirectory, exact: KeptExperts, fresh: list[Seen]) -> dict[str, Any]:
    """Median errors of round-to-nearest and of each 2-bit code over all experts with enough fresh tokens."""
    codes = {"clip (int2)": "int2", "quad (quad2)": "quad2", "split base": "split"}
    providers = {name: KeptExperts(source, TWO_BIT, code) for name, code in codes.items()}
    errors, limit = dict[str, list[Errors]](), source.config.swiglu_limit
    for layer_idx, expert_id, x in _with_tokens(source, fresh):
        coded = round_to_nearest(source, layer_idx, expert_id)
        coded |= {name: provider.weights(layer_idx, expert_id) for name, provider in providers.items()}
        for name, weights in coded.items():
            true = exact.weights(layer_idx, expert_id)
            errors.setdefault(name, []).append(expert_errors(true, weights, x, limit))
    return {name: medians(part) | {"experts": len(part)} for name, part in errors.items()}


def _with_tokens(source: ModelDirectory, fresh: list[Seen]) -> Iterator[tuple[int, int, Tensor]]:
    """Layer, expert and its fresh tokens, at most MOST_TOKENS; experts with fewer than LEAST_TOKENS are left out."""
    for layer_idx, seen in enumerate(fresh):
        for expert_id in range(source.config.n_routed_experts):
            x = seen.of(expert_id)
            if len(x) >= LEAST_TOKENS:
                yield layer_idx, expert_id, x[:: max(1, len(x) // MOST_TOKENS)][:MOST_TOKENS]


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


# Experiments: each is a method, from a layer and a projection (0 w1, 1 w3, 2 w2) to values [E, N, K]


@dataclass(frozen=True)
class Layer:
    """Some experts of a layer with all that a method may know of them, and the fresh tokens [n, D] of each, which it may not.

    exact: w1 and w3 [E, F, D], w2 [E, D, F]. rows: for each code and projection [E, R, 4], the levels a group may choose.
    """

    layer_idx: int
    expert_ids: list[int]
    exact: Weights
    rows: dict[str, Weights]
    calibration: Seen
    fresh: list[Tensor]
    limit: float

    def moments(self, projection: int, tokens: int | None = None, own: bool = False) -> Tensor:
        """Second moments of a projection's calibration inputs: [1, K, K] of the layer, or [E, K, K] of each expert's tokens.

        tokens: Only about so many of the layer's. own: Each expert's for w1 and w3 too; w2's always are.
        """
        seen = self.calibration if tokens is None else self.calibration.spread(tokens)
        if projection < 2 and not own:
            return _second_moment(seen.x)[None]
        inputs = [seen.of(expert_id) for expert_id in self.expert_ids]
        if projection == 2:
            w1, w3, _ = self.exact
            inputs = [hidden_of(x, w1[place], w3[place], self.limit) for place, x in enumerate(inputs)]
        return torch.stack([_second_moment(x) for x in inputs])

    def importance(self, projection: int, own: bool = False) -> Tensor:
        """[E, K]: mean square of each channel."""
        return self.moments(projection, own=own).diagonal(dim1=1, dim2=2).expand(len(self.expert_ids), -1)


Method = Callable[[Layer, int], Tensor]


def _second_moment(x: Tensor) -> Tensor:
    return x.mT @ x / max(1, len(x))  # no token: zeros, and the methods then do without


def plain(code: str) -> Method:
    """The code as `prep requant` writes it: every weight counts the same."""
    return lambda layer, projection: nearest(layer.exact[projection], _plain_levels(layer, code, projection))


def weighted(code: str, own: bool) -> Method:
    """Each group's row chosen for the error weighted by each channel's mean square; own: over the expert's own tokens."""

    def method(layer: Layer, projection: int) -> Tensor:
        exact = layer.exact[projection]
        return nearest(
            exact, choose_levels(exact, layer.rows[code][projection], layer.importance(projection, own) + 1e-12)
        )

    return method


def equalised(code: str, alpha: float) -> Method:
    """Channels multiplied by (root mean square)^alpha before the code and divided by it afterwards, as AWQ does."""

    def method(layer: Layer, projection: int) -> Tensor:
        factors = (layer.importance(projection) + 1e-12) ** (alpha / 2)
        factors = (factors / factors.log().mean(1, keepdim=True).exp())[:, None]
        scaled = layer.exact[projection] * factors
        levels = choose_levels(scaled, layer.rows[code][projection], torch.ones_like(factors[:, 0]))
        return nearest(scaled, levels) / factors

    return method


def fed_back(code: str, tokens: int, damp: float, own: bool = False) -> Method:
    """Rows as in the plain code, then columns rounded one by one, each one's error made up for by those that follow.

    tokens: Calibration. damp: Added to the second moments, as a share of their mean diagonal. own: As in `Layer.moments`.
    """

    def method(layer: Layer, projection: int) -> Tensor:
        levels = _plain_levels(layer, code, projection)
        return feed_back(layer.exact[projection], levels, layer.moments(projection, tokens, own), damp)

    return method


def joined(first: Method, down: Method) -> Method:
    """w1 and w3 by one method, w2 by another."""
    return lambda layer, projection: (down if projection == 2 else first)(layer, projection)


def sketched(rank: int) -> Method:
    """Each matrix by its best approximation of a low rank, nothing else."""
    return lambda layer, projection: low_rank(layer.exact[projection], rank)


def corrected(code: str, rank: int) -> Method:
    """The plain code and a low-rank matrix for what it leaves."""

    def method(layer: Layer, projection: int) -> Tensor:
        coded = plain(code)(layer, projection)
        return coded + low_rank(layer.exact[projection] - coded, rank)

    return method


def nearest(weights: Tensor, levels: Tensor) -> Tensor:
    """Each weight [E, N, K] by the nearest of its group's four ascending levels [E, N, K/32, 4]."""
    middles = ((levels[..., 1:] + levels[..., :-1]) / 2)[..., None, :]
    grouped = weights.unflatten(-1, (-1, GROUP_SIZE))[..., None]
    # as the INT2 solver does: a tie (FP4's zero) goes up at even places and down at odd ones, so that zeros add no bias
    is_even = (torch.arange(GROUP_SIZE) % 2 == 0)[:, None]
    places = torch.where(is_even, grouped >= middles, grouped > middles).sum(-1)
    return levels.gather(-1, places).flatten(-2)


def choose_levels(weights: Tensor, rows: Tensor, importance: Tensor) -> Tensor:
    """[E, N, K/32, 4]: for each group the row of least weighted squared error.

    weights: [E, N, K]. rows: [E, R, 4]. importance: [E, K], above zero.
    """
    chosen = []
    for one, table, weight in zip(weights, rows, importance, strict=True):
        best = _row_costs(one, table, weight).argmin(-1)
        chosen.append(table[best].view(len(one), -1, 4))
    return torch.stack(chosen)


def _row_costs(matrix: Tensor, table: Tensor, importance: Tensor) -> Tensor:
    """[groups, R]: weighted squared error of each group of [N, K] under each row [R, 4]; importance [K]."""
    values, place = matrix.unique(return_inverse=True)
    costs = reduce(torch.minimum, ((values[:, None] - level).square() for level in table.T))
    weight = importance.expand(matrix.shape).reshape(-1, GROUP_SIZE)
    if len(values) > MANY_VALUES:
        return (costs[place].view(*weight.shape, len(table)) * weight[..., None]).sum(1)
    # FP4 has few values: how much of each a group holds is all that counts
    held = torch.zeros(len(weight), len(values)).scatter_add_(1, place.view(weight.shape), weight)
    return held @ costs


def _plain_levels(layer: Layer, code: str, projection: int) -> Tensor:
    exact = layer.exact[projection]
    return choose_levels(exact, layer.rows[code][projection], torch.ones_like(exact[:, 0]))


def feed_back(weights: Tensor, levels: Tensor, moments: Tensor, damp: float) -> Tensor:
    """Values [E, N, K] of the given levels [E, N, K/32, 4] that lower the output error under inputs of `moments` [E or 1, K, K]."""
    size = weights.shape[-1]
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].double()
    damped = moments.double() + (damp * mean + 1e-12) * torch.eye(size, dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()
    rest, middles = weights.clone(), (levels[..., 1:] + levels[..., :-1]) / 2
    for k in range(size):
        column, group = rest[..., k, None], k // GROUP_SIZE
        above = column >= middles[..., group, :] if k % 2 == 0 else column > middles[..., group, :]
        value = levels[..., group, :].gather(-1, above.sum(-1, keepdim=True))
        rest[..., k + 1 :] -= (column - value) / factor[:, k, k, None, None] * factor[:, None, k, k + 1 :]
        rest[..., k] = value[..., 0]
    return rest


def low_rank(matrices: Tensor, rank: int) -> Tensor:
    """The best approximations of that rank of [E, N, K]."""
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    return left[..., :rank] * values[..., None, :rank] @ right[..., :rank, :]


# Running them


def code_rows(tables: Mapping[str, Tensor], code: str, layer_idx: int, expert_ids: list[int]) -> Weights:
    """For w1, w3 and w2 the rows [E, R, 4] that groups of each expert may choose, of "int2" or "quad2"."""
    normalisers = tables[f"{code}.normalisers"][layer_idx, expert_ids]  # [E, 3]
    if code == "int2":
        # the upper eight binades of E4M3; far smaller groups do not occur in a trained model this small
        scales = torch.arange(63, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        rows = (scales[:, None] * torch.tensor(INT2_LEVELS)).expand(3, -1, -1)
    else:
        rows = tables["quad2.levels"][layer_idx].float()
    w1, w3, w2 = (normalisers[:, p, None, None] * rows[p] for p in range(3))
    return w1, w3, w2


def build_layers(source: ModelDirectory, calibration: list[Seen], fresh: list[Seen], step: int) -> list[Layer]:
    """Every `step`-th expert of each layer; one with too few fresh tokens has none."""
    exact, tables, config = exact_experts(source), source.read_tables(), source.config
    tokens = {(layer_idx, expert_id): x for layer_idx, expert_id, x in _with_tokens(source, fresh)}
    layers = []
    for idx, seen in enumerate(calibration):
        ids = list(range(0, config.n_routed_experts, step))
        w1, w3, w2 = (torch.stack(part) for part in zip(*(exact.weights(idx, one) for one in ids), strict=True))
        rows = {code: code_rows(tables, code, idx, ids) for code in ("int2", "quad2")}
        own = [tokens.get((idx, one), seen.x[:0]) for one in ids]
        layers.append(Layer(idx, ids, (w1, w3, w2), rows, seen, own, config.swiglu_limit))
    return layers


def apply(layer: Layer, method: Method) -> Iterator[Weights]:
    """Each expert's three matrices under a method."""
    w1, w3, w2 = (method(layer, projection) for projection in range(3))
    return zip(w1, w3, w2, strict=True)


def outcome(layers: Sequence[Layer], method: Method) -> Errors:
    """Median errors of a method on fresh tokens."""
    errors = []
    for layer in layers:
        for coded, exact, x in zip(apply(layer, method), zip(*layer.exact, strict=True), layer.fresh, strict=True):
            if len(x):
                errors.append(expert_errors(exact, coded, x, layer.limit))
    return medians(errors)


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


_COLUMNS = ("weight", "w1", "w3", "w2", "expert")
_HEADINGS = "".join(f"{column:>8}" for column in _COLUMNS)


def _numbers(errors: Errors) -> str:
    return "".join(f"{errors[column]:8.4f}" for column in _COLUMNS)


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - the table is this command's output for people


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measures; the table goes to stderr, the last line of stdout is the measurement in the form of artifacts/measurements."""
    parser = argparse.ArgumentParser(prog="python -m prep.experiments", description=__doc__)
    parser.add_argument("model", type=Path, help="model directory with FP4, int2, quad2 and split")
    parser.add_argument("--text", type=Path, required=True, help='JSON lines with "text", held out of training')
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = measure(options.model, options.text)
    document = {
        "what": "2-bit codes on a real model: errors of every expert on fresh text, held-out loss, and uses of calibration",
        "command": "python -m prep.experiments " + " ".join(sys.argv[1:]),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": options.threads},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": _git("rev-parse", "HEAD") + (" and uncommitted changes" if _git("status", "--porcelain") else ""),
        "results": results,
    }  # fmt: skip
    print(json.dumps(document))  # noqa: T201 - the last line is the measurement


if __name__ == "__main__":
    main()
