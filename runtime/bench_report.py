"""What the runs of `runtime bench` say: medians, intervals of pairs, a table. Owns the arithmetic of the report; runs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from runtime.bench import COUNTERS, LOOKAHEAD, BenchSettings, Run
from runtime.bench_variants import prefetches

WINDOW = "first forced step's begin to last one's end, logits included, prefill left out; every run from empty tiers"
CONFIDENCE = 0.95
LEAST_PAIRS = 5  # for an interval


def results(runs: Sequence[Run], settings: BenchSettings) -> dict[str, Any]:
    """What is written down: settings, each variant's medians and runs, and what perfect prefetch would give.

    `ratio_to_first` is the median over rounds of a variant's time by the first one's, with its bootstrap interval; None for the
    first. `perfect` is None if the first variant prefetches: then its waits are not those of demand alone.
    """
    by_variant = [list(runs[index :: len(settings.variants)]) for index in range(len(settings.variants))]
    first = by_variant[0]
    return {
        "window": WINDOW,
        "tokens": settings.tokens,
        "prompt_tokens": settings.prompt_tokens,
        "repeat": settings.repeat,
        "demand": first[0].digest,
        "variants": [_variant(own, None if own is first else first) for own in by_variant],
        "perfect": None if prefetches(settings.variants[0]) else _perfect(first),
    }


def ratio_interval(first: Sequence[float], other: Sequence[float]) -> dict[str, float | None]:
    """Median of the pairs' other/first, and its percentile bootstrap interval; of five pairs that is about their range.

    Of fewer no interval can be had that keeps its promise (two equal variants miss 1 in a quarter of all cases of three pairs):
    `low` and `high` are then the smallest and the largest pair, and `confidence` is None.
    """
    ratios = [ours / theirs for ours, theirs in zip(other, first, strict=True)]
    median = statistics.median(ratios)
    if len(ratios) < LEAST_PAIRS:
        return {"median": median, "low": min(ratios), "high": max(ratios), "confidence": None}
    pairs = bootstrap(
        (np.array(other), np.array(first)),
        lambda ours, theirs, axis=-1: np.median(ours / theirs, axis=axis),
        paired=True,
        vectorized=True,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(0),
    )
    low, high = map(float, pairs.confidence_interval)
    return {"median": median, "low": low, "high": high, "confidence": CONFIDENCE}


def table(document: dict[str, Any]) -> list[str]:
    """`results` as lines for the user."""
    spread = "95 % interval" if document["repeat"] >= LEAST_PAIRS else "range of pairs"
    lines = [
        f"{'variant':10} {'ms/token':>9} {'ratio':>6} {spread:>15} {'wait ms':>8} {'NVMe MB':>8} {'issued':>7} {'used':>6} {'late':>5} {'wasted MB':>10}"
    ]
    for row in document["variants"]:
        ratio, counts = row["ratio_to_first"], row["prefetch"]
        interval = "" if ratio is None else f"{ratio['low']:.3f} … {ratio['high']:.3f}"
        lines.append(
            f"{row['variant']:10} {row['ms_per_token']:9.3f} {1.0 if ratio is None else ratio['median']:6.3f} {interval:>15}"
            f" {row['wait_ms_per_token']:8.3f} {row['nvme_bytes_per_token'] / 1e6:8.3f}"
            f" {counts['issued']:7,.0f} {counts['used']:6,.0f} {counts['late']:5,.0f} {counts['wasted_bytes'] / 1e6:10.3f}"
        )
    runs = "; ".join(f"{row['variant']} {_numbers(row['runs_ms_per_token'])}" for row in document["variants"])
    return [*lines, f"runs, ms per token: {runs}", _perfect_line(document)]


def _perfect_line(document: dict[str, Any]) -> str:
    perfect = document["perfect"]
    if perfect is None:
        return (
            f"perfect prefetch: not computed from {document['variants'][0]['variant']}; name off as the first variant"
        )
    return (
        f"perfect prefetch would give {perfect['ms_per_token']:.3f} ms per token (compute {perfect['compute_ms_per_token']:.3f},"
        f" reads {perfect['read_ms_per_token']:.3f}, known {perfect['lookahead']} layers ahead)"
    )


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _variant(runs: list[Run], first: list[Run] | None) -> dict[str, Any]:
    times = [run.ms for run in runs]
    return {
        "variant": runs[0].variant,
        "ms_per_token": statistics.median(times),
        "runs_ms_per_token": times,
        "ratio_to_first": None if first is None else ratio_interval([run.ms for run in first], times),
        "wait_ms_per_token": statistics.median(run.wait_ms for run in runs),
        "nvme_bytes_per_token": statistics.median(run.nvme_bytes for run in runs),
        "prefetch": {counter: statistics.median(run.prefetch[counter] for run in runs) for counter in COUNTERS},
    }


def _perfect(runs: list[Run]) -> dict[str, float]:
    return {
        "ms_per_token": statistics.median(run.perfect_ms for run in runs),
        "compute_ms_per_token": statistics.median(run.ms - run.wait_ms for run in runs),
        "read_ms_per_token": statistics.median(run.read_ms for run in runs),
        "lookahead": LOOKAHEAD,
    }
