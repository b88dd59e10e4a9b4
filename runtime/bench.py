"""`runtime bench --force-tokens`: variants of the store side by side on one token sequence, which makes them demand the same experts.

Inside the timed window of a run: from the first forced step's begin to the last one's end, logits included. Outside: opening
the model, the prefill of the first tokens, emptying the tiers, one unrecorded run of the first variant. Every run begins with
empty tiers and ends inside one process, so the page cache, the card's clocks and the drive's own state are what the runs before
have left; runs are interleaved so that all variants get the same of it. Sampling is left out: no text is made, none is audited.

A run whose demand differs from the first one's ends the comparison: times of different work say nothing about variants.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from runtime.bench_record import MeasuredStore, Note, Picks, perfect_schedule, token_costs, traffic
from runtime.bench_variants import Variants
from runtime.chat import require_tokenizer
from runtime.chat_template import BOS
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.store.reader import Progress
from runtime.store.store import TieredStore
from runtime.tokenizer import encode

LOOKAHEAD = 2  # layers; how far ahead the predictor speaks
COUNTERS = ("issued", "used", "late", "wasted", "cancelled", "issued_bytes", "wasted_bytes")


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is compared, and how long."""

    variants: tuple[str, ...]
    repeat: int = 5
    tokens: int = 128  # forced steps
    prompt_tokens: int = 32

    @property
    def num_tokens(self) -> int:
        """Of the whole sequence."""
        return self.prompt_tokens + self.tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One run: times in ms per token of the window, bytes that the drive moved in it, and what followed from it."""

    variant: str
    ms: float
    wait_ms: float
    nvme_bytes: float
    prefetch: dict[str, int]
    perfect_ms: float
    read_ms: float  # of the drive, for all that was demanded
    picks: list[Picks]
    logits: Tensor  # float32 [V], after the last token

    @property
    def digest(self) -> str:
        """Of the demand: layers, experts and precisions in order."""
        return blake2b(repr(self.picks).encode(), digest_size=8).hexdigest()


def forced_ids(path: Path, session: Session) -> list[int]:
    """The token ids of a .json list, or of a text behind BOS.

    Raises:
        StrawError: The file cannot be read, is neither, or holds an id that the model does not have.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else encode(require_tokenizer(session), BOS + text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise StrawError(
            f"{path}: cannot be read ({reason}), expected a text file or a .json list of token ids; name another --force-tokens"
        ) from None
    ids = content if isinstance(content, list) else [content]
    vocab_size = session.config.vocab_size
    wrong = [number for number in ids if type(number) is not int or not 0 <= number < vocab_size]
    if wrong:
        raise StrawError(
            f"{path}: {str(wrong[0])[:40]!r} in it, expected a list of token ids below {vocab_size:,}; name another --force-tokens"
        )
    return ids


def schedule(variants: Sequence[str], repeat: int) -> list[str]:
    """The variant of every run: A B C A B C …"""
    return list(variants) * repeat


def run_bench(session: Session, token_ids: Sequence[int], settings: BenchSettings) -> Iterator[Run]:
    """Every run of `schedule` as it ends, after a warm-up that is not among them.

    Args:
        session: Opened for `bench_variants.prefetch_for(settings.variants)`; when the runs have ended it is an
            empty sequence on empty tiers.
        token_ids: The sequence; what lies behind `settings.num_tokens` is not used.
        settings: The variants and lengths.

    Raises:
        StrawError: No store, too few tokens or slots, or a run demands what the first one did not.
    """
    opened = _store(session)
    ids = _checked_ids(session, token_ids, settings)
    opened.restart()
    store = MeasuredStore.over(opened)
    variants = Variants(store, opened.prefetcher, settings.variants, session.config.num_experts_per_tok)
    session._experts = store
    try:
        first = _run(session, store, variants, settings.variants[0], ids, settings)
        for name in schedule(settings.variants, settings.repeat):
            run = _run(session, store, variants, name, ids, settings)
            check_same_demand(first, run)
            yield replace(run, picks=first.picks)  # the same once, not once a run
    finally:
        store.restart()  # nothing of a guess is under way any more
        opened.restart()  # what it held has been overwritten
        opened._was_cut_off = store._was_cut_off
        session.reset()
        session._experts = opened


def check_same_demand(first: Run, run: Run) -> None:
    """Nothing, if both runs demanded the same experts at the same precisions.

    Raises:
        StrawError: They did not; names the first layer call that differs.
    """
    for number, (expected, got) in enumerate(zip(first.picks, run.picks, strict=True)):
        if got != expected:
            raise StrawError(
                f"variant {run.variant}: layer {got[0]} asked for {_first_other(got, expected)} in layer call {number:,}, expected {_first_other(expected, got)} as in variant {first.variant}; below exact what is resident decides, use --ladder exact"
            )


def _store(session: Session) -> TieredStore:
    if not isinstance(session._experts, TieredStore):
        raise StrawError(
            f"{session.directory}: all its experts are held in memory, expected a model directory, whose experts are streamed; run: prep layout {session.directory} MODEL"
        )
    return session._experts


def _checked_ids(session: Session, token_ids: Sequence[int], settings: BenchSettings) -> list[int]:
    needed = settings.num_tokens
    if len(token_ids) < needed:
        raise StrawError(
            f"--force-tokens: {len(token_ids):,} tokens, expected at least {needed:,} (--prompt-tokens and --tokens); give a longer text or smaller numbers"
        )
    if needed > session.context:
        raise StrawError(
            f"context: {session.context:,} tokens, expected at least {needed:,} (--prompt-tokens and --tokens); give a larger --context"
        )
    return list(token_ids[:needed])


def _run(
    session: Session, store: MeasuredStore, variants: Variants, name: str, ids: list[int], settings: BenchSettings
) -> Run:
    variants.begin(name)
    session.reset()
    session.prefill(ids[: settings.prompt_tokens])
    gc.collect()  # what the run before has left is not cleared away inside this one's window
    first_note, drive, begin = len(store.notes), store.files.progress(), store.now()
    for token_id in ids[settings.prompt_tokens :]:
        logits = session.step(token_id)
    end, drive = store.now(), _since(drive, store.files.progress())
    costs = _costs(session, [begin, *store.notes[first_note:]], end, drive)
    return Run(
        variant=name,
        ms=(end.seconds - begin.seconds) * 1e3 / settings.tokens,
        wait_ms=(end.wait_seconds - begin.wait_seconds) * 1e3 / settings.tokens,
        nvme_bytes=drive.num_bytes / settings.tokens,
        prefetch={counter: store.stats.prefetch[counter] for counter in COUNTERS},
        perfect_ms=costs[0] / settings.tokens,
        read_ms=costs[1] / settings.tokens,
        picks=list(traffic(store.notes)),
        logits=logits,
    )


def _since(before: Progress, after: Progress) -> Progress:
    return Progress(
        after.demand_busy_seconds - before.demand_busy_seconds,
        after.busy_seconds - before.busy_seconds,
        after.num_bytes - before.num_bytes,
    )


def _costs(session: Session, notes: list[Note], end: Note, drive: Progress) -> tuple[float, float]:
    """(perfect schedule, reads that were demanded) in ms of all steps."""
    rate = drive.num_bytes / drive.busy_seconds if drive.busy_seconds else float("inf")
    costs = token_costs(notes, end, rate, session.config.num_hash_layers)
    perfect_ms = sum(perfect_schedule(cost.layers, LOOKAHEAD, cost.lead_ms) for cost in costs)
    return perfect_ms, sum(layer.read_ms for cost in costs for layer in cost.layers)


def _first_other(picks: Picks, others: Picks) -> str:
    """The first of these picks that is not among those, in words."""
    pairs = zip(
        [pick for token in picks[1] for pick in token], [pick for token in others[1] for pick in token], strict=True
    )
    expert_id, rung = next(pick for pick, other in pairs if pick != other)
    return f"expert {expert_id} {rung}"
