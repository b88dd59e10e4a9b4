"""Who is where: which slab holds which slot of VRAM and RAM, what is in flight, and who must make room. Integers only.

Owns no memory and does no I/O: it answers with the moves that the store must carry out, and is told when they are done.
It trusts those reports. A slot that is named in a move may still be read by a kernel or a copy issued earlier; the store
fences that with its events, and issues the moves of one answer such that a Demote precedes what overwrites its VRAM slot.

Decisions depend on the order of the calls, never on time. They are reproducible if the store reports `arrived` and `copied` at
fixed points of the program (all of a layer's before the next `acquire`) and not whenever an event happens to have fired.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from runtime.errors import StrawError
from runtime.store.policies import DECAY_TOKENS, ExpertKey, SlotPool, StagingRing, UseCounts

BASE_OF = {"residual": "base"}  # the plane without which another is worth nothing; it is held only where that one is
RESIDUAL_OF = {"base": "residual"}


Slab = tuple[str, ExpertKey]  # (plane, expert)


class Tier(Enum):
    """Where slots are; what is in neither is on NVMe only."""

    VRAM = "VRAM"
    RAM = "RAM"


class PoolSizes(NamedTuple):
    """Slots of one plane; the staging ring's lie behind the `vram` slots and count apart."""

    vram: int
    ram: int = 0
    staging: int = 0


class Place(NamedTuple):
    """Where a slab is; `in_flight` in RAM means that its demotion is not yet reported."""

    tier: Tier
    slot_id: int
    in_flight: bool
    is_staged: bool = False


class Read(NamedTuple):
    """NVMe to VRAM; ends with `arrived` or `failed`."""

    plane: str
    key: ExpertKey
    vram_slot: int


class Promote(NamedTuple):
    """RAM to VRAM, after any Demote into the same RAM slot; ends with `arrived` for the one and `copied` for the other."""

    plane: str
    key: ExpertKey
    ram_slot: int
    vram_slot: int


class Stage(NamedTuple):
    """RAM to a slot of the staging ring, the RAM slot keeps its slab; ends with `arrived`."""

    plane: str
    key: ExpertKey
    ram_slot: int
    vram_slot: int


class Demote(NamedTuple):
    """VRAM to RAM, before the VRAM slot is overwritten; ends with `copied`."""

    plane: str
    key: ExpertKey
    vram_slot: int
    ram_slot: int


class Forget(NamedTuple):
    """The slab is gone from that slot; there is nothing to carry out."""

    plane: str
    key: ExpertKey
    tier: Tier
    slot_id: int


Move = Read | Promote | Demote | Forget


def check_pools(pools: Mapping[str, PoolSizes], planes: Iterable[str], num_picks: int) -> None:
    """Nothing, if each plane that the ladder may demand has the VRAM slots of one token's picks.

    Raises:
        StrawError: It has not.
    """
    for plane in planes:
        got = pools[plane].vram if plane in pools else 0
        if got < num_picks:
            raise StrawError(
                f"slots: {got} for {plane} in VRAM, the ladder needs at least {num_picks} (the experts of one token); raise --vram or --slots, or choose another --ladder"
            )


class Residency:
    """Slots, pins and use counts of all planes. Not thread-safe: one thread decides, and reports what the others have done."""

    def __init__(
        self,
        pools: Mapping[str, PoolSizes],
        *,
        decay_tokens: int = DECAY_TOKENS,
        heat: Mapping[ExpertKey, int] | None = None,
        heat_tokens: int = 1,
    ) -> None:
        """Empty tiers.

        Args:
            pools: Slots by plane; a residual needs its base beside it.
            decay_tokens: Tokens after which all use counts are halved.
            heat: Uses of each expert to begin with, for every plane alike.
            heat_tokens: Tokens in which they were counted; more than `decay_tokens` count as so many, or heat would outweigh
                what is seen from here on.
        """
        scale = min(1.0, decay_tokens / heat_tokens)
        seed = {key: uses * scale for key, uses in (heat or {}).items()}
        self._counts = {plane: UseCounts(decay_tokens, seed) for plane in pools}
        self._vram = {plane: SlotPool(sizes.vram, self._counts[plane]) for plane, sizes in pools.items()}
        self._ram = {plane: SlotPool(sizes.ram, self._counts[plane]) for plane, sizes in pools.items()}
        self._rings = {
            plane: StagingRing(range(sizes.vram, sizes.vram + sizes.staging)) for plane, sizes in pools.items()
        }

    def place(self, plane: str, key: ExpertKey) -> Place | None:
        """Where the slab is, None if on NVMe only."""
        ring = self._rings[plane]
        if key in ring.position_of:
            return Place(Tier.VRAM, ring.slot_ids[ring.position_of[key]], key in ring.in_flight, is_staged=True)
        for tier, pools in ((Tier.VRAM, self._vram), (Tier.RAM, self._ram)):
            slot_id = pools[plane].slot_of.get(key)
            if slot_id is not None:
                return Place(tier, slot_id, slot_id in pools[plane].transfers)
        return None

    def describe(self) -> str:
        """Slots by plane and tier, in a few words."""
        sizes = ((plane, pool.num_slots, self._ram[plane].num_slots) for plane, pool in self._vram.items())
        return ", ".join(f"{plane} {vram} VRAM + {ram} RAM" for plane, vram, ram in sizes)

    def has_pools(self, planes: Iterable[str]) -> bool:
        """Whether there are slots for all these planes; without them nothing of theirs is ever resident."""
        return all(plane in self._vram for plane in planes)

    def num_vram_slots(self, plane: str) -> int:
        """Slots of the plane in VRAM, the staging ring's left out: the most slabs that one wave can have of it."""
        return self._vram[plane].num_slots

    def is_resident(self, planes: Iterable[str], key: ExpertKey) -> bool:
        """Whether the ladder may count on all these planes: in VRAM (staged or not) or in RAM.

        A slab on its way down to RAM counts: a Promote waits for it, and the answer must not hang on when a copy ends.
        """
        places = [self.place(plane, key) for plane in planes]
        return all(place is not None and not (place.in_flight and place.tier is Tier.VRAM) for place in places)

    def can_acquire(self, wants: Iterable[Slab]) -> bool:
        """Whether VRAM has the slots for all of them at once, given what is pinned and in flight."""
        wanted = set(wants)
        return all(self._has_room(plane, wanted) for plane in {plane for plane, _ in wanted})

    def acquire(self, wants: Iterable[Slab]) -> list[Move]:
        """What the store must do, in order, so that each slab is in its own VRAM slot; `place` names the slots.

        Every slab is pinned once, until `release`. Those in VRAM already cause no move, nor does a staged one, which is adopted
        (late if still in flight). A residual that is not wanted follows its promoted base if there is room, unpinned.

        Raises:
            ValueError: More slabs than slots that can be had (`can_acquire`), or a residual without its base; nothing has changed.
        """
        wanted = dict.fromkeys(wants)
        self._check_wave(wanted)
        moves: list[Move] = []
        ram_slots: dict[Slab, int | None] = {}
        copied: list[tuple[str, int]] = []  # RAM slots of slabs that were copied when they were staged
        # What stays is pinned and what comes from RAM has left it before anybody looks for a victim in either tier.
        for plane, key in wanted:
            if key in self._vram[plane].slot_of:
                self._vram[plane].pin(key)
            else:
                ram_slots[plane, key] = self._leave_ram(plane, key)
        for (plane, key), ram_slot in ram_slots.items():
            copied += self._bring(plane, key, ram_slot, moves)
            self._vram[plane].pin(key)
        for plane, key in ram_slots:
            residual = _residual_in(self._ram, plane, key)
            if residual:
                copied += self._let_follow(residual, key, moves)
        for plane, slot_id in copied:  # not before: a guess must not change who goes where
            self._ram[plane].end_transfer(slot_id)
        return moves

    def release(self, wants: Iterable[Slab]) -> None:
        """One pin less on each; one whose read failed has none and is passed over. All slabs may still be in flight."""
        for plane, key in dict.fromkeys(wants):
            self._vram[plane].release(key)
            self._offer(self._vram, plane, key)

    def stage(self, plane: str, key: ExpertKey) -> Read | Stage | None:
        """How to bring a guess into the ring, where it is in flight until `arrived` or `failed`.

        None if the slab is in VRAM already or the ring is full of guesses in flight or still awaited. A slab in RAM stays there
        until its copy is adopted, so that a wrong guess takes nothing from anybody.
        """
        place = self.place(plane, key)
        if place is not None and place.tier is Tier.VRAM:
            return None
        slot_id = self._rings[plane].stage(key)
        if slot_id is None:
            return None
        return Read(plane, key, slot_id) if place is None else Stage(plane, key, place.slot_id, slot_id)

    def renew(self, plane: str, key: ExpertKey) -> bool:
        """Whether the slab is still staged for a layer that has passed; now it waits for the next time that layer comes."""
        return self._rings[plane].renew(key)

    def retire(self, layer_idx: int) -> None:
        """The layer has been served: what was staged for it and not adopted may be overwritten."""
        for ring in self._rings.values():
            ring.retire(layer_idx)

    def arrived(self, plane: str, key: ExpertKey) -> None:
        """The slab is resident: its data is in its VRAM slot, or ordered before whatever the caller issues next."""
        ring, pool = self._rings[plane], self._vram[plane]
        if key in ring.position_of:
            ring.in_flight.remove(key)
            return
        pool.end_transfer(pool.slot_of[key])
        if plane in BASE_OF and key not in self._vram[BASE_OF[plane]].slot_of:
            pool.take_out(key)  # its base's read has failed meanwhile
        self._offer(self._vram, plane, key)

    def failed(self, plane: str, key: ExpertKey) -> None:
        """The slab in flight is nowhere, its VRAM slot is free and its pins are gone; nothing will write to the slot any more."""
        ring, pool = self._rings[plane], self._vram[plane]
        if key in ring.position_of:
            ring.drop(key)
            return
        pool.end_transfer(pool.slot_of[key])
        self._drop(self._vram, plane, key)
        self._offer(self._vram, plane, key)

    def copied(self, move: Promote | Demote) -> None:
        """The copy's event has fired: the RAM slot of a Promote is free, the slab of a Demote is resident in RAM."""
        pool = self._ram[move.plane]
        pool.end_transfer(move.ram_slot)
        self._offer(self._ram, move.plane, move.key)

    def cancel(self, moves: Iterable[Move]) -> None:
        """None of these has been or will be carried out (an interrupt came first): their slabs are nowhere, their slots free."""
        for move in moves:
            if isinstance(move, Read | Promote):
                self.failed(move.plane, move.key)
            if isinstance(move, Demote) and self._ram[move.plane].slot_of.get(move.key) == move.ram_slot:
                self._drop(self._ram, move.plane, move.key)
            if isinstance(move, Promote | Demote):
                self.copied(move)

    def use(self, key: ExpertKey, planes: Iterable[str]) -> None:
        """One more use of the expert in the precision that these planes make up."""
        for plane in planes:
            self._counts[plane].use(key)

    def end_token(self) -> None:
        """One token nearer to the next halving of all use counts."""
        for plane, counts in self._counts.items():
            if counts.end_token():
                self._vram[plane].candidates.reorder()
                self._ram[plane].candidates.reorder()

    def check_balance(self) -> None:
        """Nothing, if every account balances.

        Raises:
            AssertionError: One does not; the message has its numbers.
        """
        for plane in self._vram:
            self._check_tiers(plane)
            self._check_ring(plane)

    def _check_tiers(self, plane: str) -> None:
        base = BASE_OF.get(plane)
        for tier, pools in ((Tier.VRAM, self._vram), (Tier.RAM, self._ram)):
            pool = pools[plane]
            resident = {slot for slot in pool.key_at if slot not in pool.transfers}
            free, in_flight, slots = len(set(pool.free)), len(pool.transfers), pool.num_slots
            numbers = f"{tier.value} {plane}: {free=} resident={len(resident)} {in_flight=} {slots=}"
            assert free + len(resident) + in_flight == slots, numbers
            assert not resident.intersection(pool.free), f"{numbers}: slots both free and resident"
            assert len(pool.free) == free and not pool.transfers.keys() & set(pool.free), f"{numbers}: {pool.free=}"
            assert {key: slot for slot, key in pool.key_at.items()} == pool.slot_of, f"{numbers}: two records disagree"
            assert pool.pins.keys() <= pool.slot_of.keys(), f"{numbers}: pins={pool.pins} on slabs that are not here"
            orphans = [pool.key_at[slot] for slot in resident if base and pool.key_at[slot] not in pools[base].slot_of]
            assert not orphans, f"{numbers}: {len(orphans)} residuals without their base: {orphans[:4]}"

    def _check_ring(self, plane: str) -> None:
        vram, ram, ring = self._vram[plane], self._ram[plane], self._rings[plane]
        total = vram.num_slots + len(ring.slot_ids)
        slots = sorted([*vram.free, *vram.key_at, *ring.slot_ids])
        assert slots == list(range(total)), (
            f"VRAM {plane}: {vram.num_slots} slots and {len(ring.slot_ids)} staged: {slots}"
        )
        staged = {key: position for position, key in enumerate(ring.keys) if key is not None}
        assert staged == ring.position_of, f"staging ring {plane}: {ring.keys=} {ring.position_of=}"
        assert ring.in_flight <= staged.keys(), f"staging ring {plane}: {ring.in_flight=} {staged=}"
        # What is in RAM may be staged as well: that copy is lost without harm.
        twice = vram.slot_of.keys() & (ram.slot_of.keys() | staged.keys())
        assert not twice, f"{plane}: {len(twice)} slabs in two places: {sorted(twice)[:4]}"

    def _check_wave(self, wanted: Mapping[Slab, None]) -> None:
        for plane, key in wanted:
            if plane in BASE_OF and (BASE_OF[plane], key) not in wanted:
                raise ValueError(f"{plane} of {key}: got it without its {BASE_OF[plane]}, expected both in one wave")
        if not self.can_acquire(wanted):
            sizes = {plane: (pool.num_slots, len(pool.pins), len(pool.transfers)) for plane, pool in self._vram.items()}
            raise ValueError(
                f"wave of {len(wanted)} slabs: VRAM has not the room; (slots, pinned, in flight) = {sizes}"
            )

    def _has_room(self, plane: str, wanted: set[Slab]) -> bool:
        pool = self._vram[plane]
        needed = sum(1 for wanted_plane, _ in wanted if wanted_plane == plane)
        kin = [pool, *(self._vram[name] for name in self._vram if BASE_OF.get(name) == plane)]
        at_most_stuck = sum(len(one.pins) + len(one.transfers) for one in kin)
        if needed <= pool.num_slots - at_most_stuck:
            return True
        stuck = [key for key in pool.slot_of if (plane, key) not in wanted and not self._may_go(self._vram, plane, key)]
        return needed <= pool.num_slots - len(stuck)

    def _may_go(self, pools: Mapping[str, SlotPool], plane: str, key: ExpertKey) -> bool:
        residual = _residual_in(pools, plane, key)
        return not pools[plane].is_busy(key) and not (residual and pools[residual].is_busy(key))

    def _offer(self, pools: Mapping[str, SlotPool], plane: str, key: ExpertKey) -> None:
        """The slab, and the base that it may have blocked, are candidates again if they are held in this tier."""
        if key in pools[plane].slot_of:
            pools[plane].candidates.add(key)
        if plane in BASE_OF and key in pools[BASE_OF[plane]].slot_of:
            pools[BASE_OF[plane]].candidates.add(key)

    def _coldest(self, pools: Mapping[str, SlotPool], plane: str) -> ExpertKey | None:
        """The next victim. Busy slabs met on the way fall out of the candidates; what ends their business offers them again."""
        candidates = pools[plane].candidates
        while (key := candidates.coldest()) is not None:
            if self._may_go(pools, plane, key):
                return key
            candidates.discard(key)
        return None

    def _leave_ram(self, plane: str, key: ExpertKey) -> int | None:
        """The RAM slot of a slab that is to be promoted, in flight and nobody's; None if it is not in RAM."""
        pool = self._ram[plane]
        if key not in pool.slot_of:
            return None
        pool.begin_transfer(pool.slot_of[key])
        return pool.take_out(key)

    def _bring(self, plane: str, key: ExpertKey, ram_slot: int | None, moves: list[Move]) -> list[tuple[str, int]]:
        """Gives the slab a VRAM slot; the (plane, RAM slot) that is to be freed if it was copied when it was staged."""
        pool, ring = self._vram[plane], self._rings[plane]
        vram_slot = self._make_room(plane, moves)
        if key in ring.position_of:
            is_late = key in ring.in_flight
            vram_slot = ring.adopt(key, vram_slot)
            if is_late:
                pool.begin_transfer(vram_slot)
            pool.put(key, vram_slot)
            return [] if ram_slot is None else [(plane, ram_slot)]
        pool.begin_transfer(vram_slot)
        pool.put(key, vram_slot)
        moves.append(Read(plane, key, vram_slot) if ram_slot is None else Promote(plane, key, ram_slot, vram_slot))
        return []

    def _make_room(self, plane: str, moves: list[Move]) -> int:
        pool = self._vram[plane]
        if not pool.free:
            victim = self._coldest(self._vram, plane)
            assert victim is not None, (
                f"VRAM {plane}: slots={pool.num_slots} pins={pool.pins} in_flight={pool.transfers}"
            )
            self._evict(plane, victim, moves)
        return pool.free.pop()

    def _evict(self, plane: str, key: ExpertKey, moves: list[Move]) -> None:
        """The slab leaves VRAM, for RAM if it is warm enough; its residual goes the same way, or is forgotten."""
        ram_slot = self._ram_slot_for(plane, key, moves)
        vram_slot = self._vram[plane].take_out(key)
        if ram_slot is None:
            moves.append(Forget(plane, key, Tier.VRAM, vram_slot))
        else:
            self._ram[plane].put(key, ram_slot)
            self._ram[plane].begin_transfer(ram_slot)
            moves.append(Demote(plane, key, vram_slot, ram_slot))
        residual = _residual_in(self._vram, plane, key)
        if residual:
            self._evict(residual, key, moves)

    def _ram_slot_for(self, plane: str, key: ExpertKey, moves: list[Move]) -> int | None:
        pool, rank = self._ram[plane], self._counts[plane].rank
        if plane in BASE_OF and key not in self._ram[BASE_OF[plane]].slot_of:
            return None
        if not pool.free:
            coldest = self._coldest(self._ram, plane)
            if coldest is None or rank(coldest) >= rank(key):
                return None
            moves += self._drop(self._ram, plane, coldest)
        return pool.free.pop()

    def _drop(self, pools: Mapping[str, SlotPool], plane: str, key: ExpertKey) -> list[Move]:
        """The slab is nowhere, nor is its residual; one that is in flight up to VRAM goes when it arrives."""
        tier = Tier.VRAM if pools is self._vram else Tier.RAM
        moves: list[Move] = [Forget(plane, key, tier, pools[plane].take_out(key))]
        residual = _residual_in(pools, plane, key)
        if residual and (tier is Tier.RAM or pools[residual].slot_of[key] not in pools[residual].transfers):
            moves += self._drop(pools, residual, key)
        return moves

    def _let_follow(self, residual: str, key: ExpertKey, moves: list[Move]) -> list[tuple[str, int]]:
        """A residual left behind in RAM moves up too if VRAM has a free slot or a colder residual, else it is forgotten.

        Result as of `_bring`.
        """
        rank = self._counts[residual].rank
        if not self._vram[residual].free:
            coldest = self._coldest(self._vram, residual)
            if coldest is None or rank(coldest) >= rank(key):
                moves += self._drop(self._ram, residual, key)
                return []
        return self._bring(residual, key, self._leave_ram(residual, key), moves)


def _residual_in(pools: Mapping[str, SlotPool], plane: str, key: ExpertKey) -> str | None:
    """The plane whose slab of this expert goes wherever this one goes, if it is held in this tier."""
    residual = RESIDUAL_OF.get(plane)
    return residual if residual is not None and residual in pools and key in pools[residual].slot_of else None
