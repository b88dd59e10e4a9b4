"""`prep verify`: whether a model directory or a released checkpoint is, byte for byte, what it should be. Writes nothing.

Opening checks names, sizes, shapes and headers; here contents are read and compared with their checksums, and `deep`
computes a sample of the 2-bit codes again. A checkpoint carries no checksums: names, shapes, totals and the tokenizer only.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from kernels.formats import CODES
from prep.codecs import Shape, encode, fp4_matrices
from prep.jobs import progress, say
from prep.slab_io import SlabCheck, checksum_damage, submit_slab
from runtime.artifact import COPY_CHECKSUM, DENSE_CHECKSUMS, ModelDirectory, checksum
from runtime.checkpoint import INDEX, REMEDY, Checkpoint, dense_tensors
from runtime.config import ModelConfig, read_json
from runtime.errors import ArtifactError, CheckpointError, StrawError
from runtime.manifest import (
    CHECKSUMS,
    DENSE,
    MANIFEST,
    TABLES,
    content_remedy,
    expert_file,
    manifest_checksum,
    remedy,
    start_over,
)
from runtime.safetensors_file import SafetensorsFile
from runtime.store.arena import HostArena
from runtime.store.reader import SlabReader, Ticket
from runtime.tables import layer_tables
from runtime.tokenizer import encode as encode_text
from runtime.tokenizer import load_tokenizer

RELEASED_VOCABULARY = 129_280  # whose tokenizer.json is known
TOKENIZER_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
TOKENIZER_CHECKS = {
    "hello": [33310],
    " hello": [44388],
    "two": [23315],
    " two": [1234],
    "Hello world": [19923, 2058],
    "123": [6895],
    "Hello</think>": [19923, 128822],
}
DEPTH = 16  # slabs in memory
DEEP_LAYERS, DEEP_EXPERTS = 4, 2  # computed again, spread evenly

Findings = Iterator[str]  # one line for each thing that is not as it must be
Advance = Callable[[int], object]


def verify(directory: Path, deep: bool = False) -> list[str]:
    """One line for each thing found damaged, empty if all is well: what, found, expected, what to do.

    Args:
        directory: A model directory or a released checkpoint.
        deep: Of a model directory that is else whole also quantise a sample of experts again and compare the bytes.

    Raises:
        StrawError: It is neither, or so damaged that it cannot be opened.
    """
    if (directory / MANIFEST).exists():
        with ModelDirectory(directory) as model:
            findings = list(_verify_model(model))
            if deep and not findings:  # what is not as written tells nothing about the codes
                findings = [line for code in model.codes for line in _verify_code(model, code)]
            return findings
    if (directory / INDEX).exists():
        with closing(Checkpoint(directory)) as checkpoint:
            return list(_verify_checkpoint(checkpoint))
    raise ArtifactError(
        f"{directory}: neither {MANIFEST} nor {INDEX} in it, expected a model directory or a released checkpoint; name another"
    )


def _verify_model(model: ModelDirectory) -> Findings:
    experts = model.config.num_hidden_layers * model.config.n_routed_experts
    slabs = experts * sum(record.slab_stride_bytes for record in model.planes.values())
    yield from _verify_manifest(model)
    yield from _verify_copies(model)
    if "synth" not in model.manifest.stages:  # random weights come without a tokenizer
        yield from verify_tokenizer(model.directory, model.config)
    yield from _verify_tables(model)
    with progress(slabs + model.manifest.files[DENSE], "prep verify") as bar:
        yield from _verify_dense(model, bar.update)
        yield from _verify_slabs(model, bar.update)


def _damage(model: ModelDirectory, name: str, problem: str) -> str:
    return f"{model.directory / name}: {problem}; {content_remedy(model.directory, model.manifest, name)}"


def _other_checksum(
    model: ModelDirectory, name: str, what: str, found: int, expected: int, entry: str | None = None
) -> str:
    return checksum_damage(model.directory, model.manifest, name, what, found, expected, entry)


def _verify_manifest(model: ModelDirectory) -> Findings:
    content = json.loads((model.directory / MANIFEST).read_bytes())
    found, expected = manifest_checksum(content), content.get("checksum")
    if expected is not None and found != expected:
        yield f"{model.directory / MANIFEST}: CRC-32 {found:08x}, expected {expected:08x}; edited or damaged, {start_over(model.directory, model.manifest)}"


def _verify_copies(model: ModelDirectory) -> Findings:
    for name, expected in model.read_checksums().items():
        if name.startswith(COPY_CHECKSUM):
            name = name.removeprefix(COPY_CHECKSUM)
            path = model.directory / name
            if not path.is_file() or expected.numel() != 1:
                yield f"{model.directory / CHECKSUMS}: has {expected.numel()} checksums of {name}, expected one of each copied file and no other; {remedy(model.directory, model.manifest, CHECKSUMS)}"
                continue
            found = zlib.crc32(path.read_bytes())
            if found != int(expected):
                yield _other_checksum(model, name, "the whole file", found, int(expected))


def _verify_tables(model: ModelDirectory) -> Findings:
    checksums = model.read_checksums()
    for name, tensor in model.read_tables().items():
        recorded = checksums.get(name, torch.empty(0))
        if recorded.shape != tensor.shape[:1]:
            yield f"{model.directory / CHECKSUMS}: has {recorded.numel()} checksums of {name}, expected {len(tensor)}; {content_remedy(model.directory, model.manifest, TABLES, name)}"
            continue
        for layer_idx, expected in enumerate(recorded.tolist()):
            found = checksum(tensor[layer_idx])
            if found != expected:
                yield _other_checksum(model, TABLES, f"layer {layer_idx} of {name}", found, expected, name)


def _verify_dense(model: ModelDirectory, advance: Advance) -> Findings:
    checksums = model.read_checksums()[DENSE_CHECKSUMS].tolist()
    for name, expected in zip(sorted(dense_tensors(model.config)), checksums, strict=True):
        tensor = model.read(name)
        found = checksum(tensor)
        if found != expected:
            yield _other_checksum(model, DENSE, f"tensor {name}", found, expected)
        advance(tensor.nbytes)


def _verify_slabs(model: ModelDirectory, advance: Advance) -> Findings:
    """Every slab with its padding; DEPTH of a plane are under way at once."""
    check = SlabCheck(model.directory, model.manifest, model.planes, model.read_checksums())
    keys = [(idx, e) for idx in range(model.config.num_hidden_layers) for e in range(model.config.n_routed_experts)]
    for plane, record in model.planes.items():
        stride = record.slab_stride_bytes
        arena = HostArena(DEPTH * stride)
        free, under_way = deque(arena.take(stride) for _ in range(DEPTH)), deque[tuple[Ticket, Tensor]]()
        with SlabReader([model.directory], warn=say) as reader:
            for layer_idx, expert_id in keys:
                if not free:
                    yield from _wait(under_way, free)
                block = free.popleft()
                under_way.append((submit_slab(reader, plane, layer_idx, expert_id, block, check), block))
                advance(stride)
            while under_way:
                yield from _wait(under_way, free)


def _wait(under_way: deque[tuple[Ticket, Tensor]], free: deque[Tensor]) -> Findings:
    ticket, block = under_way.popleft()
    free.append(block)
    try:
        ticket.wait()
    except StrawError as error:
        yield str(error)


def _verify_code(model: ModelDirectory, code: str) -> Findings:
    """Names the first expert of a sample that is coded otherwise than its FP4 and the tables say."""
    config, experts = model.config, model.config.n_routed_experts
    shape = Shape(config.hidden_size, config.moe_intermediate_size)
    source = ("fp4",) if "fp4" in model.planes else ("base", "residual")
    tables = model.read_tables()
    for layer_idx in _spread(config.num_hidden_layers, DEEP_LAYERS):
        split_rows = layer_tables(tables, "split", layer_idx) if "base" in source else None
        rows = layer_tables(tables, code, layer_idx)
        for expert_id in _spread(experts, DEEP_EXPERTS):
            slabs = {plane: model.read_slab(layer_idx, expert_id, plane)[None] for plane in source}
            wanted = {plane: model.read_slab(layer_idx, expert_id, plane)[None] for plane in CODES[code].planes}
            found = {plane: torch.zeros_like(slab) for plane, slab in wanted.items()}
            try:
                normalisers = encode(code, fp4_matrices(slabs, shape, split_rows), rows, found)
            except ValueError as cause:
                problem = f"layer {layer_idx} expert {expert_id}: cannot be coded ({cause}), expected FP4 values"
                yield _damage(model, expert_file(source[0], layer_idx), problem)
                return
            same = all(torch.equal(found[plane], slab) for plane, slab in wanted.items())
            if not same or not _same_normalisers(normalisers, rows, code, expert_id):
                problem = (
                    f"layer {layer_idx} expert {expert_id} {code}: not what its FP4 gives, expected the same bytes"
                )
                yield _damage(model, expert_file(CODES[code].planes[0], layer_idx), problem)
                return


def _same_normalisers(normalisers: Tensor | None, rows: dict[str, Tensor], code: str, expert_id: int) -> bool:
    return normalisers is None or torch.equal(normalisers[0].cpu(), rows[f"{code}.normalisers"][expert_id])


def _spread(count: int, wanted: int) -> list[int]:
    return sorted({place * (count - 1) // max(1, wanted - 1) for place in range(wanted)})


def _verify_checkpoint(checkpoint: Checkpoint) -> Findings:
    """What opening does not check: stray tensors in shards, byte totals, the tokenizer."""
    total = 0
    for shard in sorted(set(checkpoint.shard_of.values())):
        with closing(SafetensorsFile(checkpoint.directory / shard, CheckpointError, REMEDY)) as file:
            stray = sorted(name for name in file.entries if checkpoint.shard_of.get(name) != shard)
            if stray:
                yield f"{file.path}: holds {stray[0]}, expected only what {INDEX} says lies here; {REMEDY}"
            total += sum(entry.size_bytes for entry in file.entries.values())
    metadata = read_json(checkpoint.directory / INDEX).get("metadata") or {}
    declared = metadata.get("total_size") if isinstance(metadata, dict) else metadata
    if declared is not None and declared != total:
        size = f"{declared:,} bytes" if isinstance(declared, int) else repr(declared)
        yield f"{checkpoint.directory / INDEX}: total_size is {size}, the shards hold {total:,} bytes, expected the same; fetch them again"
    yield from verify_tokenizer(checkpoint.directory, checkpoint.config)


def verify_tokenizer(directory: Path, config: ModelConfig) -> Findings:
    """Findings about tokenizer.json where the vocabulary is the released one; nothing for any other."""
    if config.vocab_size != RELEASED_VOCABULARY:
        return
    path = directory / "tokenizer.json"
    if not path.is_file():
        yield f"{path}: file is missing, expected the released one; fetch it again"
        return
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != TOKENIZER_SHA256:
        yield f"{path}: SHA-256 {found}, expected {TOKENIZER_SHA256}; fetch it again"
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None, f"{path} was there a moment ago"
    for text, expected in TOKENIZER_CHECKS.items():
        ids = encode_text(tokenizer, text)
        if ids != expected:
            yield f"{path}: {text!r} is {ids}, expected {expected}; fetch it again"
