"""What is taken of the exact model: rows of text, what its routers saw of them, and the losses of a run over them.

Also serves the experts of such a run. Owns no 2-bit method (`prep.experiments.methods`) and compares nothing
(`prep.experiments.errors`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from kernels.expert import expert_ffn
from runtime.artifact import ModelDirectory
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.models.deepseek_v4.build import build_model
from runtime.models.deepseek_v4.state import State
from runtime.models.experts import ExpertProvider
from runtime.models.rounding import ActivationRounding
from runtime.resident import FP4, ResidentExperts
from runtime.tokenizer import load_tokenizer

ROW = 1024  # tokens of one forward, as in the demo's training record
DOCUMENT_TOKENS = 1024  # taken of each document, so that a few long ones do not make up either half
CALIBRATION_ROWS, FRESH_ROWS = 16, 10
LEAST_TOKENS, MOST_TOKENS = 32, 256  # of one expert: with fewer its error says little, more do not move it
CPU = torch.device("cpu")

Weights = tuple[Tensor, Tensor, Tensor]  # w1, w3, w2 of one expert


class Seen(NamedTuple):
    """What one layer's router saw and chose: x [T, D] float32, ids [T, K] int64."""

    x: Tensor
    ids: Tensor

    def of(self, expert_id: int) -> Tensor:
        """[n, D]: the inputs of the tokens routed to one expert."""
        return self.x[(self.ids == expert_id).any(1)]

    def spread(self, tokens: int) -> Seen:
        """About so many of the tokens, evenly over the whole text."""
        step = max(1, len(self.x) // tokens)
        return Seen(self.x[::step][:tokens], self.ids[::step][:tokens])


class Run(NamedTuple):
    """One pass over the text: loss of each token [R, ROW], CRC-32 of each row's logits, what the routers saw."""

    losses: Tensor
    checksums: list[int]
    seen: list[Seen]


class KeptExperts:
    """The experts of a ResidentExperts as an ExpertProvider that dequantises each once and not for every chunk.

    `kept` may be filled with other weights.
    """

    def __init__(self, source: ModelDirectory, precision: str, code: str) -> None:
        """precision and code: as in ResidentExperts; FP4 comes from the fp4 files unless code is "split"."""
        self._stored = ResidentExperts(source, torch.float32, CPU, False, precision=precision, code=code)
        self._limit = source.config.swiglu_limit
        self.kept: dict[tuple[int, int], Weights] = {}

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Each pick's weighted output, float32 [T, K, D]."""
        output = torch.empty(*topk_ids.shape, x.shape[-1])
        for expert_id in topk_ids.unique().tolist():
            tokens, ranks = (topk_ids == expert_id).nonzero(as_tuple=True)
            w1, w3, w2 = self.weights(layer_idx, expert_id)
            route_weights = topk_weights[tokens, ranks]
            output[tokens, ranks] = expert_ffn(x[tokens], w1, w3, w2, limit=self._limit, route_weights=route_weights)
        return output

    def weights(self, layer_idx: int, expert_id: int) -> Weights:
        """w1, w3 and w2 of one expert, float32; shared between calls."""
        key = layer_idx, expert_id
        if key not in self.kept:
            self.kept[key] = self._stored.weights(layer_idx, expert_id)
        return self.kept[key]


def exact_experts(source: ModelDirectory) -> KeptExperts:
    """Every expert as released, from the fp4 files."""
    return KeptExperts(source, FP4, "quad2")


def read_rows(path: Path, tokenizer: Tokenizer, bos: int, eos: int) -> tuple[Tensor, Tensor]:
    """Calibration and fresh rows [R, ROW + 1] int64, from the documents at even and at odd places of a JSON-lines file.

    Raises:
        StrawError: A half has too little text.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    ids = [tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids for line in lines]
    halves = []
    for first, rows in ((0, CALIBRATION_ROWS), (1, FRESH_ROWS)):
        stream = [token for one in ids[first::2] for token in (bos, *one[:DOCUMENT_TOKENS], eos)]
        if len(stream) <= rows * ROW:
            raise StrawError(f"{path}: {len(stream):,} tokens in half {first}, expected {rows * ROW + 1:,}; add text")
        halves.append(torch.tensor(stream[: rows * ROW + 1]).unfold(0, ROW + 1, ROW))
    return halves[0], halves[1]


def run_rows(session: Session, rows: Tensor) -> Run:
    """The model on each row by itself."""
    parts: list[list[Seen]] = [[] for _ in range(session.config.num_hidden_layers)]

    def observe(layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        parts[layer_idx].append(Seen(x.clone(), topk_ids.clone()))

    session.observer, losses, checksums = observe, [], []
    for row in rows:
        logits = session.logits(row[:-1].tolist())
        losses.append(cross_entropy(logits, row[1:], reduction="none"))
        checksums.append(zlib.crc32(logits.numpy().tobytes()))
    seen = [Seen(torch.cat([one.x for one in part]), torch.cat([one.ids for one in part])) for part in parts]
    return Run(torch.stack(losses), checksums, seen)


def open_sessions(source: ModelDirectory) -> Callable[[ExpertProvider], Session]:
    """A function from a provider to a Session on the one model and state that all of them share."""
    model = build_model(source, torch.float32, CPU, ActivationRounding())
    state = State(source.config, ROW, torch.float32, CPU)
    tokenizer = load_tokenizer(source.directory)
    return lambda experts: Session(model, experts, state, tokenizer, source.directory)


def with_tokens(source: ModelDirectory, fresh: list[Seen]) -> Iterator[tuple[int, int, Tensor]]:
    """Layer, expert and its fresh tokens, at most MOST_TOKENS; experts with fewer than LEAST_TOKENS are left out."""
    for layer_idx, seen in enumerate(fresh):
        for expert_id in range(source.config.n_routed_experts):
            x = seen.of(expert_id)
            if len(x) >= LEAST_TOKENS:
                yield layer_idx, expert_id, x[:: max(1, len(x) // MOST_TOKENS)][:MOST_TOKENS]


def hidden_of(x: Tensor, w1: Tensor, w3: Tensor, limit: float) -> Tensor:
    """[T, F]: what w2 is multiplied with, router weights left out."""
    return expert_ffn(x, w1, w3, torch.eye(len(w1)), limit=limit)
