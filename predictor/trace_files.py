"""The files of a routing trace: their schema, writer and reader. Owns their bytes; what is made of them is `traces.py`'s.

A trace is RECORD (TraceRecord as JSON) and shards of `shard_tokens` tokens each, the last one shorter. A shard is a safetensors
file: `weights` F32 [L, n, K], `token_ids` I32 [n], `ids` I16 [L, n, K] with the best weight first, and unless the trace is
routing-only `hidden` BF16 [L, n, D], the router's input after ffn_norm; its metadata has `first_token`. All of a shard but the
tensors' own bytes follows from the record, which is how it is checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from predictor.errors import PredictorError
from predictor.files import replace_file

SCHEMA_VERSION = 1
RECORD = "trace.json"
SHARD_BYTES = 256_000_000  # of a full shard, which the writer holds in memory
DTYPES = {"I16": torch.int16, "I32": torch.int32, "F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The sizes of a model that a trace depends on."""

    hidden_size: int
    num_experts: int
    num_layers: int
    num_picks: int


@dataclass(frozen=True, slots=True)
class Document:
    """Consecutive tokens of one sequence from its position 0: `num_tokens` from the trace's token `first_token` on."""

    name: str
    first_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """The content of `trace.json`: true of what lies in whole shards, whenever it is read."""

    shape: TraceShape
    fingerprint: str  # of the model's source, as in its manifest
    has_hidden: bool
    shard_tokens: int
    settings: dict[str, Any]  # what a resumed run must be given again
    num_tokens: int = 0
    documents: tuple[Document, ...] = ()  # those of which every token is recorded
    done: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in a shard."""
        return sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in shard_specs(self, 1).values())

    def shards(self) -> list[tuple[int, int]]:
        """(first token, tokens) of each shard that is there."""
        starts = range(0, self.num_tokens, self.shard_tokens)
        return [(start, min(self.shard_tokens, self.num_tokens - start)) for start in starts]


def shard_specs(record: TraceRecord, num_tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of a shard's tensors, in the order of their bytes: the widest numbers first, so that each lies aligned."""
    layers, picks = record.shape.num_layers, (num_tokens, record.shape.num_picks)
    specs: dict[str, tuple[str, tuple[int, ...]]] = {
        "weights": ("F32", (layers, *picks)),
        "token_ids": ("I32", (num_tokens,)),
        "ids": ("I16", (layers, *picks)),
    }
    return specs | ({"hidden": ("BF16", (layers, num_tokens, record.shape.hidden_size))} if record.has_hidden else {})


def shard_header(record: TraceRecord, first_token: int, num_tokens: int) -> bytes:
    """The first bytes of the shard with these tokens; the tensors of `shard_specs` follow back to back."""
    header: dict[str, Any] = {"__metadata__": {"first_token": str(first_token)}}
    begin = 0
    for name, (dtype, shape) in shard_specs(record, num_tokens).items():
        end = begin + prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shard_path(directory: Path, record: TraceRecord, first_token: int) -> Path:
    """Where the shard that begins with `first_token` lies."""
    return directory / f"shard-{first_token // record.shard_tokens:05d}.safetensors"


def write_shard(directory: Path, record: TraceRecord, first_token: int, tensors: Mapping[str, Tensor]) -> None:
    """Replaces one shard, whole or not at all; `tensors` on the CPU as in `shard_specs`, at most `shard_tokens` of them.

    Raises:
        PredictorError: The system refused to write.
    """
    num_tokens = len(tensors["token_ids"])
    pieces = [tensors[name] for name in shard_specs(record, num_tokens)]
    header = shard_header(record, first_token, num_tokens)
    # A layer at a time: what is contiguous is written from where it lies, and a cut shard is never copied whole.
    rows = (row for tensor in pieces for row in (tensor if tensor.dim() == 3 else tensor[None]))
    contents = (row.contiguous().flatten().view(torch.uint8).numpy().data for row in rows)
    _write_file(shard_path(directory, record, first_token), (part for parts in ([header], contents) for part in parts))


def write_record(directory: Path, record: TraceRecord) -> None:
    """Replaces `trace.json`, whole or not at all; PredictorError if the system refused."""
    content = {"schema_version": SCHEMA_VERSION, **asdict(record)}
    content = {**content.pop("shape"), **content}
    _write_file(directory / RECORD, [json.dumps(content, indent=1).encode() + b"\n"])


def _write_file(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    try:
        replace_file(path, contents)
    except OSError as cause:
        raise PredictorError(
            f"{path}: writing failed ({cause.strerror}), expected room and permission; mend that and run the same command again, it continues where it stopped"
        ) from cause


def read_record(directory: Path) -> TraceRecord:
    """What `trace.json` in `directory` says; the shards are not looked at.

    Raises:
        PredictorError: It is missing, damaged or of another schema version.
    """
    path = directory / RECORD
    try:
        raw = json.loads(path.read_bytes())
        version = raw.pop("schema_version")
        if version == SCHEMA_VERSION:
            return _record_from_json(raw)
    except OSError as cause:
        raise PredictorError(
            f"{path}: cannot be read ({cause.strerror}), expected the record of a trace; run: prep trace MODEL --text FILE"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise PredictorError(
            f"{path}: not the record of a trace ({cause!r}); remove {directory} and trace again"
        ) from None
    raise PredictorError(
        f"{path}: schema version {version!r}, expected {SCHEMA_VERSION}; remove {directory} and trace again"
    )


def _record_from_json(raw: dict[str, Any]) -> TraceRecord:
    shape = TraceShape(**{item.name: _count(raw.pop(item.name), 1) for item in fields(TraceShape)})
    documents = tuple(Document(**document) for document in raw.pop("documents"))
    record = TraceRecord(shape=shape, documents=documents, **raw)
    _count(record.shard_tokens, 1)
    _count(record.num_tokens, 0)
    kinds = {"fingerprint": str, "settings": dict, "has_hidden": bool, "done": bool}
    for name, kind in kinds.items():
        if type(getattr(record, name)) is not kind:
            raise TypeError(f"{name} is {getattr(record, name)!r}, expected {kind.__name__}")
    end = 0
    for document in documents:
        if document.first_token != end:
            raise ValueError(f"{document} begins at another token than {end}")
        end += _count(document.num_tokens, 1)
    if end > record.num_tokens or (record.done and end < record.num_tokens):
        raise ValueError(f"documents of {end} tokens in a trace of {record.num_tokens}")
    return record


def _count(value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no integer of at least {least}")
    return value


def require_model(directory: Path, record: TraceRecord, shape: TraceShape | None, fingerprint: str | None) -> None:
    """Raises PredictorError if the trace in `directory` is of another model than this one; None is any."""
    wanted = {**(asdict(shape) if shape else {}), **({"fingerprint": fingerprint} if fingerprint else {})}
    found = {**asdict(record.shape), "fingerprint": record.fingerprint}
    for name, expected in wanted.items():
        if found[name] != expected:
            raise PredictorError(
                f"{directory / RECORD}: {name} is {found[name]}, expected {expected}; it is the trace of another model, name another directory or trace this one"
            )


def map_shard(directory: Path, record: TraceRecord, first_token: int, num_tokens: int) -> dict[str, Tensor]:
    """The tensors of one shard, mapped where they lie; nothing but the header is read.

    Raises:
        PredictorError: The file is missing, or is not of the size or header that `record` asks for.
    """
    path, header = shard_path(directory, record, first_token), shard_header(record, first_token, num_tokens)
    size_bytes = len(header) + num_tokens * record.token_bytes
    remedy = f"remove {directory} and trace again"
    try:
        found_bytes = path.stat().st_size
        with path.open("rb") as file:
            found = file.read(len(header))
    except OSError as cause:
        raise PredictorError(
            f"{path}: cannot be read ({cause.strerror}), expected a shard of the trace; {remedy}"
        ) from None
    if found_bytes != size_bytes:
        raise PredictorError(
            f"{path}: {found_bytes:,} bytes, expected {size_bytes:,} for {num_tokens:,} tokens; {remedy}"
        )
    if found != header:
        raise PredictorError(
            f"{path}: its header differs, expected that of tokens {first_token:,} to {first_token + num_tokens - 1:,}; {remedy}"
        )
    # A private map: pages come from the file and are given back to it; nothing is ever written to them.
    content = torch.from_file(str(path), shared=False, size=size_bytes, dtype=torch.uint8)
    tensors, begin = {}, len(header)
    for name, (dtype, shape) in shard_specs(record, num_tokens).items():
        end = begin + prod(shape) * DTYPES[dtype].itemsize
        tensors[name] = content[begin:end].view(DTYPES[dtype]).view(shape)
        begin = end
    return tensors
