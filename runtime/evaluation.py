"""How far a ladder is from the exact model on held-out text: teacher-forced loss, KL divergence and agreement, with errors.

Owns what is read, what a pass over it leaves, and the figures made of that; which ladders run, and in what order, is
`runtime.sweep`'s. The exact pass is kept as final hidden states (D numbers a token), since the log-probabilities of V4-Flash's
129,280 tokens would fill a disk; both sides' logits are made from hidden states a piece at a time and compared in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from runtime.documents import SourceText, read_documents, token_sequences
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.ruled_store import WARM, ResidencyForm, RuledStore, traffic
from runtime.store.store import TieredStore

PIECE = 64  # rows of logits at once: 66 MB in float64 for each side of V4-Flash
RESAMPLES = 400
STATISTICS = (
    "exact_loss",
    "loss",
    "loss_difference",
    "perplexity_ratio",
    "kl_mean",
    "kl_median",
    "kl_p99",
    "agreement",
)


class HeldOut(NamedTuple):
    """What the model reads at once: a document behind BOS, or as much of it as the context holds."""

    document: str
    token_ids: list[int]

    @property
    def inputs(self) -> list[int]:
        """What the model reads: the last token is only predicted."""
        return self.token_ids[:-1]

    @property
    def targets(self) -> list[int]:
        """What it is to predict, a token after each of `inputs`: all but BOS."""
        return self.token_ids[1:]


def read_held_out(
    tokenizer: Tokenizer,
    paths: Iterable[Path],
    *,
    context: int,
    tokens: int | None = None,
    document_tokens: int | None = None,
) -> list[HeldOut]:
    """The sequences of all documents in order.

    Args:
        tokenizer: The model's.
        paths: Text files, or .jsonl with a document a line.
        context: Tokens of the longest sequence, BOS among them.
        tokens: Scored tokens in all, at most; None is all there are.
        document_tokens: Scored tokens of each document, at most, its first ones.

    Raises:
        StrawError: A file cannot be used, or the context has no room for a prediction.
    """
    if context < 2:
        raise StrawError(f"context is {context}, expected at least 2, BOS and a token to predict; correct --context")
    sequences: list[HeldOut] = []
    left = _limit(tokens)
    for document in _named_documents(list(paths)):
        room = min(left, _limit(document_tokens))
        for ids in token_sequences(tokenizer, document.text, context):
            if room > 0:
                sequences.append(HeldOut(document.name, ids[: room + 1]))
                room -= len(sequences[-1].targets)
                left -= len(sequences[-1].targets)
        if left <= 0:
            break
    return sequences


def _named_documents(paths: Sequence[Path]) -> Iterator[SourceText]:
    """As of `read_documents`; where two files are called alike their names have the directory too, so that they stay two."""
    uses = Counter(path.name for path in paths)
    for path in paths:
        for document in read_documents([path]):
            name = document.name if uses[path.name] == 1 else str(path.parent / document.name)
            yield replace(document, name=name)


def _limit(tokens: int | None) -> int:
    return 2**62 if tokens is None else tokens


def forward_all(session: Session, token_ids: Sequence[int], one_by_one: bool = False) -> Tensor:
    """[T, D] on the CPU in the session's dtype: final hidden states of a fresh sequence, in prefill chunks or token by token."""
    session.reset()
    parts = [[token_id] for token_id in token_ids] if one_by_one else [token_ids]
    return torch.cat([hidden for part in parts for hidden in session._forward(part)]).cpu()


def forward_under(session: Session, form: ResidencyForm, token_ids: Sequence[int]) -> tuple[Tensor, Counter[str]]:
    """The hidden states as in `forward_all`, and the traffic (`ruled_store.traffic`) of the pass.

    Under a rule in prefill chunks; with real pools token by token, from empty ones, or `warm` after a first pass over the same
    tokens. No sequence has a bearing on another.
    """
    store = session._experts
    assert isinstance(store, TieredStore)
    if isinstance(store, RuledStore):
        store.rule.begin()
    else:
        store.restart()
        if form.text == WARM:
            forward_all(session, token_ids, one_by_one=True)
    before = traffic(store)
    hidden = forward_all(session, token_ids, one_by_one=not form.is_offline)
    return hidden, traffic(store) - before


@dataclass(frozen=True, slots=True)
class Scores:
    """One sequence's numbers, a list entry per scored token, and its traffic in all."""

    document: str
    exact_nll: list[float]  # nats
    nll: list[float]
    kl: list[float]  # nats; exact || measured
    agrees: list[bool]  # whether both have the same likeliest token
    traffic: dict[str, int]


def score(session: Session, sequence: HeldOut, exact: Tensor, hidden: Tensor, counts: Counter[str]) -> Scores:
    """The scores of the hidden states [T, D] of a sequence's inputs beside the exact model's."""
    targets = torch.tensor(sequence.targets)
    pieces = [
        _compare(_log_probabilities(session, exact[part]), _log_probabilities(session, hidden[part]), targets[part])
        for part in torch.arange(len(targets)).split(PIECE)
    ]
    exact_nll, nll, kl, agrees = (torch.cat(column).tolist() for column in zip(*pieces, strict=True))
    return Scores(sequence.document, exact_nll, nll, kl, agrees, dict(sorted(counts.items())))


def _log_probabilities(session: Session, hidden: Tensor) -> Tensor:
    """float64 [n, V] on the session's device."""
    return session._model_logits(hidden.to(session._state.position.device)).double().log_softmax(-1)


def _compare(exact: Tensor, measured: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exact and measured NLL, KL and agreement of each row, on the CPU."""
    columns = targets.to(exact.device)[:, None]
    exact_nll, nll = (-side.gather(1, columns)[:, 0] for side in (exact, measured))
    kl = (exact.exp() * (exact - measured)).sum(-1)
    return exact_nll.cpu(), nll.cpu(), kl.cpu(), (exact.argmax(-1) == measured.argmax(-1)).cpu()


def figures(scores: Sequence[Scores]) -> dict[str, Any]:
    """Every one of STATISTICS as {"value", "standard_error"}, and what they are over.

    A loss is nats per token, `perplexity_ratio` exp(loss - exact loss), KL per token. The standard error is the spread over
    RESAMPLES bootstrap samples (seed 0) of whole documents, or of sequences where there is one document only; None for one
    sequence alone.
    """
    clusters, kind = _clusters(scores)
    values = _statistics(np.concatenate(clusters))
    errors = _bootstrap(clusters) if len(clusters) > 1 else [None] * len(STATISTICS)
    found: dict[str, Any] = {"tokens": sum(map(len, clusters)), "clusters": len(clusters), "clusters_are": kind}
    return found | {
        name: {"value": float(value), "standard_error": error}
        for name, value, error in zip(STATISTICS, values, errors, strict=True)
    }


def _clusters(scores: Sequence[Scores]) -> tuple[list[NDArray[np.float64]], str]:
    """[n, 4] numbers of each cluster, a row per token: exact NLL, NLL, KL, agreement."""
    tables = [np.array([one.exact_nll, one.nll, one.kl, one.agrees], dtype=np.float64).T for one in scores]
    documents: dict[str, list[NDArray[np.float64]]] = {}
    for one, table in zip(scores, tables, strict=True):
        documents.setdefault(one.document, []).append(table)
    if len(documents) == 1:
        return tables, "sequences"
    return [np.concatenate(parts) for parts in documents.values()], "documents"


def _statistics(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """In the order of STATISTICS."""
    exact_loss, loss, kl, agreement = table.mean(0)
    difference = (table[:, 1] - table[:, 0]).mean()  # of the tokens, not of the means: exactly 0 for equal tokens
    median, p99 = np.quantile(table[:, 2], (0.5, 0.99))
    return np.array([exact_loss, loss, difference, np.exp(difference), kl, median, p99, agreement])


def _bootstrap(clusters: Sequence[NDArray[np.float64]]) -> list[float]:
    draws = np.random.default_rng(0).integers(len(clusters), size=(RESAMPLES, len(clusters)))
    samples = np.stack([_statistics(np.concatenate([clusters[index] for index in draw])) for draw in draws])
    return [float(spread) for spread in samples.std(0, ddof=1)]


def per_token(scores: Sequence[Scores]) -> dict[str, float]:
    """The traffic per token that was read."""
    counts: Counter[str] = Counter()
    for one in scores:
        counts.update(one.traffic)
    num_tokens = sum(len(one.nll) for one in scores)
    return {name: count / num_tokens for name, count in sorted(counts.items())}
