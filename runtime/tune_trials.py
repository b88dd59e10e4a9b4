"""The trials of `runtime tune` on a real model directory: what each costs in quality, and how fast it is here.

Quality is the perplexity ratio to exact on held-out text, token by token with this machine's own pools, empty before each
document. Speed is the time of forced steps, from the first one's begin to the last one's end, logits included; before each run
the tiers are emptied and the first tokens prefilled, and one run goes unrecorded. `bench.run_bench` would stop at runs of
different demand; below exact, where a guess that came in time changes what is read, that is no fault here.

Owns the one session that is open at a time; what is tried is `tune`'s business.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from runtime.engine import Session
from runtime.errors import StrawError
from runtime.eval_rows import Model
from runtime.evaluation import figures, forward_all, forward_under, read_held_out, score
from runtime.ladder import EXACT
from runtime.opening import DEFAULT_CONTEXT, open_model
from runtime.predictors import OFF
from runtime.ruled_store import COLD, ResidencyForm
from runtime.store.pools import Shares
from runtime.store.store import TieredStore
from runtime.tokenizer import require_tokenizer_in

DEFAULT_SHARES = Shares()
NUM_DOCUMENTS = 4  # to score, at least, where the text has so many: a standard error needs several


class Quality(NamedTuple):
    """Perplexity by that of exact, and its standard error over documents, or over pieces of the only one."""

    ppl_ratio: float
    standard_error: float
    tokens: int  # scored

    @property
    def at_most(self) -> float:
        """What a budget must allow: one standard error more, since few tokens are scored."""
        return self.ppl_ratio + self.standard_error


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to run the model."""

    ladder: str
    shares: Shares = DEFAULT_SHARES
    prefetch: str = OFF


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What trials run on; None means as in `open_model`."""

    texts: tuple[Path, ...]
    tokens: int = 2048  # scored, over all documents
    steps: int = 64
    prompt_tokens: int = 128
    repeat: int = 3
    context: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    vram: str | None = None
    ram: str | None = None

    @property
    def num_forced(self) -> int:
        """Tokens of the timed sequence."""
        return self.prompt_tokens + self.steps


class Measurer(Protocol):
    """Runs trials."""

    def quality(self, trial: Trial) -> Quality:
        """Against exact on the same text."""

    def ms_per_token(self, trial: Trial) -> float:
        """Of forced steps."""


class ModelMeasurer:
    """Runs trials on a model directory. Holds at most one session, and the exact hidden states of the text."""

    def __init__(
        self, model: Model, settings: TuneSettings, advance: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        """Reads the text; `advance` is told what each measurement that has ended was."""
        self._model, self._settings, self._advance, self._warn = model, settings, advance, warn
        self._session: Session | None = None
        self._opened_for: Trial | None = None
        self._exact: list[Tensor] = []
        own_context = min(DEFAULT_CONTEXT, model.config.max_position_embeddings)
        self._context = own_context if settings.context is None else settings.context
        read = partial(read_held_out, require_tokenizer_in(model.directory), settings.texts)
        whole = read(context=self._context, tokens=settings.num_forced)
        total = sum(len(one.targets) for one in read(context=self._context, tokens=settings.tokens))
        each = -(-total // NUM_DOCUMENTS)
        self._held_out = read(context=self._context, tokens=total, document_tokens=each)
        if sum(len(sequence.targets) for sequence in self._held_out) < total:
            self._held_out = read(context=min(self._context, each + 1), tokens=total)  # a few long documents
        if len(self._held_out) < 2:
            raise StrawError(
                f"--text: one sequence of {len(self._held_out[0].targets):,} tokens to score, expected two or more for a standard error; give more text or a larger --tokens"
            )
        self._forced = self._checked([token_id for sequence in whole for token_id in sequence.token_ids])

    def quality(self, trial: Trial) -> Quality:
        """Of each document's first tokens, from empty pools."""
        if not self._exact:
            exact = self._open(Trial(EXACT))
            self._exact = [forward_all(exact, sequence.inputs) for sequence in self._held_out]
        session = self._open(trial)
        scores = []
        for sequence, states in zip(self._held_out, self._exact, strict=True):
            hidden, traffic = forward_under(session, ResidencyForm(COLD), sequence.inputs)
            scores.append(score(session, sequence, states, hidden, traffic))
        self._advance(f"quality of {trial.ladder}")
        found = figures(scores)
        ratio = found["perplexity_ratio"]
        return Quality(float(ratio["value"]), float(ratio["standard_error"]), int(found["tokens"]))

    def ms_per_token(self, trial: Trial) -> float:
        """The median of the runs after a first one."""
        session = self._open(trial)
        _, *times = [self._timed_run(session) for _ in range(self._settings.repeat + 1)]
        self._advance(f"speed of {trial.ladder}")
        return statistics.median(times)

    def close(self) -> None:
        """Ends the session, if one is open."""
        if self._session is not None:
            self._session.close()
        self._session = None

    def _timed_run(self, session: Session) -> float:
        store, num_prefilled = session._experts, self._settings.prompt_tokens
        assert isinstance(store, TieredStore)
        store.restart()
        session.reset()
        session.prefill(self._forced[:num_prefilled])
        gc.collect()  # what the run before has left is not cleared away inside this one's window
        begin = time.perf_counter()
        for token_id in self._forced[num_prefilled:]:
            session.step(token_id)
        return (time.perf_counter() - begin) * 1e3 / self._settings.steps

    def _open(self, trial: Trial) -> Session:
        """The session of this trial, in the place of any other."""
        if self._session is None or self._opened_for != trial:
            self.close()
            settings = self._settings
            self._session = open_model(
                self._model.directory,
                device=settings.device,
                dtype=settings.dtype,
                ladder=trial.ladder,
                shares=trial.shares,
                prefetch=trial.prefetch,
                vram=settings.vram,
                ram=settings.ram,
                context=self._context,
                warn=self._warn,
            )
            self._opened_for = trial
        return self._session

    def _checked(self, ids: list[int]) -> list[int]:
        """The sequence of the timed runs."""
        needed = self._settings.num_forced
        if needed > min(len(ids), self._context):
            raise StrawError(
                f"--text: {len(ids):,} tokens and a context of {self._context:,}, expected at least {needed:,} of both (--prompt-tokens and --steps); give more text or smaller numbers"
            )
        return ids[:needed]
