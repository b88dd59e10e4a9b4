"""One answer on its way to a terminal: streamed, watched by the guard, timed; and what may be said of its speed.

Owns what the reader sees, withdrawn text included. The tokens are the session's, the rollback the guard's.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from tokenizers import Tokenizer

from runtime.engine import Session
from runtime.guard import Guard, GuardCounts, Reported, Withdrawn, Written
from runtime.junk import Finding, audit
from runtime.sampler import Sampler
from runtime.speed import answer_rules, invalid_reason
from runtime.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn, how long they may become, and what is done about junk.

    Attributes:
        thinking: Whether the marks of thinking belong into an answer.
        guard: Roll back when the text turns to junk; without it junk is only found out at the end.
        junk: Texts that count as junk beside what the rules know.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    thinking: bool = False
    guard: bool = True
    junk: tuple[str, ...] = ()


@dataclass(slots=True)
class Timing:
    """Wall clock of one answer, measured where its tokens arrive."""

    started: float = field(default_factory=time.perf_counter)
    first_token_seconds: float | None = None
    last_token_seconds: float = 0.0
    tokens: int = 0

    def count(self) -> None:
        """One more token has arrived."""
        self.tokens += 1
        self.last_token_seconds = time.perf_counter() - self.started
        if self.first_token_seconds is None:
            self.first_token_seconds = self.last_token_seconds

    def line(self, prompt_tokens: int, invalid: str | None) -> str:
        """Time to first token; then the tokens after it and their seconds, apart from the prompt's work, and their rate.

        The rate is left out, and the reason given, if `invalid` says that the text is not sound.
        """
        if self.first_token_seconds is None:
            return "no token"
        seconds = self.last_token_seconds - self.first_token_seconds
        first = f"first token after {self.first_token_seconds:.2f} s ({prompt_tokens:,} prompt tokens)"
        if self.tokens < 2:
            return first
        decoded = f"{first} · decode {self.tokens - 1:,} tokens in {seconds:.2f} s"
        return (
            f"{decoded}, speed invalid: {invalid}"
            if invalid
            else f"{decoded} = {(self.tokens - 1) / seconds:.2f} tokens/s"
        )


def print_answer(session: Session, tokenizer: Tokenizer, prompt_ids: Sequence[int], sampling: Sampling) -> None:
    """Prints the answer alone to stdout: as it comes where nothing of it can be withdrawn, else when it is whole.

    What there is of an answer that an error or Ctrl-C cuts off is printed too, before that goes on its way.
    """
    is_final = not sampling.guard or session.ladder.is_exact(session.config.num_experts_per_tok)
    stream = AnswerStream(session, tokenizer, sampling, sys.stdout if is_final else io.StringIO(), sys.stderr)
    is_whole = False
    try:
        stream.run(prompt_ids)
        is_whole = True
    finally:
        if not is_final and (stream.answer_ids or is_whole):
            detokenizer = Detokenizer(tokenizer)
            sys.stdout.write("".join(map(detokenizer.push, stream.answer_ids)) + detokenizer.finish() + "\n")
        elif stream.answer_ids and not is_whole:
            sys.stdout.write("\n")


class AnswerStream:
    """Writes an answer's text as it comes; what was kept of it is in `answer_ids`, also after an exception."""

    def __init__(
        self, session: Session, tokenizer: Tokenizer, sampling: Sampling, output: TextIO, notes: TextIO | None
    ) -> None:
        """`notes` takes a line for people about each rollback; None where nobody watches."""
        self.answer_ids, self.timing, self.findings = list[int](), Timing(), list[Finding]()
        self.counts = GuardCounts()  # all zero without the guard
        self._session, self._tokenizer, self._sampling, self._output, self._notes = (
            session,
            tokenizer,
            sampling,
            output,
            notes,
        )
        self._detokenizer = Detokenizer(tokenizer)
        self._rules = answer_rules(tokenizer, session.config.eos_token_id, sampling.thinking, sampling.junk)

    def run(self, prompt_ids: Sequence[int]) -> None:
        """Streams the answer to its end."""
        sampling = self._sampling
        if sampling.guard:
            self._run_guarded(prompt_ids)
        else:
            options = (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.seed)
            for token_id in self._session.generate(prompt_ids, *options):
                self._write(token_id)
            self.findings = audit(self.answer_ids, self._rules)
        self._output.write(self._detokenizer.finish() + "\n")

    def invalid_reason(self) -> str | None:
        """Why the speed of this answer may not be said, if so."""
        limit = self._sampling.max_new_tokens
        return invalid_reason(self.answer_ids, self._session.config.eos_token_id, limit, self.findings)

    def line(self, prompt_tokens: int) -> str:
        """Timing for people."""
        return self.timing.line(prompt_tokens, self.invalid_reason())

    def _run_guarded(self, prompt_ids: Sequence[int]) -> None:
        guard, sampling = Guard(self._session, self._rules), self._sampling
        self.findings, self.counts = guard.findings, guard.counts
        sampler = Sampler(sampling.temperature, sampling.top_p, sampling.seed)
        for event in guard.answer(prompt_ids, sampling.max_new_tokens, sampler):
            if isinstance(event, Written):
                self._write(event.token_id)
            elif isinstance(event, Withdrawn):
                self._withdraw(event)
            elif isinstance(event, Reported):
                self._note(event.note)

    def _write(self, token_id: int) -> None:
        self.timing.count()
        self.answer_ids.append(token_id)
        self._output.write(self._detokenizer.push(token_id))
        self._output.flush()

    def _withdraw(self, event: Withdrawn) -> None:
        """Text on a terminal cannot be taken back: a line says what does not count, and the answer goes on after it."""
        self._output.write(self._detokenizer.finish())
        self._note(f"the last {event.num_tokens} tokens are withdrawn: {event.note}")
        del self.answer_ids[event.num_kept :]
        self._detokenizer = Detokenizer(self._tokenizer)
        for token_id in self.answer_ids:
            self._detokenizer.push(token_id)

    def _note(self, note: str) -> None:
        if self._notes is not None:
            self._output.flush()
            self._notes.write(f"\n[{note}]\n")
            self._notes.flush()
