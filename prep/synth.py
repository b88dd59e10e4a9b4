"""`prep synth`: a model directory of real geometry and random weights, without a download. Owns the order of the work.

Experts of K layers exist once, each made in a one-layer model directory of its own under `.unique` (FP4 drawn here, the 2-bit
precision solved by `prep requant`); layer l of the model is hard links to unique layer l mod K. With O_DIRECT an alias costs
what a file costs. What the bytes are, `prep.random_weights` knows.

The manifest says "synth" and not done until the last moment, so nothing opens an unfinished directory. A run that is cut off
goes on with the unique layer it was at, and ends with the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from prep.jobs import (
    expert_progress,
    progress,
    require_free_disk,
    say,
    write_lock,
)
from prep.layout import SETTINGS as LAYOUT_SETTINGS
from prep.random_weights import dense_chunks, fill_slab, random_of
from prep.requant import requant
from prep.requant_plan import settings_of
from prep.slab_io import SlabFile
from prep.synth_plan import STAGE, SynthPlan, SynthSettings, plan_synth
from runtime.artifact import (
    COPY_CHECKSUM,
    DENSE_CHECKSUMS,
    ModelDirectory,
    dense_file_specs,
    read_checksums,
    read_tables,
    safetensors_header,
    write_checksums,
    write_tables,
)
from runtime.config import ModelConfig
from runtime.errors import ArtifactError
from runtime.files import atomic_file, make_directory, remove_file, replacing, sync_directory
from runtime.manifest import (
    CONFIG,
    DENSE,
    MANIFEST,
    Manifest,
    PlaneRecord,
    Stage,
    config_record,
    expert_file,
    read_manifest,
    requant_stage,
    write_manifest,
)
from runtime.store.arena import HostArena, view_bytes

UNIQUE = ".unique"  # holds the one-layer directories until the end
THREADS = 4  # slabs drawn, checked and written at a time


def synth(directory: Path, settings: SynthSettings, device: str = "cpu") -> SynthPlan:
    """Makes or completes the model directory `directory`; the plan it carried out.

    Args:
        directory: Created when missing.
        settings: What to make.
        device: Where the 2-bit precision is solved: "cpu", "cuda" or "cuda:i"; the bytes are the same.

    Raises:
        StrawError: A setting is out of range, the directory holds something else, is being written or damaged, or the disk
            is too small.
    """
    plan = plan_synth(directory, settings)
    if not plan.is_done:
        missing_bytes = plan.peak_bytes - _held_bytes(directory)
        require_free_disk(directory, missing_bytes, "what prep synth has still to write")
    with write_lock(directory):
        plan = plan_synth(directory, settings)  # another run may have gone on until it gave up the lock
        if not plan.is_done:
            _Build(plan, device).run()
        shutil.rmtree(directory / UNIQUE, ignore_errors=True)  # other names of what is linked, or nothing
    ModelDirectory(directory).close()
    return plan


def _held_bytes(directory: Path) -> int:
    """Bytes that an earlier run has on the disk already, each file once."""
    stats = [path.lstat() for path in directory.rglob("*")]
    return 512 * sum({stat.st_ino: stat.st_blocks for stat in stats}.values())


class _Build:
    """Carries out a plan; nothing but DENSE is recorded in the manifest before the end."""

    def __init__(self, plan: SynthPlan, device: str) -> None:
        self._plan, self._device, self._directory = plan, device, plan.directory
        self._layers = range(plan.config.num_hidden_layers)

    def run(self) -> None:
        """Makes the dense part, the unique layers, and then the model of them."""
        write_manifest(self._directory, self._plan.manifest)
        manifest = self._write_dense(self._plan.manifest)
        units = [self._make_unit(idx) for idx in range(self._plan.settings.unique_layers)]
        owners = [units[idx % len(units)] for idx in self._layers]
        for plane in self._plan.planes:
            self._link(plane, owners)
        self._write_small_files(owners)
        write_manifest(self._directory, self._finished(manifest))

    def _write_dense(self, manifest: Manifest) -> Manifest:
        """The manifest with DENSE in it; a piece of a tensor is in memory at a time."""
        path, specs = self._directory / DENSE, dense_file_specs(self._plan.config)
        if manifest.files.get(DENSE) == self._plan.dense_bytes and path.is_file():
            return manifest
        checksums = {}
        with atomic_file(path) as file, progress(self._plan.dense_bytes, "prep synth: dense") as bar:
            file.write(safetensors_header(specs))
            for name, spec in specs.items():
                random, crc = random_of(self._plan.settings.seed, name), 0
                for piece in dense_chunks(name, spec, self._plan.config.n_routed_experts, random):
                    file.write(piece)
                    crc = zlib.crc32(piece, crc)
                    bar.update(len(piece))
                checksums[name] = crc
        write_checksums(self._directory, {DENSE_CHECKSUMS: torch.tensor([checksums[name] for name in sorted(specs)])})
        recorded = replace(manifest, files={DENSE: self._plan.dense_bytes})
        write_manifest(self._directory, recorded)
        return recorded

    def _make_unit(self, unique_idx: int) -> Path:
        """The finished one-layer directory of a unique layer, with the planes that stay."""
        unit, codec = self._directory / UNIQUE / f"{unique_idx:03d}", self._plan.settings.codec
        if not (unit / MANIFEST).exists():
            self._begin_unit(unit, unique_idx)
        if codec is not None:
            requant(unit, codec, device=self._device)
        if "fp4" not in self._plan.planes:
            _drop_fp4(unit)
        return unit

    def _begin_unit(self, unit: Path, unique_idx: int) -> None:
        make_directory(unit)
        raw = replace(self._plan.settings, layers=1, unique_layers=1).raw_config()
        with atomic_file(unit / CONFIG) as file:
            file.write(_json(raw))
        config, name = ModelConfig.from_json(raw, unit / CONFIG), expert_file("fp4", 0)
        record = PlaneRecord.of("fp4", config)
        crcs = write_fp4(unit / name, config, record, (self._plan.settings.seed, unique_idx))
        write_checksums(unit, {"fp4": torch.tensor([crcs])})
        files = {name: config.n_routed_experts * record.slab_stride_bytes}
        stages, planes = {"layout": Stage(LAYOUT_SETTINGS, done=True)}, {"fp4": record}
        fingerprint = f"{self._plan.manifest.fingerprint} {unique_idx}"
        write_manifest(unit, Manifest(config_record(config), fingerprint, {}, planes, None, files, stages))

    def _link(self, plane: str, owners: list[Path]) -> None:
        for layer_idx, unit in enumerate(owners):
            path = self._directory / expert_file(plane, layer_idx)
            make_directory(path.parent)
            path.unlink(missing_ok=True)
            try:
                os.link(unit / expert_file(plane, 0), path)
            except OSError as cause:
                raise ArtifactError(
                    f"{path}: cannot be linked ({cause.strerror}), expected a file system with hard links; name a directory on ext4 or xfs"
                ) from cause
        sync_directory(path.parent)

    def _write_small_files(self, owners: list[Path]) -> None:
        """CONFIG, TABLES and CHECKSUMS, in which a layer has the rows of the unique layer it is made of."""
        content = _json(self._plan.raw_config)
        with atomic_file(self._directory / CONFIG) as file:
            file.write(content)
        code = self._plan.code
        if code is not None:
            write_tables(self._directory, _joined({unit: read_tables(unit, code) for unit in owners}, owners))
        rows = _joined({unit: read_checksums(unit) for unit in owners}, owners)
        dense = read_checksums(self._directory)[DENSE_CHECKSUMS]
        kept = {name: tensor for name, tensor in rows.items() if name != "fp4" or "fp4" in self._plan.planes}
        copied = {COPY_CHECKSUM + CONFIG: torch.tensor([zlib.crc32(content)])}
        write_checksums(self._directory, {**kept, **copied, DENSE_CHECKSUMS: dense})

    def _finished(self, manifest: Manifest) -> Manifest:
        plan = self._plan
        files = {CONFIG: len(_json(plan.raw_config)), DENSE: plan.dense_bytes}
        files |= {expert_file(plane, idx): size for plane, size in plan.layer_bytes.items() for idx in self._layers}
        stages = {"layout": Stage(LAYOUT_SETTINGS, done=True), STAGE: replace(manifest.stages[STAGE], done=True)}
        if plan.code is not None:
            stages[requant_stage(plan.code)] = Stage(settings_of(plan.code), done=True)
        return replace(manifest, planes=plan.planes, code=plan.code, files=files, stages=stages)


def _json(raw: dict[str, Any]) -> bytes:
    return json.dumps(raw, indent=1).encode() + b"\n"


def _joined(tensors: dict[Path, dict[str, Tensor]], owners: list[Path]) -> dict[str, Tensor]:
    """The owners' tensors behind one another, each [1, ...]."""
    return {name: torch.cat([tensors[unit][name] for unit in owners]) for name in tensors[owners[0]]}


def _drop_fp4(unit: Path) -> None:
    """The line goes before the file, as everywhere."""
    manifest, name = read_manifest(unit), expert_file("fp4", 0)
    files = {other: size for other, size in manifest.files.items() if other != name}
    planes = {plane: record for plane, record in manifest.planes.items() if plane != "fp4"}
    write_manifest(unit, replace(manifest, files=files, planes=planes))
    remove_file(unit / name)


def write_fp4(path: Path, config: ModelConfig, record: PlaneRecord, key: tuple[int, int]) -> list[int]:
    """Writes a layer of random FP4 experts drawn by `key`, seed and layer; the slabs' CRC-32."""
    stride, experts = record.slab_stride_bytes, config.n_routed_experts
    blocks, free = HostArena(THREADS * stride).take(THREADS, stride), SimpleQueue[Tensor]()
    for block in blocks:
        free.put(block)

    def write_slab(expert_id: int) -> int:
        block = free.get()
        try:
            fill_slab(block, config.hidden_size, config.moe_intermediate_size, random_of(*key, expert_id))
            file.write(block, expert_id * stride)
            return zlib.crc32(view_bytes(block)[: record.slab_bytes])
        finally:
            free.put(block)

    with replacing(path) as temporary, closing(SlabFile(path, temporary, experts * stride, say)) as file:
        with expert_progress(experts, "prep synth: fp4", stride) as bar, ThreadPoolExecutor(THREADS) as pool:
            checksums = []
            for crc in pool.map(write_slab, range(experts)):
                checksums.append(crc)
                bar.update()
        file.finish()
    return checksums
