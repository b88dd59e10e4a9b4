"""A trace with a planted rule: what layer l + 2 picks follows from the hidden state at layer l alone. For tests of predictors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from predictor.trace_files import Document, TraceRecord, TraceShape, write_record, write_shard
from predictor.traces import Trace

PLANTED = TraceShape(hidden_size=12, num_experts=12, num_layers=5, num_picks=2)
FINGERPRINT = "planted"
LOOKAHEAD = 2


def write_planted_trace(
    directory: Path,
    *,
    shape: TraceShape = PLANTED,
    documents: int = 40,
    document_tokens: int = 100,
    shard_tokens: int = 700,
    fingerprint: str = FINGERPRINT,
    seed: int = 0,
) -> Trace:
    """Hidden states are normal and independent, so no other layer, token or count knows anything of a pick."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = documents * document_tokens
    hidden = torch.randn(shape.num_layers, num_tokens, shape.hidden_size, generator=random).bfloat16()
    ids = planted_picks(hidden, shape, random)
    directory.mkdir(parents=True, exist_ok=True)
    starts = range(0, num_tokens, document_tokens)
    record = TraceRecord(
        shape=shape,
        fingerprint=fingerprint,
        has_hidden=True,
        shard_tokens=shard_tokens,
        settings={},
        num_tokens=num_tokens,
        documents=tuple(Document(f"document {start}", start, document_tokens) for start in starts),
        done=True,
    )
    for first, count in record.shards():
        part = slice(first, first + count)
        tensors = {"ids": ids[:, part].short(), "hidden": hidden[:, part], "weights": torch.ones(ids[:, part].shape)}
        write_shard(directory, record, first, tensors | {"token_ids": torch.zeros(count, dtype=torch.int32)})
    write_record(directory, record)
    return Trace.open(directory)


def planted_picks(hidden: Tensor, shape: TraceShape, random: torch.Generator) -> Tensor:
    """int64 [L, n, K]: a linear rule of each layer, applied LOOKAHEAD layers before; in the first layers one of noise."""
    rules = torch.randn(shape.num_layers, shape.hidden_size, shape.num_experts, generator=random)
    noise = torch.randn(LOOKAHEAD, *hidden.shape[1:], generator=random)
    sources = torch.cat([noise, hidden[: shape.num_layers - LOOKAHEAD].float()])
    return torch.bmm(sources, rules).topk(shape.num_picks, dim=-1).indices
