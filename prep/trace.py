"""`prep trace`: the model runs on text, and what each router saw and chose is written as a trace, and as heat.

Owns the order of things: documents to sequences to forwards to shards, and where a run that was cut off goes on. The files
are `predictor.traces`'; HEAT is the model directory's. A shard is the unit of resume: the record names whole shards only, and
the document in which the last of them ends is computed again from its sequence's start. With the exact ladder the same
tokens give the same bytes; with another one what is resident decides, so a resumed trace may differ from an uninterrupted one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from predictor.errors import PredictorError
from predictor.trace_files import (
    RECORD,
    SHARD_BYTES,
    TraceRecord,
    map_shard,
    read_record,
    require_model,
    write_record,
)
from predictor.traces import Trace
from prep.jobs import free_disk_bytes, require_free_disk, say, write_lock
from prep.trace_recorder import Recorder
from runtime.artifact import ModelDirectory, write_heat
from runtime.config import ModelConfig
from runtime.devices import compute_device
from runtime.documents import digests, read_documents, token_sequences
from runtime.engine import Session
from runtime.errors import ArtifactError, StrawError
from runtime.manifest import TRACE
from runtime.opening import DEFAULT_CONTEXT, open_model
from runtime.predictors import trace_shape
from runtime.sampler import Sampler
from runtime.tokenizer import TOKENIZER_FILE, load_tokenizer

EXACT = "exact"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What to run on and how; None of a run's own means as in `open_model`.

    Attributes:
        tokens: At most so many, over all documents; None is all there are.
        generate: Tokens of its own that the model adds to the first `prompt_tokens` of each document, until EOS; with 0 it
            reads each document whole.
        temperature: Of the sampler; document i draws with `seed` + i.
        routing_only: Leave the hidden states out.
        shard_bytes: Of a full shard.
    """

    tokens: int | None = None
    generate: int = 0
    prompt_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    routing_only: bool = False
    device: str | None = None
    dtype: str | None = None
    ladder: str = EXACT
    vram: str | None = None
    ram: str | None = None
    slots: str | None = None
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("generate", 0), ("prompt_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise StrawError(f"{name} is {value}, expected at least {least}; correct --{name.replace('_', '-')}")
        try:
            Sampler(self.temperature, seed=self.seed)
        except ValueError as cause:
            raise StrawError(f"{cause}; correct --temperature or --seed") from None


@dataclass(frozen=True, slots=True)
class TracePlan:
    """A trace before it is made: `record` is what lies in `out`, the numbers are what it will have at most."""

    directory: Path
    out: Path
    texts: tuple[Path, ...]
    options: TraceOptions
    tokenizer: Tokenizer
    context: int
    record: TraceRecord
    num_tokens: int = 0
    num_documents: int = 0

    @property
    def todo_bytes(self) -> int:
        """Bytes still to write."""
        return 0 if self.record.done else (self.num_tokens - self.record.num_tokens) * self.record.token_bytes

    def sequences(self, text: str, room: int) -> list[list[int]]:
        """What the model reads of a document when at most `room` tokens are left."""
        sequences = token_sequences(self.tokenizer, text, self.context)
        if self.options.generate:
            prompt_tokens = min(self.options.prompt_tokens, self.context - self.options.generate)
            sequences = [sequences[0][:prompt_tokens]]
        return list(_cut(sequences, room))


def _cut(sequences: Sequence[list[int]], room: int) -> Iterator[list[int]]:
    for sequence in sequences:
        if room > 0:
            yield sequence[:room]
        room -= len(sequence)


def trace(
    model_dir: Path, texts: Sequence[Path], options: TraceOptions = TraceOptions(), out: Path | None = None
) -> Trace:
    """The trace in `out` (default: TRACE in the model directory), made or completed, and HEAT counted from it.

    Memory holds one shard and one chunk of tokens beside the model, whatever the length.

    Raises:
        StrawError: The model, a text or an option is not usable, or the disk is too small.
        PredictorError: `out` holds the trace of another model or of other settings, or a damaged one.
    """
    plan = plan_trace(model_dir, texts, options, out)
    require_free_disk(plan.out, plan.todo_bytes, "the trace")
    with write_lock(plan.out):
        if not plan.record.done:
            _record(plan)
        made = Trace.open(plan.out, shape=plan.record.shape, fingerprint=plan.record.fingerprint)
    with write_lock(model_dir):
        write_heat(model_dir, made.uses(), made.num_tokens)
    return made


def describe_trace(
    model_dir: Path, texts: Sequence[Path], options: TraceOptions = TraceOptions(), out: Path | None = None
) -> str:
    """What `trace` would write and whether it fits, as lines of text; writes nothing. Errors as in `trace`."""
    plan = plan_trace(model_dir, texts, options, out)
    total_bytes = plan.num_tokens * plan.record.token_bytes
    counts = (("documents", plan.num_documents), ("tokens at most" if options.generate else "tokens", plan.num_tokens))
    sizes = {
        "bytes of a token": plan.record.token_bytes,
        "whole trace": total_bytes,
        "still to write": plan.todo_bytes,
        "free disk": free_disk_bytes(plan.out),
    }
    lines = [f"{what:<18}{count:>20,}" for what, count in counts]
    return "\n".join(lines + [f"{what:<18}{size:>20,} bytes {size / 1e9:>10.2f} GB" for what, size in sizes.items()])


def plan_trace(model_dir: Path, texts: Sequence[Path], options: TraceOptions, out: Path | None = None) -> TracePlan:
    """What is to be done; reads the model's headers and all text up to the limit. Errors as in `trace`."""
    with ModelDirectory(model_dir) as model:
        config, fingerprint = model.config, model.fingerprint
    context = min(DEFAULT_CONTEXT, config.max_position_embeddings)
    if options.generate >= context:
        raise StrawError(
            f"generate is {options.generate:,}, expected less than {context:,}, the context; correct --generate"
        )
    tokenizer = _require_tokenizer(model_dir)
    fresh = _fresh_record(config, fingerprint, texts, options)
    place = out or model_dir / TRACE
    plan = TracePlan(model_dir, place, tuple(texts), options, tokenizer, context, _begun(place, fresh))
    rooms = list(_planned(plan))
    return replace(plan, num_tokens=sum(rooms), num_documents=len(rooms))


def _require_tokenizer(model_dir: Path) -> Tokenizer:
    tokenizer = load_tokenizer(model_dir)
    if tokenizer is None:
        raise ArtifactError(
            f"{model_dir / TOKENIZER_FILE}: file is missing, expected the model's tokenizer to read text with; copy it there"
        )
    return tokenizer


def _fresh_record(config: ModelConfig, fingerprint: str, texts: Sequence[Path], options: TraceOptions) -> TraceRecord:
    device = compute_device(options.device).partition(":")[0]
    kept = ("tokens", "generate", "prompt_tokens", "temperature", "seed", "ladder")
    settings: dict[str, Any] = {name: asdict(options)[name] for name in kept}
    settings |= {"device": device, "dtype": _dtype(options, device), "texts": digests(texts)}
    record = TraceRecord(trace_shape(config), fingerprint, not options.routing_only, 1, settings)
    return replace(record, shard_tokens=max(1, options.shard_bytes // record.token_bytes))


def _dtype(options: TraceOptions, device: str) -> str:
    return options.dtype or ("float32" if device == "cpu" else "bfloat16")


def _begun(out: Path, fresh: TraceRecord) -> TraceRecord:
    """The record in `out` if it is of the same run as `fresh`, or `fresh` if there is none yet."""
    if not (out / RECORD).exists():
        if any(out.glob("shard-*")):
            raise PredictorError(f"{out}: shards without {RECORD}, expected both or neither; remove it and trace again")
        return fresh
    begun = read_record(out)
    if not begun.num_tokens:
        return fresh  # it ended before its first shard: nothing is lost
    require_model(out, begun, fresh.shape, fresh.fingerprint)
    names = ("has_hidden", "shard_tokens")
    wanted = {**fresh.settings, **{name: getattr(fresh, name) for name in names}}
    found = {**begun.settings, **{name: getattr(begun, name) for name in names}}
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise PredictorError(
                f"{out / RECORD}: the trace was begun with {name} {found.get(name)}, expected {wanted.get(name)}; use the same settings or another --out"
            )
    for place in begun.shards():
        map_shard(out, begun, *place)
    return begun


def _planned(plan: TracePlan) -> Iterator[int]:
    """Tokens of each document, at most."""
    room = _limit(plan)
    for document in read_documents(plan.texts):
        if room <= 0:
            return
        count = min(room, sum(map(len, plan.sequences(document.text, room))) + plan.options.generate)
        yield count
        room -= count


def _limit(plan: TracePlan) -> int:
    return sys.maxsize if plan.options.tokens is None else plan.options.tokens


def _record(plan: TracePlan) -> None:
    """Runs the model over all documents not yet recorded."""
    if plan.record.num_tokens and plan.options.ladder != EXACT:
        say(
            f"ladder {plan.options.ladder}: what is resident decides, so the rest may differ from that of an uninterrupted run"
        )
    options = plan.options
    session = open_model(
        plan.directory,
        device=compute_device(options.device),
        dtype=plan.record.settings["dtype"],
        ladder=options.ladder,
        slots=options.slots,
        vram=options.vram,
        ram=options.ram,
        context=plan.context,
        warn=say,
    )
    bar = tqdm(total=plan.num_tokens, initial=plan.record.num_tokens, desc="prep trace", unit="token", disable=None)
    with closing(session), bar:
        write_record(plan.out, plan.record)  # before any shard: shards without a record are nobody's
        session.observer = recorder = Recorder(plan.out, plan.record, bar.update)
        done = len(plan.record.documents)
        for number, document in enumerate(islice(read_documents(plan.texts), done, None), done):
            if recorder.position >= _limit(plan):
                break
            _record_document(plan, session, recorder, number, document.text)
            recorder.end_document(document.name)
        recorder.finish()


def _record_document(plan: TracePlan, session: Session, recorder: Recorder, number: int, text: str) -> None:
    room = _limit(plan) - recorder.position
    for sequence in plan.sequences(text, room):
        if not plan.options.generate and recorder.pass_by(len(sequence)):
            continue
        session.reset()
        recorder.expect(sequence)
        logits = session.prefill(sequence)
        if plan.options.generate:
            sampler = Sampler(plan.options.temperature, seed=plan.options.seed + number)
            _generate(session, recorder, logits, sampler, min(plan.options.generate, room - len(sequence)))


def _generate(session: Session, recorder: Recorder, logits: Tensor, sampler: Sampler, num_tokens: int) -> None:
    """Up to `num_tokens` steps; EOS ends the text and is not stepped."""
    for _ in range(num_tokens):
        token_id = sampler(logits)
        if token_id == session.config.eos_token_id:
            return
        recorder.expect([token_id])
        logits = session.step(token_id)
