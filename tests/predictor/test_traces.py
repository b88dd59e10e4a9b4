"""Traces as files and as a data set: what is written is read, from where it lies, and what is damaged or foreign is refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from predictor.errors import PredictorError
from predictor.trace_files import (
    DTYPES,
    RECORD,
    TraceRecord,
    read_record,
    shard_header,
    shard_path,
    shard_specs,
    write_record,
    write_shard,
)
from predictor.traces import Document, Trace, TraceShape

SHAPE = TraceShape(hidden_size=6, num_experts=9, num_layers=3, num_picks=2)
LENGTHS = (4, 11, 2, 6)  # of the documents; shards of 5 tokens cut through them


def make_record(**changes: object) -> TraceRecord:
    documents, start = [], 0
    for number, length in enumerate(LENGTHS):
        documents.append(Document(f"d{number}", start, length))
        start += length
    record = TraceRecord(SHAPE, "fp", True, 5, {"ladder": "exact"}, start, tuple(documents), done=True)
    return replace(record, **changes)  # type: ignore[arg-type]


def write_trace(directory: Path, record: TraceRecord) -> dict[str, Tensor]:
    """All tokens of random content by name; token axis first."""
    generator = torch.Generator().manual_seed(0)
    whole: dict[str, Tensor] = {}
    for name, (dtype, shape) in shard_specs(record, record.num_tokens).items():
        numbers = torch.randint(0, record.shape.num_experts, shape, generator=generator)
        whole[name] = numbers.to(DTYPES[dtype])
    for start, count in record.shards():
        parts = {
            name: part[..., start : start + count] if part.dim() == 1 else part[:, start : start + count]
            for name, part in whole.items()
        }
        write_shard(directory, record, start, parts)
    write_record(directory, record)
    return {name: part if part.dim() == 1 else part.transpose(0, 1) for name, part in whole.items()}


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Tensor]:
    return write_trace(tmp_path, make_record())


@pytest.mark.parametrize("tokens", [[0], [22, 0, 7, 7, 4, 5], list(range(23)), []])
def test_any_tokens_come_back_as_written(tmp_path: Path, written: dict[str, Tensor], tokens: list[int]) -> None:
    trace, chosen = Trace.open(tmp_path), torch.tensor(tokens, dtype=torch.int64)
    assert (trace.shape, trace.fingerprint, trace.num_tokens, trace.has_hidden) == (SHAPE, "fp", 23, True)
    for name, dtype in {
        "ids": torch.int64,
        "weights": torch.float32,
        "hidden": torch.bfloat16,
        "token_ids": torch.int64,
    }.items():
        found = getattr(trace, name)(chosen)
        assert found.dtype == dtype
        assert torch.equal(found, written[name][chosen].to(dtype)), name


def test_shards_are_safetensors_files_with_their_place(tmp_path: Path, written: dict[str, Tensor]) -> None:
    with safe_open(tmp_path / "shard-00002.safetensors", "pt") as file:
        assert file.metadata() == {"first_token": "10"}
        assert torch.equal(file.get_tensor("hidden").transpose(0, 1), written["hidden"][10:15])
        assert sorted(file.keys()) == ["hidden", "ids", "token_ids", "weights"]


def test_uses_count_every_pick(tmp_path: Path, written: dict[str, Tensor]) -> None:
    uses = Trace.open(tmp_path).uses()
    assert uses.sum() == 23 * 3 * 2
    assert uses[1, 4] == (written["ids"][:, 1] == 4).sum() > 0


def test_tokens_outside_are_an_error(tmp_path: Path, written: dict[str, Tensor]) -> None:
    for outside in (-1, 23):
        with pytest.raises(ValueError, match=f"{outside}.*expected some of 0 to 22"):
            Trace.open(tmp_path).ids(torch.tensor([outside]))


@pytest.mark.parametrize("held_out", [0.01, 0.1, 0.5, 0.99])
def test_split_holds_out_whole_documents(tmp_path: Path, written: dict[str, Tensor], held_out: float) -> None:
    trace = Trace.open(tmp_path)
    train, held = trace.split(held_out, seed=3)
    assert torch.equal(torch.cat((train, held)).sort().values, torch.arange(23))
    assert len(train) and len(held) and (len(held) >= held_out * 23 or held_out == 0.99)
    sides = [
        {int(token) in set(held.tolist()) for token in range(d.first_token, d.first_token + d.num_tokens)}
        for d in trace.documents
    ]
    assert all(len(side) == 1 for side in sides)
    assert torch.equal(trace.split(held_out, seed=3)[1], held)
    assert len({tuple(trace.split(held_out, seed=seed)[1].tolist()) for seed in range(8)}) > 1


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    write_trace(tmp_path, make_record(documents=(Document("all", 0, 23),)))
    with pytest.raises(PredictorError, match=r"one document of 23 tokens, expected two or more.*trace more files"):
        Trace.open(tmp_path).split()


def test_routing_only_has_no_hidden_states(tmp_path: Path) -> None:
    written = write_trace(tmp_path, make_record(has_hidden=False))
    trace = Trace.open(tmp_path)
    assert torch.equal(trace.weights(torch.arange(23)), written["weights"])
    assert not trace.has_hidden
    with pytest.raises(PredictorError, match="routing-only trace, expected one with hidden states"):
        trace.hidden(torch.tensor([0]))


@pytest.mark.parametrize("name", ["hidden_size", "num_experts", "num_layers", "num_picks"])
def test_another_models_trace_is_refused_by_name(tmp_path: Path, written: dict[str, Tensor], name: str) -> None:
    found = getattr(SHAPE, name)
    other = replace(SHAPE, **{name: found + 1})
    with pytest.raises(PredictorError, match=f"{RECORD}: {name} is {found}, expected {found + 1}; .*another model"):
        Trace.open(tmp_path, shape=other, fingerprint="fp")
    with pytest.raises(PredictorError, match="fingerprint is fp, expected else"):
        Trace.open(tmp_path, shape=SHAPE, fingerprint="else")
    Trace.open(tmp_path, shape=SHAPE, fingerprint="fp")


def _edit(**changes: object) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        content = json.loads((directory / RECORD).read_text()) | changes
        (directory / RECORD).write_text(json.dumps(content))

    return edit


def _documents(*lengths: int) -> Callable[[Path], object]:
    return _edit(documents=[{"name": "d", "first_token": 0, "num_tokens": length} for length in lengths])


def _swap(directory: Path) -> None:
    first, second = directory / "shard-00000.safetensors", directory / "shard-00001.safetensors"
    first.write_bytes(second.read_bytes())


SHARD = "shard-00004.safetensors"
DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no record", lambda d: (d / RECORD).unlink(), r"trace\.json: cannot be read \(No such file.*run: prep trace"),
    ("no json", lambda d: (d / RECORD).write_text("{"), r"trace\.json: not the record of a trace"),
    ("a list", lambda d: (d / RECORD).write_text("[]"), r"trace\.json: not the record of a trace"),
    ("version", _edit(schema_version=2), "schema version 2, expected 1"),
    ("unknown key", _edit(more=1), "not the record of a trace"),
    ("no layers", _edit(num_layers=0), "not the record of a trace"),
    ("text for a number", _edit(shard_tokens="5"), "not the record of a trace"),
    ("text for a flag", _edit(done="yes"), "not the record of a trace"),
    ("documents too short", _documents(20), "documents of 20 tokens in a trace of 23"),
    ("documents overlap", _documents(11, 12), "begins at another token than 11"),
    ("unfinished", _edit(done=False), "23 tokens so far, expected a finished trace; run the same prep trace again"),
    ("no shard", lambda d: (d / SHARD).unlink(), f"{SHARD}: cannot be read .No such file"),
    ("short shard", lambda d: os.truncate(d / SHARD, 500), f"{SHARD}: 500 bytes, expected [0-9]+ for 3 tokens"),
    ("another shard", _swap, "shard-00000.*its header differs, expected that of tokens 0 to 4"),
]


@pytest.mark.parametrize(("damage", "line"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_damage_is_one_line(
    tmp_path: Path, written: dict[str, Tensor], damage: Callable[[Path], object], line: str
) -> None:
    damage(tmp_path)
    with pytest.raises(PredictorError, match=line) as raised:
        Trace.open(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_record_is_read_as_written(tmp_path: Path) -> None:
    record = make_record(done=False, num_tokens=25)
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record


def test_a_refused_write_leaves_nothing(
    tmp_path: Path, written: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PredictorError, match=r"trace\.json: writing failed \(No space left"):
        write_record(tmp_path, make_record(num_tokens=0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


MEASURE = """
import sys, torch
from pathlib import Path
from predictor.traces import Trace
def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
trace = Trace.open(Path(sys.argv[1]))
tokens = torch.arange(0, trace.num_tokens, 100)
trace.hidden(tokens[:2])
before = anonymous_bytes()
rows = trace.hidden(tokens)
trace.ids(tokens)
print(anonymous_bytes() - before, rows.nbytes)
"""


def test_gathering_needs_memory_for_the_batch_alone(tmp_path: Path) -> None:
    """From two sparse shards of 410 MB; in a process of its own, whose memory is nobody else's."""
    shape = TraceShape(hidden_size=4096, num_experts=256, num_layers=10, num_picks=6)
    record = TraceRecord(shape, "fp", True, 5_000, {}, 10_000, (Document("d", 0, 10_000),), done=True)
    for start, count in record.shards():
        header = shard_header(record, start, count)
        shard_path(tmp_path, record, start).write_bytes(header)
        os.truncate(shard_path(tmp_path, record, start), len(header) + count * record.token_bytes)
    write_record(tmp_path, record)
    finished = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    grown_bytes, batch_bytes = map(int, finished.stdout.split())
    assert batch_bytes == 100 * 10 * 4096 * 2
    assert grown_bytes < 4 * batch_bytes
