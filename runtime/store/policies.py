"""What a tier is made of: use counts that fade, the coldest slab by them, a pool of slots, a staging ring. Integers only.

Each of these knows one plane in one tier and keeps no rule about the others; those are `residency`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

Rank = tuple[float, int]  # (uses, moment of the last one); the smaller rank leaves first

DECAY_TOKENS = (
    8  # best or within 0.6 points of it up to a quarter of the experts resident, on both traces of tests/traces
)
NEVER_USED: Rank = (0.0, 0)
WORTH_LIMIT = 2.0**500  # of a use, far from where floats end; what was used 500 halvings ago may round to never


class ExpertKey(NamedTuple):
    """A routed expert of the model."""

    layer_idx: int
    expert_id: int


class UseCounts:
    """Uses of every key, all halved every `decay_tokens` tokens; among equals the least recently used ranks lowest.

    Only ratios matter, so instead of halving all counts a use is worth twice as much after each period. That is exact, costs
    nothing, and leaves ranks comparable across periods.
    """

    def __init__(self, decay_tokens: int = DECAY_TOKENS, seed: Mapping[ExpertKey, float] | None = None) -> None:
        if decay_tokens < 1:
            raise ValueError(f"decay_tokens: got {decay_tokens}, expected 1 or more")
        self._decay_tokens = decay_tokens
        self._ranks: dict[ExpertKey, Rank] = {key: (uses, 0) for key, uses in (seed or {}).items()}
        self._worth = 1.0  # of a use now
        self._moment = 0
        self._num_tokens = 0

    def use(self, key: ExpertKey) -> None:
        """One more use, the most recent of all."""
        self._moment += 1
        self._ranks[key] = (self.rank(key)[0] + self._worth, self._moment)

    def rank(self, key: ExpertKey) -> Rank:
        """How warm the key is beside others; grows with each use and falls only when `end_token` says so."""
        return self._ranks.get(key, NEVER_USED)

    def end_token(self) -> bool:
        """Whether this token's end has scaled all ranks down (their order stays), which floats need once in a long while."""
        self._num_tokens += 1
        if self._num_tokens % self._decay_tokens:
            return False
        self._worth *= 2.0
        if self._worth < WORTH_LIMIT:
            return False
        self._ranks = {key: (uses / self._worth, moment) for key, (uses, moment) in self._ranks.items()}
        self._worth = 1.0
        return True


class ColdestFirst:
    """A set of keys that gives its coldest by `counts` without looking at all of them.

    A heap in which a key's entry may lag behind its rank: ranks only grow, so an entry that lags is met too early, never too
    late, and is put right when met. When the counts have been scaled down the owner calls `reorder`.
    """

    def __init__(self, counts: UseCounts) -> None:
        self._counts = counts
        self._entries: dict[
            ExpertKey, Rank
        ] = {}  # the rank in each member's valid heap entry; other heap entries are dead
        self._heap: list[tuple[Rank, ExpertKey]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._entries

    def add(self, key: ExpertKey) -> None:
        """The key is a member; nothing changes if it was."""
        if key in self._entries:
            return
        rank = self._entries[key] = self._counts.rank(key)
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._entries) + 64:  # dead entries may not outgrow the members
            self.reorder()

    def discard(self, key: ExpertKey) -> None:
        """The key is no member; nothing changes if it was none."""
        self._entries.pop(key, None)

    def coldest(self) -> ExpertKey | None:
        """The member of the lowest rank, which stays a member; None if there is no member."""
        while self._heap:
            rank, key = self._heap[0]
            if self._entries.get(key) != rank:
                heapq.heappop(self._heap)
            elif (current := self._counts.rank(key)) != rank:
                heapq.heapreplace(self._heap, (current, key))
                self._entries[key] = current
            else:
                return key
        return None

    def reorder(self) -> None:
        """Every entry brought up to date, in one pass over all members."""
        self._entries = {key: self._counts.rank(key) for key in self._entries}
        self._heap = [(rank, key) for key, rank in self._entries.items()]
        heapq.heapify(self._heap)


class SlotPool:
    """The slots of one plane in one tier. A slot is free, in flight (in `transfers`, whether a slab holds it or not) or resident."""

    def __init__(self, num_slots: int, counts: UseCounts) -> None:
        self.num_slots = num_slots
        self.free = list(reversed(range(num_slots)))
        self.slot_of: dict[ExpertKey, int] = {}
        self.key_at: dict[int, ExpertKey] = {}
        self.transfers: dict[
            int, int
        ] = {}  # unreported transfers by slot: a RAM slot may await its Demote and its Promote
        self.pins: dict[ExpertKey, int] = {}
        self.candidates = ColdestFirst(counts)  # all that may go, and busy ones that nobody has met there yet

    def is_busy(self, key: ExpertKey) -> bool:
        """Whether the slab is held here and may not go now."""
        return key in self.pins or self.slot_of.get(key) in self.transfers

    def put(self, key: ExpertKey, slot_id: int) -> None:
        """The slab holds a slot that the caller has taken from `free` or from the ring."""
        self.slot_of[key] = slot_id
        self.key_at[slot_id] = key

    def take_out(self, key: ExpertKey) -> int:
        """The slot that the slab held; it is free, at once or when its last transfer is reported."""
        slot_id = self.slot_of.pop(key)
        del self.key_at[slot_id]
        self.pins.pop(key, None)
        self.candidates.discard(key)
        if slot_id not in self.transfers:
            self.free.append(slot_id)
        return slot_id

    def begin_transfer(self, slot_id: int) -> None:
        """The slot is in flight until `end_transfer`, once for each."""
        self.transfers[slot_id] = self.transfers.get(slot_id, 0) + 1

    def end_transfer(self, slot_id: int) -> None:
        """The slot is resident or free if that was its last transfer."""
        self.transfers[slot_id] -= 1
        if self.transfers[slot_id]:
            return
        del self.transfers[slot_id]
        if slot_id not in self.key_at:
            self.free.append(slot_id)

    def pin(self, key: ExpertKey) -> None:
        """The slab stays until as many releases."""
        self.pins[key] = self.pins.get(key, 0) + 1

    def release(self, key: ExpertKey) -> None:
        """One pin less; a slab without pins is passed over."""
        left = self.pins.pop(key, 0) - 1
        if left > 0:
            self.pins[key] = left


class StagingRing:
    """The slots of one plane that guesses are brought into, used in turn.

    A guess stays until its layer has passed; then, not adopted, it may be overwritten by the next one.
    """

    def __init__(self, slot_ids: Iterable[int]) -> None:
        self.slot_ids = list(slot_ids)
        self.keys: list[ExpertKey | None] = [None] * len(self.slot_ids)
        self.position_of: dict[ExpertKey, int] = {}
        self.in_flight: set[ExpertKey] = set()
        self._passed: set[ExpertKey] = set()
        self._next = 0

    def stage(self, key: ExpertKey) -> int | None:
        """The next slot that is neither in flight nor awaited, now the key's and in flight; None if there is none."""
        for step in range(len(self.slot_ids)):
            position = (self._next + step) % len(self.slot_ids)
            overwritten = self.keys[position]
            if overwritten is not None:
                if overwritten in self.in_flight or overwritten not in self._passed:
                    continue
                self.drop(overwritten)
            self.keys[position] = key
            self.position_of[key] = position
            self.in_flight.add(key)
            self._next = position + 1
            return self.slot_ids[position]
        return None

    def retire(self, layer_idx: int) -> None:
        """The layer has passed: nobody waits for its guesses."""
        self._passed.update(key for key in self.position_of if key.layer_idx == layer_idx)

    def renew(self, key: ExpertKey) -> bool:
        """Whether a guess whose layer had passed is here still; it is awaited again."""
        is_here = key in self._passed
        self._passed.discard(key)
        return is_here

    def drop(self, key: ExpertKey) -> int:
        """The position that the key had; its slot is empty."""
        position = self.position_of.pop(key)
        self.keys[position] = None
        self.in_flight.discard(key)
        self._passed.discard(key)
        return position

    def adopt(self, key: ExpertKey, slot_id: int) -> int:
        """The slot that the key was staged in, which leaves the ring; `slot_id` takes its turn."""
        position = self.drop(key)
        adopted, self.slot_ids[position] = self.slot_ids[position], slot_id
        return adopted
