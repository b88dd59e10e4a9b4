"""`runtime eval`: rows, each measured against the exact model on the same text.

Owns the order of things: one exact pass over the text, whose hidden states stay in host memory, then row by row, sequence by
sequence, each written down as it ends (`eval_state`). Which rows there are is `eval_rows`' business, how they are printed and
drawn `sweep_report`'s, what is computed of a sequence `evaluation`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from runtime.documents import digests
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.eval_rows import BOTH_PRECISIONS, V4_FLASH_LAYERS, Model, Row, v4_flash_bytes
from runtime.eval_state import EvalState
from runtime.evaluation import Scores, figures, forward_all, forward_under, per_token, read_held_out, score
from runtime.ladder import EXACT, Rung
from runtime.opening import DEFAULT_CONTEXT, open_model
from runtime.ruled_store import READ, RuledStore, new_rule
from runtime.store.pools import Shares
from runtime.store.store import TieredStore
from runtime.tokenizer import require_tokenizer_in

STATE = ".state.json"  # in the place of the result's suffix


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """What the rows run on; None of a run's own means as in `open_model`.

    `tokens` and `document_tokens` limit what is scored in all and of each document. `slots` are of the real pools (`cold`,
    `warm`), `vram` and `ram` of those and of the working memory of all others. With `out` the state lies beside it.
    """

    texts: tuple[Path, ...]
    tokens: int | None = None
    document_tokens: int | None = None
    context: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    seed: int = 0
    slots: str | None = None
    vram: str | None = None
    ram: str | None = None
    out: Path | None = None

    @property
    def state_path(self) -> Path | None:
        """Where what is finished lies."""
        return None if self.out is None else self.out.with_suffix(STATE)


def run(model: Model, settings: EvalSettings, rows: Sequence[Row], warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """The results of all rows in order, progress on stderr; what an earlier run with the same `out` has finished is taken over.

    Raises:
        StrawError: A row, the text or the state does not fit the model, or a slab could not be read.
    """
    evaluation = Evaluation(model, settings, rows, warn)
    with closing(evaluation), tqdm(total=evaluation.num_passes, desc="eval", unit="pass", disable=None) as bar:

        def advance(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        return evaluation.run(advance)


class Evaluation:
    """Rows on one model and one text. Holds at most one session, and the exact hidden states of what is still to do."""

    def __init__(self, model: Model, settings: EvalSettings, rows: Sequence[Row], warn: Callable[[str], None]) -> None:
        """Checks all that can be checked without running the model, and takes up what a run before has finished."""
        self._model, self._settings, self._rows, self._warn = model, settings, rows, warn
        self._session: Session | None = None
        self._opened_for: object = None
        for row in rows:
            model.check(row)
        if settings.slots is not None and all(row.form.is_offline for row in rows):
            raise StrawError(
                "--slots: no row uses the real pools, expected --residency cold or warm with it; pools that are played along are spelled --residency replay:F,R,f,r"
            )
        tokenizer = require_tokenizer_in(model.directory)
        own_context = min(DEFAULT_CONTEXT, model.config.max_position_embeddings)
        self._context = own_context if settings.context is None else settings.context
        limits = {"tokens": settings.tokens, "document_tokens": settings.document_tokens}
        self._held_out = read_held_out(tokenizer, settings.texts, context=self._context, **limits)
        self._state = EvalState(settings.state_path, self._identity())

    @property
    def num_passes(self) -> int:
        """Passes over a sequence that are still to be made, the exact ones among them."""
        todo = [self._num_todo(row) for row in self._rows]
        return sum(todo) + max(todo, default=0)

    def run(self, advance: Callable[[str], None]) -> list[dict[str, Any]]:
        """The results of all rows, in order; `advance` is told what each pass that has ended was for."""
        exact = self._exact_pass(advance)
        return [self._measured(row, exact, advance) for row in self._rows]

    def close(self) -> None:
        """Ends the session, if one is open, and leaves the state to other runs."""
        self._end_session()
        self._state.close()

    def _identity(self) -> dict[str, Any]:
        """All that the numbers hang on beside the row."""
        settings = asdict(self._settings)
        names = ("tokens", "document_tokens", "device", "dtype", "seed", "slots", "vram", "ram")
        own = {"model": self._model.identity, "texts": digests(self._settings.texts), "context": self._context}
        return own | {name: settings[name] for name in names}

    def _num_todo(self, row: Row) -> int:
        """Sequences of the row that are still to be measured."""
        is_whole = self._state.result(row.name) is not None
        return 0 if is_whole else len(self._held_out) - len(self._state.scores(row.name))

    def _exact_pass(self, advance: Callable[[str], None]) -> list[Tensor]:
        """The exact hidden states of the last sequences, as many as some row still needs."""
        todo = max((self._num_todo(row) for row in self._rows), default=0)
        states = []
        for sequence in self._held_out[len(self._held_out) - todo :]:
            session = self._open(EXACT, ladder=EXACT, vram=self._settings.vram, ram=self._settings.ram)
            states.append(forward_all(session, sequence.inputs))
            advance(EXACT)
        return states

    def _measured(self, row: Row, exact: Sequence[Tensor], advance: Callable[[str], None]) -> dict[str, Any]:
        """The row's result; measures what is still missing of it."""
        found = self._state.result(row.name)
        if found is not None:
            return found
        todo = self._num_todo(row)
        if todo:
            self._measure(row, exact[-todo:], advance)
        result = self._summary(row, self._state.scores(row.name))
        self._state.finish(row.name, result)
        return result

    def _measure(self, row: Row, exact: Sequence[Tensor], advance: Callable[[str], None]) -> None:
        """Scores the last sequences, of which these are the exact states."""
        session = self._session_for(row)
        for sequence, states in zip(self._held_out[-len(exact) :], exact, strict=True):
            hidden, counts = forward_under(session, row.form, sequence.inputs)
            self._state.add(row.name, score(session, sequence, states, hidden, counts))
            advance(row.name)

    def _session_for(self, row: Row) -> Session:
        """A session whose store is what the row asks for; one serves all offline rows of a code."""
        settings, ladder = self._settings, row.parsed(self._model.config.num_experts_per_tok)
        options: dict[str, Any] = {"code": row.code, "vram": settings.vram, "ram": settings.ram}
        if not row.form.is_offline:
            options |= {"ladder": row.ladder, "renormalise": row.renormalise, "slots": settings.slots}
            session = self._open(row, shares=Shares(), **options)  # never `runtime.toml`'s, which may change
            self._state.check_pools(row.name, session.experts_line)
            return session
        session = self._open(("offline", row.code), ladder=BOTH_PRECISIONS if row.code else EXACT, **options)
        store = session._experts
        assert isinstance(store, TieredStore)
        session._experts = RuledStore.over(store, ladder, new_rule(row.form, store, ladder, settings.seed))
        return session

    def _open(self, purpose: object, **options: Any) -> Session:
        """The session opened for this purpose, in the place of any other."""
        if self._session is None or self._opened_for != purpose:
            self._end_session()
            settings = self._settings
            options |= {"device": settings.device, "dtype": settings.dtype, "context": self._context}
            self._session = open_model(self._model.directory, warn=self._warn, **options)
            self._opened_for = purpose
        return self._session

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _summary(self, row: Row, scores: Sequence[Scores]) -> dict[str, Any]:
        """The row, its figures, its real pools in words, and per token the picks by what served them, the slabs read and their bytes (None: not known)."""
        counts = per_token(scores)
        uses = {rung.value: counts.get(rung.value, 0.0) for rung in Rung}
        has_pools = row.form.share is None
        reads = {name.removeprefix(READ): count for name, count in counts.items() if name.startswith(READ)}
        own_bytes = sum(count * self._model.slab_bytes[plane] for plane, count in reads.items())
        # As many slabs a layer as here, in as many layers as there.
        deeper = V4_FLASH_LAYERS / self._model.config.num_hidden_layers
        full_bytes = sum(count * deeper * v4_flash_bytes(plane) for plane, count in reads.items())
        return {
            **asdict(row),
            **figures(scores),
            "pools": self._state.pools(row.name),
            "uses_per_token": uses,
            "reads_per_token": reads if has_pools else None,
            "nvme_bytes_per_token": own_bytes if has_pools else None,
            "v4_flash_nvme_bytes_per_token": full_bytes if has_pools else None,
        }
