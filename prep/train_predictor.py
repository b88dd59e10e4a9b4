"""`prep train-predictor`: a routing trace in, the model directory's predictor out. Owns the order of the steps and what is kept.

Networks, training and the measure are the predictor package's; the table and the picture are in `prep.predictor_report`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from predictor.baselines import (
    Frequency,
    LinearProbe,
    NextRouter,
    PreviousToken,
    RouterWeights,
    Scorer,
    use_shares,
)
from predictor.batches import take_documents
from predictor.evaluate import Recall, evaluate, from_hidden, reference_k
from predictor.model import LOOKAHEADS, MAX_WIDTH, WIDTH, RouterPredictor, save
from predictor.trace_files import TraceShape
from predictor.traces import Trace
from predictor.train import Check, Trainable, TrainSettings, fit, require_targets
from prep.jobs import write_lock
from runtime.artifact import ModelDirectory
from runtime.devices import compute_device
from runtime.errors import StrawError
from runtime.manifest import PREDICTOR, TRACE
from runtime.predictors import trace_shape

WATCHED = 0.05  # of the training tokens: they choose the best state and are not trained on
QUARTER = 0.25
MARGIN = 0.005  # of recall: what training must win to be worth its weights
EPOCHS = 10.0  # passes over the training tokens
LEARNING_RATES = {"mlp": 3e-3, "linear": 3e-3}  # 1e-3 learned more slowly on the demo, at width 512 and 1536


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command was asked for."""

    trace: Path | None = None  # None: TRACE of the model directory
    out: Path | None = None  # None: PREDICTOR of the model directory
    epochs: float = EPOCHS
    steps: int | None = None  # None: as `epochs` has it
    batch_tokens: int = 256
    width: int = WIDTH
    device: str | None = None  # None: the best there is
    seed: int = 0
    held_out: float = 0.1
    kind: str = "mlp"


class Parts(NamedTuple):
    """Token indices: those trained on, those that choose the best state, those that recall is measured on."""

    train: Tensor
    watched: Tensor
    held_out: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured and what was written."""

    out: Path
    shape: TraceShape
    num_hash_layers: int
    trained_kind: str
    saved_kind: str
    recall: Mapping[str, Recall]  # by what was measured: the kinds, mlp-quarter, previous-token, frequency
    checks: Mapping[str, list[Check]]  # by what was trained
    tokens: Mapping[str, int]  # by part
    settings: dict[str, Any]
    seconds: float


def train_predictor(directory: Path, settings: Settings) -> Outcome:
    """Trains, measures and writes the predictor of the model in `directory`; a file that was there stays until the new one is whole.

    Raises:
        StrawError: A setting is out of its range, or the model directory is damaged or being written.
        PredictorError: The trace is missing, damaged, of another model, without hidden states or of one document.
    """
    begun = time.monotonic()
    _check(settings)
    device = torch.device(compute_device(settings.device))
    out = settings.out or directory / PREDICTOR
    with ModelDirectory(directory) as model, write_lock(out.parent):
        trace = Trace.open(
            settings.trace or directory / TRACE, shape=trace_shape(model.config), fingerprint=model.fingerprint
        )
        parts = split(trace, settings)
        run = _Run(trace, parts, settings, device)
        next_router = NextRouter(trace.shape, LOOKAHEADS, read_routers(model, device))
        try:
            trained, recall = run.measure(next_router)
        except KeyboardInterrupt:
            raise StrawError(
                f"{out}: training was interrupted, the file is as it was; run the same command again, it starts over"
            ) from None
        chosen = choose(recall, trained.kind, trace.shape, model.config.num_hash_layers)
        save(out, next_router if chosen == NextRouter.kind else trained, model.fingerprint)
    return Outcome(
        out=out,
        shape=trace.shape,
        num_hash_layers=model.config.num_hash_layers,
        trained_kind=trained.kind,
        saved_kind=chosen,
        recall=recall,
        checks=run.checks,
        tokens={name: len(tokens) for name, tokens in parts._asdict().items()},
        settings={
            **asdict(settings),
            "device": str(device),
            "steps": run.steps,
            "trace": str(trace.directory),
            "out": str(out),
        },
        seconds=time.monotonic() - begun,
    )


def read_routers(model: ModelDirectory, device: torch.device) -> list[RouterWeights | None]:
    """What each layer's router chooses by, on `device`; None for a hash layer."""
    routers: list[RouterWeights | None] = []
    for layer_idx in range(model.config.num_hidden_layers):
        stem = f"layers.{layer_idx}.ffn.gate"
        hashed = layer_idx < model.config.num_hash_layers
        names = ("weight", "bias")
        routers.append(None if hashed else RouterWeights(*(model.read(f"{stem}.{name}").to(device) for name in names)))
    return routers


def split(trace: Trace, settings: Settings) -> Parts:
    """The trace's documents in three; PredictorError if there are too few."""
    rest, held_out = trace.split(settings.held_out, settings.seed)
    watched, train = take_documents(trace, rest, WATCHED, settings.seed)
    return Parts(train, watched, held_out)


def choose(recall: Mapping[str, Recall], trained: str, shape: TraceShape, num_hash_layers: int) -> str:
    """The kind to keep: the trained one, unless the next router's mean recall at the reference k is within MARGIN of it."""
    layers = routed_layers(shape, num_hash_layers)
    k = reference_k(shape)
    gain = recall[trained].at(k, layers=layers) - recall[NextRouter.kind].at(k, layers=layers)
    return NextRouter.kind if gain <= MARGIN else trained


def routed_layers(shape: TraceShape, num_hash_layers: int) -> range:
    """The layers whose picks need predicting."""
    return range(num_hash_layers, shape.num_layers)


def _check(settings: Settings) -> None:
    """Names the first setting out of its range by its option."""
    ranges = {
        "epochs": 0 < settings.epochs < math.inf,
        "steps": settings.steps is None or settings.steps > 0,
        "batch": settings.batch_tokens > 0,
        "width": 0 < settings.width <= MAX_WIDTH,
        "held-out": 0 < settings.held_out < 1,
        "kind": settings.kind in LEARNING_RATES,
    }
    wrong = next((option for option, holds in ranges.items() if not holds), None)
    if wrong:
        value = settings.batch_tokens if wrong == "batch" else getattr(settings, wrong.replace("-", "_"))
        expected = {"held-out": "a share between 0 and 1", "kind": "mlp or linear", "width": f"1 to {MAX_WIDTH}"}.get(
            wrong, "more than 0"
        )
        raise StrawError(f"--{wrong} is {value}, expected {expected}; correct it")
    if settings.out is not None and settings.out.is_dir():
        raise StrawError(f"--out is {settings.out}, expected a file to write; name one in that directory")


class _Run:
    """One trace, its parts and the settings, for all that is trained and measured on them."""

    def __init__(self, trace: Trace, parts: Parts, settings: Settings, device: torch.device) -> None:
        self.trace, self.parts, self.settings, self.device = trace, parts, settings, device
        passes = settings.epochs * len(parts.train) / settings.batch_tokens
        self.steps = settings.steps or max(1, round(passes))
        self.checks: dict[str, list[Check]] = {}

    def measure(self, next_router: NextRouter) -> tuple[Trainable, dict[str, Recall]]:
        """The predictor of the kind asked for, and the recall of everything, measured on the held-out tokens.

        The quarter is trained for as many steps as the whole, so that their difference is the data's alone.
        """
        require_targets(RouterPredictor(self.trace.shape, LOOKAHEADS, 1))
        frequency = Frequency(use_shares(self.trace, self.parts.train).to(self.device), LOOKAHEADS)
        linear = self._train("linear", "linear", self.parts.train)
        trained, scorers = linear, dict[str, Scorer]()
        if self.settings.kind == "mlp":
            quarter, _ = take_documents(self.trace, self.parts.train, QUARTER, self.settings.seed)
            trained = self._train("mlp", "mlp", self.parts.train)
            scorers["mlp"] = from_hidden(trained)
            if len(quarter):
                scorers["mlp-quarter"] = from_hidden(self._train("mlp-quarter", "mlp", quarter))
        scorers |= {
            "linear": from_hidden(linear),
            NextRouter.kind: from_hidden(next_router),
            "previous-token": PreviousToken(frequency),
            "frequency": frequency,
        }
        held_out = self.parts.held_out
        with tqdm(total=len(held_out), desc="measuring", unit="token", disable=None) as bar:
            recall = evaluate(scorers, self.trace, held_out, LOOKAHEADS, self.device, bar.update)
        return trained, recall

    def _train(self, name: str, kind: str, tokens: Tensor) -> Trainable:
        random = torch.Generator().manual_seed(self.settings.seed)
        shape = self.trace.shape
        model: Trainable = (
            LinearProbe(shape, LOOKAHEADS)
            if kind == "linear"
            else RouterPredictor(shape, LOOKAHEADS, self.settings.width, random)
        )
        train = TrainSettings(self.steps, self.settings.batch_tokens, LEARNING_RATES[kind], seed=self.settings.seed)
        with tqdm(total=self.steps, desc=f"training {name}", unit="step", disable=None) as bar:
            self.checks[name] = fit(
                model.to(self.device), self.trace, tokens, self.parts.watched, train, _show_loss(bar, self.steps)
            )
        return model


def _show_loss(bar: tqdm, steps: int) -> Callable[[int, Tensor], None]:
    """Moves the bar; the loss is asked for a hundred times only, since each time waits for the card."""
    every = max(1, steps // 100)

    def on_step(step: int, loss: Tensor) -> None:
        if step % every == 0:
            bar.set_postfix_str(f"loss {loss.item():.4f}", refresh=False)
        bar.update()

    return on_step
