"""Whether generated text has turned to junk: misplaced tokens, loops, a few phrases over and over. Token ids only.

Owns the rules and the detector. Does not roll back, knows no text and no model: what to do about a finding is the guard's.

A table, a list or a block of code is nearly periodic too. Three things tell a loop from it: how many tokens it lasts, how much
is new in each copy (a token that departs once is a variation; one that departs in every copy is a column), and whether the
copies are lines, of which more are needed. Defaults are measured: tests/runtime/test_junk.py has the clean text they hold for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from runtime.errors import StrawError

QUIET_TOKENS = 64  # without a hit before the next one is another event
EARLIER_TOKENS = 8  # variations in the first copies can hide so many
REPLAY_TOKENS = 2048  # more than any rule looks back
RECENT_TOKENS, RECENT_NOVEL = (
    32,
    6,
)  # a lag with more that is new is not looked at: its loop, if any, is not yet on its way
NOTHING = -1  # equals no token id


class Kind(Enum):
    """What was found."""

    PATTERN = "pattern"
    TRIGRAMS = "trigrams"
    LOOP = "loop"


class Finding(NamedTuple):
    """Junk: its kind, a sentence for people, and the position of the token where it began (of a loop, the first copy's)."""

    kind: Kind
    message: str
    began: int


@dataclass(frozen=True, slots=True)
class JunkRules:
    """When text is junk. Lengths are tokens, a run of one filler token counting as one; shares are of 1."""

    misplaced_ids: frozenset[int] = frozenset()  # special tokens with no business inside an answer
    patterns: tuple[tuple[int, ...], ...] = ()  # sequences of ids that the user adds
    filler_ids: frozenset[int] = frozenset()  # blanks and the stuff of rulers; see `token_classes`
    newline_ids: frozenset[int] = frozenset()
    max_period: int = 128
    loop_tokens: int = 60  # a loop of period p lasts p + this after its first copy,
    loop_periods: float = 2.4  # and so many periods
    novel_share: float = 1 / 12  # of its tokens differ from the copies before
    row_factor: float = 2.0  # copies that contain a newline last so many times longer,
    row_novel_share: float = 0.03  # with less that is new in them,
    row_columns: float = 0.3  # and so many tokens per copy that differ each time (elsewhere one)
    long_rows_tokens: int = 1024  # or as long as this, with as much that is new as elsewhere
    filler_run: int = 256  # of one filler token, in tokens
    trigram_window: int = 192
    trigram_share: float = 0.92  # of the window's trigrams occurred before within it

    def check(self) -> None:
        """Nothing, if the rules can be applied.

        Raises:
            StrawError: A pattern is empty, or a length is below 1.
        """
        if not all(self.patterns):
            raise StrawError("junk patterns: got an empty one, expected one or more token ids in each; remove it")
        for name in ("max_period", "loop_tokens", "long_rows_tokens", "filler_run", "trigram_window"):
            if getattr(self, name) < 1:
                raise StrawError(f"junk rules: {name} is {getattr(self, name)}, expected 1 or more; raise it")


class TokenClasses(NamedTuple):
    """`filler_ids` and `newline_ids` of a tokenizer."""

    filler_ids: frozenset[int]
    newline_ids: frozenset[int]


def token_classes(tokenizer: Tokenizer) -> TokenClasses:
    """The ids of blanks and ruler characters (one kind of ASCII mark, blanks beside it), and of what contains a newline."""
    ids = range(tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False)
    filler = (token_id for token_id, text in zip(ids, texts, strict=True) if _is_filler(text))
    return TokenClasses(
        frozenset(filler), frozenset(token_id for token_id, text in zip(ids, texts, strict=True) if "\n" in text)
    )


def audit(token_ids: Iterable[int], rules: JunkRules) -> list[Finding]:
    """All findings of a finished transcript, in the order in which they were noticed; a loop is one, however long."""
    detector = JunkDetector(rules)
    findings = (detector.push(token_id) for token_id in token_ids)
    return [finding for finding in findings if finding]


class JunkDetector:
    """Reads one answer token by token; positions count from its first."""

    def __init__(self, rules: JunkRules) -> None:
        """Nothing read yet.

        Raises:
            StrawError: The rules cannot be applied.
        """
        rules.check()
        self._rules = rules
        self._token_ids: list[int] = []
        self._last_hit = -QUIET_TOKENS - 1
        self._reset()

    def push(self, token_id: int) -> Finding | None:
        """What this token brings to light. A loop is reported once; it is another after 64 tokens without one."""
        position = len(self._token_ids)
        self._token_ids.append(token_id)
        finding = self._repetition(position, token_id)
        if finding:
            is_new = position - self._last_hit > QUIET_TOKENS
            self._last_hit = position
            finding = finding if is_new else None
        return self._pattern(position, token_id) or finding

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens`, as if no more had been read; costs the reading of 2,048 tokens at most.

        Raises:
            ValueError: Fewer were read.
        """
        if not 0 <= num_tokens <= len(self._token_ids):
            raise ValueError(f"truncate: got {num_tokens}, expected 0 to {len(self._token_ids)} (the tokens read)")
        first = max(0, num_tokens - REPLAY_TOKENS)
        replayed = self._token_ids[first:num_tokens]
        del self._token_ids[first:]
        self._reset()
        for token_id in replayed:
            self.push(token_id)

    def _reset(self) -> None:
        self._positions: list[int] = []  # of the tokens that count
        self._filler_run = 0
        self._last_hit = -QUIET_TOKENS - 1
        self._loops = _Loops(self._rules)
        self._trigrams = _Trigrams(self._rules)

    def _pattern(self, position: int, token_id: int) -> Finding | None:
        if token_id in self._rules.misplaced_ids:
            return Finding(Kind.PATTERN, f"special token {token_id} at token {position} has no place here", position)
        for pattern in self._rules.patterns:
            if token_id == pattern[-1] and tuple(self._token_ids[-len(pattern) :]) == pattern:
                began = position - len(pattern) + 1
                return Finding(Kind.PATTERN, f"the unwanted sequence {list(pattern)} at token {began}", began)
        return None

    def _repetition(self, position: int, token_id: int) -> Finding | None:
        ids = self._token_ids
        if token_id in self._rules.filler_ids and position and ids[-2] == token_id:
            self._filler_run += 1
            return self._filler_finding(position)
        self._filler_run = 1
        self._positions.append(position)
        is_few = self._trigrams.push(token_id)
        loop = self._loops.push(token_id)
        if loop:
            return self._loop_finding(loop, position)
        return self._trigram_finding() if is_few else None

    def _filler_finding(self, position: int) -> Finding | None:
        if self._filler_run < self._rules.filler_run:
            return None
        began = position - self._filler_run + 1
        return Finding(Kind.LOOP, f"one token {self._filler_run} times from token {began} on", began)

    def _loop_finding(self, loop: _Loop, position: int) -> Finding:
        start = max(0, len(self._positions) - loop.span - loop.period)
        began = max(0, self._positions[start] - EARLIER_TOKENS)
        copies = loop.span / loop.period + 1
        words = f"about {copies:.1f} copies of {loop.period} tokens, ending at token {position}, differ in {loop.novel} of {loop.span} tokens"
        return Finding(Kind.LOOP, words, began)

    def _trigram_finding(self) -> Finding:
        """The junk fills nearly all of the window, and may have begun before it: back as long as the trigrams are known."""
        start = len(self._positions) - self._rules.trigram_window
        read = [self._token_ids[position] for position in self._positions]
        while start > 0 and self._trigrams.knows(read[start - 1 : start + 2]):
            start -= 1
        began = self._positions[max(0, start)]
        share = self._trigrams.repeated_share()
        return Finding(Kind.TRIGRAMS, f"{share:.0%} of the trigrams since token {began} are repeats", began)


class _Trigrams:
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


class _Loop(NamedTuple):
    period: int
    span: int  # tokens after the first copy
    novel: int  # of them unlike the copies before


Vector = NDArray[np.int64]


class _Limit(NamedTuple):
    """The tokens looked at, and how many of them may be novel, and novel in copy after copy."""

    span: int
    novel: int
    column: int


class _Loops:
    """All lags at once: for each, which tokens are novel, and how many in a span that depends on the lag.

    A token is novel at lag p if it differs from the one p before, unless it only returns to what stood 2p before, after a
    departure; it is in a column if the one p before was novel too. Counts are cumulative, in rings of rows by token.
    """

    def __init__(self, rules: JunkRules) -> None:
        lags = np.arange(1, rules.max_period + 1)
        self._prose, self._rows, self._long = zip(*(_limits(rules, lag) for lag in lags.tolist()), strict=True)
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

    def push(self, token_id: int) -> _Loop | None:
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

    def _find(self) -> _Loop | None:
        now, then = self._index % self._ring, (self._index - RECENT_TOKENS) % self._ring
        recent = self._counts[now, 0] - self._counts[then, 0]
        for at in np.flatnonzero(recent <= RECENT_NOVEL).tolist():
            # A copy of p tokens contains a newline if the last one is less than p back.
            is_row = at + 1 > self._index - self._newline
            for limits in (self._rows, self._long) if is_row else (self._prose,):
                loop = self._within(limits[at], at)
                if loop:
                    return loop
        return None

    def _within(self, limit: _Limit, at: int) -> _Loop | None:
        if self._index + 1 < limit.span + at + 1:
            return None
        now, then = self._index % self._ring, (self._index - limit.span) % self._ring
        # What is new in the second copy may stand against anything in the first, so columns count from the third.
        third = (self._index - limit.span + at + 1) % self._ring
        novel = int(self._counts[now, 0, at] - self._counts[then, 0, at])
        column = int(self._counts[now, 1, at] - self._counts[third, 1, at])
        return _Loop(at + 1, limit.span, novel) if novel <= limit.novel and column <= limit.column else None


def _limits(rules: JunkRules, lag: int) -> tuple[_Limit, _Limit, _Limit]:
    """For prose, for rows, and for rows that go on for long."""
    span = round(max(lag + rules.loop_tokens, rules.loop_periods * lag))
    rows = round(span * rules.row_factor)
    return (
        _limit(span, lag, rules.novel_share, 1.0),
        _limit(rows, lag, rules.row_novel_share, rules.row_columns),
        _limit(max(rows, rules.long_rows_tokens), lag, rules.novel_share, 1.0),
    )


def _limit(span: int, lag: int, novel_share: float, columns: float) -> _Limit:
    """Most allowed: a departure in the first copy shows in the second, spans begin anywhere, variations meet (oftener at long lags)."""
    return _Limit(
        span, int((span + lag) * novel_share + 1.5), int((span - lag) / lag * columns) + int(lag / 20 * columns) + 1
    )


def _is_filler(text: str) -> bool:
    marks = set(text) - set(" \t\r\n")
    return bool(text) and text.isascii() and len(marks) <= 1 and not any(mark.isalnum() for mark in marks)
