"""How a token comes out: a Session holds one model and one sequence, and turns token ids into logits and more token ids.

Owns the order of things (prefill in chunks, then step by step) and the tokens whose state is held. The arithmetic is the
model's (`runtime.models`), the choice of a token the sampler's, the experts their provider's.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from runtime.config import ModelConfig
from runtime.errors import ContextFullError, StrawError
from runtime.ladder import AnyLadder, Ladder
from runtime.models.deepseek_v4.model import DeepseekV4
from runtime.models.deepseek_v4.state import Snapshot, State
from runtime.models.experts import ExpertProvider, RouterObserver
from runtime.sampler import Sampler
from runtime.store.store import TieredStore

PREFILL_CHUNK = 256  # tokens of one forward: attention scores of 64 heads stay below 100 MB at 4,096 tokens of context


@dataclass(slots=True)
class Counters:
    """What a session has done since it was opened; times are wall clock around finished work."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """A moment of a session; stays valid whatever the session does next."""

    token_ids: tuple[int, ...]
    state: Snapshot


@dataclass(frozen=True, slots=True)
class SessionMark:
    """A moment of the running sequence, for `rewind`: light, and good only while the sequence has not been left."""

    serial: int
    num_tokens: int
    state: Snapshot


class Session:
    """One model, one sequence. Not thread-safe; a call that fails or is interrupted leaves an empty sequence behind."""

    def __init__(
        self, model: DeepseekV4, experts: ExpertProvider, state: State, tokenizer: Tokenizer | None, directory: Path
    ) -> None:
        self.config: ModelConfig = model.config
        self.tokenizer = tokenizer
        self.directory = directory
        self.observer: RouterObserver | None = None  # sees every router's input and picks from the next forward on
        self._model, self._experts, self._state = model, experts, state
        self._token_ids: list[int] = []  # the tokens that `_state` holds
        self._counters = Counters()
        self._is_interrupted = False
        self._marks: dict[int, int] = {}  # tokens before each mark that can still be rewound to, by serial number
        self._num_marks = 0
        self._end = weakref.finalize(self, experts.close if isinstance(experts, TieredStore) else lambda: None)

    @property
    def context(self) -> int:
        """Tokens that the sequence may have."""
        return self._state.context

    @property
    def token_ids(self) -> list[int]:
        """A copy of the sequence so far."""
        return list(self._token_ids)

    @property
    def ladder(self) -> AnyLadder:
        """What each pick may use from the next forward on; can be set to any ladder that `can_serve` allows."""
        exact = Ladder.exact(self.config.num_experts_per_tok)
        return self._experts.ladder if isinstance(self._experts, TieredStore) else exact

    @ladder.setter
    def ladder(self, ladder: AnyLadder) -> None:
        if not self.can_serve(ladder):
            raise StrawError(
                f"ladder {ladder}: {self.experts_line} has not the slots for it, expected {self.config.num_experts_per_tok} in VRAM for each of its planes; open the model with other --slots"
            )
        if isinstance(self._experts, TieredStore):
            self._experts.ladder = ladder

    def can_serve(self, ladder: AnyLadder) -> bool:
        """Whether the slots that were allocated at opening suffice for this ladder."""
        if isinstance(self._experts, TieredStore):
            return self._experts.can_serve(ladder)
        return ladder.is_exact(self.config.num_experts_per_tok)

    @property
    def experts_line(self) -> str:
        """How the experts are served, in a few words."""
        return self._experts.describe() if isinstance(self._experts, TieredStore) else "all experts resident"

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [T, V]: the next-token logits after each token, from position 0; the session's own sequence stays."""
        kept = self.snapshot()
        self.reset()
        try:
            return torch.cat([self._model_logits(hidden) for hidden in self._forward(token_ids)])
        finally:
            self.restore(kept)

    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [V]: the next-token logits after appending `token_ids` to the sequence.

        Raises:
            ContextFullError: They do not fit; nothing has been appended.
            ValueError: No token, or an id outside the vocabulary.
        """
        start = time.perf_counter()
        for hidden in self._forward(token_ids):
            last = hidden[-1:]
        logits = self._model_logits(last)[0]
        self._wait()
        self._counters.prefill_tokens += len(token_ids)
        self._counters.prefill_seconds += time.perf_counter() - start
        return logits

    def step(self, token_id: int) -> Tensor:
        """float32 [V]: the next-token logits after appending one token; errors as in `prefill`."""
        start = time.perf_counter()
        (hidden,) = self._forward([token_id])
        logits = self._model_logits(hidden)[0]
        self._wait()
        self._counters.decode_tokens += 1
        self._counters.decode_seconds += time.perf_counter() - start
        return logits

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """Yields up to `max_new_tokens` ids that follow `prompt_ids`, the last one EOS if the model ends there.

        `prompt_ids` is the whole text from position 0. What the session already holds of it is not computed again: a
        conversation passes all of itself at every turn and pays for the new part only.

        Raises:
            ValueError: An argument outside its range, at once.
            ContextFullError: The prompt, or the next token, does not fit; from the iteration.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        return self._generate(self._checked(prompt_ids), max_new_tokens, Sampler(temperature, top_p, seed))

    def snapshot(self) -> SessionSnapshot:
        """The sequence as it stands, for `restore`."""
        return SessionSnapshot(tuple(self._token_ids), self._state.snapshot())

    def restore(self, snapshot: SessionSnapshot) -> None:
        """Back to the snapshot's sequence, bit for bit."""
        self._state.restore(snapshot.state)
        self._token_ids, self._marks = list(snapshot.token_ids), {}

    def mark(self) -> SessionMark:
        """The sequence as it stands, for `rewind`; 17.8 MB for V4-Flash where a snapshot takes up to a context's entries more."""
        self._num_marks += 1
        self._marks[self._num_marks] = len(self._token_ids)
        return SessionMark(self._num_marks, len(self._token_ids), self._state.mark())

    def rewind(self, mark: SessionMark) -> None:
        """Takes back every token since the mark, bit for bit; later marks are void.

        Raises:
            ValueError: The sequence has been reset, restored or rewound behind the mark since.
        """
        if mark.serial not in self._marks:
            raise ValueError(
                f"rewind: the mark at token {mark.num_tokens:,} is of a sequence that was left, expected this one's"
            )
        self._state.rewind(mark.state)
        del self._token_ids[mark.num_tokens :]
        self._marks = {serial: n for serial, n in self._marks.items() if serial <= mark.serial}

    def reset(self) -> None:
        """An empty sequence."""
        self._state.reset()
        self._token_ids, self._marks = [], {}

    def interrupt(self) -> None:
        """Makes the next prefill chunk or step raise KeyboardInterrupt before it begins; safe in a signal handler.

        The sequence then stands as the chunks before have left it, while an exception in the middle of one empties it.
        """
        self._is_interrupted = True

    def stats(self) -> dict[str, Any]:
        """Counters since the session was opened, how full the context is, and the store's counters where there is one."""
        counters = {**asdict(self._counters), "context_tokens": len(self._token_ids), "context": self.context}
        return {**counters, "store": self._experts.as_dict()} if isinstance(self._experts, TieredStore) else counters

    def close(self) -> None:
        """Ends the store's threads and releases its slots, as the end of the session's life does; nothing works after it."""
        self._end()

    def extend(self, prompt_ids: Sequence[int]) -> Tensor:
        """float32 [V]: the next-token logits after `prompt_ids`, the whole text from position 0; what is held of it is kept.

        Errors as in `prefill`.
        """
        ids = self._checked(prompt_ids)
        self._is_interrupted = False  # one that came when the last answer was over is not meant for this one
        held = len(self._token_ids)
        if held >= len(ids) or ids[:held] != self._token_ids:
            self.reset()
            held = 0
        return self.prefill(ids[held:])

    def _generate(self, prompt_ids: list[int], max_new_tokens: int, sampler: Sampler) -> Iterator[int]:
        logits = self.extend(prompt_ids)
        for remaining in reversed(range(max_new_tokens)):
            token_id = sampler(logits)
            yield token_id
            if token_id == self.config.eos_token_id or not remaining:
                return
            logits = self.step(token_id)

    def _forward(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Final hidden states [T, D] of each chunk of the tokens, which join the sequence."""
        if not self._end.alive:
            raise StrawError(f"session on {self.directory}: it was closed, expected an open one; open the model again")
        ids = self._checked(token_ids)
        if len(self._token_ids) + len(ids) > self.context:
            raise ContextFullError(
                f"context: {len(self._token_ids):,} tokens held and {len(ids):,} more to come, expected at most"
                f" {self.context:,} in all; start afresh (/reset in chat) or give a larger --context"
            )
        tensor = torch.tensor(ids, device=self._state.position.device)
        for chunk in tensor.split(PREFILL_CHUNK):
            yield self._forward_chunk(chunk)

    def _forward_chunk(self, token_ids: Tensor) -> Tensor:
        if self._is_interrupted:
            self._is_interrupted = False
            raise KeyboardInterrupt
        try:
            with torch.inference_mode():
                if isinstance(self._experts, TieredStore) and len(token_ids) == 1:
                    self._experts.begin_step(int(token_ids))
                hidden = self._model.forward(token_ids, self._state, self._experts, self.observer)
        except BaseException:
            self.reset()  # some layers have moved on and others not: nothing of this sequence can be used
            raise
        self._token_ids += token_ids.tolist()
        return hidden

    def _model_logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._model.logits(hidden)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        ids = [index(token_id) for token_id in token_ids]
        wrong = [token_id for token_id in ids if not 0 <= token_id < self.config.vocab_size]
        if not ids or wrong:
            found = f"id {wrong[0]}" if wrong else "no token"
            raise ValueError(f"token ids: {found}, expected one or more ids below {self.config.vocab_size:,}")
        return ids

    def _wait(self) -> None:
        if self._state.position.is_cuda:
            torch.cuda.synchronize(self._state.position.device)
