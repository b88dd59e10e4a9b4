"""The tiered store: serves a layer's routed experts from VRAM, pinned RAM and NVMe, in two precisions, under a ladder.

Owns the order of one layer call: what each pick may use (`ladder`), who must move (`residency`), the moves themselves (`slots`,
`reader`), and the arithmetic as slabs arrive. All misses of a call are issued together; a call that needs more slabs than there
are slots runs in waves. Streaming changes no bit: each expert computes all its tokens of the call at once, each pick has its own
output, and the caller adds them in rank order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.errors import StoreError
from runtime.expert_weights import ExpertWeights
from runtime.ladder import EXACT, AnyLadder, Rung, decide
from runtime.prefetch import Prefetcher
from runtime.store.lookahead import Lookahead
from runtime.store.policies import ExpertKey
from runtime.store.residency import Demote, Move, Promote, Read, Residency, Slab, Tier
from runtime.store.slab_files import SlabFiles
from runtime.store.slots import SlotMemory
from runtime.store.staging import Staging
from runtime.store.stats import WINDOW_TOKENS, StoreStats
from runtime.store.tickets import Ticket


@dataclass(slots=True)
class Work:
    """One expert at one precision: the tokens and ranks of the call that it serves, and with which weights."""

    key: ExpertKey
    rung: Rung
    slabs: list[Slab]
    begin: int = 0  # of its picks among those of the call
    tokens: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, token: int, rank: int, weight: float) -> None:
        """One more pick."""
        self.tokens.append(token)
        self.ranks.append(rank)
        self.weights.append(weight)


class _Call(NamedTuple):
    """The tensors of one call: activations [T, D], outputs [T, K, D], and of all picks (token, rank) [2, picks] and weight."""

    x: Tensor
    output: Tensor
    rows: Tensor
    weights: Tensor


class TieredStore:
    """An ExpertProvider (runtime.models.experts) that keeps what fits and streams the rest. One caller at a time."""

    new_staging = Staging

    def __init__(
        self,
        weights: ExpertWeights,
        new_residency: Callable[[], Residency],
        memory: SlotMemory,
        files: SlabFiles,
        ladder: AnyLadder,
        watch: Callable[[], None],
        prefetcher: Prefetcher | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Joins the parts.

        Args:
            weights: The arithmetic of the experts.
            new_residency: Makes empty tiers with the pools that `memory` has the slots of.
            memory: The slots.
            files: The reads.
            ladder: What each pick may use.
            watch: Called now and then between tokens, to look after what the program does not own.
            prefetcher: Whose guesses are brought into the staging rings.
            clock: Seconds; what waits and budgets are measured by.
        """
        self._ladder, self.prefetcher = ladder, prefetcher
        self._weights, self._new_residency, self._memory, self._files = weights, new_residency, memory, files
        self._watch, self._clock = watch, clock
        self._last_layer = weights.config.num_hidden_layers - 1
        self._was_cut_off = False
        self._begin()

    def _begin(self) -> None:
        self.stats, self._residency = StoreStats(), self._new_residency()
        self._lookahead = None if self.prefetcher is None else self._new_lookahead(self.prefetcher)

    def _new_lookahead(self, prefetcher: Prefetcher) -> Lookahead:
        resolved, residency, files = prefetcher.budget.resolved, self._residency, self._files
        staging = self.new_staging(residency, self._memory, files, self.stats, resolved)
        return Lookahead(prefetcher, staging, residency, files, self._weights, self.ladder, self._clock)

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Each pick's weighted output, float32 [T, K, D]; a pick that the ladder drops is zeros.

        Raises:
            StoreError: A slab could not be read; other experts can still be asked for.
        """
        with self._uncut():
            call = self._serve(layer_idx, x, topk_ids, topk_weights)
            if layer_idx == self._last_layer:
                self._end_tokens(len(x))
            return call.output

    def _serve(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> _Call:
        look = self._lookahead.begin_layer(layer_idx, x) if self._lookahead else None
        # Here the host waits for the router and the predictor; everything below is decided by integers.
        work = self._plan(layer_idx, topk_ids.tolist(), topk_weights.tolist())
        seen = None if look is None else look.tolist()
        call = _Call(x, torch.zeros(*topk_ids.shape, x.shape[-1], device=x.device), *_upload(work, x.device))
        for wave in self._waves(work):
            self._run_wave(wave, call)
        if self._lookahead:
            self._lookahead.end_layer(layer_idx, seen)
        return call

    def _end_tokens(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._residency.end_token()
        self.stats.end_tokens(num_tokens)
        if self.stats.num_tokens % WINDOW_TOKENS < num_tokens:
            self._watch()

    @contextmanager
    def _uncut(self) -> Iterator[None]:
        """Within, an exception that is no StoreError ends the store: a read may be writing to a slot that nobody knows of."""
        if self._was_cut_off:
            raise StoreError(
                "expert store: an earlier call was cut off inside a layer, expected every call to end; open the model again"
            )
        try:
            yield
        except StoreError:
            raise
        except BaseException:
            self._was_cut_off = True
            raise

    @property
    def ladder(self) -> AnyLadder:
        """What each pick may use; a change holds from the next call on."""
        return self._ladder

    @ladder.setter
    def ladder(self, ladder: AnyLadder) -> None:
        self._ladder = ladder
        if self._lookahead:
            self._lookahead.ladder = ladder

    def can_serve(self, ladder: AnyLadder) -> bool:
        """Whether VRAM has the slots of one token's picks for each plane that the ladder may demand."""
        num_picks = self._weights.config.num_experts_per_tok
        planes = self._weights.planes(Rung.FP4) if ladder.needs_fp4(num_picks) else ()
        if not ladder.is_exact(num_picks) and ladder.needs_two_bit(num_picks):
            planes += self._weights.planes(Rung.TWO_BIT) or ("2-bit, which is not there",)
        has_pools = self._residency.has_pools(planes)
        return has_pools and all(self._residency.num_vram_slots(plane) >= num_picks for plane in planes)

    def begin_step(self, token_id: int) -> None:
        """The next forward is of this one token: what that alone decides is brought near."""
        if self._lookahead:
            with self._uncut():
                self._lookahead.begin_step(token_id)

    def restart(self) -> None:
        """Empty tiers and counters, as after opening; for a comparison of runs that must begin alike."""
        if self._lookahead:
            self._lookahead.drain()
        self._begin()

    def check_balance(self) -> None:
        """Nothing, if the accounts of all tiers balance; AssertionError with the numbers if not."""
        self._residency.check_balance()

    def as_dict(self) -> dict[str, object]:
        """The counters, and what the reader measured of the drive."""
        return {
            **self.stats.as_dict(),
            "reader": self._files.stats(),
            "ladder": str(self.ladder),
            "reproducible": self.is_reproducible,
        }

    def describe(self) -> str:
        """The ladder and the slots of each plane, in a few words."""
        note = "" if self.is_reproducible else ", not reproducible (prefetch decides with)"
        return f"ladder {EXACT if self._is_exact else self.ladder}, slots {self._residency.describe()}{note}"

    @property
    def is_reproducible(self) -> bool:
        """Whether what serves a pick follows from the tokens alone, and not from when a guess arrived."""
        return self.prefetcher is None or self._is_exact

    @property
    def _is_exact(self) -> bool:
        return self.ladder.is_exact(self._weights.config.num_experts_per_tok)

    def close(self) -> None:
        """Ends the reader's threads and releases the slots."""
        self._files.close()
        self._memory.close()

    def _plan(self, layer_idx: int, ids: list[list[int]], weights: list[list[float]]) -> list[Work]:
        """What every pick of the call uses, by expert and precision, decided on what is resident as the call begins."""
        work: dict[tuple[ExpertKey, Rung], Work] = {}
        for token, (token_ids, token_weights) in enumerate(zip(ids, weights, strict=True)):
            keys = [ExpertKey(layer_idx, expert_id) for expert_id in token_ids]
            resident = [[self._is_resident(rung, key) for key in keys] for rung in (Rung.FP4, Rung.TWO_BIT)]
            decision = decide(self.ladder, token_weights, *resident)
            for rank, (key, rung, weight) in enumerate(zip(keys, decision.rungs, decision.weights, strict=True)):
                self.stats.use(layer_idx, rank, rung, self._tier(rung, key))
                if rung is not Rung.DROP:
                    item = work.setdefault((key, rung), Work(key, rung, self._slabs(rung, key)))
                    item.add(token, rank, weight)
        for item in work.values():
            for _ in item.tokens:
                self._residency.use(item.key, self._weights.planes(item.rung))
        return list(work.values())

    def _slabs(self, rung: Rung, key: ExpertKey) -> list[Slab]:
        return [(plane, key) for plane in self._weights.planes(rung)]

    def _is_resident(self, rung: Rung, key: ExpertKey) -> bool:
        planes = self._weights.planes(rung)
        return bool(planes) and self._residency.has_pools(planes) and self._residency.is_resident(planes, key)

    def _tier(self, rung: Rung, key: ExpertKey) -> str | None:
        """Where the slowest of the planes is; None for a dropped pick."""
        if rung is Rung.DROP:
            return None
        places = [self._residency.place(*slab) for slab in self._slabs(rung, key)]
        if None in places:
            return "NVMe"
        if any(place and place.tier is Tier.VRAM and place.in_flight for place in places):
            return "late"
        return "RAM" if any(place and place.tier is Tier.RAM for place in places) else "VRAM"

    def _waves(self, work: Sequence[Work]) -> Iterator[list[Work]]:
        """The work in parts whose slabs fit in VRAM at the same time; what is there already comes first."""
        wave: list[Work] = []
        wanted: dict[Slab, None] = {}
        for item in sorted(work, key=lambda item: self._tier(item.rung, item.key) != "VRAM"):
            together = wanted | dict.fromkeys(item.slabs)
            if wave and not self._fits(together):
                yield wave
                wave, together = [], dict.fromkeys(item.slabs)
            wave.append(item)
            wanted = together
        if wave:
            yield wave

    def _fits(self, wanted: dict[Slab, None]) -> bool:
        counts = Counter(plane for plane, _ in wanted)
        return all(count <= self._residency.num_vram_slots(plane) for plane, count in counts.items())

    def _run_wave(self, wave: list[Work], call: _Call) -> None:
        wants = dict.fromkeys(slab for item in wave for slab in item.slabs)
        try:
            moves = self._residency.acquire(wants)
            late = self._lookahead.claim(wants) if self._lookahead else {}
            missing = {(move.plane, move.key) for move in (*moves, *late.values()) if isinstance(move, Read)}
            with closing(self._carry_out(moves, late)) as arrivals:
                for arrived in arrivals:
                    missing.discard(arrived)
                    wave = self._compute_ready(wave, missing, call)
            self._residency.release(wants)
        except StoreError:
            self._residency.release(wants)
            self.stats.abandon()
            raise

    def _compute_ready(self, wave: list[Work], missing: set[Slab], call: _Call) -> list[Work]:
        """Computes the work of which no slab is missing; what is left of the wave."""
        waiting = []
        for item in wave:
            if missing.isdisjoint(item.slabs):
                self._compute(item, call)
            else:
                waiting.append(item)
        return waiting

    def _compute(self, item: Work, call: _Call) -> None:
        places = {plane: self._residency.place(plane, key) for plane, key in item.slabs}
        slots = [(plane, place.slot_id) for plane, place in places.items() if place is not None]
        self._memory.before_use(slots)
        slabs = {plane: self._memory.view(plane, slot_id) for plane, slot_id in slots}
        tokens, ranks = call.rows[:, item.begin : item.begin + len(item.tokens)]
        weights = call.weights[item.begin : item.begin + len(item.tokens)]
        call.output[tokens, ranks] = self._weights.apply(*item.key, item.rung, slabs, call.x[tokens], weights).float()
        self._memory.after_use(slots)

    def _carry_out(self, moves: list[Move], late: dict[Ticket, Read]) -> Generator[Slab | None]:
        """Issues all moves, beside the reads that are `late`; yields None once nothing but reads is left to wait for, then each slab that a read has brought.

        Raises:
            StoreError: Of the first read that failed, after the last one has ended.
        """
        for move in moves:
            self._copy(move)
        reads = [move for move in moves if isinstance(move, Read)]
        size = self._memory.reads_at_once or max(len(reads), 1)
        batches = [reads[begin : begin + size] for begin in range(0, len(reads) or 1, size)]
        submitted = [late | self._files.submit(batch, self._memory) for batch in batches[:1]]
        yield None
        error: StoreError | None = None
        for number in range(len(batches)):
            submitted += [self._files.submit(batch, self._memory) for batch in batches[number + 1 : number + 2]]
            for move, failure in self._timed(self._files.completed(submitted[number])):
                error = error or failure
                if failure is None:
                    self._memory.land(move)
                    self._residency.arrived(move.plane, move.key)
                    self._count(move, "prefetch" if move in late.values() else "read")
                    yield move.plane, move.key
                else:
                    self._memory.drop(move)
                    self._residency.failed(move.plane, move.key)
        if error is not None:
            raise error

    def _copy(self, move: Move) -> None:
        """Issues a copy between tiers. It is in order with all later copies and kernels, so it counts as done at once."""
        if isinstance(move, Demote):
            self._memory.demote(move)
            self._residency.copied(move)
            self._count(move, "demote")
        if isinstance(move, Promote):
            self._memory.promote(move)
            self._residency.arrived(move.plane, move.key)
            self._residency.copied(move)
            self._count(move, "promote")

    def _count(self, move: Read | Demote | Promote, kind: str) -> None:
        self.stats.move(move.plane, kind, self._files.stride_bytes(move.plane), self._memory.copies_over_pcie)

    def _timed(self, completions: Iterator[tuple[Read, StoreError | None]]) -> Iterator[tuple[Read, StoreError | None]]:
        """The completions, the time spent waiting for each counted as exposed wait."""
        while True:
            start = self._clock()
            completion = next(completions, None)
            self.stats.wait(self._clock() - start)
            if completion is None:
                return
            yield completion


def _upload(work: Sequence[Work], device: torch.device) -> tuple[Tensor, Tensor]:
    """(token, rank) [2, picks] int64 and weight [picks] float32 of all work; each item learns where its picks begin."""
    tokens: list[int] = []
    ranks: list[int] = []
    weights: list[float] = []
    for item in work:
        item.begin = len(tokens)
        tokens += item.tokens
        ranks += item.ranks
        weights += item.weights
    # Once a call and before anything is issued: a small copy waits for the stream, which must not wait for a slab yet.
    return torch.tensor([tokens, ranks], device=device), torch.tensor(weights, dtype=torch.float32, device=device)
