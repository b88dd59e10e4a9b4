"""Prefetch never harms: on a virtual clock a wrong predictor costs nothing, a right one hides the drive; and the budget's arithmetic."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from torch import Tensor
from virtual_drive import TimedStore, VirtualClock, VirtualFiles

from prep.layout import layout
from prep.requant import requant
from runtime import open_model
from runtime.artifact import ModelDirectory
from runtime.engine import Session
from runtime.errors import StoreError, StrawError
from runtime.ladder import Ladder, Rung
from runtime.prefetch import LEAST_TRUST, DriveBudget, Guess, Prefetcher
from runtime.store import assemble
from runtime.store.policies import ExpertKey
from runtime.store.reader import SlabReader

NUM_EXPERTS, NUM_PICKS, NUM_LAYERS, NUM_HASH = 12, 3, 7, 2
COMPUTE_US = 1000  # of a layer
TOKENS = torch.randint(2, 512, (36,), generator=torch.Generator().manual_seed(5)).tolist()
PREFIX = 4
EXACT = Ladder.exact(NUM_PICKS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint, directory = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("prefetch") / "model"
    write_random_checkpoint(
        checkpoint,
        compress_ratios=[0] * (NUM_LAYERS + 1),
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_PICKS,
        num_hash_layers=NUM_HASH,
        num_hidden_layers=NUM_LAYERS,
    )
    layout(checkpoint, directory)
    requant(directory, "clip")
    return directory


class Teacher:
    """A predictor that knows the routing of the run: `picks[token][layer]`; says the opposite if `is_wrong`."""

    lookaheads = (2, 3)

    def __init__(self, picks: list[list[list[int]]], is_wrong: bool, device: str = "cpu") -> None:
        self._picks, self._is_wrong, self._device, self._token = picks, is_wrong, device, -1

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        self._token += layer_idx == 0
        scores = torch.zeros(1, len(self.lookaheads), NUM_EXPERTS)
        for row, lookahead in enumerate(self.lookaheads):
            if layer_idx + lookahead < NUM_LAYERS:
                scores[0, row, self._picks[self._token][layer_idx + lookahead]] = 1.0
        return (1 - scores if self._is_wrong else scores).to(self._device)


class Run(NamedTuple):
    """What a run of TOKENS left behind; times of the steps alone."""

    logits: Tensor
    picks: list[list[list[int]]]
    microseconds: int
    wait_ms: float
    read_bytes: float
    contents: list[Any]
    stats: dict[str, Any]


@pytest.fixture
def play(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    def run(
        bytes_per_us: int, slots: tuple[int, ...], predictor: Any = None, prefetch: str = "hash", **options: Any
    ) -> Run:
        clock = VirtualClock()

        def timed(weights, new_residency, memory, files, ladder, watch, prefetcher) -> TimedStore:
            files.close()
            drive = VirtualFiles(ModelDirectory(model), clock, bytes_per_us)
            if prefetcher:
                prefetcher._predictor = predictor
            store = TimedStore(weights, new_residency, memory, drive, ladder, watch, prefetcher, clock)  # type: ignore[arg-type]
            return store.begin(clock, COMPUTE_US)

        monkeypatch.setattr(assemble, "TieredStore", timed)
        session = open_model(model, slots=slots, prefetch=prefetch, **options)
        store: TimedStore = session._experts  # type: ignore[assignment]
        logits, picks = [session.prefill(TOKENS[:PREFIX])], []
        start, before = clock.now_us, _totals(store)
        session.observer = lambda layer_idx, x, ids, weights: picks.append(ids[0].tolist())
        for token_id in TOKENS[PREFIX:]:
            logits.append(session.step(token_id))
            store.check_balance()
        wait_ms, read_bytes = (after - first for after, first in zip(_totals(store), before, strict=True))
        by_token = [picks[begin : begin + NUM_LAYERS] for begin in range(0, len(picks), NUM_LAYERS)]
        microseconds = clock.now_us - start
        return Run(torch.stack(logits), by_token, microseconds, wait_ms, read_bytes, store.contents, store.as_dict())

    return run


def _totals(store: TimedStore) -> tuple[float, float]:
    """(exposed wait in ms, bytes read) since the start."""
    per_token, tokens = store.as_dict()["per_token"], store.as_dict()["tokens"]  # type: ignore[operator]
    return per_token["wait_ms"] * tokens, per_token["nvme_bytes"] * tokens


def speed_for(off: Run, share: float) -> int:
    """Bytes per µs at which the reads of a layer take `share` of its compute."""
    layers = NUM_LAYERS * (len(TOKENS) - PREFIX)
    return round(off.read_bytes / layers / (share * COMPUTE_US))


@pytest.mark.parametrize("slots", [(NUM_PICKS, 0, 0, 0), (16, 10, 0, 0)])
def test_a_perfect_oracle_hides_the_drive(play: Callable[..., Run], slots: tuple[int, ...]) -> None:
    speed = speed_for(play(100, slots, prefetch="off"), 0.8)
    off = play(speed, slots, prefetch="off")
    right = play(speed, slots, Teacher(off.picks, is_wrong=False))
    assert torch.equal(right.logits, off.logits)
    assert right.wait_ms <= 0.2 * off.wait_ms
    counts = right.stats["prefetch"]
    assert counts["used"] + counts.get("late", 0) == counts["issued"]


@pytest.mark.parametrize(
    ("slots", "share"), [((NUM_PICKS, 0, 0, 0), 0.8), ((16, 10, 0, 0), 0.3), ((16, 10, 0, 0), 2.0)]
)
def test_a_predictor_that_is_always_wrong_harms_nobody(
    play: Callable[..., Run], slots: tuple[int, ...], share: float
) -> None:
    speed = speed_for(play(100, slots, prefetch="off"), share)
    hashed = play(speed, slots)
    wrong = play(speed, slots, Teacher(hashed.picks, is_wrong=True))
    assert torch.equal(wrong.logits, hashed.logits)
    assert (
        wrong.contents == hashed.contents
    )  # the pools held the same slabs after each layer: nothing was evicted for a guess
    assert wrong.microseconds <= 1.02 * hashed.microseconds
    assert wrong.stats["prefetch"]["wasted"] > 0  # it was tried
    off = play(speed, slots, prefetch="off")
    assert hashed.contents == off.contents
    assert hashed.microseconds <= off.microseconds


@pytest.mark.slow
def test_in_parts_too(play: Callable[..., Run], model: Path) -> None:
    """The same with base and residual, each staged by itself."""
    requant(model, "split")
    slots = (12, 8, 4, 4)
    for ladder in ("exact", "1,2"):
        off = play(60, slots, prefetch="off", code="split", ladder=ladder)
        right = play(60, slots, Teacher(off.picks, is_wrong=False), code="split", ladder=ladder)
        wrong = play(60, slots, Teacher(off.picks, is_wrong=True), code="split", ladder=ladder)
        assert right.wait_ms < off.wait_ms
        if ladder == "exact":
            assert torch.equal(right.logits, off.logits)
            assert torch.equal(wrong.logits, off.logits)
            assert wrong.contents == off.contents


def test_the_token_alone_brings_the_hash_layers_near(play: Callable[..., Run]) -> None:
    slots = (NUM_PICKS, 0, 0, 0)
    speed = speed_for(play(100, slots, prefetch="off"), 0.3)
    off, hashed = play(speed, slots, prefetch="off"), play(speed, slots)
    assert torch.equal(hashed.logits, off.logits)
    steps = len(TOKENS) - PREFIX
    assert hashed.stats["prefetch"] == {
        "issued": pytest.approx(NUM_PICKS * NUM_HASH * steps, rel=0.15),  # some were held already
        "issued_bytes": hashed.stats["prefetch"]["issued_bytes"],
        "used": hashed.stats["prefetch"]["issued"],
    }
    assert hashed.wait_ms < 0.85 * off.wait_ms


def test_below_exact_a_guess_changes_only_what_was_resident(play: Callable[..., Run]) -> None:
    slots, ladder = (NUM_PICKS, 0, NUM_PICKS, 0), "1,2"
    off = play(50, slots, prefetch="off", ladder=ladder)
    assert off.stats["reproducible"]
    right = play(50, slots, Teacher(off.picks, is_wrong=False), ladder=ladder)
    assert not right.stats["reproducible"]
    assert right.stats["per_token"]["uses"].get("dropped", 0) <= off.stats["per_token"]["uses"]["dropped"]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_with_real_reads_at_random_times_too(model: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Threads, events and copies instead of the virtual drive: guesses that are right, wrong or late change no bit."""
    draw = random.Random(3)

    def preadv(descriptor: int, targets: list[memoryview], offset: int) -> int:
        time.sleep(draw.random() * 2e-3)
        return os.preadv(descriptor, targets, offset)

    monkeypatch.setattr(assemble, "SlabReader", partial(SlabReader, preadv=preadv))
    slots = (16, 10, 0, 0)
    off, picks, _ = real_run(open_model(model, slots=slots, device=device, dtype="float32"))
    for is_wrong in (False, True):
        session = open_model(model, slots=slots, prefetch="hash", device=device, dtype="float32")
        prefetcher = session._experts.prefetcher  # type: ignore[attr-defined]
        prefetcher._predictor = Teacher(picks, is_wrong, device)
        logits, _, stats = real_run(session)
        assert torch.equal(logits, off)
        assert stats["prefetch"]["used"] + stats["prefetch"].get("late", 0) > 0
        assert is_wrong == bool(stats["prefetch"].get("wasted", 0) + stats["prefetch"].get("cancelled", 0))


def real_run(session: Session) -> tuple[Tensor, list[list[list[int]]], dict[str, Any]]:
    """Logits of TOKENS, the routing of each step, and the store's counters; the accounts are checked after each step."""
    picks: list[list[int]] = []
    logits = [session.prefill(TOKENS[:PREFIX])]
    session.observer = lambda layer_idx, x, ids, weights: picks.append(ids[0].tolist())
    for token_id in TOKENS[PREFIX:]:
        logits.append(session.step(token_id))
        session._experts.check_balance()  # type: ignore[attr-defined]
    stats = session.stats()["store"]
    session.close()
    return torch.stack(logits), [picks[at : at + NUM_LAYERS] for at in range(0, len(picks), NUM_LAYERS)], stats


def test_an_interrupt_while_a_guess_is_issued_ends_the_store(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot would be in flight for good, with nobody reading into it."""
    session = open_model(model, slots=(NUM_PICKS, 0, 0, 0), prefetch="hash")
    session.prefill(TOKENS[:PREFIX])
    files = session._experts._files  # type: ignore[attr-defined]

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "submit_prefetch", cut)
        session.step(TOKENS[PREFIX])
    with pytest.raises(StoreError, match="cut off inside a layer"):
        session.step(TOKENS[PREFIX])
    session.close()


def test_a_guess_that_cannot_be_read_is_nobodys_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = (16, 10, 0, 0)
    off, picks, _ = real_run(open_model(model, slots=slots, dtype="float32"))
    session = open_model(model, slots=slots, prefetch="hash", dtype="float32")
    files = session._experts._files  # type: ignore[attr-defined]
    session._experts.prefetcher._predictor = Teacher(picks, is_wrong=False)  # type: ignore[attr-defined]
    submit = files._reader.submit

    def submit_failing(path: str, *arguments: Any, demand: bool, **more: Any) -> Any:
        return submit(path if demand else "experts/nothing.bin", *arguments, demand=demand, **more)

    monkeypatch.setattr(files._reader, "submit", submit_failing)
    logits, _, stats = real_run(session)
    assert torch.equal(logits, off)
    assert stats["prefetch"]["failed"] > 0
    assert stats["prefetch"]["issued"] == stats["prefetch"]["failed"] + stats["prefetch"]["used"]  # used: from RAM
    assert "prefetch" not in stats["by_plane"]["fp4"]


def test_settings_that_cannot_be_met(model: Path) -> None:
    with pytest.raises(StrawError, match="prefetch is 'oracle', expected off, hash or predictor"):
        open_model(model, prefetch="oracle")
    with pytest.raises(StrawError, match=r"predictor\.safetensors: no such file, .*run: prep trace"):
        open_model(model, prefetch="predictor")


def test_the_budget_is_the_idle_time_of_the_drive() -> None:
    budget = DriveBudget(slab_bytes=100)
    assert not budget.has_room(1)
    for _ in range(200):
        budget.layer(seconds=1.0, demand_busy_seconds=0.75, bytes_per_second=1000)
    assert budget.has_room(999)
    assert not budget.has_room(1001)  # four layers' worth
    budget.resolved(was_right=False)
    budget.layer(1.0, 0.75, 1000)
    assert budget.has_room(249 * budget.trust)
    assert not budget.has_room(251 * budget.trust)  # nothing was kept from the layers before
    budget.spend(round(249 * budget.trust))
    assert not budget.has_room(100)
    for _ in range(1000):
        budget.layer(1.0, 2.0, 1000)
    assert not budget.has_room(101)  # no idle time: what had added up to one slab, and nothing more
    budget.spend(100)
    budget.layer(1.0, 2.0, 1000)
    assert not budget.has_room(1)


def test_a_slab_that_fits_no_single_layer_waits_for_several() -> None:
    budget = DriveBudget(slab_bytes=1000)
    for _ in range(200):
        budget.layer(1.0, 0.75, 1000)
    assert budget.has_room(1000)
    budget.spend(1000)
    waited = [budget.layer(1.0, 0.75, 1000) or budget.has_room(999) for _ in range(5)]
    assert waited == [False, False, False, True, True]


def test_trust_falls_with_wrong_guesses_and_comes_back() -> None:
    budget = DriveBudget(slab_bytes=1)
    assert budget.trust == 1.0
    for _ in range(200):
        budget.resolved(was_right=False)
    assert budget.trust == LEAST_TRUST
    for _ in range(100):
        budget.resolved(was_right=True)
    assert budget.trust == 1.0


class Fixed:
    """Says the same at every layer: expert e of 4 has score e."""

    lookaheads = (2, 3)

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        return torch.arange(4.0).expand(1, 2, 4) + torch.tensor([[[0.5], [0.0]]])


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [
        (Ladder(2, 2), {(3, Rung.FP4), (2, Rung.FP4)}),
        (Ladder(1, 2), {(3, Rung.FP4), (2, Rung.TWO_BIT)}),
        (Ladder(0, 1), {(3, Rung.TWO_BIT)}),
        (Ladder(0, 0), set()),
    ],
)
def test_a_guess_asks_for_what_its_rank_would_get(ladder: Ladder, expected: set[tuple[int, Rung]]) -> None:
    prefetcher = Prefetcher({0: torch.tensor([[1, 2]])}, Fixed(), num_layers=5, num_picks=2, budget=DriveBudget(1))
    x = torch.zeros(1, 8)
    seen = prefetcher.look(1, x)
    assert seen is not None
    guesses = prefetcher.guesses(1, seen.tolist(), ladder)
    assert [guess.key.layer_idx for guess in guesses[:2]] == [3, 4][: len(guesses)]  # the likelier first
    for layer_idx in (3, 4):
        assert {(g.key.expert_id, g.rung) for g in guesses if g.key.layer_idx == layer_idx} == expected
    assert prefetcher.look(3, x) is None  # no layer behind the last
    known = prefetcher.begin_step(0, ladder)
    assert [guess.key for guess in known] == [ExpertKey(0, 1), ExpertKey(0, 2)][: len(expected)]
    assert all(isinstance(guess, Guess) and guess.is_certain for guess in known)
