"""The model directory that `prep` writes and everything else reads: the only owner of its offsets; `runtime.manifest` names its files.

Owns what lies where and that each file is there with its exact size. Owns neither the meaning of a slab's bytes
(`kernels.formats`) nor fast reads (`runtime.store`). Opening costs headers only; contents are checked on demand.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from kernels.formats import PLANES
from runtime.checkpoint import dense_tensors
from runtime.config import ModelConfig
from runtime.errors import ArtifactError
from runtime.files import atomic_file
from runtime.manifest import (
    CHECKSUMS,
    CONFIG,
    DENSE,
    HEAT,
    MANIFEST,
    TABLES,
    PlaneRecord,
    expert_file,
    read_manifest,
    read_model_config,
    remedy,
    stage_command,
    stage_of,
    start_over,
)
from runtime.safetensors_file import TORCH_DTYPES, SafetensorsFile, TensorSpec
from runtime.tables import DTYPE_NAMES, Tables, table_specs

DENSE_CHECKSUMS = "dense"  # its entry in CHECKSUMS; a slab's is called as its plane, a row of TABLES' as its tensor
COPY_CHECKSUM = "file:"  # begins the entry of a file copied whole
NO_CHECKSUM = -1  # stands in CHECKSUMS for a slab or tensor not yet written
FP4_PLANE_SETS = (frozenset({"fp4"}), frozenset({"base", "residual"}))


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes; of a slab these are its `slab_bytes`, without the padding behind."""
    return zlib.crc32(byte_view(tensor))


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor of one or more dimensions; shares its memory when it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def checksum_specs(config: ModelConfig, planes: list[str]) -> dict[str, TensorSpec]:
    """Entries of CHECKSUMS: per plane int64 [L, E], and int64 [number of dense tensors] in the order of sorted names."""
    slabs = TensorSpec("I64", (config.num_hidden_layers, config.n_routed_experts))
    return {DENSE_CHECKSUMS: TensorSpec("I64", (len(dense_tensors(config)),)), **dict.fromkeys(planes, slabs)}


def write_checksums(directory: Path, checksums: dict[str, Tensor]) -> None:
    """Replaces CHECKSUMS, whole or not at all; `checksums` as in `checksum_specs`, NO_CHECKSUM where nothing is written."""
    _write_tensors(directory / CHECKSUMS, checksums)


def write_tables(directory: Path, tables: Mapping[str, Tensor]) -> None:
    """Replaces TABLES, whole or not at all; `tables` as in `runtime.tables.table_specs`."""
    _write_tensors(directory / TABLES, tables)


def write_heat(directory: Path, uses: Tensor, num_tokens: int) -> None:
    """Replaces HEAT, whole or not at all: `uses` int64 [L, E] of each expert, counted over `num_tokens` tokens."""
    _write_tensors(directory / HEAT, {"uses": uses, "tokens": torch.tensor([num_tokens])})


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The widest numbers first, so that each tensor lies aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    specs = {name: TensorSpec(DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in order}
    with atomic_file(path) as file:
        file.write(safetensors_header(specs))
        for name in order:
            file.write(byte_view(tensors[name]))


def read_checksums(directory: Path) -> dict[str, Tensor]:
    """The entries of CHECKSUMS, as in `checksum_specs`; ArtifactError if the file is missing or damaged."""
    return _read_tensors(directory / CHECKSUMS, f"run: {stage_command('layout', directory)}")


def read_tables(directory: Path, code: str | None) -> Tables:
    """Every tensor of TABLES, on the CPU; ArtifactError if it is missing or damaged, naming the stage of `code` as remedy."""
    return _read_tensors(directory / TABLES, f"run: {stage_command(stage_of(TABLES, code), directory)}")


def _read_tensors(path: Path, remedy: str) -> dict[str, Tensor]:
    file = _open(path, remedy)
    try:
        return {name: file.read(name) for name in file.entries}
    finally:
        file.close()


def _open(path: Path, remedy: str) -> SafetensorsFile:
    if path.is_dir():
        raise ArtifactError(f"{path}: a directory, expected a file of prep; remove it, then {remedy}")
    return SafetensorsFile(path, ArtifactError, remedy)


def safetensors_header(specs: dict[str, TensorSpec]) -> bytes:
    """The first bytes of a safetensors file; the payloads of `specs` follow back to back in its order."""
    header, offset = {}, 0
    for name, spec in specs.items():
        end = offset + spec.size_bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dense_file_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The tensors of DENSE in the order of their payloads: the widest numbers first, so that each lies aligned."""
    specs = dense_tensors(config)
    order = sorted(specs, key=lambda name: (-TORCH_DTYPES[specs[name].dtype].itemsize, name))
    return {name: specs[name] for name in order}


class ModelDirectory:
    """An opened model directory. Holds one file descriptor until `close`; tensors are newly allocated on the CPU."""

    def __init__(self, directory: Path) -> None:
        """Opens `directory` and checks manifest, every file's size and the headers.

        Raises:
            ArtifactError: Something is missing, unfinished, of another size or version; one line that names it.
        """
        if not directory.is_dir():
            raise ArtifactError(
                f"{directory}: no such directory, expected a model directory; run: {stage_command('layout', directory)}"
            )
        self.directory = directory
        self.manifest = read_manifest(directory)
        self.code, self.fingerprint = self.manifest.code, self.manifest.fingerprint
        self._check_finished()
        self._check_sizes()
        self.raw_config, self.config = read_model_config(directory, self.manifest)
        self.planes = {name: self.manifest.planes[name] for name in self.manifest.complete_planes()}
        self.codes = self.manifest.complete_codes()
        self._check_planes()
        self._check_code()
        self._check_header(CHECKSUMS, checksum_specs(self.config, list(self.planes)))
        if self.codes:
            self._check_header(TABLES, table_specs(self.config, self.codes))
        self._dense = SafetensorsFile(directory / DENSE, ArtifactError, self._remedy(DENSE))
        try:
            self._check_specs(self._dense, dense_tensors(self.config))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ModelDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._dense.entries

    def read(self, name: str) -> Tensor:
        """The dense tensor `name` as released."""
        return self._dense.read(name)

    def read_slab(self, layer_idx: int, expert_id: int, plane: str = "fp4") -> Tensor:
        """One expert in one plane, without padding: uint8 [slab_bytes].

        Raises:
            ArtifactError: The plane is not present, or the file ended early or could not be read.
        """
        path = self.expert_path(plane, layer_idx)
        record = self.planes[plane]
        slab = torch.empty(record.slab_bytes, dtype=torch.uint8)
        try:
            with path.open("rb", buffering=0) as file:
                count = os.preadv(file.fileno(), [byte_view(slab)], expert_id * record.slab_stride_bytes)
        except OSError as cause:
            raise self._error(
                path, f"reading expert {expert_id} failed ({cause.strerror}), expected its slab"
            ) from cause
        if count != record.slab_bytes:
            raise self._error(path, f"expert {expert_id} ends after {count:,} bytes, expected {record.slab_bytes:,}")
        return slab

    def expert_path(self, plane: str, layer_idx: int) -> Path:
        """The file with the slabs of one layer; slab e begins at e * planes[plane].slab_stride_bytes."""
        path = self.directory / expert_file(plane, layer_idx)
        if plane not in self.planes:
            raise self._error(path, f"plane {plane} is not present, expected one of {', '.join(self.planes)}")
        return path

    def read_checksums(self) -> dict[str, Tensor]:
        """What `checksum` must give: per plane int64 [L, E], and "dense" int64 in the order of sorted names."""
        return read_checksums(self.directory)

    def read_tables(self) -> Tables:
        """The tables and normalisers of every code in `codes`, by the names of `kernels.formats.CODES`, on the CPU."""
        if not self.codes:
            return {}
        found = _read_tensors(self.directory / TABLES, self._remedy(TABLES))
        return {name: found[name] for name in table_specs(self.config, self.codes)}

    def read_heat(self) -> tuple[Tensor, int] | None:
        """Uses of each expert, int64 [L, E], and the tokens they were counted over; None where no trace has left any.

        Raises:
            ArtifactError: HEAT is damaged or of another model.
        """
        path = self.directory / HEAT
        if not path.exists():
            return None
        file = _open(path, f"remove it, or run: {stage_command('trace', self.directory)}")
        try:
            uses = TensorSpec("I64", (self.config.num_hidden_layers, self.config.n_routed_experts))
            self._check_specs(file, {"uses": uses, "tokens": TensorSpec("I64", (1,))})
            return file.read("uses"), int(file.read("tokens"))
        finally:
            file.close()

    def close(self) -> None:
        """Releases the descriptor; a second call does nothing."""
        self._dense.close()

    def _remedy(self, name: str, entry: str | None = None) -> str:
        return remedy(self.directory, self.manifest, name, entry)

    def _error(self, path: Path, problem: str, entry: str | None = None) -> ArtifactError:
        return ArtifactError(f"{path}: {problem}; {self._remedy(path.relative_to(self.directory).as_posix(), entry)}")

    def _check_finished(self) -> None:
        stages, present = self.manifest.stages, self.manifest.complete_planes()
        layout_done = "layout" in stages and stages["layout"].done
        if layout_done and any(planes <= set(present) for planes in FP4_PLANE_SETS):
            return
        unfinished = next((name for name, stage in stages.items() if not stage.done), None)
        problem = f"prep {unfinished} did not finish" if unfinished else "planes are missing"
        remedy = f"run: {stage_command(unfinished, self.directory)}" if unfinished else start_over(self.directory)
        raise ArtifactError(
            f"{self.directory / MANIFEST}: {problem} (whole planes: {', '.join(present) or 'none'}), expected fp4 or base and residual; {remedy}"
        )

    def _check_sizes(self) -> None:
        needed: dict[str, int | None] = dict.fromkeys((CONFIG, DENSE, CHECKSUMS))
        for name, expected in (needed | self.manifest.files).items():
            path = self.directory / name
            wanted = "a file of prep" if expected is None else f"{expected:,} bytes"
            if path.is_dir():
                raise ArtifactError(f"{path}: a directory, expected {wanted}; remove it, then {self._remedy(name)}")
            if not path.is_file():
                raise self._error(path, f"file is missing, expected {wanted}")
            if expected is not None and path.stat().st_size != expected:
                raise self._error(path, f"{path.stat().st_size:,} bytes, expected {wanted}")

    def _check_planes(self) -> None:
        for name, record in self.planes.items():
            if name not in PLANES:
                raise self._error(self.directory / MANIFEST, f"plane {name}, expected one of {', '.join(PLANES)}")
            if record != PlaneRecord.of(name, self.config):
                wanted = PlaneRecord.of(name, self.config)
                raise self._error(self.directory / MANIFEST, f"plane {name} is {record}, expected {wanted}")
            expected = self.config.n_routed_experts * record.slab_stride_bytes
            for layer_idx in range(self.config.num_hidden_layers):
                self._check_slab_file(expert_file(name, layer_idx), expected)

    def _check_slab_file(self, name: str, expected: int) -> None:
        if self.manifest.files[name] != expected:
            raise self._error(self.directory / name, f"{self.manifest.files[name]:,} bytes, expected {expected:,}")

    def _check_code(self) -> None:
        if self.code is None or self.code in self.codes:
            return
        raise self._error(
            self.directory / MANIFEST,
            f"code {self.code} is in use, expected one whose planes are whole ({', '.join(self.codes) or 'none'})",
        )

    def _check_header(self, name: str, expected: dict[str, TensorSpec]) -> None:
        """Entries of a plane that is being written are not looked at."""
        file = _open(self.directory / name, self._remedy(name))
        try:
            self._check_specs(file, expected, known=set(expected) | set(file.entries))
        finally:
            file.close()

    def _check_specs(
        self, file: SafetensorsFile, expected: dict[str, TensorSpec], known: set[str] | None = None
    ) -> None:
        for name, spec in expected.items():
            entry = file.entries.get(name)
            if entry is None:
                raise self._error(file.path, f"tensor {name} is missing, expected {spec}", name)
            if entry.spec != spec:
                raise self._error(file.path, f"tensor {name} is {entry.spec}, expected {spec}", name)
        unknown = sorted(set(file.entries) - (known or set(expected)))
        if unknown:
            raise self._error(file.path, f"tensor {unknown[0]} is not one of the model's, expected none besides them")
