"""What `prep requant` has still to do in a model directory, and whether it can. Reads headers, sizes and tables; writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.formats import CODES
from prep.codecs import SAMPLE_EXPERTS
from prep.jobs import require_free_disk, require_same_settings, same_form
from prep.slab_io import checksum_damage
from runtime.artifact import (
    DENSE_CHECKSUMS,
    FP4_PLANE_SETS,
    NO_CHECKSUM,
    checksum,
    checksum_specs,
    read_checksums,
    read_tables,
)
from runtime.config import ModelConfig
from runtime.errors import ArtifactError
from runtime.files import partial_path
from runtime.manifest import (
    BYTE_ORDER,
    CHECKSUMS,
    MANIFEST,
    TABLES,
    Manifest,
    PlaneRecord,
    expert_file,
    read_manifest,
    read_model_config,
    remedy,
    requant_stage,
    stage_command,
)
from runtime.tables import Tables, empty_tables, table_specs

SLACK_BYTES = 16 << 20  # for manifest, tables and checksums, each twice while it is replaced


@dataclass(frozen=True, slots=True)
class RequantPlan:
    """What a run would do: write the planes of `code` for the layers `todo`, from the planes `source`."""

    directory: Path
    config: ModelConfig
    manifest: Manifest
    code: str
    source: tuple[str, ...]
    todo: list[int]
    checksums: dict[str, Tensor]
    tables: Tables

    @property
    def planes(self) -> dict[str, PlaneRecord]:
        """Geometry of the planes to write."""
        return {plane: PlaneRecord.of(plane, self.config) for plane in CODES[self.code].planes}

    @property
    def sources(self) -> dict[str, PlaneRecord]:
        """Geometry of the planes to read."""
        return {plane: PlaneRecord.of(plane, self.config) for plane in self.source}

    @property
    def num_experts(self) -> int:
        """Experts still to solve."""
        return len(self.todo) * self.config.n_routed_experts

    @property
    def slab_bytes(self) -> int:
        """Bytes read and written for one expert."""
        return sum(record.slab_stride_bytes for record in (*self.sources.values(), *self.planes.values()))

    @property
    def read_bytes(self) -> int:
        """Bytes of FP4 to read."""
        return self.num_experts * sum(record.slab_stride_bytes for record in self.sources.values())

    @property
    def write_bytes(self) -> int:
        """Bytes of slabs to write."""
        return self.num_experts * sum(record.slab_stride_bytes for record in self.planes.values())


def settings_of(code: str) -> dict[str, Any]:
    """What decides the bytes of a code; a run begun with others is not resumed."""
    return {"code": code, "byte_order": BYTE_ORDER, "sample_experts": SAMPLE_EXPERTS, "solver_version": 1}


def plan_requant(directory: Path, code: str, layers: range | None = None) -> RequantPlan:
    """What is left to do in `directory`; reads headers, sizes and tables only, writes nothing; errors as in `prep.requant.requant`."""
    manifest = read_manifest(directory)
    _require_begun(directory, manifest, code)
    _, config = read_model_config(directory, manifest)
    wanted = _wanted_layers(config, layers)
    tables = _tables_for(directory, config, manifest, code)
    checksums = _checksums_for(directory, config, code)
    source = _source(directory, manifest, code)
    _require_recorded(directory, config, manifest, checksums, source)
    if "base" in source:
        require_intact_split(directory, manifest, tables, checksums, range(config.num_hidden_layers))
    plan = RequantPlan(directory, config, manifest, code, source, [], checksums, tables)
    todo = [idx for idx in unfinished_layers(plan) if idx in wanted]
    _require_source(plan, todo)
    return replace(plan, todo=todo)


def unfinished_layers(plan: RequantPlan) -> list[int]:
    """The layers of which a plane, a checksum or a table of the code is missing or of another size."""
    return [idx for idx in range(plan.config.num_hidden_layers) if not _is_written(plan, idx)]


def table_checksums(rows: Mapping[str, Tensor], layer_idx: int) -> dict[str, int]:
    """Name -> CRC-32 of one layer's part of each tensor of TABLES."""
    return {name: checksum(tensor[layer_idx]) for name, tensor in rows.items()}


def code_tables(plan: RequantPlan) -> Tables:
    """The tensors of TABLES that belong to the plan's code; the plan's own, not copies."""
    return {name: plan.tables[name] for name in table_specs(plan.config, [plan.code])}


def _is_written(plan: RequantPlan, layer_idx: int) -> bool:
    for plane, record in plan.planes.items():
        name = expert_file(plane, layer_idx)
        size, path = record.slab_stride_bytes * plan.config.n_routed_experts, plan.directory / name
        if plan.manifest.files.get(name) != size or not path.is_file() or path.stat().st_size != size:
            return False
        if bool((plan.checksums[plane][layer_idx] == NO_CHECKSUM).any()):
            return False
    found = table_checksums(code_tables(plan), layer_idx)
    return all(int(plan.checksums[name][layer_idx]) == crc for name, crc in found.items())


def _require_begun(directory: Path, manifest: Manifest, code: str) -> None:
    layout = manifest.stages.get("layout")
    if layout is None or not layout.done:
        raise ArtifactError(
            f"{directory / MANIFEST}: prep layout did not finish, expected a whole model directory; run: {stage_command('layout', directory)}"
        )
    stage = requant_stage(code)
    other = next(
        (name for name, its in manifest.stages.items() if name not in (stage, "layout") and not its.done), None
    )
    if other is not None and other.startswith("requant"):
        raise ArtifactError(
            f"{directory / MANIFEST}: prep {other} did not finish, expected it to end before prep {stage} begins; run: {stage_command(other, directory)}"
        )
    require_same_settings(directory, manifest, stage, settings_of(code))


def _wanted_layers(config: ModelConfig, layers: range | None) -> range:
    every = range(config.num_hidden_layers)
    if layers is None:
        return every
    if not layers or layers.start < 0 or layers.stop > every.stop:
        raise ArtifactError(
            f"layers {layers.start} to {layers.stop - 1}, expected some of 0 to {every.stop - 1}; correct --layers"
        )
    return layers


def _tables_for(directory: Path, config: ModelConfig, manifest: Manifest, code: str) -> Tables:
    path, problem = directory / TABLES, ""
    if path.is_dir():
        raise ArtifactError(f"{path}: a directory, expected a file of prep; remove it and run the same command again")
    try:
        tables = read_tables(directory, code)
    except ArtifactError:  # every layer is written again
        tables, problem = {}, "file is damaged" if path.exists() else "file is missing"
    known = empty_tables(config, code) | empty_tables(config, "split")
    fits = {name: tensor for name, tensor in tables.items() if name not in known or same_form(tensor, known[name])}
    lost = [name for name in table_specs(config, ["split"]) if name not in fits]
    if lost and "split" in manifest.complete_codes() and "fp4" not in manifest.complete_planes():
        raise ArtifactError(
            f"{path}: {problem or f'tensor {lost[0]} is missing or of another shape'}, expected the tables of base and residual, without which there is no FP4; run prep layout into another directory"
        )
    return empty_tables(config, code) | fits


def _checksums_for(directory: Path, config: ModelConfig, code: str) -> dict[str, Tensor]:
    layers = config.num_hidden_layers
    slabs = {plane: (layers, config.n_routed_experts) for plane in CODES[code].planes}
    shapes: dict[str, tuple[int, ...]] = slabs | dict.fromkeys(table_specs(config, [code]), (layers,))
    fresh = {name: torch.full(shape, NO_CHECKSUM, dtype=torch.int64) for name, shape in shapes.items()}
    found = read_checksums(directory)
    return fresh | {name: t for name, t in found.items() if name not in fresh or same_form(t, fresh[name])}


def _require_recorded(
    directory: Path, config: ModelConfig, manifest: Manifest, checksums: Mapping[str, Tensor], source: Iterable[str]
) -> None:
    for plane, spec in checksum_specs(config, list(source)).items():
        found = checksums.get(plane)
        if plane != DENSE_CHECKSUMS and (found is None or tuple(found.shape) != spec.shape):
            raise ArtifactError(
                f"{directory / CHECKSUMS}: tensor {plane} is missing or of another shape, expected {spec}; {remedy(directory, manifest, CHECKSUMS, plane)}"
            )


def require_intact_split(
    directory: Path, manifest: Manifest, tables: Tables, checksums: Mapping[str, Tensor], layers: Iterable[int]
) -> None:
    """Raises ArtifactError unless the rows of SPLIT, without which base and residual are other numbers, are as written."""
    rows = {tensor.name: tables[tensor.name] for tensor in CODES["split"].tables}
    for layer_idx in layers:
        for name, found in table_checksums(rows, layer_idx).items():
            recorded = checksums.get(name, torch.empty(0))
            expected = int(recorded[layer_idx]) if recorded.shape == rows[name].shape[:1] else NO_CHECKSUM
            if found != expected:
                what = f"layer {layer_idx} of {name}"
                raise ArtifactError(checksum_damage(directory, manifest, TABLES, what, found, expected, name))


def _source(directory: Path, manifest: Manifest, code: str) -> tuple[str, ...]:
    """The planes to take FP4 from; SPLIT is made of fp4 alone, layer by layer."""
    present = set(manifest.complete_planes())
    if code == "split" or "fp4" in present:
        return ("fp4",)
    if present >= FP4_PLANE_SETS[1]:
        return ("base", "residual")
    raise ArtifactError(
        f"{directory / MANIFEST}: whole planes are {', '.join(sorted(present)) or 'none'}, expected fp4 or base and residual; remove {directory} and run: {stage_command('layout', directory)}"
    )


def _require_source(plan: RequantPlan, todo: Sequence[int]) -> None:
    for layer_idx in todo:
        for plane in plan.source:
            path = plan.directory / expert_file(plane, layer_idx)
            size = plan.sources[plane].slab_stride_bytes * plan.config.n_routed_experts
            found = f"{path.stat().st_size:,} bytes" if path.is_file() else "file is missing"
            if expert_file(plane, layer_idx) not in plan.manifest.files or found != f"{size:,} bytes":
                raise ArtifactError(
                    f"{path}: {found}, expected {size:,} bytes to make {plan.code} of; run: {stage_command('layout', plan.directory)}, into another directory if the file was consumed"
                )


def require_room(plan: RequantPlan, consume: bool) -> None:
    """Raises ArtifactError unless the disk has room for what is to be written."""
    if not plan.todo:
        return
    names = [expert_file(plane, idx) for plane in plan.planes for idx in plan.todo]
    partials = (partial_path(plan.directory / name) for name in names)
    held_bytes = sum(path.stat().st_blocks * 512 for path in partials if path.exists())  # a cut-off run's, overwritten
    # each fp4 file makes room before the next layer is written
    needed_bytes = plan.write_bytes // (len(plan.todo) if consume else 1) - held_bytes
    require_free_disk(plan.directory, needed_bytes + SLACK_BYTES, "what prep requant has still to write")
