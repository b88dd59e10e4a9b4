"""What each pick of a token may use: FP4, 2-bit or nothing, by its rank and by what is resident. Pure; owns no state.

Both ladders come down to two numbers of picks for a token, best router weight first: the first `fp4` picks are served at
FP4 whatever it costs, those up to `two_bit` at FP4 if resident, else at 2-bit, and the rest at what is resident or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from runtime.errors import StrawError

EXACT = "exact"
MASS = "mass:"


class Rung(Enum):
    """What serves a pick."""

    FP4 = "FP4"
    TWO_BIT = "2-bit"
    DROP = "dropped"


class Demand(NamedTuple):
    """How many of a token's best picks are read at FP4, and how many at 2-bit or better, when nothing is resident."""

    fp4: int
    two_bit: int


class Decision(NamedTuple):
    """What serves each pick, and the router weight it is added with (0.0 if dropped)."""

    rungs: tuple[Rung, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ladder:
    """By rank: 1 … a at FP4; a+1 … b at FP4 if resident, else 2-bit; the rest only if resident."""

    a: int
    b: int
    renormalise: bool = True

    @classmethod
    def exact(cls, num_picks: int) -> Ladder:
        """Every pick at FP4."""
        return cls(num_picks, num_picks)

    def check(self, num_picks: int) -> None:
        """Nothing, if 0 <= a <= b <= num_picks.

        Raises:
            StrawError: It is not so.
        """
        if not 0 <= self.a <= self.b <= num_picks:
            raise StrawError(
                f"--ladder {self}: expected a,b with 0 <= a <= b <= {num_picks} (the experts of one token), e.g. --ladder {min(2, num_picks)},{min(4, num_picks)}"
            )

    def demand(self, ranked_weights: Sequence[float]) -> Demand:
        """(a, b), whatever the weights."""
        return Demand(self.a, self.b)

    def is_exact(self, num_picks: int) -> bool:
        """Whether every pick is at FP4."""
        return self.a == num_picks

    def needs_fp4(self, num_picks: int) -> bool:
        """Whether FP4 can be demanded, so that its planes need slots."""
        return self.a > 0

    def needs_two_bit(self, num_picks: int) -> bool:
        """Whether 2-bit can be demanded, so that its planes need slots; with b = 0 it is for a token that would have none."""
        return self.b > self.a or self.b == 0

    def __str__(self) -> str:
        return f"{self.a},{self.b}"


@dataclass(frozen=True, slots=True)
class MassLadder:
    """By the share of the token's router mass that better picks have: FP4 while below `hi`, then 2-bit or better while below `lo`."""

    hi: float
    lo: float
    renormalise: bool = True

    def check(self, num_picks: int) -> None:
        """Nothing, if 0 <= hi <= lo <= 1.

        Raises:
            StrawError: It is not so.
        """
        if not 0 <= self.hi <= self.lo <= 1:
            raise StrawError(
                f"--ladder {self}: expected shares of the router mass with 0 <= hi <= lo <= 1, e.g. --ladder mass:0.5,0.9"
            )

    def demand(self, ranked_weights: Sequence[float]) -> Demand:
        """The picks before which less than `hi`, and less than `lo`, of the mass has been served; a share of 1 means all picks."""
        return Demand(_picks_below(ranked_weights, self.hi), _picks_below(ranked_weights, self.lo))

    def is_exact(self, num_picks: int) -> bool:
        """Whether every pick is at FP4."""
        return self.hi >= 1

    def needs_fp4(self, num_picks: int) -> bool:
        """Whether FP4 can be demanded, so that its planes need slots."""
        return self.hi > 0

    def needs_two_bit(self, num_picks: int) -> bool:
        """Whether 2-bit can be demanded, so that its planes need slots."""
        return self.hi < self.lo or self.lo == 0

    def __str__(self) -> str:
        return f"{MASS}{self.hi:g},{self.lo:g}"


AnyLadder = Ladder | MassLadder


def parse_ladder(text: str, num_picks: int, renormalise: bool = True) -> AnyLadder:
    """The checked ladder that `--ladder` spells: `a,b`, `exact` or `mass:hi,lo`.

    Raises:
        StrawError: It spells none, or none for that many picks.
    """
    ladder: AnyLadder
    try:
        if text == EXACT:
            ladder = Ladder(num_picks, num_picks, renormalise)
        elif text.startswith(MASS):
            hi, lo = map(float, text.removeprefix(MASS).split(","))
            ladder = MassLadder(hi, lo, renormalise)
        else:
            a, b = map(int, text.split(","))
            ladder = Ladder(a, b, renormalise)
    except ValueError:
        raise StrawError(
            f"--ladder {text}: not a ladder; expected a,b or exact or mass:hi,lo, e.g. --ladder 2,4 or --ladder mass:0.5,0.9"
        ) from None
    ladder.check(num_picks)
    return ladder


def check_precisions(ladder: AnyLadder, num_picks: int, has_two_bit: bool, model: str) -> None:
    """Nothing, if the model directory has the precisions of the ladder: without a 2-bit one it runs at exact only.

    Raises:
        StrawError: It has not.
    """
    if not has_two_bit and not ladder.is_exact(num_picks):
        raise StrawError(
            f"{model}: --ladder {ladder} needs a 2-bit precision of the experts, found FP4 only; run: prep requant {model}, or use --ladder {EXACT}"
        )


def decide(
    ladder: AnyLadder, weights: Sequence[float], fp4_resident: Sequence[bool], two_bit_resident: Sequence[bool]
) -> Decision:
    """What serves each pick of one token, and with which weight.

    Args:
        ladder: Checked for this many picks.
        weights: Router weights, none negative, in any order: they are ranked here, of equals the earlier first.
        fp4_resident: Whether all planes of a pick's FP4 are in VRAM or RAM, in the order of `weights`.
        two_bit_resident: Likewise for 2-bit; all False where there is none.

    Returns:
        Both in the order of `weights`. After drops the survivors are scaled to the sum of all weights if the ladder says
        so (not if they have no mass themselves); otherwise their weights are those given, unchanged.
    """
    ranking = sorted(range(len(weights)), key=lambda pick: -weights[pick])
    demand = ladder.demand([weights[pick] for pick in ranking])
    rungs = [Rung.DROP] * len(weights)
    for rank, pick in enumerate(ranking):
        if rank < demand.fp4 or fp4_resident[pick]:
            rungs[pick] = Rung.FP4
        elif rank < demand.two_bit or two_bit_resident[pick]:
            rungs[pick] = Rung.TWO_BIT
    if all(rung is Rung.DROP for rung in rungs):
        rungs[ranking[0]] = Rung.TWO_BIT
    return Decision(tuple(rungs), _weights_after_drops(weights, rungs, ladder.renormalise))


def _weights_after_drops(weights: Sequence[float], rungs: Sequence[Rung], renormalise: bool) -> tuple[float, ...]:
    kept = [0.0 if rung is Rung.DROP else weight for weight, rung in zip(weights, rungs, strict=True)]
    served = sum(kept)
    if Rung.DROP not in rungs or not renormalise or not served:
        return tuple(kept)
    scale = sum(weights) / served
    return tuple(weight * scale for weight in kept)


def _picks_below(ranked_weights: Sequence[float], share: float) -> int:
    """Picks before which less than `share` of the mass lies; without any mass there is nothing to reach, so all or none."""
    if share >= 1:
        return len(ranked_weights)
    threshold, before, count = share * sum(ranked_weights), 0.0, 0
    if not threshold:
        return len(ranked_weights) if share else 0
    for weight in ranked_weights:
        if before >= threshold:
            break
        before += weight
        count += 1
    return count
