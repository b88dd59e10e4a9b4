"""The experiments' methods: what a layer lets them know, the methods themselves, and the algorithms they are made of.

A method goes from a layer and a projection (0 w1, 1 w3, 2 w2) to values [E, N, K]. Owns no setting that is tried and no
table (`prep.experiments.measure`), and no error (`prep.experiments.errors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from kernels.formats import GROUP_SIZE, INT2_LEVELS
from prep.experiments.captured import Seen, Weights, exact_experts, hidden_of, with_tokens
from runtime.artifact import ModelDirectory

MANY_VALUES = 1024  # from here on a gather is faster than a product with a mostly empty matrix


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


def build_layers(source: ModelDirectory, calibration: list[Seen], fresh: list[Seen], step: int) -> list[Layer]:
    """Every `step`-th expert of each layer; one with too few fresh tokens has none."""
    exact, tables, config = exact_experts(source), source.read_tables(), source.config
    tokens = {(layer_idx, expert_id): x for layer_idx, expert_id, x in with_tokens(source, fresh)}
    layers = []
    for idx, seen in enumerate(calibration):
        ids = list(range(0, config.n_routed_experts, step))
        w1, w3, w2 = (torch.stack(part) for part in zip(*(exact.weights(idx, one) for one in ids), strict=True))
        rows = {code: code_rows(tables, code, idx, ids) for code in ("int2", "quad2")}
        own = [tokens.get((idx, one), seen.x[:0]) for one in ids]
        layers.append(Layer(idx, ids, (w1, w3, w2), rows, seen, own, config.swiglu_limit))
    return layers


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


def apply(layer: Layer, method: Method) -> Iterator[Weights]:
    """Each expert's three matrices under a method."""
    w1, w3, w2 = (method(layer, projection) for projection in range(3))
    return zip(w1, w3, w2, strict=True)


# Methods


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


# Their algorithms


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
