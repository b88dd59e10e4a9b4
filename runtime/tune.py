"""`runtime tune`: the fastest ladder, pool shares and prefetch of this machine within a quality budget, for `runtime.toml`.

Owns what is tried and what is chosen; how a trial is measured is `tune_trials`' business. The search is greedy, since every
trial opens the model anew: the quality of each ladder (its perplexity ratio and one standard error above it), the speed of
those within the budget, then other shares and at last prefetch for the winner. Shares and prefetch are judged once more before
they are chosen, since what is resident decides what a ladder reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from runtime.eval_rows import Model, for_picks
from runtime.ladder import EXACT, parse_ladder
from runtime.manifest import PREDICTOR
from runtime.predictors import HASH, LEARNED
from runtime.store.pools import Shares
from runtime.store.tuned import FREE, NO_CODE, TUNED, Tuned, write_tuned
from runtime.tune_state import FinishedTrials, forget_trials
from runtime.tune_trials import Measurer, ModelMeasurer, Quality, Trial, TuneSettings

LADDERS = (EXACT, "4,6", "2,6", "4,4", "2,4", "1,4", "0,6", "mass:0.5,0.9")  # for K = 6
OTHER_SHARES = (Shares(0.95, 1.0), Shares(0.8, 0.6), Shares(0.5, 0.5))
TIE = 0.02  # times that differ by no more say nothing: then quality decides, or the simpler setting stays


@dataclass(frozen=True, slots=True)
class Measured:
    """A trial with what is known of it; None is not measured, since it could no longer matter."""

    trial: Trial
    quality: Quality | None = None
    ms_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What may be tried; the first ladder is exact."""

    ladders: tuple[str, ...]
    shares: tuple[Shares, ...]
    prefetches: tuple[str, ...]
    num_picks: int

    def with_shares(self, trial: Trial) -> list[Trial]:
        """The trial with other shares; none where the ladder reads one precision only, which has all the memory."""
        ladder = parse_ladder(trial.ladder, self.num_picks)
        divides = ladder.needs_fp4(self.num_picks) and ladder.needs_two_bit(self.num_picks)
        return [replace(trial, shares=shares) for shares in self.shares] if divides else []

    def with_prefetch(self, trial: Trial) -> list[Trial]:
        """The trial with each way to prefetch."""
        return [replace(trial, prefetch=prefetch) for prefetch in self.prefetches]

    @property
    def most_measurements(self) -> int:
        """Qualities and speeds, if every one of them is needed."""
        return 2 * (len(self.ladders) + len(self.shares) + len(self.prefetches)) - 1  # exact needs no quality

    def lines(self, max_ppl_ratio: float, settings: TuneSettings, directory: Path) -> list[str]:
        """What `search` will do, for people."""
        shares = ", ".join(f"{one.fp4_vram:g} and {one.fp4_ram:g}" for one in self.shares)
        runs = (
            f"{settings.repeat + 1} runs of {settings.steps:,} steps after {settings.prompt_tokens:,} prefilled tokens"
        )
        return [
            f"quality on at most {settings.tokens:,} tokens of text, as perplexity ratio to exact: {' '.join(self.ladders[1:]) or 'nothing, no 2-bit precision'}",
            f"speed of exact and of all ladders up to a ratio of {max_ppl_ratio:g}, one standard error included: {runs} each",
            f"the fastest one, if it reads both precisions, with FP4 shares of VRAM and RAM of {shares}",
            f"the fastest of these with prefetch: {' '.join(self.prefetches) or 'none to choose from'}",
            f"the result goes to {directory / TUNED}",
        ]


def plan_for(model: Model) -> Plan:
    """What this model directory allows: ladders of its precisions, prefetch of what its layers and files can say."""
    config = model.config
    ladders = (
        dict.fromkeys(for_picks(text, config.num_experts_per_tok) for text in LADDERS) if model.code else {EXACT: None}
    )
    has_predictor = (model.directory / PREDICTOR).exists()
    prefetches = [HASH] * (config.num_hash_layers > 0) + [LEARNED] * has_predictor
    return Plan(tuple(ladders), OTHER_SHARES if model.code else (), tuple(prefetches), config.num_experts_per_tok)


def tune(
    model: Model, plan: Plan, settings: TuneSettings, max_ppl_ratio: float, warn: Callable[[str], None]
) -> list[Measured]:
    """All trials, the chosen one last, progress on stderr; what is measured is kept in a file until `save`, for another try.

    Raises:
        StrawError: The text does not do, or the memory not for a trial.
    """
    with tqdm(total=plan.most_measurements, desc="tune", unit="measurement", disable=None) as bar:

        def advance(what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update()

        with (
            closing(ModelMeasurer(model, settings, advance, warn)) as measurer,
            closing(FinishedTrials(model, settings, measurer, advance)) as remembered,
        ):
            return search(plan, remembered, max_ppl_ratio)


def search(plan: Plan, measurer: Measurer, max_ppl_ratio: float) -> list[Measured]:
    """All trials in the order in which they were first measured, and the chosen one once more as the last.

    The chosen one's quality is within the budget and measured with its own shares and prefetch; exact always is.
    """
    ladders = [Measured(trial, _quality(measurer, trial)) for trial in map(Trial, plan.ladders)]
    timed = [
        replace(one, ms_per_token=measurer.ms_per_token(one.trial)) if _is_within(one, max_ppl_ratio) else one
        for one in ladders
    ]
    best = _fastest([one for one in timed if one.ms_per_token is not None])
    tried = list(timed)
    for others in (plan.with_shares, plan.with_prefetch):
        rows, best = _improved(best, others(best.trial), measurer, max_ppl_ratio)
        tried += rows
    return [*tried, best]


def results(trials: Sequence[Measured], max_ppl_ratio: float) -> dict[str, Any]:
    """What is written down of `search`."""
    *tried, chosen = trials
    rows = [_row(one) | {"chosen": one == chosen} for one in tried]
    return {"max_ppl_ratio": max_ppl_ratio, "trials": rows, "chosen": _row(chosen)}


def table(document: dict[str, Any]) -> list[str]:
    """`results` as lines for the user."""
    lines = [
        f"{'ladder':14} {'FP4 shares':>11} {'prefetch':9} {'ppl ratio':>9} {'std error':>9} {'sum':>7} {'ms/token':>9}"
    ]
    for row in document["trials"]:
        ratio, error, ms = (
            _number(row[name], digits)
            for name, digits in (("ppl_ratio", 4), ("standard_error", 4), ("ms_per_token", 3))
        )
        at_most = None if row["ppl_ratio"] is None else row["ppl_ratio"] + row["standard_error"]
        is_over = at_most is not None and not at_most <= document["max_ppl_ratio"]
        note = "chosen" if row["chosen"] else f"over {document['max_ppl_ratio']:g}" if is_over else ""
        shares = f"{row['fp4_vram']:g} {row['fp4_ram']:g}"
        lines.append(
            f"{row['ladder']:14} {shares:>11} {row['prefetch']:9} {ratio:>9} {error:>9} {_number(at_most, 4):>7} {ms:>9}  {note}".rstrip()
        )
    return lines


def save(
    model: Model, trials: Sequence[Measured], max_ppl_ratio: float, settings: TuneSettings, machine: dict[str, Any]
) -> Path:
    """Writes the last of the trials to the model directory's `runtime.toml`, with what was measured; its path."""
    chosen, exact = trials[-1], trials[0]
    measured: dict[str, str | int | float | None] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "text": ", ".join(path.name for path in settings.texts),
        "tokens": max(one.quality.tokens for one in trials if one.quality),
        "steps": settings.steps,
        "fingerprint": model.identity["fingerprint"],
        "code": model.code or NO_CODE,
        "device": settings.device,
        "machine": machine["card"] if settings.device != "cpu" else machine["cpu"],
        "vram": settings.vram or FREE,
        "ram": settings.ram or FREE,
        "max_ppl_ratio": max_ppl_ratio,
        "ppl_ratio": chosen.quality and chosen.quality.ppl_ratio,
        "standard_error": chosen.quality and chosen.quality.standard_error,
        "ms_per_token": chosen.ms_per_token,
        "exact_ms_per_token": exact.ms_per_token,
    }
    known = {name: value for name, value in measured.items() if value is not None}
    trial = chosen.trial
    path = write_tuned(model.directory, Tuned(trial.shares, trial.ladder, trial.prefetch, known))
    forget_trials(model)
    return path


def _quality(measurer: Measurer, trial: Trial) -> Quality:
    return Quality(1.0, 0.0, 0) if trial.ladder == EXACT else measurer.quality(trial)


def _is_within(one: Measured, max_ppl_ratio: float) -> bool:
    return one.quality is not None and one.quality.at_most <= max_ppl_ratio


def _fastest(timed: Sequence[Measured]) -> Measured:
    """The best quality among those about as fast as the fastest; a ratio below 1 is noise and no better than exact."""
    least = min(_ms(one) for one in timed)
    ties = [one for one in timed if _ms(one) <= least * (1 + TIE)]
    return min(ties, key=lambda one: (max(1.0, one.quality.ppl_ratio if one.quality else 1.0), _ms(one)))


def _improved(
    best: Measured, others: Sequence[Trial], measurer: Measurer, max_ppl_ratio: float
) -> tuple[list[Measured], Measured]:
    """The others as far as they were measured, and the fastest within the budget; `best` unless one is faster by more than TIE."""
    rows = [Measured(trial, None, measurer.ms_per_token(trial)) for trial in others]
    for row in sorted(rows, key=_ms):
        if _ms(row) * (1 + TIE) >= _ms(best):
            break
        judged = replace(row, quality=_quality(measurer, row.trial))
        rows[rows.index(row)] = judged
        if _is_within(judged, max_ppl_ratio):
            return rows, judged
    return rows, best


def _ms(one: Measured) -> float:
    assert one.ms_per_token is not None
    return one.ms_per_token


def _row(one: Measured) -> dict[str, Any]:
    quality = one.quality._asdict() if one.quality else dict.fromkeys(Quality._fields)
    trial = {"ladder": one.trial.ladder, **one.trial.shares._asdict(), "prefetch": one.trial.prefetch}
    return {**trial, **quality, "ms_per_token": one.ms_per_token}


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
