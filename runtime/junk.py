"""Whether generated text has turned to junk: misplaced tokens, loops, a few phrases over and over. Token ids and their bytes only.

Owns the detector; its rules are in `junk_rules`. Does not roll back, knows no tokenizer and no model: what to do about a finding is the guard's.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from runtime.junk_rules import JunkRules
from runtime.repetition import Loop, Loops, Trigrams

QUIET_TOKENS = 64  # without a hit before the next one is another event
EARLIER_TOKENS = 8  # variations in the first copies can hide so many
REPLAY_TOKENS = 2048  # more than any rule looks back


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
        self._loops = Loops(self._rules)
        self._trigrams = Trigrams(self._rules)

    def _pattern(self, position: int, token_id: int) -> Finding | None:
        if token_id in self._rules.misplaced_ids:
            return Finding(Kind.PATTERN, f"special token {token_id} at token {position} has no place here", position)
        for pattern in self._rules.patterns:
            if token_id == pattern[-1] and tuple(self._token_ids[-len(pattern) :]) == pattern:
                began = position - len(pattern) + 1
                return Finding(Kind.PATTERN, f"the unwanted sequence {list(pattern)} at token {began}", began)
        return self._text(position) if self._rules.texts else None

    def _text(self, position: int) -> Finding | None:
        """An unwanted text that ends within this token; UTF-8 has no character that begins inside another one."""
        first, pieces, longest = position, [self._bytes_at(position)], max(map(len, self._rules.texts))
        num_bytes = len(pieces[0])
        while first and num_bytes < longest + len(pieces[0]) - 1:
            first -= 1
            pieces.append(self._bytes_at(first))
            num_bytes += len(pieces[-1])
        tail = b"".join(reversed(pieces))
        for text in self._rules.texts:
            at = tail.find(text, max(0, num_bytes - len(pieces[0]) - len(text) + 1))
            if at >= 0:
                began = self._token_at(first, at)
                words = text.decode(errors="replace")
                return Finding(Kind.PATTERN, f"the unwanted text {words!r} at token {began}", began)
        return None

    def _token_at(self, first: int, at: int) -> int:
        """The token that holds byte `at`, counted from the token `first` on."""
        while at >= len(self._bytes_at(first)):
            at -= len(self._bytes_at(first))
            first += 1
        return first

    def _bytes_at(self, position: int) -> bytes:
        token_id = self._token_ids[position]
        return self._rules.token_bytes[token_id] if token_id < len(self._rules.token_bytes) else b""

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

    def _loop_finding(self, loop: Loop, position: int) -> Finding:
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
