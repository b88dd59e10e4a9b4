"""Removal of what has become redundant: fp4 files after `split`, source shards after `layout`. Nothing goes before it is read back.

A file is removed only when what replaces it was written, synced, recorded in the manifest, read from the drive again and found
to hold the same. The manifest's line goes first, the file second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.formats import PLANES, Matrix, split_slab, unpack_codes
from prep.codecs import Shape, fp4_matrices
from prep.jobs import say
from prep.requant_plan import require_intact_split
from prep.slab_io import BlockRing, SlabCheck, batches, read_ahead
from runtime.artifact import byte_view, read_checksums, read_tables
from runtime.checkpoint import Checkpoint, dense_tensors, expert_tensors
from runtime.config import ModelConfig
from runtime.errors import ArtifactError, CheckpointError
from runtime.files import remove_file
from runtime.manifest import DENSE, Manifest, PlaneRecord, expert_file, write_manifest
from runtime.safetensors_file import SafetensorsFile
from runtime.store.arena import HostArena
from runtime.store.reader import SlabReader
from runtime.tables import layer_tables

BATCH = 4  # experts compared at once, each from three files
DEPTH = 2
THREADS = 4  # experts of a shard compared at once


def consume_fp4_layer(directory: Path, config: ModelConfig, manifest: Manifest, layer_idx: int) -> Manifest:
    """The manifest after the layer's fp4 file has gone, if base and residual on the drive give the same; else unchanged.

    Raises:
        StrawError: They give something else, or could not be read; the fp4 file stays.
    """
    name = expert_file("fp4", layer_idx)
    if any(expert_file(plane, layer_idx) not in manifest.files for plane in ("base", "residual")):
        return manifest
    if name in manifest.files:
        _require_same_fp4(directory, config, manifest, layer_idx)
        files = {other: size for other, size in manifest.files.items() if other != name}
        manifest = replace(manifest, files=files)
        write_manifest(directory, manifest)
    remove_file(directory / name)  # without a line it may be left over from a run that was cut off here
    return manifest


def _require_same_fp4(directory: Path, config: ModelConfig, manifest: Manifest, layer_idx: int) -> None:
    records = {plane: PlaneRecord.of(plane, config) for plane in ("fp4", "base", "residual")}
    checksums, tables = read_checksums(directory), read_tables(directory, "split")
    require_intact_split(directory, manifest, tables, checksums, [layer_idx])
    check, rows = SlabCheck(directory, manifest, records, checksums), layer_tables(tables, "split", layer_idx)
    shape = Shape(config.hidden_size, config.moe_intermediate_size)
    todo = batches([layer_idx], config.n_routed_experts, BATCH)
    with closing(BlockRing(records, BATCH, DEPTH)) as ring, SlabReader([directory], warn=say) as reader:
        for batch, blocks in read_ahead(reader, todo, ring, check):
            exact = split_slab(blocks.pop("fp4"), PLANES["fp4"], *shape)
            merged = fp4_matrices(blocks, shape, rows)
            if not all(_is_same(a, b) for a, b in zip(exact, merged, strict=True)):
                raise ArtifactError(
                    f"{directory / expert_file('base', layer_idx)}: experts {batch.first} to {batch.first + batch.number - 1} read back with residual are not the FP4 in {expert_file('fp4', layer_idx)}, expected the same; that file stays, remove base and residual of the layer and run: prep requant --codec split {directory}"
                )


def _is_same(exact: Matrix, merged: Matrix) -> bool:
    """Whether codes, -0 as 0, and exponents are equal."""
    assert exact.scales is not None and merged.scales is not None
    pairs = torch.arange(256, dtype=torch.uint8)
    codes = unpack_codes(pairs[:, None], 4)
    codes = codes.where(codes != 8, 0)
    positive = codes[:, 0] | codes[:, 1] << 4
    wanted = positive.index_select(0, exact.codes.int().flatten()).view(exact.codes.shape)
    return torch.equal(wanted, merged.codes) and torch.equal(exact.scales, merged.scales)


def files_by_shard(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Shard -> the model directory's files that hold its tensors; empty for a shard of draft stages only."""
    config = checkpoint.config
    files: dict[str, set[str]] = {shard: set() for shard in checkpoint.shard_of.values()}
    for name in dense_tensors(config):
        files[checkpoint.shard_of[name]].add(DENSE)
    for layer_idx in range(config.num_hidden_layers):
        for expert_id in range(config.n_routed_experts):
            for name in expert_tensors(config, layer_idx, expert_id):
                files[checkpoint.shard_of[name]].add(expert_file("fp4", layer_idx))
    return files


class ShardConsumer:
    """Removes source shards whose tensors the model directory has. Holds nothing open between calls."""

    def __init__(self, checkpoint: Checkpoint, directory: Path) -> None:
        """Raises CheckpointError if a shard lies outside the checkpoint's directory, where others may use it too."""
        self._checkpoint, self._directory, self._config = checkpoint, directory, checkpoint.config
        self.files_by_shard = files_by_shard(checkpoint)
        self._left = [shard for shard in self.files_by_shard if shard not in checkpoint.consumed]
        for shard in self._left:
            _require_own(checkpoint.directory, shard)

    def consume(self, manifest: Manifest) -> list[str]:
        """Names of the shards it removed: those all of whose files are recorded in `manifest` and hold the same.

        Raises:
            StrawError: A file holds something else or could not be read; its shard and those behind it stay.
        """
        ready = [shard for shard in self._left if self.files_by_shard[shard] <= set(manifest.files)]
        for shard in ready:
            self._require_same(shard)
            self._left.remove(shard)
            remove_file(self._checkpoint.directory / shard)
        return ready

    def peak_bytes(self, manifest: Manifest, todo: Sequence[str], sizes: Mapping[str, int]) -> int:
        """Most bytes that must be free while the files `todo` are written in order and shards go as soon as they can."""
        source = self._checkpoint.directory
        existing = next(path for path in (self._directory, *self._directory.absolute().parents) if path.exists())
        if existing.stat().st_dev != source.stat().st_dev:
            return sum(sizes[name] for name in todo)
        left, written, used, peak = list(self._left), set(manifest.files), 0, 0
        for name in todo:
            used, written = used + sizes[name], written | {name}
            peak = max(peak, used)
            for shard in [shard for shard in left if self.files_by_shard[shard] <= written]:
                left.remove(shard)
                used -= (source / shard).stat().st_size
        return peak

    def _require_same(self, shard: str) -> None:
        with closing(SafetensorsFile(self._directory / DENSE, ArtifactError, "the shard stays")) as dense:
            _forget_cached(dense.path)
            for name in dense_tensors(self._config):
                if self._checkpoint.shard_of[name] == shard:
                    self._compare(shard, name, dense.read(name).view(torch.uint8), dense.path)
        with SlabReader([self._directory], warn=say) as reader, ThreadPoolExecutor(THREADS) as pool:
            jobs = [pool.submit(self._compare_expert, shard, reader, *key) for key in self._experts_in(shard)]
            for job in jobs:
                job.result()

    def _experts_in(self, shard: str) -> Iterator[tuple[int, int]]:
        for layer_idx in range(self._config.num_hidden_layers):
            for expert_id in range(self._config.n_routed_experts):
                names = expert_tensors(self._config, layer_idx, expert_id)
                if any(self._checkpoint.shard_of[name] == shard for name in names):
                    yield layer_idx, expert_id

    def _compare_expert(self, shard: str, reader: SlabReader, layer_idx: int, expert_id: int) -> None:
        stride = PlaneRecord.of("fp4", self._config).slab_stride_bytes
        slab = HostArena(stride).take(stride)
        name = expert_file("fp4", layer_idx)
        reader.submit(name, expert_id * stride, slab, label=f"layer {layer_idx} expert {expert_id} fp4").wait()
        begin = 0
        for tensor, spec in expert_tensors(self._config, layer_idx, expert_id).items():
            if self._checkpoint.shard_of[tensor] == shard:
                self._compare(shard, tensor, slab[begin : begin + spec.size_bytes], self._directory / name)
            begin += spec.size_bytes

    def _compare(self, shard: str, name: str, found: Tensor, path: Path) -> None:
        if byte_view(found) != byte_view(self._checkpoint.read(name)):
            raise CheckpointError(
                f"{path}: {name} read back is not what {self._checkpoint.directory / shard} holds, expected the same; the shard stays, remove {path} and run the same command again"
            )


def _require_own(source: Path, shard: str) -> None:
    target = (source / shard).resolve()
    if not target.is_relative_to(source.resolve()):
        raise CheckpointError(
            f"{source / shard}: a link to {target}, expected a file in {source}: what lies elsewhere, as in the Hugging Face cache, others may use; copy the checkpoint (cp -rL) or run without --consume"
        )


def _forget_cached(path: Path) -> None:
    """Lets the next read come from the drive."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
