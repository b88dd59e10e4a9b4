"""What to bring near before a layer asks for it: hash layers' experts, which the token id gives, and a predictor's guesses.

Owns the choice and the budget. Bringing a slab near is `store.staging`'s, where it may lie is `store.residency`'s: a guess never
evicts, and every demand read passes it. Speaks only for a step of one token; a prefill needs more experts than a ring holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.ladder import AnyLadder, Rung
from runtime.store.policies import ExpertKey

SMOOTHING = 0.1  # weight of the last layer in the mean idle time
LEARNING = 0.1  # weight of the last guess in the share of right ones
KEPT_LAYERS = 4  # whose idle time may be spent at once
LEAST_TRUST = 1 / 64  # so that a predictor that has been wrong for long is still tried now and then
FIRST_RATE = 1e9  # bytes/s taken for a drive that has not read yet


class Guess(NamedTuple):
    """An expert that a later layer will or may ask for, at the precision its rank would get."""

    key: ExpertKey
    rung: Rung
    is_certain: bool = False


class Predictor(Protocol):
    """What `predictor.model.load` returns, as far as a run needs it."""

    lookaheads: tuple[int, ...]

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        """float32 [T, number of lookaheads, E]; higher means likelier."""
        ...


class DriveBudget:
    """Bytes of guesses that the drive has time for between two layers' demands: its idle time times its rate, less where guesses
    have been wrong.

    What one layer leaves is kept for later ones only while guesses are mostly right: many at once may still be under way when the
    next demand comes. Where less than one slab fits between two demands, it adds up to one.
    """

    def __init__(self, slab_bytes: int) -> None:
        """`slab_bytes` is the size of a guess."""
        self._slab_bytes = slab_bytes
        self._idle_seconds: float | None = None  # of a layer, in the mean; None before the first
        self._credit = 0.0
        self._right = 0.5  # share of the guesses, lately

    @property
    def trust(self) -> float:
        """Share of the idle time that guesses get: all of it while half of them or more are right."""
        return max(LEAST_TRUST, min(1.0, 2.0 * self._right))

    def layer(self, seconds: float, demand_busy_seconds: float, bytes_per_second: float) -> None:
        """So long did the last layer take, and so long was a demand read under way."""
        idle = max(0.0, seconds - demand_busy_seconds)
        before = idle if self._idle_seconds is None else self._idle_seconds
        self._idle_seconds = before + SMOOTHING * (idle - before)
        added = self._idle_seconds * bytes_per_second * self.trust
        most = added * KEPT_LAYERS if self.trust == 1.0 else added
        self._credit = min(self._credit + added, max(most, float(self._slab_bytes)))

    def has_room(self, num_bytes: int) -> bool:
        """Whether one more guess of so many bytes fits."""
        return self._credit >= num_bytes

    def spend(self, num_bytes: int) -> None:
        """A guess of so many bytes was issued."""
        self._credit -= num_bytes

    def resolved(self, was_right: bool) -> None:
        """One guess was used, or not."""
        self._right += LEARNING * (was_right - self._right)


class Prefetcher:
    """Guesses of one sequence, in the order in which they should be brought near."""

    def __init__(
        self,
        hash_experts: Mapping[int, Tensor],
        predictor: Predictor | None,
        num_layers: int,
        num_picks: int,
        budget: DriveBudget,
    ) -> None:
        """Joins what is known and what is guessed.

        Args:
            hash_experts: Of each hash layer int64 [vocab, K] on the CPU, the experts of every token.
            predictor: None: hash layers only.
            num_layers: Of the model.
            num_picks: K.
            budget: Limits guesses; certain ones need none.
        """
        self.budget = budget
        self._hash_experts, self._predictor = hash_experts, predictor
        self._num_layers, self._num_picks = num_layers, num_picks

    def begin_step(self, token_id: int, ladder: AnyLadder) -> list[Guess]:
        """The hash layers' experts, as soon as the token is known; in order of their layers.

        Their weights, and so their ranks, are not known yet: each is asked for at the precision of its place in the table.
        """
        demand = ladder.demand([1.0] * self._num_picks)
        return [
            Guess(ExpertKey(layer_idx, expert_id), rung, is_certain=True)
            for layer_idx, table in sorted(self._hash_experts.items())
            for rank, expert_id in enumerate(table[token_id].tolist())
            if (rung := _rung(rank, demand)) is not Rung.DROP
        ]

    def look(self, layer_idx: int, x: Tensor) -> Tensor | None:
        """What the predictor says at this layer, on x's device, for `guesses`: float32 [2, lookaheads, K] of experts and scores.

        Issues work and waits for nothing. None if no later layer can be guessed from here.
        """
        if self._predictor is None or not any(map(self._is_guessable, self._targets(layer_idx))):
            return None
        best = self._predictor.scores(layer_idx, x)[0].topk(self._num_picks, dim=-1)
        return torch.stack([best.indices.float(), best.values])

    def guesses(self, layer_idx: int, seen: Sequence[Sequence[Sequence[float]]], ladder: AnyLadder) -> list[Guess]:
        """The experts behind what `look` gave, the likeliest first; a guess of rank r asks for what a pick of rank r would get."""
        found = []
        for target, experts, scores in zip(self._targets(layer_idx), *seen, strict=True):
            if not self._is_guessable(target):
                continue
            demand = ladder.demand([1.0] * len(scores))
            for rank, (expert_id, score) in enumerate(zip(experts, scores, strict=True)):
                rung = _rung(rank, demand)
                if rung is not Rung.DROP:
                    found.append((score, Guess(ExpertKey(target, int(expert_id)), rung)))
        return [guess for _, guess in sorted(found, key=lambda item: -item[0])]

    def _targets(self, layer_idx: int) -> list[int]:
        return [layer_idx + ahead for ahead in self._predictor.lookaheads] if self._predictor else []

    def _is_guessable(self, layer_idx: int) -> bool:
        return layer_idx < self._num_layers and layer_idx not in self._hash_experts


def _rung(rank: int, demand: tuple[int, int]) -> Rung:
    fp4, two_bit = demand
    if rank < fp4:
        return Rung.FP4
    return Rung.TWO_BIT if rank < two_bit else Rung.DROP
