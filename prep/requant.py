"""`prep requant`: a 2-bit precision of every expert beside its FP4. Owns the order of the work and of its recording.

A layer's files are written under temporary names, synced and renamed; then its tables, its checksums and at last its line in
the manifest. A run that is cut off at any point goes on at the first layer without a line and ends with the same bytes. A
layer of a finished run that is missing or of another size is written again, so this command is also the repair.

Reading, solving and writing overlap: threads read batches of experts ahead, this thread solves, threads write; tables of the
next layers are trained meanwhile. In memory are READ_DEPTH batches of FP4, WRITE_DEPTH of the code and a layer's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from kernels.formats import CODES
from prep.codecs import placeholder_tables
from prep.consume import consume_fp4_layer
from prep.jobs import expert_progress, free_disk_bytes, say, write_lock
from prep.layer_solver import LayerSolver, shape_of, split_tables_of
from prep.requant_plan import (
    RequantPlan,
    code_tables,
    plan_requant,
    require_room,
    settings_of,
    table_checksums,
    unfinished_layers,
)
from prep.slab_io import Batch, BlockRing, Blocks, SlabCheck, SlabFile, WriteRing, batches, read_ahead
from prep.table_training import SampleReader, TableTrainer
from runtime.artifact import write_checksums, write_tables
from runtime.errors import ArtifactError
from runtime.files import replacing
from runtime.manifest import (
    CODECS,
    MANIFEST,
    Stage,
    expert_file,
    read_manifest,
    requant_stage,
    stage_command,
    write_manifest,
)
from runtime.store.reader import SlabReader

DEFAULT_CODEC = "quad"  # the better of clip and quad, artifacts/measurements/2026-11-29-requant-synthetic.json
BATCH = {"cpu": 2, "cuda": 8}  # experts solved at once: a CPU's memory traffic; enough groups to fill a GPU
READ_DEPTH, WRITE_DEPTH = 3, 3  # batches in memory on each side: one in hand, the others under way
WRITERS = 16  # slabs written at once, as many as the reader reads


def requant(
    directory: Path,
    codec: str | None = None,
    *,
    layers: range | None = None,
    device: str = "cpu",
    consume: bool = False,
) -> RequantPlan:
    """Writes the 2-bit precision of `codec` and makes it the one in use; the plan it carried out.

    Args:
        directory: A model directory that `prep layout` has finished.
        codec: "clip", "quad" or "split"; None is DEFAULT_CODEC.
        layers: Only these; the code comes into use once all are there.
        device: Where to compute: "cpu", "cuda" or "cuda:i".
        consume: Remove each fp4 file once its split planes give the same back.

    Raises:
        StrawError: Not a finished directory, begun with other settings, damaged, being written, or the disk is too small.
    """
    code = CODECS[codec or DEFAULT_CODEC]
    plan = plan_requant(directory, code, layers)
    if not plan.todo and not consume and _is_complete(plan):
        return plan
    require_room(plan, consume)
    with write_lock(directory):
        plan = plan_requant(directory, code, layers)  # another run may have gone on until it gave up the lock
        _Run(plan, torch.device(device), consume).run()
    return plan


def use_code(directory: Path, code: str) -> None:
    """Makes `code`, whose planes are there, the one in use.

    Raises:
        ArtifactError: It is not one of CODES, its planes are not whole, or the directory cannot be written.
    """
    manifest = read_manifest(directory)
    present = manifest.complete_codes()
    if code not in present:
        remedy = f"run: {stage_command(requant_stage(code), directory)}" if code in CODES else "correct --code"
        raise ArtifactError(
            f"{directory / MANIFEST}: code {code} is not present, expected one of {', '.join(present) or 'none'}; {remedy}"
        )
    if manifest.code != code:
        with write_lock(directory):
            write_manifest(directory, replace(read_manifest(directory), code=code))


def describe_requant(directory: Path, codec: str | None, *, layers: range | None = None, device: str = "cpu") -> str:
    """What `requant` would read and write, how long at the speed of one batch, and whether it fits; writes nothing."""
    plan = plan_requant(directory, CODECS[codec or DEFAULT_CODEC], layers)
    files = len(plan.todo) * plan.config.n_routed_experts
    sizes = {
        "FP4 to read": plan.read_bytes,
        **{f"{plane} to write": files * record.slab_stride_bytes for plane, record in plan.planes.items()},
        "free disk": free_disk_bytes(directory),
    }
    lines = [f"{what:<20}{size:>20,} bytes {size / 1e9:>10.2f} GB" for what, size in sizes.items()]
    lines.append(f"{'experts to solve':<20}{plan.num_experts:>20,}")
    if plan.todo:
        seconds = plan.num_experts * _seconds_per_expert(plan, torch.device(device))
        lines.append(f"{'time on ' + device:<20}{seconds:>20,.0f} seconds, training of tables and writing left out")
    return "\n".join(lines)


def _seconds_per_expert(plan: RequantPlan, device: torch.device) -> float:
    """Of reading and solving the first batch, with tables that are never written."""
    size, layer_idx = BATCH[device.type], plan.todo[0]
    tables = placeholder_tables(plan.config, plan.code)
    solver = LayerSolver(replace(plan, tables=plan.tables | tables), layer_idx, device)
    check = SlabCheck(plan.directory, plan.manifest, plan.source, plan.checksums)
    first = batches([layer_idx], plan.config.n_routed_experts, size)[:1]
    sources, targets = BlockRing(plan.sources, size, 1), BlockRing(plan.planes, size, 1)
    with SlabReader([plan.directory], warn=say) as reader:
        start = perf_counter()
        for batch, blocks in read_ahead(reader, first, sources, check):
            solver.solve(batch, blocks, targets.sets[0])
        return (perf_counter() - start) / first[0].number


def _is_complete(plan: RequantPlan) -> bool:
    """Whether nothing is left to record: also true while layers are missing that this run was not asked for."""
    stage = plan.manifest.stages.get(requant_stage(plan.code))
    return bool(unfinished_layers(plan)) or (plan.manifest.code == plan.code and stage is not None and stage.done)


class _LayerFiles:
    """The files of one layer, one a plane, until all their slabs are written; nothing appears before `finish`."""

    def __init__(self, plan: RequantPlan, layer_idx: int) -> None:
        self.layer_idx = layer_idx
        self.files: dict[str, SlabFile] = {}
        self.missing = len(plan.planes) * plan.config.n_routed_experts  # slabs
        self._stack = ExitStack()
        try:
            for plane, record in plan.planes.items():
                path = plan.directory / expert_file(plane, layer_idx)
                temporary = self._stack.enter_context(replacing(path))
                size = record.slab_stride_bytes * plan.config.n_routed_experts
                self.files[plane] = SlabFile(path, temporary, size, say)
        except BaseException as error:
            self.abandon(error)
            raise

    def finish(self) -> None:
        """Syncs the files and gives them their names."""
        for file in self.files.values():
            file.finish()
        self._stack.close()

    def abandon(self, error: BaseException) -> None:
        """Removes what was written; no thread may be writing."""
        for file in self.files.values():
            file.close()
        self._stack.__exit__(type(error), error, error.__traceback__)


class _Run:
    """Carries out a plan; `manifest`, the plan's checksums and its tables are true of the disk after each layer."""

    def __init__(self, plan: RequantPlan, device: torch.device, consume: bool) -> None:
        self._plan, self._device, self._consume = plan, device, consume
        self._directory, self._config, self._manifest = plan.directory, plan.config, plan.manifest
        self._num_experts = plan.config.n_routed_experts
        self._open: list[_LayerFiles] = []  # the one being filled, and before it one whose last slabs are being written

    def run(self) -> None:
        """Writes every layer of the plan, consumes where asked to, and records what is whole."""
        if self._plan.todo:
            self._begin()
            self._write_layers()
        if self._consume:
            self._consume_layers(range(self._config.num_hidden_layers))
        self._finish()

    def _begin(self) -> None:
        """Lines of what is written again go first; then there is a place for each checksum and table, and the stage."""
        plan, manifest = self._plan, self._manifest
        again = {expert_file(plane, idx) for plane in plan.planes for idx in plan.todo}
        files = {name: size for name, size in manifest.files.items() if name not in again}
        stages = manifest.stages | {requant_stage(plan.code): Stage(settings_of(plan.code))}
        code = None if manifest.code == plan.code else manifest.code  # not whole until the end
        self._manifest = replace(manifest, files=files, stages=stages, code=code)
        write_manifest(self._directory, self._manifest)
        write_tables(self._directory, plan.tables)
        write_checksums(self._directory, plan.checksums)
        self._manifest = replace(self._manifest, planes=manifest.planes | plan.planes)
        write_manifest(self._directory, self._manifest)

    def _write_layers(self) -> None:
        plan, size, pin = self._plan, BATCH[self._device.type], self._device.type == "cuda"
        with ExitStack() as stack:
            sources = BlockRing(plan.sources, size, READ_DEPTH, pin)
            stack.callback(sources.close)
            targets = BlockRing(plan.planes, size, WRITE_DEPTH, pin)
            stack.callback(targets.close)
            pool = stack.enter_context(ThreadPoolExecutor(WRITERS, thread_name_prefix="slab-write"))
            reader = stack.enter_context(SlabReader([self._directory], warn=say))
            check = SlabCheck(self._directory, plan.manifest, plan.source, plan.checksums)
            samples = SampleReader(
                reader, plan.sources, shape_of(plan), self._num_experts, check, split_tables_of(plan)
            )
            trainer = stack.enter_context(TableTrainer(plan.code, samples, plan.todo, self._device))
            bar = stack.enter_context(expert_progress(plan.num_experts, "prep requant", plan.slab_bytes))
            todo = batches(plan.todo, self._num_experts, size)
            stream = read_ahead(reader, todo, sources, check)
            self._fill(stream, trainer, WriteRing(targets, plan.planes, pool), bar.update)

    def _fill(
        self,
        stream: Iterator[tuple[Batch, Blocks]],
        trainer: TableTrainer,
        ring: WriteRing,
        advance: Callable[[int], object],
    ) -> None:
        """Solves all batches; a layer is finished when the next one has taken the blocks its last slabs lay in."""
        solver: LayerSolver | None = None
        try:
            for batch, blocks in stream:
                if batch.first == 0:
                    solver = self._begin_layer(batch.layer_idx, trainer)
                assert solver is not None, f"{batch=} before its layer"
                target = ring.take(self._done)
                self._finish_written()
                solver.solve(batch, blocks, target)
                ring.write(target, batch, self._open[-1].files)
                advance(batch.number)
            ring.drain(self._done)
            self._finish_written()
        except BaseException as error:
            ring.abandon()
            for layer in self._open:
                layer.abandon(error)
            raise

    def _begin_layer(self, layer_idx: int, trainer: TableTrainer) -> LayerSolver:
        for name, table in trainer.tables(layer_idx).items():
            self._plan.tables[name][layer_idx] = table
        self._open.append(_LayerFiles(self._plan, layer_idx))
        return LayerSolver(self._plan, layer_idx, self._device)

    def _done(self, layer_idx: int, plane: str, expert_id: int, crc: int) -> None:
        self._plan.checksums[plane][layer_idx, expert_id] = crc
        next(layer for layer in self._open if layer.layer_idx == layer_idx).missing -= 1

    def _finish_written(self) -> None:
        while self._open and not self._open[0].missing:
            layer = self._open[0]
            layer.finish()
            del self._open[0]
            self._record(layer.layer_idx)
            if self._consume:
                self._consume_layers([layer.layer_idx])

    def _record(self, layer_idx: int) -> None:
        plan = self._plan
        for name, crc in table_checksums(code_tables(plan), layer_idx).items():
            plan.checksums[name][layer_idx] = crc
        write_tables(self._directory, plan.tables)
        write_checksums(self._directory, plan.checksums)
        sizes = {plane: record.slab_stride_bytes * self._num_experts for plane, record in plan.planes.items()}
        lines = {expert_file(plane, layer_idx): size for plane, size in sizes.items()}
        self._manifest = replace(self._manifest, files=self._manifest.files | lines)
        write_manifest(self._directory, self._manifest)

    def _consume_layers(self, layers: Iterable[int]) -> None:
        for layer_idx in layers:
            self._manifest = consume_fp4_layer(self._directory, self._config, self._manifest, layer_idx)

    def _finish(self) -> None:
        plan, manifest = self._plan, self._manifest
        if unfinished_layers(replace(plan, manifest=manifest)):
            return
        stages = manifest.stages | {requant_stage(plan.code): Stage(settings_of(plan.code), done=True)}
        has_fp4 = any(name.startswith("experts/fp4/") for name in manifest.files)
        planes = {name: record for name, record in manifest.planes.items() if name != "fp4" or has_fp4}
        finished = replace(manifest, planes=planes, stages=stages, code=plan.code)
        if finished != manifest:
            write_manifest(self._directory, finished)
