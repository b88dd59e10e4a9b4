"""`prep all`: layout, requant, trace and train-predictor, one after the other; what is finished is skipped. Owns their order.

The estimate for `--dry-run` is in bytes that follow from the config, and in the least time that the drive needs for them at the
rate at which it reads the checkpoint now; arithmetic comes on top and depends on the machine.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from kernels.formats import CODES
from predictor.errors import PredictorError
from predictor.model import WIDTH, load
from predictor.trace_files import RECORD, TraceRecord, read_record
from prep.jobs import free_disk_bytes, say
from prep.layout import layout
from prep.requant import DEFAULT_CODEC, requant
from prep.source import open_source
from prep.trace import TraceOptions, trace
from prep.train_predictor import Settings, train_predictor
from runtime.artifact import MANIFEST, ModelDirectory, read_manifest
from runtime.config import ModelConfig
from runtime.documents import read_documents, token_sequences
from runtime.engine import PREFILL_CHUNK
from runtime.errors import StrawError
from runtime.manifest import CODECS, PREDICTOR, TRACE, PlaneRecord
from runtime.predictors import trace_shape
from runtime.tokenizer import load_tokenizer

SAMPLE_BYTES = 256_000_000  # of the checkpoint, read to learn the drive's rate
READ_BYTES = 4_194_304
LEAST_DOCUMENTS = 3  # to train on, to choose by and to measure on


class Stage(NamedTuple):
    """One stage before it runs: what it writes, and what it reads and writes in all."""

    name: str
    is_done: bool
    new_bytes: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class AllOptions:
    """What the stages are given.

    Attributes:
        codec: As of `prep requant`; None is its default.
        tokens: Of the trace, over all documents; None is all there are.
        device: Where requant, trace and training compute.
    """

    codec: str | None = None
    tokens: int | None = None
    device: str = "cpu"


def run_all(checkpoint: Path, directory: Path, texts: Sequence[Path], options: AllOptions) -> list[str]:
    """Makes `directory` whole, each stage at most once; a line for each, whether it ran or was finished before.

    Raises:
        StrawError, PredictorError: As the stages do; what they had finished stays, and the same command goes on.
    """
    lines = []
    for stage in plan_all(checkpoint, directory, texts, options):
        if not stage.is_done:
            tqdm.write(f"prep {stage.name} ...", file=sys.stderr)
            _run(stage.name, checkpoint, directory, texts, options)
        lines.append(f"{stage.name}: {'was finished' if stage.is_done else 'done'}")
    return lines


def _run(name: str, checkpoint: Path, directory: Path, texts: Sequence[Path], options: AllOptions) -> None:
    if name == "layout":
        layout(checkpoint, directory)
    elif name == "requant":
        requant(directory, options.codec, device=options.device)
    elif name == "trace":
        trace(directory, texts, TraceOptions(tokens=options.tokens, device=options.device))
    else:
        train_predictor(directory, Settings(device=options.device))


def describe_all(checkpoint: Path, directory: Path, texts: Sequence[Path], options: AllOptions) -> str:
    """Each stage with what it writes and the least time its bytes take, and the sums beside the free disk; writes nothing."""
    stages = plan_all(checkpoint, directory, texts, options)
    rate = drive_rate(checkpoint)
    todo = [stage for stage in stages if not stage.is_done]
    sums = Stage("in all", False, sum(s.new_bytes for s in todo), sum(s.moved_bytes for s in todo))
    lines = [f"{'stage':<16}{'writes':>22}{'moves':>14}{'at least':>12}"]
    lines += [f"{stage.name:<16}{'finished':>22}" if stage.is_done else _row(stage, rate) for stage in (*stages, sums)]
    lines.append(f"{'free disk':<16}{free_disk_bytes(directory):>16,} bytes; the drive reads {rate / 1e9:.2f} GB/s now")
    return "\n".join(lines)


def _row(stage: Stage, rate: float) -> str:
    return f"{stage.name:<16}{stage.new_bytes:>16,} bytes{stage.moved_bytes / 1e9:>11.2f} GB{stage.moved_bytes / rate / 60:>8.1f} min"


def plan_all(checkpoint: Path, directory: Path, texts: Sequence[Path], options: AllOptions) -> list[Stage]:
    """The stages in order. Reads headers and the text; errors as of the stages for what is missing or damaged already."""
    with closing(open_source(checkpoint, directory)) as source:
        config = source.config
    num_experts = config.num_hidden_layers * config.n_routed_experts
    fp4_bytes = num_experts * PlaneRecord.of("fp4", config).slab_stride_bytes
    code = CODECS[options.codec or DEFAULT_CODEC]
    two_bit_bytes = num_experts * sum(PlaneRecord.of(plane, config).slab_stride_bytes for plane in CODES[code].planes)
    source_bytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    num_tokens = _num_tokens(checkpoint, texts, options, config)
    shape = trace_shape(config)
    trace_bytes = num_tokens * TraceRecord(shape, "", True, 1, {}).token_bytes
    chunk_bytes = -(-num_tokens // PREFILL_CHUNK) * fp4_bytes  # a chunk of a prefill asks for nearly all experts
    weights = 4 * (WIDTH * (shape.hidden_size + WIDTH) + WIDTH * 2 * shape.num_experts)
    done = _finished(directory, code)
    return [
        Stage("layout", "layout" in done, source_bytes, 2 * source_bytes),
        Stage("requant", "requant" in done, two_bit_bytes, fp4_bytes + two_bit_bytes),
        Stage("trace", "trace" in done, trace_bytes, trace_bytes + chunk_bytes),
        Stage("train-predictor", "train-predictor" in done, weights, trace_bytes),
    ]


def _num_tokens(checkpoint: Path, texts: Sequence[Path], options: AllOptions, config: ModelConfig) -> int:
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise StrawError(
            f"{checkpoint}: no tokenizer.json, expected one to read text with; copy it from the release, or run: prep layout and prep requant"
        )
    limit, count, documents = options.tokens, 0, 0
    for document in read_documents(texts):
        documents += 1
        count += sum(map(len, token_sequences(tokenizer, document.text, config.max_position_embeddings)))
        if limit is not None and count >= limit:
            count = limit
            break
    if documents < LEAST_DOCUMENTS:
        raise StrawError(
            f"--text: {documents} documents in {count:,} tokens, expected at least {LEAST_DOCUMENTS}: the predictor is tried on documents that it has not seen; give more files, a .jsonl with one document a line, or more --tokens"
        )
    return count


def _finished(directory: Path, code: str) -> set[str]:
    """Names of the stages that need not run."""
    if not (directory / MANIFEST).exists():
        return set()
    manifest = read_manifest(directory)
    layout_stage = manifest.stages.get("layout")
    if layout_stage is None or not layout_stage.done:
        return set()
    done = {"layout"}
    if code in manifest.complete_codes() and manifest.code == code:
        done.add("requant")
    if (directory / TRACE / RECORD).exists() and read_record(directory / TRACE).done:
        done.add("trace")
    if _has_predictor(directory):
        done.add("train-predictor")
    return done


def _has_predictor(directory: Path) -> bool:
    """Whether a usable predictor of this model is there; one of another model is trained anew."""
    if not (directory / PREDICTOR).exists():
        return False
    with ModelDirectory(directory) as model:
        shape, fingerprint = trace_shape(model.config), model.fingerprint
    try:
        load(directory / PREDICTOR, shape=shape, fingerprint=fingerprint, routers=[None] * shape.num_layers)
    except PredictorError as error:
        say(str(error))
        return False
    return True


def drive_rate(checkpoint: Path) -> float:
    """Bytes per second at which the largest file of the checkpoint is read past the page cache, one read after the other."""
    largest = max(checkpoint.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    buffer = mmap.mmap(-1, READ_BYTES)
    descriptor = os.open(largest, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start, done = time.perf_counter(), 0
        while done < SAMPLE_BYTES and (count := os.preadv(descriptor, [buffer], done)):
            done += count
        return done / max(time.perf_counter() - start, 1e-9)
    finally:
        os.close(descriptor)
