"""The variants of `runtime bench`: what each prefetches and how it waits, and the two that exist only as controls.

Owns the switch from one to the next on one store, so that slots, reader and model are the same for all. Measures nothing.
"evicting" lets guesses into the pools, where they push out what is colder; "polling" looks for finished reads every 300 µs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy

from runtime.bench_record import MeasuredStore
from runtime.errors import StoreError, StrawError
from runtime.predictors import HASH, LEARNED, OFF
from runtime.prefetch import Prefetcher
from runtime.store.assemble import STAGED_LAYERS
from runtime.store.residency import BASE_OF, Demote, Move, Promote, Read, Slab, Stage, Tier
from runtime.store.slab_files import SlabFiles
from runtime.store.staging import Staging
from runtime.store.tickets import Ticket

EVICTING, POLLING = "evicting", "polling"
VARIANTS = (OFF, HASH, LEARNED, EVICTING, POLLING)
POLL_SECONDS = 300e-6


def parse_variants(text: str) -> tuple[str, ...]:
    """The names in "off,hash"; one may be given twice, which shows the noise.

    Raises:
        StrawError: There is none, or one of them is no variant.
    """
    names = tuple(name.strip() for name in text.split(","))
    wrong = [name for name in names if name not in VARIANTS]
    if wrong:
        raise StrawError(f"variants: {wrong[0]!r}, expected some of {','.join(VARIANTS)}; correct --variants")
    return names


def prefetch_for(variants: Sequence[str]) -> str:
    """What the session must be opened with, for all of them to run on it."""
    if LEARNED in variants:
        return LEARNED
    return HASH if HASH in variants or EVICTING in variants else OFF


def prefetches(variant: str) -> bool:
    """Whether it reads anything ahead of demand."""
    return variant not in (OFF, POLLING)


class Variants:
    """Turns one store into any of the variants."""

    def __init__(
        self, store: MeasuredStore, prefetcher: Prefetcher | None, variants: Sequence[str], num_picks: int
    ) -> None:
        """Checks that the store can be each of them.

        Args:
            store: As opened for `prefetch_for(variants)`.
            prefetcher: Of that store, fresh; "evicting" has all its guesses.
            variants: Those that will be asked for.
            num_picks: K.

        Raises:
            StrawError: The pools are too small for the evicting one.
        """
        self._store, self._prefetcher = store, prefetcher
        self._num_staged = STAGED_LAYERS * num_picks
        if EVICTING in variants:
            _check_room(store.num_slots, 2 * num_picks + self._num_staged)
        self._files = store.files
        self._polling = PollingFiles(store.files) if POLLING in variants else store.files

    def begin(self, variant: str) -> None:
        """The store is this variant, with empty tiers, counters and a budget that knows nothing."""
        store = self._store
        store.prefetcher = self._new_prefetcher(variant)
        store.files = self._polling if variant == POLLING else self._files
        store.new_staging = evicting_staging(self._num_staged) if variant == EVICTING else Staging
        store.restart()

    def _new_prefetcher(self, variant: str) -> Prefetcher | None:
        if self._prefetcher is None or not prefetches(variant):
            return None
        prefetcher = copy(self._prefetcher)
        prefetcher.budget = copy(self._prefetcher.budget)
        if variant == HASH:
            prefetcher._predictor = None
        return prefetcher


class EvictingStaging(Staging):
    """Brings guesses into the pools instead of the staging ring, at the cost of what is coldest there. A control, not for use.

    With more slots than twice K and twice `most_on_the_way`, a step's wave always finds room beside guesses in flight.
    """

    most_on_the_way: int  # guesses in flight

    def place(self, slab: Slab) -> Read | Stage | None:
        plane, key = slab
        held = self._residency.place(plane, key)
        wants = [(BASE_OF[plane], key), slab] if plane in BASE_OF else [slab]
        if (held and held.tier is Tier.VRAM) or not self._has_room(wants):
            return None
        moves = self._residency.acquire(wants)
        self._residency.release(wants)
        return self._carry_out(moves, slab)

    def _has_room(self, wants: list[Slab]) -> bool:
        """Whether the guess may come, its base being there already if it has one."""
        bases = [self._residency.place(*base) for base in wants[:-1]]
        near = all(base is not None and base.tier is Tier.VRAM for base in bases)
        is_free = len({key for _, key in self._on_the_way}) < self.most_on_the_way
        return near and is_free and self._residency.can_acquire(wants)

    def _carry_out(self, moves: list[Move], slab: Slab) -> Read | Stage | None:
        """Does all that makes room and follows along; the move of the guess itself is the caller's."""
        own: Read | Stage | None = None
        for move in moves:
            if isinstance(move, Demote):
                self._memory.demote(move)
                self._residency.copied(move)
                self._count(move, "demote")
            elif isinstance(move, Promote):
                self._residency.copied(move)  # whatever takes the RAM slot is issued later, so it comes behind the copy
                if (move.plane, move.key) == slab:
                    own = Stage(*move)
                    continue
                self._memory.promote(move)
                self._residency.arrived(move.plane, move.key)
                self._count(move, "promote")
            elif isinstance(move, Read):
                own = move
        return own


def evicting_staging(limit: int) -> type[EvictingStaging]:
    """EvictingStaging with at most so many guesses in flight."""

    class Limited(EvictingStaging):
        most_on_the_way = limit

    return Limited


class PollingFiles(SlabFiles):
    """Waits for reads by looking and sleeping in turn, as a program without a blocking wait does. A control, not for use."""

    def __init__(self, files: SlabFiles, sleep: Callable[[float], None] = time.sleep) -> None:
        """Shares the reader of `files`, which stays the owner of it."""
        super().__init__(files._model, files._reader, files._checksums)
        self._sleep = sleep

    def completed(self, tickets: dict[Ticket, Read]) -> Iterator[tuple[Read, StoreError | None]]:
        missing = dict(tickets)
        while missing:
            done = [ticket for ticket in missing if ticket.is_done()]
            if done:
                yield from super().completed({ticket: missing.pop(ticket) for ticket in done})
            else:
                self._sleep(POLL_SECONDS)


def _check_room(num_slots: dict[str, int], needed: int) -> None:
    for plane, got in num_slots.items():
        if got <= needed:
            raise StrawError(
                f"slots: {got} for {plane} in VRAM, the evicting variant needs more than {needed} (twice the experts of one token and a staging ring); raise --vram or --slots, or leave it out of --variants"
            )
