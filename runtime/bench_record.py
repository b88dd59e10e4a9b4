"""What a benchmark run did, layer call by layer call: a store that takes notes, and what follows from its notes.

Owns the notes. Which variant runs is `bench_variants`'s business, what is compared `bench`'s. A note is taken where the host
knows a layer's picks, so that from one to the next lie this layer's reads and arithmetic and the next one's dense work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from runtime.ladder import Rung
from runtime.store.slab_files import SlabFiles
from runtime.store.stats import StoreStats
from runtime.store.store import TieredStore, Work

Picks = tuple[int, tuple[tuple[tuple[int, str], ...], ...]]  # (layer, of each token of the call (expert, rung) by rank)


class Note(NamedTuple):
    """The moment at which a layer's picks were known, or a step's token: totals since the run began, then what was asked for."""

    seconds: float  # of the store's clock
    wait_seconds: float
    demand_bytes: int
    layer_idx: int | None  # None where a step begins
    ids: Sequence[Sequence[int]] = ()
    work: Sequence[Work] = ()


class LayerCost(NamedTuple):
    """From a layer's picks to the next layer's: arithmetic, and the drive's time for all that the layer demands."""

    compute_ms: float
    read_ms: float
    is_known_early: bool = False  # by the token alone


class TokenCost(NamedTuple):
    """A step's time up to the first layer's picks, and its layers."""

    lead_ms: float
    layers: list[LayerCost]


class _Totals(StoreStats):
    """The counters, with the sums that no token's end closes."""

    def __init__(self) -> None:
        super().__init__()
        self.wait_seconds, self.demand_bytes = 0.0, 0

    def move(self, plane: str, kind: str, num_bytes: int, over_pcie: bool) -> None:
        super().move(plane, kind, num_bytes, over_pcie)
        self.demand_bytes += num_bytes if kind == "read" else 0

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self.wait_seconds += seconds


class MeasuredStore(TieredStore):
    """A store that notes every layer call since the last `restart`; changes nothing of what it does."""

    notes: list[Note]
    _totals: _Totals

    @classmethod
    def over(cls, store: TieredStore) -> MeasuredStore:
        """A store with empty tiers on the slots and the reads of `store`, which is not to be used before its own `restart`."""
        parts = store._weights, store._new_residency, store._memory, store._files, store.ladder, store._watch
        return cls(*parts, clock=store._clock)

    @property
    def files(self) -> SlabFiles:
        """The reads; another one holds from the next `restart` on."""
        return self._files

    @files.setter
    def files(self, files: SlabFiles) -> None:
        self._files = files

    @property
    def num_slots(self) -> dict[str, int]:
        """VRAM slots by plane, the staging ring's left out."""
        planes = {*self._weights.planes(Rung.FP4), *self._weights.planes(Rung.TWO_BIT)}
        return {plane: self._residency.num_vram_slots(plane) for plane in planes if self._residency.has_pools([plane])}

    def now(self) -> Note:
        """The totals as they stand."""
        return self._note(None)

    def begin_step(self, token_id: int) -> None:
        self.notes.append(self.now())
        super().begin_step(token_id)

    def _begin(self) -> None:
        super()._begin()
        self.notes, self._totals = [], _Totals()
        self.stats = self._totals
        if self.prefetcher is not None:
            self._lookahead = self._new_lookahead(self.prefetcher)  # once more: it counts where the store does

    def _plan(self, layer_idx: int, ids: list[list[int]], weights: list[list[float]]) -> list[Work]:
        note = self._note(layer_idx)
        work = super()._plan(layer_idx, ids, weights)
        self.notes.append(note._replace(ids=ids, work=work))
        return work

    def _note(self, layer_idx: int | None) -> Note:
        return Note(self._clock(), self._totals.wait_seconds, self._totals.demand_bytes, layer_idx)


def traffic(notes: Sequence[Note]) -> Iterator[Picks]:
    """What each layer call demanded: every pick with the precision that it got."""
    for note in notes:
        if note.layer_idx is not None:
            rungs = {(token, rank): item.rung for item in note.work for token, rank in _picks(item)}
            yield (
                note.layer_idx,
                tuple(
                    tuple(
                        (expert_id, rungs.get((token, rank), Rung.DROP).value) for rank, expert_id in enumerate(experts)
                    )
                    for token, experts in enumerate(note.ids)
                ),
            )


def token_costs(notes: Sequence[Note], end: Note, bytes_per_second: float, num_hash_layers: int) -> list[TokenCost]:
    """The steps of `notes`, up to `end`, in parts that add up to the whole time less the exposed wait."""
    tokens: list[TokenCost] = []
    for note, after in pairwise([*notes, end]):
        compute_ms = (after.seconds - note.seconds - (after.wait_seconds - note.wait_seconds)) * 1e3
        if note.layer_idx is None:
            tokens.append(TokenCost(compute_ms, []))
            continue
        num_bytes = after.demand_bytes - note.demand_bytes
        read_ms = num_bytes / bytes_per_second * 1e3 if num_bytes else 0.0
        tokens[-1].layers.append(LayerCost(compute_ms, read_ms, note.layer_idx < num_hash_layers))
    return tokens


def perfect_schedule(layers: Sequence[LayerCost], lookahead: int, lead_ms: float = 0.0) -> float:
    """Milliseconds of a step whose reads begin as soon as they can be known: with the token, or with the picks `lookahead` layers before.

    The drive reads for one layer after the other, in the order of demand; a layer computes when all its reads have ended. The
    first layers are known with the first layer's picks at the earliest. A bound, since no guess is wrong and none lacks room.
    """
    now, drive_free = lead_ms, 0.0
    picks_ms: list[float] = []
    for idx, layer in enumerate(layers):
        picks_ms.append(now)
        known_ms = 0.0 if layer.is_known_early else picks_ms[max(0, idx - lookahead)]
        drive_free = max(drive_free, known_ms) + layer.read_ms
        now = max(now, drive_free) + layer.compute_ms
    return now


def _picks(item: Work) -> Iterator[tuple[int, int]]:
    return zip(item.tokens, item.ranks, strict=True)
