"""Batches of a routing trace: short runs of consecutive tokens, in a drawn order to train and in theirs to measure.

Owns which tokens come together; the trace owns what was recorded of them. A run lies together in the files, so that a trace
larger than memory is read in pieces and not a page a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from predictor.errors import PredictorError
from predictor.traces import Trace

RUN_TOKENS = 32


class Batch(NamedTuple):
    """What was recorded of some tokens, and what the token before each had picked."""

    ids: Tensor  # int64 [n, L, K], best weight first
    previous: Tensor  # int64 [n, L, K]; -1 where the token is its document's first
    hidden: Tensor  # bfloat16 [n, L, D], the router's input


def load_batch(trace: Trace, tokens: Tensor, device: torch.device) -> Batch:
    """The batch of these token indices, on `device`.

    Raises:
        PredictorError: The trace has no hidden states, or a pick that is no expert.
    """
    ids, previous = trace.ids(tokens), trace.ids((tokens - 1).clamp(min=0))
    _require_experts(trace, ids)
    _require_experts(trace, previous)
    previous[torch.isin(tokens, first_tokens(trace))] = -1
    return Batch(ids.to(device), previous.to(device), trace.hidden(tokens).to(device))


def _require_experts(trace: Trace, ids: Tensor) -> None:
    """An index that is none would end the program on a card, with no word of where it came from."""
    least, most = (int(value) for value in ids.aminmax())
    if least < 0 or most >= trace.shape.num_experts:
        raise PredictorError(
            f"{trace.directory}: picks from {least} to {most}, expected 0 to {trace.shape.num_experts - 1}; the trace is damaged, remove it and trace again"
        )


def first_tokens(trace: Trace) -> Tensor:
    """The index of each document's first token: int64 [number of documents], ascending."""
    return torch.tensor([document.first_token for document in trace.documents])


def runs(tokens: Tensor, run_tokens: int = RUN_TOKENS) -> list[Tensor]:
    """The token indices in ascending order, cut into runs of consecutive ones, each of `run_tokens` at most."""
    tokens = tokens.sort().values
    place = torch.arange(len(tokens))
    is_first = torch.ones(len(tokens), dtype=torch.bool)
    is_first[1:] = tokens.diff() != 1
    segment_start = torch.where(is_first, place, 0).cummax(0).values
    starts = ((place - segment_start) % run_tokens == 0).nonzero().flatten()
    return list(tokens.tensor_split(starts[1:]))


def in_order(tokens: Tensor, batch_tokens: int) -> Iterator[Tensor]:
    """The token indices once, ascending, `batch_tokens` at a time."""
    yield from tokens.sort().values.split(batch_tokens)


def shuffled(tokens: Tensor, batch_tokens: int, random: torch.Generator) -> Iterator[Tensor]:
    """Batches of whole runs without end; each pass over the tokens is drawn anew."""
    pieces = runs(tokens, min(RUN_TOKENS, batch_tokens))
    runs_each = max(1, batch_tokens // RUN_TOKENS)
    while True:
        order = torch.randperm(len(pieces), generator=random).tolist()
        for begin in range(0, len(order), runs_each):
            yield torch.cat([pieces[place] for place in order[begin : begin + runs_each]])


def take_documents(trace: Trace, tokens: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Token indices (taken, rest), about `share` of them taken, drawn by whole documents.

    What is taken exceeds the share only if the smallest document does; of a single document nothing is taken.
    """
    owners = torch.searchsorted(first_tokens(trace), tokens, right=True)
    documents, sizes = owners.unique(return_counts=True)
    if len(documents) == 1:
        return tokens[:0], tokens
    taken, budget = [], int(share * len(tokens))
    for place in torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist():
        if sizes[place] <= budget:
            taken.append(documents[place])
            budget -= int(sizes[place])
    is_taken = torch.isin(owners, torch.stack(taken or [documents[sizes.argmin()]]))
    return tokens[is_taken], tokens[~is_taken]
