"""Chunks of routed tokens in, the shards of a trace out. Owns the buffer between them; runs no model and reads no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from predictor.trace_files import DTYPES, Document, TraceRecord, shard_specs, write_record, write_shard
from runtime.engine import PREFILL_CHUNK


class Recorder:
    """The RouterObserver of a trace: chunks of tokens in, shards out.

    Owns the one buffer all tokens pass through, a shard and a chunk long, and the record beside the shards. Tokens that an
    earlier run has recorded pass by unrecorded.
    """

    def __init__(self, out: Path, record: TraceRecord, advance: Callable[[int], object] = lambda count: None) -> None:
        """Goes on behind the shards of `record`; `advance` is told of tokens newly recorded."""
        self.record, self._out, self._advance = record, out, advance
        specs = shard_specs(record, record.shard_tokens + PREFILL_CHUNK)
        self._buffer = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in specs.items()}
        self._filled = 0  # tokens at the buffer's start that are in no shard
        self._first_token = self._position = sum(document.num_tokens for document in record.documents)

    @property
    def position(self) -> int:
        """The trace's token that comes next."""
        return self._position

    def expect(self, token_ids: Sequence[int]) -> None:
        """Says which tokens the next forwards are about."""
        self._expected = torch.tensor(token_ids, dtype=torch.int32)

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """One layer of a chunk; the last layer completes its tokens."""
        rows = slice(self._filled, self._filled + len(x))
        self._buffer["ids"][layer_idx, rows] = topk_ids.to("cpu", torch.int16)
        self._buffer["weights"][layer_idx, rows] = topk_weights.cpu()
        if self.record.has_hidden:
            self._buffer["hidden"][layer_idx, rows] = x.to("cpu", torch.bfloat16)
        if layer_idx == self.record.shape.num_layers - 1:
            self._buffer["token_ids"][rows] = self._expected[: len(x)]
            self._expected = self._expected[len(x) :]
            self._end_chunk(len(x))

    def pass_by(self, num_tokens: int) -> bool:
        """Whether the next `num_tokens` are all recorded; then they are passed by without a forward."""
        if self._position + num_tokens > self.record.num_tokens:
            return False
        self._position += num_tokens
        return True

    def end_document(self, name: str) -> None:
        """All tokens since the last call, or since the start, are of the document `name`."""
        document = Document(name, self._first_token, self._position - self._first_token)
        self.record = replace(self.record, documents=(*self.record.documents, document))
        self._first_token = self._position

    def finish(self) -> None:
        """Writes what is left, and that the trace is done."""
        if self._filled:
            self._write(self._filled)
        self.record = replace(self.record, done=True)
        write_record(self._out, self.record)

    def _end_chunk(self, num_tokens: int) -> None:
        known = min(num_tokens, max(0, self.record.num_tokens - self._position))
        self._filled += num_tokens
        self._position += num_tokens
        self._remove(known)
        while self._filled >= self.record.shard_tokens:
            self._write(self.record.shard_tokens)
            write_record(self._out, self.record)
        self._advance(num_tokens - known)

    def _write(self, num_tokens: int) -> None:
        """A shard of the buffer's first tokens; the record on the disk does not know of it yet."""
        first = {
            name: part[:num_tokens] if part.dim() == 1 else part[:, :num_tokens] for name, part in self._buffer.items()
        }
        write_shard(self._out, self.record, self.record.num_tokens, first)
        self.record = replace(self.record, num_tokens=self.record.num_tokens + num_tokens)
        self._remove(num_tokens)

    def _remove(self, num_tokens: int) -> None:
        """The buffer's first tokens go, the others move to its start."""
        rest = self._filled - num_tokens
        if num_tokens and rest:
            for part in self._buffer.values():
                for row in part if part.dim() == 3 else part[None]:
                    row[:rest] = row[num_tokens : self._filled].clone()  # they may overlap
        self._filled = rest
