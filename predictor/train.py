"""Training of a predictor on a routing trace: binary cross-entropy against the picks of the layers ahead.

Owns the loop, the schedule and the choice of the best state; neither the network nor the files. On the CPU a seed decides
every bit; on a card the arithmetic is bfloat16 where autocast has it so, with float32 weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from predictor.baselines import LinearProbe
from predictor.batches import Batch, in_order, load_batch, runs, shuffled
from predictor.errors import PredictorError
from predictor.model import RouterPredictor
from predictor.traces import Trace

Trainable = RouterPredictor | LinearProbe
WARM_UP = 0.05  # of the steps
CHECKS = 10  # looks at the watched tokens
WATCHED_TOKENS = 4096  # at most, spread over what there is


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """One step is one batch of tokens, each in all of its layers."""

    steps: int
    batch_tokens: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """The loss on the watched tokens after so many steps."""

    step: int
    loss: float


def fit(
    model: Trainable,
    trace: Trace,
    tokens: Tensor,
    watched: Tensor,
    settings: TrainSettings,
    on_step: Callable[[int, Tensor], None],
) -> list[Check]:
    """Trains `model` in place on these token indices and leaves it at its best check.

    Args:
        watched: Token indices to choose the best state by; with none of them it is the last.
        on_step: Hears the steps done and the batch's loss, still on the model's device.

    Raises:
        PredictorError: The loss is no number, or no layer has one `lookahead` layers before it.
    """
    require_targets(model)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_share(step, settings.steps))
    batches = shuffled(tokens, settings.batch_tokens, torch.Generator().manual_seed(settings.seed))
    best = _Best(model, trace, thinned(watched), settings.batch_tokens)
    for step in range(1, settings.steps + 1):
        loss = batch_loss(model, load_batch(trace, next(batches), device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step, loss.detach())
        if step % max(1, settings.steps // CHECKS) == 0 or step == settings.steps:
            require_number(loss.item(), step)
            best.look(step)
    best.restore()
    return best.checks


def batch_loss(model: Trainable, batch: Batch) -> Tensor:
    """Binary cross-entropy, the mean over experts and over the pairs of layers that exist: float32 [].

    Layers less than a lookahead before the end have no target there; the next token's first layers are no substitute.
    """
    num_layers, num_experts = model.shape.num_layers, model.shape.num_experts
    with torch.autocast("cuda", torch.bfloat16, enabled=batch.hidden.is_cuda):
        logits = model(batch.hidden).float()
    picked = logits.new_zeros(*batch.ids.shape[:2], num_experts).scatter_(-1, batch.ids, 1.0)
    total, count = logits.new_zeros(()), 0
    for place, lookahead in enumerate(model.lookaheads):
        if lookahead < num_layers:
            got, wanted = logits[:, : num_layers - lookahead, place], picked[:, lookahead:]
            total = total + F.binary_cross_entropy_with_logits(got, wanted, reduction="sum")
            count += wanted.numel()
    return total / count


def require_targets(model: Trainable) -> None:
    """Nothing, if some layer has another one a lookahead behind it.

    Raises:
        PredictorError: None has.
    """
    if min(model.lookaheads) >= model.shape.num_layers:
        raise PredictorError(
            f"model: {model.shape.num_layers} layers, expected more than {min(model.lookaheads)} (the shortest lookahead); there is nothing to predict"
        )


def require_number(loss: float, step: int) -> None:
    """Nothing, if `loss` is finite; else PredictorError."""
    if not math.isfinite(loss):
        raise PredictorError(
            f"training: loss is {loss} at step {step}, expected a number; look at the trace or train with another --seed"
        )


def learning_share(step: int, steps: int) -> float:
    """The learning rate of a step relative to the highest: a straight rise, then half a cosine down to 0."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def thinned(tokens: Tensor) -> Tensor:
    """At most WATCHED_TOKENS of the token indices, in runs spread evenly over them."""
    pieces = runs(tokens)
    every = max(1, math.ceil(len(tokens) / WATCHED_TOKENS))
    return torch.cat(pieces[::every]) if pieces else tokens


class _Best:
    """The best state seen so far by the loss on the watched tokens."""

    def __init__(self, model: Trainable, trace: Trace, watched: Tensor, batch_tokens: int) -> None:
        self.model, self.trace, self.watched, self.batch_tokens = model, trace, watched, batch_tokens
        self.checks: list[Check] = []
        self.state: dict[str, Tensor] = {}

    def look(self, step: int) -> None:
        if not len(self.watched):
            return
        loss = self._loss()
        if not self.checks or loss < min(check.loss for check in self.checks):
            self.state = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.checks.append(Check(step, loss))

    def restore(self) -> None:
        if self.state:
            self.model.load_state_dict(self.state)

    @torch.no_grad()
    def _loss(self) -> float:
        device = next(self.model.parameters()).device
        total = 0.0
        for part in in_order(self.watched, self.batch_tokens):
            total += batch_loss(self.model, load_batch(self.trace, part, device)).item() * len(part)
        return total / len(self.watched)
