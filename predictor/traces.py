"""A routing trace as a data set: which tokens to train on, and what the routers saw and chose for any of them.

Owns no byte on the disk: the files are `trace_files.py`'s. Two passes: the headers give all sizes, then each answer is allocated
once and filled from the shards, which are mapped where they lie. So anonymous memory is that of the answer and of its part from
one shard, and no second file with all tokens in one piece (20 GB for 58k tokens of V4-Flash) is ever written.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from predictor.errors import PredictorError
from predictor.trace_files import RECORD, Document, TraceRecord, TraceShape, map_shard, read_record, require_model

__all__ = ["Document", "Trace", "TraceShape"]


class Trace:
    """A finished trace, opened for reading. Tokens are counted through all documents; `tokens` are int64 indices, any order."""

    def __init__(self, directory: Path, record: TraceRecord) -> None:
        self.shape, self.fingerprint, self.documents = record.shape, record.fingerprint, record.documents
        self.has_hidden, self.num_tokens = record.has_hidden, record.num_tokens
        self.directory, self.record = directory, record
        self._shards = [map_shard(directory, record, *place) for place in record.shards()]

    @classmethod
    def open(cls, directory: Path, *, shape: TraceShape | None = None, fingerprint: str | None = None) -> Trace:
        """The trace in `directory`; costs the shards' headers only.

        Args:
            shape: The model's; None is any.
            fingerprint: Of the model's source, as in its manifest; None is any.

        Raises:
            PredictorError: It is missing, damaged, unfinished or of another model; one line that names the field.
        """
        record = read_record(directory)
        require_model(directory, record, shape, fingerprint)
        if not record.done or not record.num_tokens:
            raise PredictorError(
                f"{directory / RECORD}: {record.num_tokens:,} tokens so far, expected a finished trace; run the same prep trace again, it continues where it stopped"
            )
        return cls(directory, record)

    def split(self, held_out: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Token indices to train on and held out, int64 each, ascending, neither empty; no document is in both.

        Documents are held out in the order of a draw with `seed` until they have the share `held_out` of the tokens.

        Raises:
            PredictorError: There is one document only.
        """
        if not 0 < held_out < 1:
            raise ValueError(f"held_out is {held_out}, expected a number between 0 and 1")
        if len(self.documents) < 2:
            raise PredictorError(
                f"{self.directory}: one document of {self.num_tokens:,} tokens, expected two or more so that some can be held out; trace more files, or more --tokens of them"
            )
        order = torch.randperm(len(self.documents), generator=torch.Generator().manual_seed(seed)).tolist()
        is_held_out = torch.zeros(self.num_tokens, dtype=torch.bool)
        held = 0
        for position in order[:-1]:
            document = self.documents[position]
            is_held_out[document.first_token : document.first_token + document.num_tokens] = True
            held += document.num_tokens
            if held >= held_out * self.num_tokens:
                break
        return (~is_held_out).nonzero()[:, 0], is_held_out.nonzero()[:, 0]

    def ids(self, tokens: Tensor) -> Tensor:
        """The picks of `tokens`, best weight first: int64 [n, L, K]."""
        return self._gather("ids", tokens, torch.int64)

    def weights(self, tokens: Tensor) -> Tensor:
        """The picks' router weights: float32 [n, L, K]."""
        return self._gather("weights", tokens, torch.float32)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the routers saw: bfloat16 [n, L, D]; PredictorError if the trace is routing-only."""
        if not self.has_hidden:
            raise PredictorError(
                f"{self.directory}: a routing-only trace, expected one with hidden states; trace without --routing-only into another directory"
            )
        return self._gather("hidden", tokens, torch.bfloat16)

    def token_ids(self, tokens: Tensor) -> Tensor:
        """The token ids: int64 [n]."""
        return self._gather("token_ids", tokens, torch.int64)

    def uses(self) -> Tensor:
        """How often each expert was picked: int64 [L, E]."""
        layers = range(self.shape.num_layers)
        counts = torch.zeros(self.shape.num_layers, self.shape.num_experts, dtype=torch.int64)
        for shard in self._shards:
            for layer_idx in layers:
                picks = shard["ids"][layer_idx].flatten().int()
                counts[layer_idx] += torch.bincount(picks, minlength=self.shape.num_experts)
        return counts

    def _gather(self, name: str, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of `tokens` from the shards they lie in, each shard visited once."""
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_tokens:
            found = f"{int(tokens.min())} to {int(tokens.max())}"
            raise ValueError(f"tokens are {found}, expected some of 0 to {self.num_tokens - 1}")
        axis = 0 if name == "token_ids" else 1  # of the tokens; the others are [L, n, ...]
        rows = torch.empty(len(tokens), *self._shards[0][name].movedim(axis, 0).shape[1:], dtype=dtype)
        shard_of = tokens // self.record.shard_tokens
        for number in shard_of.unique().tolist():
            places = (shard_of == number).nonzero()[:, 0]
            picked = self._shards[number][name].index_select(axis, tokens[places] % self.record.shard_tokens)
            rows[places] = picked.movedim(axis, 0).to(dtype)
        return rows
