"""The router on a card: scores of all experts, then picks and weights, in two kernels; copies go straight to pinned memory.

Owns no memory: outputs and the scratch for scores are the caller's. On a CPU the definition in reference.py runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.checks import FLOAT32, FLOATS, INTEGERS, expect
from kernels.router.kernel import scores_kernel, select_kernel
from kernels.router.reference import router_reference, scores_reference

MAX_TOPK = 8
MAX_EXPERTS = 4096  # one warp holds a token's scores
MAX_HIDDEN = 16_384  # a program holds its experts' weights
TOKEN_GROUPS = 8  # programs that share an expert's weights; more tokens than this go through a program in turn


class RouterWeights(NamedTuple):
    """weight [E, D] bfloat16 or float32; bias float32 [E] for the choice alone; table [vocab, K] of a hash layer; K; scaling.

    With a table the bias is not read.
    """

    weight: Tensor
    bias: Tensor | None
    token_to_experts: Tensor | None
    topk: int
    scaling: float


class Picks(NamedTuple):
    """Experts [T, K] int32 or int64 and their weights float32 [T, K], the heaviest first."""

    experts: Tensor
    weights: Tensor


def router(
    x: Tensor, weights: RouterWeights, token_ids: Tensor | None, scores: Tensor, out: Picks, host: Picks | None = None
) -> Picks:
    """The picks of every token in `out`, and again in `host`.

    Chosen are the K largest of sqrt(softplus(weight · x)) + bias, of equal ones the lower index first (torch.topk leaves that
    open), or the table's row of the token. Weights are scores over their sum, times scaling; picks of equal weight keep the
    order of the choice. NaN counts as the largest score and gives NaN weights; picks are distinct experts whatever x holds.

    Args:
        x: [T, D] bfloat16 or float32, contiguous.
        weights: Of the layer.
        token_ids: [T] int32 or int64; needed with a table only.
        scores: Scratch of at least T rows, float32 [>= T, E]; holds the scores afterwards.
        out: On x's device.
        host: In pinned host memory. The kernel writes there itself; the host may read once an event recorded after this call
            has passed.

    Raises:
        ValueError: A shape, dtype, device or layout is not as said here, or `host` is not pinned.
    """
    _check_router(x, weights, token_ids, scores)
    _check_picks("out", out, (x.shape[0], weights.topk), x.device)
    if host is not None:
        _check_picks("host", host, (x.shape[0], weights.topk), torch.device("cpu"))
        if x.is_cuda and not all(tensor.is_pinned() for tensor in host):
            raise ValueError("router: host is pageable memory, expected pinned; allocate it with pin_memory=True")
    if x.is_cuda:
        return launch_router(x, weights, token_ids, scores, out, host)
    return _define(x, weights, token_ids, scores, out, host)


def launch_router(
    x: Tensor, weights: RouterWeights, token_ids: Tensor | None, scores: Tensor, out: Picks, host: Picks | None = None
) -> Picks:
    """router by the kernels, unchecked."""
    if x.shape[0]:
        launch_scores(x, weights.weight, scores)
        launch_select(scores, weights, token_ids, out, host)
    return out


def launch_scores(x: Tensor, weight: Tensor, scores: Tensor) -> None:
    """sqrt(softplus(weight · x)) in the first T rows of `scores`, unchecked."""
    num_tokens, (num_experts, hidden) = x.shape[0], weight.shape
    each, experts = triton.cdiv(num_tokens, TOKEN_GROUPS), 2
    scores_kernel[(triton.cdiv(num_experts, experts), triton.cdiv(num_tokens, each))](
        x,
        weight,
        scores,
        num_tokens,
        each,
        E=num_experts,
        D=hidden,
        D_BLOCK=triton.next_power_of_2(hidden),
        EXPERTS=experts,
        num_warps=8 if hidden > 1024 else 2,
    )


def launch_select(
    scores: Tensor, weights: RouterWeights, token_ids: Tensor | None, out: Picks, host: Picks | None
) -> None:
    """Picks and weights of as many tokens as `out` has, unchecked."""
    num_experts, topk = scores.shape[1], weights.topk
    select_kernel[(out.experts.shape[0],)](
        scores,
        weights.bias,
        weights.token_to_experts,
        token_ids if weights.token_to_experts is not None else None,
        weights.scaling,
        out.experts,
        out.weights,
        host.experts if host else None,
        host.weights if host else None,
        E=num_experts,
        E_BLOCK=triton.next_power_of_2(num_experts),
        K=topk,
        K_BLOCK=triton.next_power_of_2(topk),
        num_warps=1,
    )


def _define(
    x: Tensor, weights: RouterWeights, token_ids: Tensor | None, scores: Tensor, out: Picks, host: Picks | None
) -> Picks:
    used = scores[: x.shape[0]].copy_(scores_reference(x, weights.weight))
    found = router_reference(used, *weights[1:3], token_ids, weights.topk, weights.scaling)
    for target in (out, host) if host else (out,):
        target.experts.copy_(found[0])
        target.weights.copy_(found[1])
    return out


def _check_router(x: Tensor, weights: RouterWeights, token_ids: Tensor | None, scores: Tensor) -> None:
    expect("router", "weight", weights.weight, ("E", "D"), FLOATS, x.device)
    num_experts, hidden = weights.weight.shape
    if not 0 < hidden <= MAX_HIDDEN:
        raise ValueError(f"router: weight has D = {hidden}, expected 1 to {MAX_HIDDEN}; use the reference")
    if not 0 < weights.topk <= min(MAX_TOPK, num_experts) or num_experts > MAX_EXPERTS:
        expected = f"1 to {MAX_TOPK} of at most {MAX_EXPERTS} experts"
        raise ValueError(
            f"router: topk {weights.topk} of {num_experts} experts, expected {expected}; use the reference"
        )
    expect("router", "x", x, ("T", hidden), FLOATS, x.device)
    expect("router", "scores (scratch)", scores, (x.shape[0], num_experts), FLOAT32, x.device, more_rows=True)
    if weights.token_to_experts is not None:
        _check_table(weights.token_to_experts, token_ids, x.shape[0], weights.topk, x.device)
    elif weights.bias is not None:
        expect("router", "bias", weights.bias, (num_experts,), FLOAT32, x.device)


def _check_table(table: Tensor, token_ids: Tensor | None, num_tokens: int, topk: int, device: torch.device) -> None:
    if token_ids is None:
        raise ValueError("router: a layer with a table got no token_ids, expected [T]; pass the tokens' ids")
    expect("router", "token_to_experts", table, ("vocab", topk), INTEGERS, device)
    expect("router", "token_ids", token_ids, (num_tokens,), INTEGERS, device)


def _check_picks(name: str, picks: Picks, shape: tuple[int, int], device: torch.device) -> None:
    expect("router", f"{name}.experts", picks.experts, shape, INTEGERS, device)
    expect("router", f"{name}.weights", picks.weights, shape, FLOAT32, device)
