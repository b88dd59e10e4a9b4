"""Watches an answer while it is written; on junk goes back to before it began, exact for a while, then eases down the ladder again.

Owns the marks, the tries and the ladder of the moment. What junk is, is `junk`'s; the state that it goes back to is the session's.
At exact a loop is the model's own: it is reported and stays, also where exact runs only since a rollback.

A mark keeps the logits that the ladder of its moment made, so the token after it is that ladder's: the way back leads to a mark
strictly before the junk, and where there is none at all, since the answer begins with it, to the prompt, read anew at exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from runtime.engine import Session, SessionMark
from runtime.junk import Finding, JunkDetector
from runtime.junk_rules import JunkRules
from runtime.ladder import AnyLadder, Ladder, MassLadder
from runtime.sampler import Sampler

MARK_TOKENS = 16  # between two marks
KEPT_MARKS = 12  # 192 tokens to go back; 214 MB for V4-Flash
EXACT_TOKENS = 96  # after a rollback
EASE_TOKENS = 16  # on each step of the ladder down
MAX_TRIES = 4
EASE_STEPS = 4  # of a mass ladder


class Written(NamedTuple):
    """One more token of the answer."""

    token_id: int


class Withdrawn(NamedTuple):
    """The answer is shorter again: only its first `num_kept` tokens stay."""

    num_kept: int
    num_tokens: int
    note: str


class Reported(NamedTuple):
    """Junk that stays: the model's own, or what no rollback could mend; `ends` if the answer stops here."""

    note: str
    ends: bool


Event = Written | Withdrawn | Reported


class _Mark(NamedTuple):
    num_tokens: int  # of the answer
    state: SessionMark
    logits: Tensor  # of the next token


@dataclass(slots=True)
class GuardCounts:
    """What the guard has done in an answer."""

    findings: int = 0
    rollbacks: int = 0
    withdrawn_tokens: int = 0


class Guard:
    """One answer under watch. Iterate `answer` to its end; the session keeps what the answer kept."""

    def __init__(self, session: Session, rules: JunkRules, max_tries: int = MAX_TRIES) -> None:
        """Takes the session's ladder as the one to come back to."""
        self.counts, self.findings = GuardCounts(), list[Finding]()
        self._session, self._rules, self._max_tries = session, rules, max_tries
        self._base = session.ladder
        self._went_back_to: int | None = None  # tokens of the answer that the last rollback kept
        self._steps = deque(ease_down(self._base, session.config.num_experts_per_tok))

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int, sampler: Sampler) -> Iterator[Event]:
        """What happens to the answer, in order. `max_new_tokens` bounds what is kept; EOS is written and ends it.

        Errors as of `Session.generate`. However the iteration ends, the session's ladder is the one it had.
        """
        detector, answer_ids = JunkDetector(self._rules), list[int]()
        logits = self._session.extend(prompt_ids)
        marks: deque[_Mark] = deque([_Mark(0, self._session.mark(), logits)], maxlen=KEPT_MARKS)
        try:
            while True:
                token_id = sampler(logits)
                answer_ids.append(token_id)
                yield Written(token_id)
                is_end = token_id == self._session.config.eos_token_id or len(answer_ids) == max_new_tokens
                finding = detector.push(token_id)
                if finding is not None:
                    event = self._judge(finding, marks, len(answer_ids))
                    yield event
                    if isinstance(event, Reported) and event.ends:
                        return
                    if isinstance(event, Withdrawn):
                        del answer_ids[event.num_kept :]
                        detector.truncate(event.num_kept)
                        self._go_back(event)
                        if event.num_kept or finding.began:
                            self._session.rewind(marks[-1].state)
                        else:
                            self._read_again(marks, prompt_ids)
                        logits = marks[-1].logits
                        continue
                if is_end:
                    return
                logits = self._step(token_id)
                if len(answer_ids) % MARK_TOKENS == 0:
                    marks.append(_Mark(len(answer_ids), self._session.mark(), logits))
        finally:
            self._session.ladder = self._base

    def _judge(self, finding: Finding, marks: deque[_Mark], num_tokens: int) -> Withdrawn | Reported:
        """Whether to go back, and to which mark, which is then the last one in `marks`."""
        self.findings.append(finding)
        self.counts.findings += 1
        num_picks = self._session.config.num_experts_per_tok
        if self._is_models_own(finding.began, num_tokens):
            return Reported(f"{finding.message}; every expert is at FP4, so this is the model's own", ends=False)
        if self.counts.rollbacks == self._max_tries:
            return Reported(f"{finding.message}; stopped after {self._max_tries} rollbacks", ends=True)
        if not self._session.can_serve(Ladder.exact(num_picks)):
            return Reported(
                f"{finding.message}; stopped: no FP4 slots to go on exactly, give --slots with {num_picks} or more",
                ends=True,
            )
        note = f"{finding.message}; going on exactly from before it"
        while len(marks) > 1 and marks[-1].num_tokens >= finding.began:
            marks.pop()
        if marks[-1].num_tokens >= max(finding.began, 1):
            note = f"{finding.message}; it began before the oldest state that is kept, going on exactly from there"
        return Withdrawn(marks[-1].num_tokens, num_tokens - marks[-1].num_tokens, note)

    def _is_models_own(self, began: int, num_tokens: int) -> bool:
        """Whether exact wrote the junk: it always runs, or it wrote at least half of it after the last rollback."""
        if self._base.is_exact(self._session.config.num_experts_per_tok):
            return True
        if self._went_back_to is None:
            return False
        exactly = min(num_tokens, self._went_back_to + EXACT_TOKENS) - max(began, self._went_back_to)
        return 2 * exactly >= num_tokens - began

    def _go_back(self, event: Withdrawn) -> None:
        """Counts it; the ladder comes down anew."""
        self.counts.rollbacks += 1
        self.counts.withdrawn_tokens += event.num_tokens
        self._went_back_to = event.num_kept
        self._steps = deque(ease_down(self._base, self._session.config.num_experts_per_tok))

    def _read_again(self, marks: deque[_Mark], prompt_ids: Sequence[int]) -> None:
        """The prompt at exact, whose logits choose the first token; `marks` begins anew."""
        self._session.reset()
        self._session.ladder = Ladder.exact(self._session.config.num_experts_per_tok)
        logits = self._session.prefill(prompt_ids)
        marks.clear()
        marks.append(_Mark(0, self._session.mark(), logits))

    def _step(self, token_id: int) -> Tensor:
        """The next logits at the ladder that is due."""
        if self.counts.rollbacks and self._steps:
            self._session.ladder = self._steps.popleft()
        return self._session.step(token_id)


def ease_down(base: AnyLadder, num_picks: int) -> list[AnyLadder]:
    """The ladder of each token after a rollback: exact, then step by step down to `base`, which comes last."""
    ladders: list[AnyLadder] = [Ladder.exact(num_picks)] * EXACT_TOKENS
    for step in _steps_between(base, num_picks):
        ladders += [step] * EASE_TOKENS
    return [*ladders, base]


def _steps_between(base: AnyLadder, num_picks: int) -> list[AnyLadder]:
    if isinstance(base, MassLadder):
        shares = [1 - number / EASE_STEPS for number in range(1, EASE_STEPS)]
        return [
            MassLadder(base.hi + share * (1 - base.hi), base.lo + share * (1 - base.lo), base.renormalise)
            for share in shares
        ]
    return [Ladder(a, max(base.b, a), base.renormalise) for a in range(num_picks - 1, base.a, -1)]
