"""How much of a token sequence repeats: the trigrams of a window, and loops of every period at once. Counts only.

Owns the two counters that `junk` asks, and no rule about what their numbers mean.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.junk_rules import JunkRules

RECENT_TOKENS = 32
RECENT_NOVEL = 6  # a lag with more that is new in them is not looked at: its loop, if any, is not yet on its way
NOTHING = -1  # equals no token id


class Trigrams:
    """The trigrams of a sliding window, counted."""

    def __init__(self, rules: JunkRules) -> None:
        self._window = rules.trigram_window
        self._limit = rules.trigram_share
        self._last = (NOTHING, NOTHING)
        self._order: deque[tuple[int, int, int]] = deque()
        self._counts: Counter[tuple[int, int, int]] = Counter()

    def push(self, token_id: int) -> bool:
        """Whether too many of a full window are repeats."""
        trigram = (*self._last, token_id)
        self._last = trigram[1:]
        self._order.append(trigram)
        self._counts[trigram] += 1
        if len(self._order) > self._window:
            oldest = self._order.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        return len(self._order) == self._window and self.repeated_share() >= self._limit

    def repeated_share(self) -> float:
        return 1 - len(self._counts) / len(self._order)

    def knows(self, trigram: Sequence[int]) -> bool:
        return tuple(trigram) in self._counts


class Loop(NamedTuple):
    period: int
    span: int  # tokens after the first copy
    novel: int  # of them unlike the copies before


Vector = NDArray[np.int64]


class _Limit(NamedTuple):
    """The tokens looked at, and how many of them may be novel, and novel in copy after copy."""

    span: int
    novel: int
    column: int


class Loops:
    """All lags at once: for each, which tokens are novel, and how many in a span that depends on the lag.

    A token is novel at lag p if it differs from the one p before, unless it only returns to what stood 2p before, after a
    departure; it is in a column if the one p before was novel too. Counts are cumulative, in rings of rows by token.
    """

    def __init__(self, rules: JunkRules) -> None:
        lags = np.arange(1, rules.max_period + 1)
        self._exact, self._prose, self._rows, self._long = zip(
            *(_limits(rules, lag) for lag in lags.tolist()), strict=True
        )
        self._newline_ids = rules.newline_ids
        period = self._period = rules.max_period
        self._history = np.full(4 * period, NOTHING, np.int64)  # the last 2 to 4 periods, newest at _end - 1
        self._end = 2 * period
        self._was_novel = np.zeros((period, period), bool)
        self._diagonals = (np.arange(period)[:, None] - lags) % period * period + lags - 1
        self._ring = max(limit.span for limit in self._long) + 1
        self._counts = np.zeros((self._ring, 2, period), np.int32)
        self._step = np.zeros((2, period), bool)
        self._index = self._newline = -1
        self._newline -= period

    def push(self, token_id: int) -> Loop | None:
        """The loop of the smallest period that this token completes."""
        self._index += 1
        if token_id in self._newline_ids:
            self._newline = self._index
        novel, column = self._step
        before = self._was_novel.take(self._diagonals[self._index % self._period])
        near, far = self._lagged()
        np.greater(near != token_id, (far == token_id) & before, out=novel)
        np.logical_and(novel, before, out=column)
        self._was_novel[self._index % self._period] = novel
        self._remember(token_id)
        counts = self._counts[self._index % self._ring]
        np.add(self._counts[(self._index - 1) % self._ring], self._step, out=counts)
        return self._find()

    def _lagged(self) -> tuple[Vector, Vector]:
        """The tokens 1 … P before the next one, and 2, 4 … 2P before it."""
        end, period = self._end, self._period
        return self._history[end - period : end][::-1], self._history[end - 2 * period : end - 1][::-2]

    def _remember(self, token_id: int) -> None:
        if self._end == len(self._history):
            self._history[: 2 * self._period] = self._history[-2 * self._period :]
            self._end = 2 * self._period
        self._history[self._end] = token_id
        self._end += 1

    def _find(self) -> Loop | None:
        now, then = self._index % self._ring, (self._index - RECENT_TOKENS) % self._ring
        recent = self._counts[now, 0] - self._counts[then, 0]
        for at in np.flatnonzero(recent <= RECENT_NOVEL).tolist():
            # A copy of p tokens contains a newline if the last one is less than p back.
            is_row = at + 1 > self._index - self._newline
            for limits in (self._exact, self._rows, self._long) if is_row else (self._exact, self._prose):
                loop = self._within(limits[at], at)
                if loop:
                    return loop
        return None

    def _within(self, limit: _Limit, at: int) -> Loop | None:
        if self._index + 1 < limit.span + at + 1:
            return None
        now, then = self._index % self._ring, (self._index - limit.span) % self._ring
        # What is new in the second copy may stand against anything in the first, so columns count from the third.
        third = (self._index - limit.span + at + 1) % self._ring
        novel = int(self._counts[now, 0, at] - self._counts[then, 0, at])
        column = int(self._counts[now, 1, at] - self._counts[third, 1, at])
        return Loop(at + 1, limit.span, novel) if novel <= limit.novel and column <= limit.column else None


def _limits(rules: JunkRules, lag: int) -> tuple[_Limit, _Limit, _Limit, _Limit]:
    """For copies that are all alike, for prose, for rows, and for rows that go on for long."""
    span = round(max(lag + rules.loop_tokens, rules.loop_periods * lag))
    rows = round(span * rules.row_factor)
    return (
        _Limit(lag + rules.exact_tokens, 0, 0),
        _limit(span, lag, rules.novel_share, 1.0),
        _limit(rows, lag, rules.row_novel_share, rules.row_columns),
        _limit(max(rows, rules.long_rows_tokens), lag, rules.novel_share, 1.0),
    )


def _limit(span: int, lag: int, novel_share: float, columns: float) -> _Limit:
    """Most allowed: a departure in the first copy shows in the second, spans begin anywhere, variations meet (oftener at long lags)."""
    return _Limit(
        span, int((span + lag) * novel_share + 1.5), int((span - lag) / lag * columns) + int(lag / 20 * columns) + 1
    )
