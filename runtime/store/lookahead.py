"""Prefetch of one store: from a step's token and each layer's guesses to slabs in the staging ring, as far as the drive has time.

Joins the choice (`runtime.prefetch`), the moves (`staging`) and the clock. Without one of these the store only ever demands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from runtime.expert_weights import ExpertWeights
from runtime.ladder import AnyLadder, Rung
from runtime.prefetch import FIRST_RATE, Guess, Prefetcher
from runtime.store.residency import Read, Residency, Slab, Tier
from runtime.store.slab_files import SlabFiles
from runtime.store.staging import Staging
from runtime.store.tickets import Ticket


class Lookahead:
    """What the store does ahead of demand. Called at fixed points of a layer, always by the thread that decides."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        staging: Staging,
        residency: Residency,
        files: SlabFiles,
        weights: ExpertWeights,
        ladder: AnyLadder,
        clock: Callable[[], float],
    ) -> None:
        """Joins the parts of one store."""
        self._prefetcher, self._staging, self._residency, self._files = prefetcher, staging, residency, files
        self._weights, self.ladder, self._clock = weights, ladder, clock
        self._is_step = False
        self._known: list[Guess] = []  # certain guesses that the ring has had no room for yet
        self._last_look = clock(), files.progress()

    def begin_step(self, token_id: int) -> None:
        """The next forward is of this one token: brings near what that alone decides."""
        self._last_look = self._clock(), self._files.progress()
        self._known = self._prefetcher.begin_step(token_id, self.ladder)
        self._stage_known()

    def begin_layer(self, layer_idx: int, x: Tensor) -> Tensor | None:
        """Starts the predictor on the router's input [T, D] and lands what has been read.

        What the predictor says is for `end_layer`, read by the host where it reads the router's picks: one wait for both.
        """
        self._is_step = len(x) == 1
        seen = self._prefetcher.look(layer_idx, x) if self._is_step else None
        self._staging.collect()
        return seen

    def claim(self, wants: Iterable[Slab]) -> dict[Ticket, Read]:
        """Reads of wanted slabs that are still on their way; now demand, and the caller's."""
        return self._staging.claim(wants)

    def end_layer(self, layer_idx: int, seen: list[list[list[float]]] | None) -> None:
        """What was staged for this layer is over; the drive's spare time goes to guesses for those to come."""
        self._staging.retire(layer_idx)
        if self._is_step:  # a prefill, or the pause before it, says nothing about the layers of a step
            self._measure()
        self._known = [guess for guess in self._known if guess.key.layer_idx > layer_idx]
        self._stage_known()
        for guess in [] if seen is None else self._prefetcher.guesses(layer_idx, seen, self.ladder):
            for slab in self._slabs(guess):
                if not self._prefetcher.budget.has_room(self._files.stride_bytes(slab[0])):
                    return
                self._prefetcher.budget.spend(self._staging.issue(slab))

    def drain(self) -> None:
        """Waits until no read of a guess is under way."""
        self._staging.drain()

    def _measure(self) -> None:
        now, progress = self._clock(), self._files.progress()
        then, before = self._last_look
        rate = progress.num_bytes / progress.busy_seconds if progress.busy_seconds else FIRST_RATE
        busy_seconds = progress.demand_busy_seconds - before.demand_busy_seconds
        self._prefetcher.budget.layer(now - then, busy_seconds, rate)
        self._last_look = now, progress

    def _stage_known(self) -> None:
        """Certain guesses in order, as far as the ring has room."""
        self._known = [guess for guess in self._known if not self._bring_near(guess)]

    def _bring_near(self, guess: Guess) -> bool:
        """Whether all slabs of the guess are in VRAM or on their way there now."""
        return all([self._staging.issue(slab, is_certain=True) or self._is_near(slab) for slab in self._slabs(guess)])

    def _slabs(self, guess: Guess) -> list[Slab]:
        """Those of the precision that the pick would get: FP4 where that is resident, however low its rank."""
        fp4 = self._weights.planes(Rung.FP4)
        holds_fp4 = self._residency.has_pools(fp4) and self._residency.is_resident(fp4, guess.key)
        return [(plane, guess.key) for plane in (fp4 if holds_fp4 else self._weights.planes(guess.rung))]

    def _is_near(self, slab: Slab) -> bool:
        place = self._residency.place(*slab)
        return place is not None and place.tier is Tier.VRAM
