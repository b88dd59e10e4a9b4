"""Residency: who is evicted, demoted, adopted, and that every account balances whatever is called in whatever order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime.errors import StrawError
from runtime.store.policies import ColdestFirst, UseCounts
from runtime.store.residency import (
    Demote,
    ExpertKey,
    Forget,
    Move,
    Place,
    PoolSizes,
    Promote,
    Read,
    Residency,
    Slab,
    Stage,
    Tier,
    check_pools,
)

A, B, C, D, E, F = (ExpertKey(0, expert_id) for expert_id in range(6))
FP4 = ("fp4",)
SPLIT = ("base", "residual")


def slabs(*keys: ExpertKey, planes: tuple[str, ...] = FP4) -> list[Slab]:
    return [(plane, key) for key in keys for plane in planes]


def settle(residency: Residency, moves: list[Move]) -> None:
    """Everything is carried out and reported."""
    for move in moves:
        if isinstance(move, Read | Promote):
            residency.arrived(move.plane, move.key)
        if isinstance(move, Promote | Demote):
            residency.copied(move)
    residency.check_balance()


def serve(residency: Residency, *keys: ExpertKey, planes: tuple[str, ...] = FP4, uses: int = 1) -> list[Move]:
    """One wave from acquire to release, each expert used `uses` times."""
    for key in keys:
        for _ in range(uses):
            residency.use(key, planes)
    moves = residency.acquire(slabs(*keys, planes=planes))
    settle(residency, moves)
    residency.release(slabs(*keys, planes=planes))
    return moves


def test_the_first_wave_is_read_into_distinct_slots_and_takes_no_ram() -> None:
    residency = Residency({"fp4": PoolSizes(vram=3, ram=2)})
    assert serve(residency, A, B) == [Read("fp4", A, 0), Read("fp4", B, 1)]
    assert residency.place("fp4", A) == Place(Tier.VRAM, 0, in_flight=False)
    assert residency.place("fp4", C) is None
    assert serve(residency, B, A) == []


@pytest.mark.parametrize(
    ("uses", "victim"),
    [
        ((3, 1, 2), B),  # the least used
        ((2, 2, 2), A),  # of equals the least recently used
        ((1, 3, 1), A),
    ],
)
def test_who_is_evicted(uses: tuple[int, int, int], victim: ExpertKey) -> None:
    residency = Residency({"fp4": PoolSizes(vram=3)})
    for key, count in zip((A, B, C), uses, strict=True):
        serve(residency, key, uses=count)
    slot_id = (A, B, C).index(victim)
    assert serve(residency, D) == [Forget("fp4", victim, Tier.VRAM, slot_id), Read("fp4", D, slot_id)]


def test_a_halving_lets_what_is_used_lately_overtake() -> None:
    residency = Residency({"fp4": PoolSizes(vram=2)}, decay_tokens=2)
    serve(residency, A, uses=3)
    residency.end_token()
    serve(residency, B, uses=2)
    residency.end_token()  # A 1.5, B 1
    serve(residency, B)  # B 2
    assert serve(residency, C)[0] == Forget("fp4", A, Tier.VRAM, 0)


def test_picks_of_the_wave_are_never_victims_even_if_coldest() -> None:
    residency = Residency({"fp4": PoolSizes(vram=2)})
    serve(residency, A)
    serve(residency, B, uses=5)
    moves = residency.acquire(slabs(A, C))
    assert moves == [Forget("fp4", B, Tier.VRAM, 1), Read("fp4", C, 1)]


def test_a_pick_of_the_wave_is_not_pushed_out_of_ram_before_its_promotion() -> None:
    residency = Residency({"fp4": PoolSizes(vram=2, ram=1)})
    serve(residency, A)
    serve(residency, B, uses=3)
    serve(residency, C, uses=2)  # A is in RAM now, the coldest there
    assert residency.acquire(slabs(D, A)) == [
        Forget("fp4", C, Tier.VRAM, 0),
        Read("fp4", D, 0),
        Forget("fp4", B, Tier.VRAM, 1),
        Promote("fp4", A, 0, 1),
    ]


def test_a_slab_passed_over_while_pinned_can_be_a_victim_after_its_release() -> None:
    residency = Residency({"fp4": PoolSizes(vram=2)})
    serve(residency, A)
    serve(residency, B, uses=5)
    residency.acquire(slabs(A))
    assert serve(residency, C, uses=2)[0] == Forget("fp4", B, Tier.VRAM, 1)  # A is colder, but pinned
    residency.release(slabs(A))
    assert serve(residency, D)[0] == Forget("fp4", A, Tier.VRAM, 0)


def test_heat_seeds_the_counts_and_weighs_no_more_than_one_decay_period() -> None:
    residency = Residency({"fp4": PoolSizes(vram=2)}, decay_tokens=4, heat={A: 1000, B: 250}, heat_tokens=1000)
    serve(residency, B)  # 1 + 1
    serve(residency, A)  # 4 + 1
    assert serve(residency, C)[0] == Forget("fp4", B, Tier.VRAM, 0)
    serve(residency, D, uses=6)
    assert serve(residency, B)[0] == Forget("fp4", A, Tier.VRAM, 1)


def test_a_victim_goes_to_ram_while_there_is_room_and_then_only_if_it_beats_the_coldest() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, ram=1)})
    serve(residency, A, uses=2)
    assert serve(residency, B) == [Demote("fp4", A, 0, 0), Read("fp4", B, 0)]
    assert residency.place("fp4", A) == Place(Tier.RAM, 0, in_flight=False)
    assert serve(residency, C, uses=3) == [Forget("fp4", B, Tier.VRAM, 0), Read("fp4", C, 0)]
    assert serve(residency, D) == [Forget("fp4", A, Tier.RAM, 0), Demote("fp4", C, 0, 0), Read("fp4", D, 0)]


def test_a_ram_slot_is_free_only_when_the_promotion_is_reported() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, ram=1)})
    serve(residency, A)
    serve(residency, B)
    moves = residency.acquire(slabs(A))
    promote = Promote("fp4", A, ram_slot=0, vram_slot=0)
    assert moves == [Forget("fp4", B, Tier.VRAM, 0), promote]  # B cannot have the slot that A is still read from
    residency.arrived("fp4", A)
    residency.release(slabs(A))
    assert [type(move) for move in residency.acquire(slabs(C))] == [Forget, Read]
    residency.copied(promote)
    residency.arrived("fp4", C)
    residency.release(slabs(C))
    assert Demote("fp4", C, 0, 0) in residency.acquire(slabs(D))
    residency.check_balance()


def test_a_slab_on_its_way_down_can_be_promoted_before_the_copy_is_reported() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, ram=2)})
    serve(residency, A)
    demote, read = residency.acquire(slabs(B))
    assert demote == Demote("fp4", A, 0, 0)
    assert residency.place("fp4", A) == Place(Tier.RAM, 0, in_flight=True)
    assert residency.is_resident(FP4, A)
    settle(residency, [read])
    residency.release(slabs(B))
    second_demote, promote = residency.acquire(slabs(A))
    assert promote == Promote("fp4", A, 0, 0)
    settle(residency, [second_demote, promote])
    assert residency._ram["fp4"].transfers == {0: 1}  # the first copy down is still unreported
    assert isinstance(demote, Demote)
    residency.copied(demote)
    residency.check_balance()
    assert sorted(residency._ram["fp4"].slot_of) == [B]


def test_a_failed_read_frees_its_slot_and_pins_and_the_others_go_on() -> None:
    residency = Residency({"fp4": PoolSizes(vram=2)})
    residency.acquire(slabs(A, B))
    residency.failed("fp4", A)
    residency.arrived("fp4", B)
    residency.release(slabs(A, B))
    residency.check_balance()
    assert residency.place("fp4", A) is None
    assert serve(residency, A) == [Read("fp4", A, 0)]


def test_cancelled_moves_leave_nothing_that_was_never_copied() -> None:
    residency = Residency({"fp4": PoolSizes(vram=2, ram=2)})
    serve(residency, A, B)
    moves = residency.acquire(slabs(C, D))
    residency.cancel(moves)
    residency.release(slabs(C, D))
    residency.check_balance()
    assert [residency.place("fp4", key) for key in (A, B, C, D)] == [None] * 4
    assert serve(residency, A) == [Read("fp4", A, 1)]


def test_a_wave_beyond_the_slots_is_refused_and_changes_nothing() -> None:
    residency = Residency({"fp4": PoolSizes(vram=2)})
    residency.acquire(slabs(A))
    assert residency.can_acquire(slabs(A, B))
    assert not residency.can_acquire(slabs(B, C))
    with pytest.raises(ValueError, match=r"wave of 2 slabs.*\(2, 1, 1\)"):
        residency.acquire(slabs(B, C))
    assert residency.place("fp4", B) is None
    residency.check_balance()


def test_the_smallest_legal_pools_serve_wave_after_wave() -> None:
    residency = Residency({plane: PoolSizes(vram=3) for plane in SPLIT})
    for start in range(0, 30, 3):
        wave = [ExpertKey(0, start + pick) for pick in range(3)]
        moves = serve(residency, *wave, planes=SPLIT)
        assert sum(isinstance(move, Read) for move in moves) == 6


def test_pools_below_one_token_are_an_error_that_says_what_to_do() -> None:
    pools = {"fp4": PoolSizes(vram=6), "int2": PoolSizes(vram=5, ram=100)}
    check_pools(pools, ["fp4"], num_picks=6)
    with pytest.raises(StrawError, match=r"slots: 5 for int2 in VRAM.*at least 6.*--slots"):
        check_pools(pools, ["fp4", "int2"], num_picks=6)
    with pytest.raises(StrawError, match="slots: 0 for base"):
        check_pools(pools, ["base"], num_picks=1)


def test_pins_are_counted() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1)})
    settle(residency, residency.acquire(slabs(A)))
    residency.acquire(slabs(A))
    residency.release(slabs(A))
    assert not residency.can_acquire(slabs(B))
    residency.release(slabs(A))
    assert residency.can_acquire(slabs(B))


def test_a_right_guess_changes_places_with_the_victim() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, ram=1, staging=2)})
    serve(residency, A)
    assert residency.stage("fp4", A) is None  # it is held
    assert residency.stage("fp4", B) == Read("fp4", B, 1)
    assert residency.stage("fp4", C) == Read("fp4", C, 2)
    assert residency.stage("fp4", D) is None  # both in flight
    assert not residency.is_resident(FP4, B)
    residency.arrived("fp4", B)
    assert residency.is_resident(FP4, B)
    assert residency.acquire(slabs(B)) == [Demote("fp4", A, 0, 0)]
    assert residency.place("fp4", B) == Place(Tier.VRAM, 1, in_flight=False)
    residency.check_balance()
    assert residency.stage("fp4", E) == Read("fp4", E, 0)  # the victim's slot has B's turn
    residency.arrived("fp4", C)
    assert residency.stage("fp4", F) is None  # C may still be right
    residency.retire(C.layer_idx)
    assert residency.stage("fp4", F) == Read("fp4", F, 2)  # C was a wrong guess
    assert residency.place("fp4", C) is None
    residency.check_balance()


def test_a_guess_in_ram_takes_nothing_until_it_is_right() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, ram=1, staging=1)})
    serve(residency, A)
    serve(residency, B)  # A goes down
    assert residency.stage("fp4", A) == Stage("fp4", A, 0, 1)
    residency.arrived("fp4", A)
    assert residency.place("fp4", A) == Place(Tier.VRAM, 1, in_flight=False, is_staged=True)
    residency.check_balance()
    residency.retire(A.layer_idx)
    assert residency.stage("fp4", C) == Read("fp4", C, 1)
    residency.failed("fp4", C)
    assert residency.place("fp4", A) == Place(Tier.RAM, 0, in_flight=False)  # a wrong guess: still in RAM
    assert residency.stage("fp4", A) == Stage("fp4", A, 0, 1)
    residency.arrived("fp4", A)
    assert residency.acquire(slabs(A)) == [
        Forget("fp4", B, Tier.VRAM, 0)
    ]  # a right one: as without it, but for the copy
    assert residency.place("fp4", A) == Place(Tier.VRAM, 1, in_flight=False)
    residency.check_balance()


def test_a_guess_left_from_the_last_token_is_awaited_again() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, staging=1)})
    assert not residency.renew("fp4", A)
    residency.stage("fp4", A)
    residency.arrived("fp4", A)
    assert not residency.renew("fp4", A)  # its layer has not passed
    residency.retire(A.layer_idx)
    assert residency.renew("fp4", A)
    assert residency.stage("fp4", B) is None
    assert residency.place("fp4", A) == Place(Tier.VRAM, 1, in_flight=False, is_staged=True)


def test_a_guess_that_is_late_stays_in_flight_when_adopted() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, staging=1)})
    residency.stage("fp4", A)
    assert residency.acquire(slabs(A)) == []
    assert residency.place("fp4", A) == Place(Tier.VRAM, 1, in_flight=True)
    residency.arrived("fp4", A)
    assert residency.place("fp4", A) == Place(Tier.VRAM, 1, in_flight=False)
    residency.check_balance()


def test_guesses_take_the_ring_slots_in_turn() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, staging=2)})
    taken = []
    for key in (A, B, C, D, E):
        taken.append(residency.stage("fp4", key).vram_slot)
        residency.arrived("fp4", key)
        residency.retire(key.layer_idx)
    assert taken == [1, 2, 1, 2, 1]


def test_a_failed_guess_leaves_its_ring_slot_empty() -> None:
    residency = Residency({"fp4": PoolSizes(vram=1, staging=1)})
    residency.stage("fp4", A)
    residency.failed("fp4", A)
    assert residency.stage("fp4", B) == Read("fp4", B, 1)
    residency.check_balance()


def split(base: PoolSizes, residual: PoolSizes) -> Residency:
    return Residency({"base": base, "residual": residual})


def test_a_residual_goes_down_with_its_base_and_up_with_it() -> None:
    residency = split(PoolSizes(vram=1, ram=2), PoolSizes(vram=1, ram=2))
    serve(residency, A, planes=SPLIT)
    moves = serve(residency, B, planes=("base",))
    assert moves == [Demote("base", A, 0, 0), Demote("residual", A, 0, 0), Read("base", B, 0)]
    assert residency.is_resident(SPLIT, A)
    moves = serve(residency, A, planes=("base",))  # its residual is not wanted, but has room to follow
    assert [type(move) for move in moves] == [Demote, Promote, Promote]
    assert residency.place("residual", A) == Place(Tier.VRAM, 0, in_flight=False)


def test_a_residual_that_cannot_follow_is_forgotten() -> None:
    residency = split(PoolSizes(vram=2, ram=2), PoolSizes(vram=1, ram=2))
    serve(residency, A, planes=SPLIT)
    serve(residency, B, C, planes=("base",))
    assert residency.is_resident(SPLIT, A)
    serve(residency, D, planes=SPLIT, uses=3)
    moves = residency.acquire([("base", A)])
    assert moves[-1] == Forget("residual", A, Tier.RAM, 0)
    settle(residency, moves)
    assert residency.is_resident(("base",), A)
    assert not residency.is_resident(SPLIT, A)


def test_a_residual_evicted_alone_is_forgotten_and_its_base_stays() -> None:
    residency = split(PoolSizes(vram=2, ram=2), PoolSizes(vram=1, ram=2))
    serve(residency, A, planes=SPLIT)
    moves = serve(residency, B, planes=SPLIT)
    assert Forget("residual", A, Tier.VRAM, 0) in moves
    assert residency.place("base", A) == Place(Tier.VRAM, 0, in_flight=False)


def test_a_base_forgotten_in_ram_takes_its_residual_along() -> None:
    residency = split(PoolSizes(vram=1, ram=1), PoolSizes(vram=1, ram=1))
    serve(residency, A, planes=SPLIT)
    serve(residency, B, planes=("base",), uses=2)
    assert residency.is_resident(SPLIT, A)
    moves = serve(residency, C, planes=("base",))
    assert moves[:2] == [Forget("base", A, Tier.RAM, 0), Forget("residual", A, Tier.RAM, 0)]


def test_a_residual_whose_base_fails_goes_when_it_arrives() -> None:
    for base_first in (True, False):
        residency = split(PoolSizes(vram=1), PoolSizes(vram=1))
        residency.acquire(slabs(A, planes=SPLIT))
        steps = [lambda r=residency: r.failed("base", A), lambda r=residency: r.arrived("residual", A)]
        for step in steps if base_first else reversed(steps):
            step()
            residency.check_balance()
        residency.release(slabs(A, planes=SPLIT))
        assert residency.place("residual", A) is None
        serve(residency, B, planes=SPLIT)


def test_a_base_stays_while_its_residual_is_in_flight() -> None:
    residency = split(PoolSizes(vram=1), PoolSizes(vram=1))
    residency.acquire(slabs(A, planes=SPLIT))
    residency.arrived("base", A)
    residency.release(slabs(A, planes=SPLIT))
    assert not residency.can_acquire([("base", B)])
    residency.arrived("residual", A)
    assert residency.acquire([("base", B)])[:2] == [
        Forget("base", A, Tier.VRAM, 0),
        Forget("residual", A, Tier.VRAM, 0),
    ]


def test_a_residual_is_not_acquired_without_its_base() -> None:
    with pytest.raises(ValueError, match="without its base"):
        split(PoolSizes(vram=1), PoolSizes(vram=1)).acquire([("residual", A)])


def test_the_balance_check_finds_a_lost_slot_and_prints_the_numbers() -> None:
    residency = Residency({"fp4": PoolSizes(vram=3)})
    serve(residency, A)
    residency._vram["fp4"].free.pop()
    with pytest.raises(AssertionError, match=r"VRAM fp4: free=1 resident=1 in_flight=0 slots=3"):
        residency.check_balance()


def test_use_counts_hold_a_positive_decay() -> None:
    with pytest.raises(ValueError, match="decay_tokens: got 0"):
        UseCounts(0)


def test_scaling_down_leaves_ratios_and_order() -> None:
    counts = UseCounts(decay_tokens=1, seed={A: 5.0})
    assert not any(counts.end_token() for _ in range(499))
    counts.use(B)
    counts.use(B)
    counts.use(C)
    assert counts.end_token()
    assert counts.rank(C)[0] == 0.5
    assert counts.rank(A) < counts.rank(C) < counts.rank(B)
    counts.use(C)  # 1.5 against 1
    assert counts.rank(B) < counts.rank(C)


class ColdestMachine(RuleBasedStateMachine):
    """ColdestFirst against a scan of all members."""

    keys = st.builds(ExpertKey, st.just(0), st.integers(0, 7))

    def __init__(self) -> None:
        super().__init__()
        self.counts = UseCounts(decay_tokens=2)
        self.counts._worth = 2.0**498  # so that a run reaches the limit and scales down
        self.coldest = ColdestFirst(self.counts)
        self.members: set[ExpertKey] = set()

    @rule(key=keys)
    def add(self, key: ExpertKey) -> None:
        self.coldest.add(key)
        self.members.add(key)

    @rule(key=keys)
    def discard(self, key: ExpertKey) -> None:
        self.coldest.discard(key)
        self.members.discard(key)

    @rule(key=keys)
    def use(self, key: ExpertKey) -> None:
        self.counts.use(key)

    @rule()
    def end_token(self) -> None:
        if self.counts.end_token():
            self.coldest.reorder()

    @rule()
    def ask(self) -> None:
        expected = min(self.members, key=lambda key: (self.counts.rank(key), key), default=None)
        assert self.coldest.coldest() == expected

    @invariant()
    def membership(self) -> None:
        assert len(self.coldest) == len(self.members)
        assert all(key in self.coldest for key in self.members)


TestColdestFirst = ColdestMachine.TestCase
TestColdestFirst.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

LAYOUTS = {
    "two copies": {"fp4": PoolSizes(3, 2, 2), "int2": PoolSizes(4, 1, 1)},
    "two copies, no RAM": {"fp4": PoolSizes(3), "int2": PoolSizes(3)},
    "split": {"base": PoolSizes(5, 3, 2), "residual": PoolSizes(3, 2, 2)},
    "split, smallest": {"base": PoolSizes(3), "residual": PoolSizes(3)},
    "split, more residuals": {"base": PoolSizes(3, 2, 1), "residual": PoolSizes(4, 3, 1)},
}


class ResidencyMachine(RuleBasedStateMachine):
    """Residency against slots that hold real marks: what is moved, when, and what each slot then contains.

    The machine plays the store. Copies take effect when their move is issued, as on one stream; reports come later, in any
    order. `vram` and `ram` say what the bytes of a slot are, `waves` what is pinned, `pending` which reports are due.
    """

    picks = st.lists(
        st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=4, unique_by=lambda pick: pick[0]
    )

    @initialize(layout=st.sampled_from(sorted(LAYOUTS)), decay_tokens=st.integers(1, 4))
    def set_up(self, layout: str, decay_tokens: int) -> None:
        self.pools = LAYOUTS[layout]
        self.residency = Residency(self.pools, decay_tokens=decay_tokens)
        self.is_split = "base" in self.pools
        self.vram: dict[tuple[str, int], ExpertKey] = {}
        self.ram: dict[tuple[str, int], ExpertKey] = {}
        self.arriving: dict[Slab, int] = {}
        self.copying: list[Promote | Demote] = []
        self.waves: list[list[Slab]] = []

    def planes(self, is_fp4: bool) -> tuple[str, ...]:
        if self.is_split:
            return SPLIT if is_fp4 else ("base",)
        return FP4 if is_fp4 else ("int2",)

    def pinned(self) -> Counter[Slab]:
        return Counter(slab for wave in self.waves for slab in wave)

    @rule(picks=picks)
    def acquire(self, picks: list[tuple[int, bool]]) -> None:
        wants = [(plane, ExpertKey(0, expert)) for expert, is_fp4 in picks for plane in self.planes(is_fp4)]
        before = {slab: self.residency.place(*slab) for slab in {*wants, *self.pinned(), *self.arriving}}
        if not self.residency.can_acquire(wants):
            self.refused(wants)
            return
        moves = self.residency.acquire(wants)
        for move in moves:
            self.issue(move, wants, before)
        self.waves.append(wants)
        self.check_wave(wants, before, moves)

    @rule(picks=picks)
    def interrupted(self, picks: list[tuple[int, bool]]) -> None:
        """A wave of which no move is carried out."""
        wants = [(plane, ExpertKey(0, expert)) for expert, is_fp4 in picks for plane in self.planes(is_fp4)]
        if not self.residency.can_acquire(wants):
            return
        moves = self.residency.acquire(wants)
        self.residency.cancel(moves)
        self.residency.release(wants)
        for move in moves:
            if isinstance(move, Promote):
                self.ram.pop((move.plane, move.ram_slot))
            elif isinstance(move, Forget):
                (self.vram if move.tier is Tier.VRAM else self.ram).pop((move.plane, move.slot_id))
            elif isinstance(move, Demote):
                self.vram.pop((move.plane, move.vram_slot))
            assert self.residency.place(move.plane, move.key) is None

    def refused(self, wants: list[Slab]) -> None:
        with pytest.raises(ValueError, match="has not the room"):
            self.residency.acquire(wants)
        idle = not self.waves and not self.arriving
        few = all(sum(plane == name for plane, _ in wants) <= self.pools[name].vram for name in self.pools)
        assert not (idle and few), f"refused {wants} although nothing is pinned or in flight"

    def issue(self, move: Move, wants: list[Slab], before: dict[Slab, Place | None]) -> None:
        slab = (move.plane, move.key)
        if isinstance(move, Read):
            assert slab in wants and before[slab] is None
            self.fill(slab, move.vram_slot)
        elif isinstance(move, Promote):
            assert self.ram.pop((move.plane, move.ram_slot)) == move.key
            self.fill(slab, move.vram_slot)
            self.copying.append(move)
        else:
            assert slab not in self.pinned() and slab not in self.arriving, f"{move} although in use"
            assert slab not in wants, f"{move} although wanted"
        if isinstance(move, Demote):
            due = [copy for copy in self.copying if (copy.plane, copy.ram_slot) == (move.plane, move.ram_slot)]
            assert not due, f"{move} into a slot with unreported copies {due}"
            self.ram[move.plane, move.ram_slot] = self.vram.pop((move.plane, move.vram_slot))
            assert self.ram[move.plane, move.ram_slot] == move.key
            self.copying.append(move)
        if isinstance(move, Forget):
            bytes_of = self.vram if move.tier is Tier.VRAM else self.ram
            assert bytes_of.pop((move.plane, move.slot_id)) == move.key
            going_down = any((copy.plane, copy.ram_slot) == (move.plane, move.slot_id) for copy in self.copying)
            # A residual may have to go while its copy is on the way: its base went, or moved up without it.
            assert move.tier is Tier.VRAM or move.plane == "residual" or not going_down

    def fill(self, slab: Slab, slot_id: int) -> None:
        plane, key = slab
        in_use = [
            other
            for other in self.pinned()
            if (place := self.residency.place(*other))
            and other[0] == plane
            and place.tier is Tier.VRAM
            and place.slot_id == slot_id
            and other != slab
        ]
        assert not in_use, f"{slab} overwrites {in_use}"
        assert slab not in self.arriving
        self.vram[plane, slot_id] = key
        self.arriving[slab] = slot_id

    def check_wave(self, wants: list[Slab], before: dict[Slab, Place | None], moves: list[Move]) -> None:
        places = [self.residency.place(*slab) for slab in wants]
        assert all(place is not None and place.tier is Tier.VRAM and not place.is_staged for place in places)
        slots = [(plane, place.slot_id) for (plane, _), place in zip(wants, places, strict=True) if place is not None]
        assert len(set(slots)) == len(wants)
        moved = {(move.plane, move.key) for move in moves}
        for slab, old in before.items():
            if old is not None and old.tier is Tier.VRAM and (not old.is_staged or slab in wants):
                new = self.residency.place(*slab)
                assert new is not None and new.slot_id == old.slot_id and new.in_flight == old.in_flight
                assert slab not in moved

    @precondition(lambda self: self.arriving)
    @rule(data=st.data(), fails=st.integers(0, 4))
    def report(self, data: st.DataObject, fails: int) -> None:
        slab = data.draw(st.sampled_from(sorted(self.arriving)))
        slot_id = self.arriving.pop(slab)
        if fails == 0:
            self.residency.failed(*slab)
            self.vram.pop((slab[0], slot_id))
            self.unpin(slab)
            if slab[0] == "base" and ("residual", slab[1]) not in self.arriving:
                self.unpin(("residual", slab[1]))
            assert self.residency.place(*slab) is None
        else:
            self.residency.arrived(*slab)
            if self.residency.place(*slab) is None:
                assert slab[0] == "residual"
                self.unpin(slab)

    def unpin(self, slab: Slab) -> None:
        self.waves = [[other for other in wave if other != slab] for wave in self.waves]

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        move = data.draw(st.sampled_from(self.copying))
        self.copying.remove(move)
        self.residency.copied(move)

    @rule()
    def settle_all(self) -> None:
        for slab in sorted(self.arriving):
            self.residency.arrived(*slab)
            if self.residency.place(*slab) is None:
                self.unpin(slab)
        for move in self.copying:
            self.residency.copied(move)
        self.arriving, self.copying = {}, []

    @precondition(lambda self: self.waves)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        wave = self.waves.pop(data.draw(st.integers(0, len(self.waves) - 1)))
        self.residency.release(wave)

    @rule(expert=st.integers(0, 8), is_fp4=st.booleans())
    def stage(self, expert: int, is_fp4: bool) -> None:
        key = ExpertKey(0, expert)
        for plane in self.planes(is_fp4):
            held = self.residency.place(plane, key)
            move = self.residency.stage(plane, key)
            if move is None:
                staged = [e for e in range(9) if (p := self.residency.place(plane, ExpertKey(0, e))) and p.is_staged]
                full = len(staged) == self.pools[plane].staging
                assert full or (held is not None and held.tier is Tier.VRAM)
                continue
            assert held is None or held.tier is Tier.RAM
            assert isinstance(move, Read if held is None else Stage)
            if isinstance(move, Stage):
                assert self.ram[plane, move.ram_slot] == key
            assert self.residency.place(plane, key) == Place(Tier.VRAM, move.vram_slot, in_flight=True, is_staged=True)
            self.fill((plane, key), move.vram_slot)
            if isinstance(move, Stage):  # ordered before whatever follows, as all copies are
                self.arriving.pop((plane, key))
                self.residency.arrived(plane, key)

    @rule()
    def retire(self) -> None:
        self.residency.retire(0)

    @rule(expert=st.integers(0, 8), is_fp4=st.booleans(), times=st.integers(1, 3))
    def use(self, expert: int, is_fp4: bool, times: int) -> None:
        for _ in range(times):
            self.residency.use(ExpertKey(0, expert), self.planes(is_fp4))

    @rule()
    def end_token(self) -> None:
        self.residency.end_token()

    @invariant()
    def accounts_balance(self) -> None:
        self.residency.check_balance()

    @invariant()
    def slots_contain_what_is_said(self) -> None:
        for plane in self.pools:
            for expert in range(9):
                key = ExpertKey(0, expert)
                place = self.residency.place(plane, key)
                if place is None:
                    assert (plane, key) not in self.arriving and (plane, key) not in self.pinned()
                    continue
                assert (self.vram if place.tier is Tier.VRAM else self.ram)[plane, place.slot_id] == key
                if place.tier is Tier.VRAM:
                    assert place.in_flight == ((plane, key) in self.arriving)
                else:
                    due = [copy for copy in self.copying if (copy.plane, copy.ram_slot) == (plane, place.slot_id)]
                    assert place.in_flight == bool(due)

    @invariant()
    def residual_with_its_base(self) -> None:
        if not self.is_split:
            return
        for expert in range(9):
            base, residual = (self.residency.place(plane, ExpertKey(0, expert)) for plane in SPLIT)
            if residual is not None and not residual.is_staged and not residual.in_flight:
                assert base is not None and (base.is_staged or base.tier is residual.tier)


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_residency_machine_at_length() -> None:
    run_state_machine_as_test(
        ResidencyMachine, settings=settings(max_examples=400, stateful_step_count=60, deadline=None)
    )
