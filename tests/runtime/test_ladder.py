"""The ladder's decisions, as tables: what each pick uses, and with which weight."""

from __future__ import annotations

import pytest

from runtime.errors import StrawError
from runtime.ladder import Demand, Ladder, MassLadder, Rung, check_precisions, decide, parse_ladder

RUNGS = {"4": Rung.FP4, "2": Rung.TWO_BIT, "-": Rung.DROP}
WEIGHTS = (0.4, 0.3, 0.2, 0.1)


def flags(text: str) -> list[bool]:
    return [mark == "x" for mark in text]


@pytest.mark.parametrize(
    ("a", "b", "fp4", "two_bit", "expected"),
    [
        (4, 4, "....", "....", "4444"),  # exact reads everything
        (4, 4, "....", "xxxx", "4444"),
        (2, 4, "....", "....", "4422"),
        (2, 4, "..x.", "...x", "4442"),  # FP4 if it is there anyway
        (1, 2, "....", "....", "42--"),
        (1, 2, "...x", "..x.", "4224"),  # below b: what is resident
        (1, 2, "...x", "...x", "42-4"),  # and of two the better
        (2, 2, "....", "....", "44--"),  # a = b: 2-bit only if resident
        (2, 2, "....", "...x", "44-2"),
        (0, 2, "....", "....", "22--"),
        (0, 2, "x...", "....", "42--"),
        (0, 0, ".x..", "x...", "24--"),
        (0, 0, "...x", "....", "---4"),
        (0, 0, "....", "....", "2---"),  # nothing resident: the best is fetched at 2-bit
    ],
)
def test_rank_ladder(a: int, b: int, fp4: str, two_bit: str, expected: str) -> None:
    ladder = Ladder(a, b)
    ladder.check(4)
    assert decide(ladder, WEIGHTS, flags(fp4), flags(two_bit)).rungs == tuple(RUNGS[mark] for mark in expected)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.1, 0.4, 0.2, 0.3), "-4-2"),  # ranked by weight, answered in the order given
        ((0.3, 0.3, 0.3, 0.3), "42--"),  # ties: the earlier pick
        ((0.2, 0.3, 0.3, 0.2), "-42-"),
        ((0.0, 0.0, 0.0, 0.0), "42--"),
    ],
)
def test_ranks_come_from_the_weights(weights: tuple[float, ...], expected: str) -> None:
    decision = decide(Ladder(1, 2), weights, [False] * 4, [False] * 4)
    assert decision.rungs == tuple(RUNGS[mark] for mark in expected)


def test_the_best_is_the_one_fetched_when_all_would_be_dropped() -> None:
    decision = decide(Ladder(0, 0), (0.2, 0.5, 0.5), [False] * 3, [False] * 3)
    assert decision.rungs == (Rung.DROP, Rung.TWO_BIT, Rung.DROP)
    assert decision.weights == (0.0, pytest.approx(1.2), 0.0)


@pytest.mark.parametrize(
    ("weights", "renormalise", "expected"),
    [
        ((0.5, 0.25, 0.25), True, (1.0, 0.0, 0.0)),
        ((0.5, 0.25, 0.25), False, (0.5, 0.0, 0.0)),
        ((1.0, 1.0, 0.5), True, (2.5, 0.0, 0.0)),  # the full sum, which need not be 1
        ((0.0, 0.0, 0.0), True, (0.0, 0.0, 0.0)),  # no mass: nothing to scale
        ((1.0, 0.0, 0.0), True, (1.0, 0.0, 0.0)),
    ],
)
def test_weights_after_drops(weights: tuple[float, ...], renormalise: bool, expected: tuple[float, ...]) -> None:
    decision = decide(Ladder(1, 1, renormalise), weights, [False] * 3, [False] * 3)
    assert decision.rungs == (Rung.FP4, Rung.DROP, Rung.DROP)
    assert decision.weights == expected


def test_without_drops_the_weights_are_bit_equal_to_those_given() -> None:
    weights = (0.1, 0.2, 0.30000000000000004)
    assert decide(Ladder(1, 3), weights, [False] * 3, [False] * 3).weights == weights


@pytest.mark.parametrize(
    ("hi", "lo", "weights", "expected"),
    [
        (0.5, 0.9, (0.5, 0.25, 0.25), "422"),  # 0.5 is reached by the first; 0.75 is below 0.9
        (0.5, 0.75, (0.5, 0.25, 0.25), "42-"),
        (0.51, 0.75, (0.5, 0.25, 0.25), "44-"),
        (0.5, 0.9, (0.25, 0.25, 0.25, 0.25), "4422"),
        (0.5, 0.9, (2.0, 1.0, 1.0), "422"),  # shares of the sum, whatever the sum
        (0.0, 0.5, (0.5, 0.25, 0.25), "2--"),
        (0.5, 0.5, (0.5, 0.25, 0.25), "4--"),
        (0.0, 0.0, (0.5, 0.25, 0.25), "2--"),  # all dropped: the best is fetched
        (1.0, 1.0, (0.5, 0.5, 0.0), "444"),  # 1 means all picks, with mass or without
        (0.5, 1.0, (0.5, 0.5, 0.0), "422"),
        (0.5, 0.9, (0.0, 0.0, 0.0), "444"),  # no mass, so hi is never reached
        (0.0, 0.9, (0.0, 0.0, 0.0), "222"),
    ],
)
def test_mass_ladder(hi: float, lo: float, weights: tuple[float, ...], expected: str) -> None:
    ladder = MassLadder(hi, lo)
    ladder.check(len(weights))
    none = [False] * len(weights)
    assert decide(ladder, weights, none, none).rungs == tuple(RUNGS[mark] for mark in expected)


def test_mass_ladder_takes_what_is_resident_beyond_lo() -> None:
    decision = decide(MassLadder(0.5, 0.5), WEIGHTS, flags("..x."), flags("...x"))
    assert decision.rungs == (Rung.FP4, Rung.FP4, Rung.FP4, Rung.TWO_BIT)


def test_demand_is_what_is_read_when_nothing_is_resident() -> None:
    assert Ladder(2, 4).demand(WEIGHTS) == Demand(fp4=2, two_bit=4)
    assert MassLadder(0.4, 0.8).demand(WEIGHTS) == Demand(fp4=1, two_bit=3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2,4", Ladder(2, 4)),
        ("0,0", Ladder(0, 0)),
        ("exact", Ladder(6, 6)),
        ("mass:0.5,0.9", MassLadder(0.5, 0.9)),
        ("mass:1,1", MassLadder(1.0, 1.0)),
    ],
)
def test_parse(text: str, expected: Ladder | MassLadder) -> None:
    ladder = parse_ladder(text, num_picks=6)
    assert ladder == expected
    assert parse_ladder(str(ladder), num_picks=6) == expected
    assert not parse_ladder(text, num_picks=6, renormalise=False).renormalise


@pytest.mark.parametrize(
    "text", ["", "2", "2,4,6", "a,b", "2.5,4", "EXACT", "mass:", "mass:0.5", "mass:x,y", "mass", "2;4"]
)
def test_what_is_no_ladder(text: str) -> None:
    with pytest.raises(StrawError, match=f"--ladder {text}: not a ladder; expected a,b or exact or mass:hi,lo"):
        parse_ladder(text, num_picks=6)


@pytest.mark.parametrize("text", ["4,2", "2,7", "7,7", "-1,2"])
def test_ranks_out_of_order(text: str) -> None:
    with pytest.raises(StrawError, match=f"--ladder {text}: expected a,b with 0 <= a <= b <= 6 .*e.g. --ladder 2,4"):
        parse_ladder(text, num_picks=6)


@pytest.mark.parametrize("text", ["mass:0.9,0.5", "mass:0.5,1.1", "mass:-0.1,0.5", "mass:nan,1", "mass:0,inf"])
def test_shares_out_of_order(text: str) -> None:
    with pytest.raises(StrawError, match=f"--ladder {text}: expected shares .* 0 <= hi <= lo <= 1"):
        parse_ladder(text, num_picks=6)


@pytest.mark.parametrize(
    ("text", "is_exact", "needs_fp4", "needs_two_bit"),
    [
        ("exact", True, True, False),
        ("6,6", True, True, False),
        ("2,4", False, True, True),
        ("2,2", False, True, False),
        ("0,4", False, False, True),
        ("0,0", False, False, True),
        ("mass:1,1", True, True, False),
        ("mass:0.5,0.9", False, True, True),
        ("mass:0.5,0.5", False, True, False),
        ("mass:0,0.5", False, False, True),
        ("mass:0,0", False, False, True),
    ],
)
def test_what_a_ladder_can_demand(text: str, is_exact: bool, needs_fp4: bool, needs_two_bit: bool) -> None:
    ladder = parse_ladder(text, num_picks=6)
    assert ladder.is_exact(6) == is_exact
    assert ladder.needs_fp4(6) == needs_fp4
    assert ladder.needs_two_bit(6) == needs_two_bit
    for weights in ((0.0,) * 6, (1.0,) * 6, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (0.3, 0.2, 0.2, 0.1, 0.1, 0.1)):
        rungs = decide(ladder, weights, [False] * 6, [False] * 6).rungs
        assert needs_fp4 or Rung.FP4 not in rungs
        assert needs_two_bit or Rung.TWO_BIT not in rungs
        assert set(rungs) != {Rung.DROP}


def test_a_model_without_two_bit_runs_at_exact_only() -> None:
    check_precisions(parse_ladder("exact", 6), 6, has_two_bit=False, model="m")
    check_precisions(parse_ladder("2,4", 6), 6, has_two_bit=True, model="m")
    with pytest.raises(
        StrawError, match=r"m: --ladder 2,4 needs a 2-bit precision.*run: prep requant m, or use --ladder exact"
    ):
        check_precisions(parse_ladder("2,4", 6), 6, has_two_bit=False, model="m")
