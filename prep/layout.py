"""`prep layout`: a released checkpoint becomes a model directory with FP4 slabs. Owns the order of the work, no format.

Every file is written under a temporary name, synced and renamed; then its checksums, then its line in the manifest. A run
that is cut off at any point goes on at the first file without a line and ends with the same bytes. A file of a finished
directory that is missing, of another size or begins otherwise is written again, so this command is also the repair.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prep.consume import ShardConsumer
from prep.jobs import (
    LOCK,
    free_disk_bytes,
    progress,
    pwrite_all,
    require_free_disk,
    require_same_settings,
    same_form,
    write_lock,
)
from prep.source import open_source, require_shards, source_fingerprint, source_shards
from runtime.artifact import (
    COPY_CHECKSUM,
    DENSE_CHECKSUMS,
    NO_CHECKSUM,
    byte_view,
    checksum,
    checksum_specs,
    dense_file_specs,
    read_checksums,
    safetensors_header,
    write_checksums,
)
from runtime.checkpoint import Checkpoint
from runtime.config import ModelConfig
from runtime.errors import ArtifactError
from runtime.files import atomic_file, partial_path
from runtime.manifest import (
    BYTE_ORDER,
    CHECKSUMS,
    CONFIG,
    DENSE,
    MANIFEST,
    Manifest,
    PlaneRecord,
    Stage,
    config_record,
    expert_file,
    read_manifest,
    write_manifest,
)
from runtime.safetensors_file import TensorSpec

STAGE = "layout"
PLANE = "fp4"
SETTINGS: dict[str, Any] = {"plane": PLANE, "byte_order": BYTE_ORDER}
COPIED_FILES = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json")
COPIED_FOLDER = "encoding"
THREADS = 4  # slabs in memory at a time; enough to keep reading, checksum and writing busy together
SYNC_EVERY_BYTES = 64 << 20  # dirty pages go out while reading goes on, so that a layer's last sync is short


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """What a run would do: `sizes` bytes of each file of the finished stage, `todo` the names still to write, in order."""

    manifest: Manifest
    checksums: dict[str, Tensor]
    sizes: dict[str, int]
    todo: list[str]

    @property
    def todo_bytes(self) -> int:
        """Bytes still to write."""
        return sum(self.sizes[name] for name in self.todo)


class Content(NamedTuple):
    """What a written file must show: its size, its first bytes, and its checksums in CHECKSUMS (None for a copy)."""

    size_bytes: int
    head: bytes
    checksums: Tensor | None


def layout(source: Path, directory: Path, *, consume: bool = False) -> LayoutPlan:
    """Makes or completes the model directory `directory` from the checkpoint `source`; the plan it carried out.

    Args:
        source: A released checkpoint; shards that an earlier run consumed may be missing.
        directory: Created when missing.
        consume: Remove each source shard once every tensor of it that the directory needs is read back the same.

    Raises:
        CheckpointError: The checkpoint is damaged.
        ArtifactError: The directory belongs to another source, is being written or cannot be; the disk is too small.
    """
    with closing(open_source(source, directory)) as checkpoint:
        plan = plan_layout(checkpoint, directory)
        if not plan.todo and _is_done(plan.manifest) and not consume:
            return plan
        consumer = ShardConsumer(checkpoint, directory) if consume else None
        _require_room(plan, directory, consumer)
        with write_lock(directory):
            plan = plan_layout(checkpoint, directory)  # another run may have gone on until it gave up the lock
            _Writer(checkpoint, directory, plan, consumer).run()
        return plan


def describe_layout(source: Path, directory: Path) -> str:
    """What `layout` would write and whether it fits, as lines of text; writes nothing."""
    with closing(open_source(source, directory)) as checkpoint:
        plan = plan_layout(checkpoint, directory)
    slabs = sum(size for name, size in plan.sizes.items() if name.startswith("experts/"))
    rows = (
        ("FP4 slabs", slabs),
        ("dense tensors", plan.sizes[DENSE]),
        ("all files", sum(plan.sizes.values())),
        ("still to write", plan.todo_bytes),
        ("free disk", free_disk_bytes(directory)),
    )
    return "\n".join(f"{what:<16}{size:>20,} bytes {size / 1e9:>10.2f} GB" for what, size in rows)


def plan_layout(checkpoint: Checkpoint, directory: Path) -> LayoutPlan:
    """What is left to do in `directory`; reads headers and sizes only, writes nothing."""
    manifest = _manifest_for(checkpoint, directory)
    checksums = _checksums_for(checkpoint, directory)
    sizes = _file_sizes(checkpoint)
    # A finished directory has exactly the files it records: FP4 files consumed by requant are not written again.
    wanted = [name for name in sizes if name in manifest.files] if _is_done(manifest) else list(sizes)
    rows, heads = _checksum_rows(checksums, checkpoint.config), _heads(checkpoint)
    expected = {name: Content(sizes[name], heads.get(name, b""), rows.get(name)) for name in wanted}
    todo = [name for name in wanted if not _is_written(directory / name, expected[name], manifest.files.get(name))]
    require_shards(checkpoint, todo if _is_done(manifest) else [*todo, *(set(sizes) - set(manifest.files))])
    return LayoutPlan(manifest, checksums, sizes, todo)


def _is_done(manifest: Manifest) -> bool:
    return STAGE in manifest.stages and manifest.stages[STAGE].done


def _manifest_for(checkpoint: Checkpoint, directory: Path) -> Manifest:
    known = read_manifest(directory) if (directory / MANIFEST).exists() else None
    shards = source_shards(checkpoint, known.shards if known else None)
    fingerprint = source_fingerprint(checkpoint, shards)
    if known is None:
        _require_empty(directory)
        return Manifest(
            config=config_record(checkpoint.config),
            fingerprint=fingerprint,
            shards=shards,
            planes={PLANE: PlaneRecord.of(PLANE, checkpoint.config)},
            code=None,
            files={},
            stages={STAGE: Stage(SETTINGS)},
        )
    if known.fingerprint != fingerprint:
        raise ArtifactError(
            f"{directory / MANIFEST}: made from source {known.fingerprint[:16]}, expected {fingerprint[:16]} ({checkpoint.directory}); name the checkpoint it was made from or another model directory"
        )
    require_same_settings(directory, known, STAGE, SETTINGS)
    return known


def _require_empty(directory: Path) -> None:
    """A directory without a manifest is ours only if a first run left nothing but its beginnings there."""
    beginnings = {LOCK, partial_path(directory / MANIFEST).name}
    if directory.exists() and not directory.is_dir():
        raise ArtifactError(f"{directory}: a file, expected a directory to create; name another")
    found = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    foreign = [name for name in found if name not in beginnings]
    if foreign:
        raise ArtifactError(
            f"{directory}: holds {foreign[0]} and no {MANIFEST}, expected an empty directory or none; name another or remove it"
        )


def _checksums_for(checkpoint: Checkpoint, directory: Path) -> dict[str, Tensor]:
    specs = checksum_specs(checkpoint.config, [PLANE])
    copies = (COPY_CHECKSUM + name for name in _copied_names(checkpoint.directory))
    specs |= dict.fromkeys(copies, TensorSpec("I64", (1,)))
    checksums = {name: torch.full(spec.shape, NO_CHECKSUM, dtype=torch.int64) for name, spec in specs.items()}
    if not (directory / CHECKSUMS).is_file():
        return checksums
    try:
        found = read_checksums(directory)
    except ArtifactError:  # damaged: everything whose checksum is lost is written again
        return checksums
    fits = {name: tensor for name, tensor in found.items() if name not in specs or same_form(tensor, checksums[name])}
    return checksums | fits


def _heads(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The first bytes of the files that show damage cheaply: copies whole, the dense file's header."""
    heads = {name: (checkpoint.directory / name).read_bytes() for name in _copied_names(checkpoint.directory)}
    return heads | {DENSE: safetensors_header(dense_file_specs(checkpoint.config))}


def _file_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    config = checkpoint.config
    sizes = {name: (checkpoint.directory / name).stat().st_size for name in _copied_names(checkpoint.directory)}
    specs = dense_file_specs(config)
    sizes[DENSE] = len(safetensors_header(specs)) + sum(spec.size_bytes for spec in specs.values())
    layer_bytes = config.n_routed_experts * PlaneRecord.of(PLANE, config).slab_stride_bytes
    return sizes | {expert_file(PLANE, idx): layer_bytes for idx in range(config.num_hidden_layers)}


def _copied_names(source: Path) -> list[str]:
    inside = sorted(path for path in (source / COPIED_FOLDER).rglob("*") if path.is_file())
    return [name for name in COPIED_FILES if (source / name).is_file()] + [str(p.relative_to(source)) for p in inside]


def _checksum_rows(checksums: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """File name -> view of the part of `checksums` that is filled when the file is written."""
    layers = {expert_file(PLANE, idx): checksums[PLANE][idx] for idx in range(config.num_hidden_layers)}
    copies = {name[len(COPY_CHECKSUM) :]: row for name, row in checksums.items() if name.startswith(COPY_CHECKSUM)}
    return {DENSE: checksums[DENSE_CHECKSUMS], **copies, **layers}


def _is_written(path: Path, content: Content, recorded_bytes: int | None) -> bool:
    if recorded_bytes != content.size_bytes or not path.is_file() or path.stat().st_size != content.size_bytes:
        return False
    with path.open("rb") as file:
        if file.read(len(content.head)) != content.head:
            return False
    return content.checksums is None or bool((content.checksums != NO_CHECKSUM).all())


def _require_room(plan: LayoutPlan, directory: Path, consumer: ShardConsumer | None) -> None:
    partials = (partial_path(directory / name) for name in plan.todo)
    held_bytes = sum(path.stat().st_blocks * 512 for path in partials if path.exists())  # a cut-off run's, overwritten
    needed_bytes = plan.todo_bytes if consumer is None else consumer.peak_bytes(plan.manifest, plan.todo, plan.sizes)
    require_free_disk(directory, needed_bytes - held_bytes, "what prep layout has still to write")


class _Writer:
    """Carries out a plan; `manifest` and the plan's checksums are true of the disk after each file."""

    def __init__(
        self, checkpoint: Checkpoint, directory: Path, plan: LayoutPlan, consumer: ShardConsumer | None
    ) -> None:
        self.consumer = consumer
        self.checkpoint, self.config, self.directory = checkpoint, checkpoint.config, directory
        self.plan, self.manifest = plan, plan.manifest
        self.rows = _checksum_rows(plan.checksums, self.config)
        self.layer_of = {expert_file(PLANE, idx): idx for idx in range(self.config.num_hidden_layers)}

    def run(self) -> None:
        """Writes every file of the plan, then marks the stage done."""
        write_manifest(self.directory, self.manifest)
        with progress(self.plan.todo_bytes, "prep layout") as bar:
            for name in self.plan.todo:
                self._write(name, bar.update)
                self._record(name)
                self._consume()
        self._consume()
        stages = self.manifest.stages | {STAGE: Stage(SETTINGS, done=True)}
        write_manifest(self.directory, replace(self.manifest, stages=stages))

    def _consume(self) -> None:
        if self.consumer is not None:
            self.consumer.consume(self.manifest)

    def _write(self, name: str, advance: Callable[[int], object]) -> None:
        if name in self.layer_of:
            self._write_layer(name, advance)
        elif name == DENSE:
            self._write_dense(advance)
        else:
            content = (self.checkpoint.directory / name).read_bytes()
            with atomic_file(self.directory / name) as file:
                file.write(content)
            self.rows[name][0] = zlib.crc32(content)
            advance(len(content))

    def _record(self, name: str) -> None:
        if name in self.rows:
            write_checksums(self.directory, self.plan.checksums)
        self.manifest = replace(self.manifest, files=self.manifest.files | {name: self.plan.sizes[name]})
        write_manifest(self.directory, self.manifest)

    def _write_dense(self, advance: Callable[[int], object]) -> None:
        """One tensor in memory at a time (the embedding is the largest: 1.06 GB in V4-Flash)."""
        specs = dense_file_specs(self.config)
        place = {name: idx for idx, name in enumerate(sorted(specs))}
        with atomic_file(self.directory / DENSE) as file:
            file.write(safetensors_header(specs))
            for name in specs:
                tensor = self.checkpoint.read(name)
                file.write(byte_view(tensor))
                self.rows[DENSE][place[name]] = checksum(tensor)
                advance(tensor.nbytes)

    def _write_layer(self, name: str, advance: Callable[[int], object]) -> None:
        layer_idx, stride = self.layer_of[name], self.manifest.planes[PLANE].slab_stride_bytes
        slabs_per_sync = max(1, SYNC_EVERY_BYTES // stride)
        with atomic_file(self.directory / name) as file, ThreadPoolExecutor(THREADS) as pool:
            descriptor = file.fileno()
            os.ftruncate(descriptor, self.plan.sizes[name])  # what no slab covers reads as zeros

            def copy_slab(expert_id: int) -> int:
                slab = self.checkpoint.read_slab(layer_idx, expert_id)
                pwrite_all(descriptor, slab, expert_id * stride)
                if (expert_id + 1) % slabs_per_sync == 0:
                    os.fdatasync(descriptor)
                return checksum(slab)

            for expert_id, crc in enumerate(pool.map(copy_slab, range(self.config.n_routed_experts))):
                self.rows[name][expert_id] = crc
                advance(stride)
