"""The model directory that `prep` writes and everything else reads: the only owner of its file names and offsets.

Owns what lies where and that each file is there with its exact size. Owns neither the meaning of a slab's bytes
(`kernels.formats`) nor fast reads (`runtime.store`). Opening costs headers only; contents are checked on demand.

Whoever writes here adds a file first and its line in the manifest second, and removes the line first and the file second:
then the manifest is true at every moment.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kernels.formats import PLANES
from runtime.checkpoint import dense_tensors
from runtime.config import ModelConfig
from runtime.errors import ArtifactError, CheckpointError
from runtime.safetensors_file import TORCH_DTYPES, SafetensorsFile, TensorSpec

SCHEMA_VERSION = 1
BYTE_ORDER = 1  # of the parts inside a slab: kernels.formats.split_slab
ALIGNMENT_BYTES = 4096  # O_DIRECT reads want whole pages
MANIFEST = "manifest.json"
CONFIG = "config.json"
DENSE = "dense.safetensors"
CHECKSUMS = "checksums.safetensors"
DENSE_CHECKSUMS = "dense"  # its entry in CHECKSUMS; the others are called as their plane
NO_CHECKSUM = -1  # stands in CHECKSUMS for a slab or tensor not yet written
FP4_PLANE_SETS = (frozenset({"fp4"}), frozenset({"base", "residual"}))


def expert_file(plane: str, layer_idx: int) -> str:
    """Name, relative to the model directory, of the file with all slabs of one layer in one plane."""
    return f"experts/{plane}/layer_{layer_idx:03d}.bin"


def partial_path(path: Path) -> Path:
    """Where the content of `path` lies until it is whole."""
    return path.with_name(path.name + ".partial")


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes; of a slab these are its `slab_bytes`, without the padding behind."""
    return zlib.crc32(byte_view(tensor))


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor of one or more dimensions; shares its memory when it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class PlaneRecord:
    """Geometry of a plane's files: slab e begins at e * slab_stride_bytes, its slab_bytes follow, then zeros."""

    slab_bytes: int
    slab_stride_bytes: int
    byte_order: int

    @classmethod
    def of(cls, plane: str, config: ModelConfig) -> PlaneRecord:
        """The geometry this program writes and reads."""
        slab_bytes = PLANES[plane].slab_bytes(config.hidden_size, config.moe_intermediate_size)
        return cls(slab_bytes, -(-slab_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, BYTE_ORDER)


@dataclass(frozen=True, slots=True)
class Stage:
    """A command that writes here: the settings it was begun with, and whether it finished."""

    settings: dict[str, Any]
    done: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a model directory holds; a plane is present when every layer's file of it is in `files`."""

    config: dict[str, Any]  # ModelConfig.to_json() as JSON gives it back
    fingerprint: str  # SHA-256 of the source: config.json, tensor names, size and header of each shard
    shards: dict[str, str]  # source shard -> its part of the fingerprint, so that a consumed one is still known
    planes: dict[str, PlaneRecord]
    code: str | None  # the 2-bit code in use
    files: dict[str, int]  # relative name -> bytes of each finished file but this one and CHECKSUMS
    stages: dict[str, Stage]

    def complete_planes(self) -> list[str]:
        """Names of the planes of which every layer is there."""
        layers = range(self.config["num_hidden_layers"])
        return [plane for plane in self.planes if all(expert_file(plane, idx) in self.files for idx in layers)]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Puts `manifest` in the place of the one in `directory`; a reader sees the old one or this one, nothing between."""
    content = {"schema_version": SCHEMA_VERSION, **asdict(manifest)}
    with atomic_file(directory / MANIFEST) as file:
        file.write(json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of `directory`, complete or not.

    Raises:
        ArtifactError: It is missing, damaged or of another schema version.
    """
    path = directory / MANIFEST
    again = _start_over(directory)
    try:
        raw = json.loads(path.read_bytes())
        version = raw["schema_version"]
        if version == SCHEMA_VERSION:
            return _manifest_from_json(raw)
    except OSError as cause:
        raise ArtifactError(
            f"{path}: cannot be read ({cause.strerror}), expected in every model directory; run: {stage_command('layout', directory)}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ArtifactError(
            f"{path}: not a manifest ({cause!r}), expected JSON of schema version {SCHEMA_VERSION}; {again}"
        ) from cause
    raise ArtifactError(f"{path}: schema version {version!r}, expected {SCHEMA_VERSION}; {again}")


def _manifest_from_json(raw: dict[str, Any]) -> Manifest:
    config = {
        **raw["config"],
        "num_hidden_layers": int(raw["config"]["num_hidden_layers"]),
    }  # complete_planes counts on it
    return Manifest(
        config=config,
        fingerprint=raw["fingerprint"],
        shards=dict(raw["shards"]),
        planes={name: PlaneRecord(**record) for name, record in raw["planes"].items()},
        code=raw["code"],
        files={name: int(size_bytes) for name, size_bytes in raw["files"].items()},
        stages={name: Stage(**stage) for name, stage in raw["stages"].items()},
    )


def config_record(config: ModelConfig) -> dict[str, Any]:
    """`config` as it stands in a manifest that has been written and read."""
    return json.loads(json.dumps(config.to_json()))


def stage_command(stage: str, directory: Path) -> str:
    """The command line that begins or completes `stage`."""
    return f"prep {stage} CHECKPOINT {directory}" if stage == "layout" else f"prep {stage} {directory}"


def _start_over(directory: Path) -> str:
    return f"remove {directory} and run: {stage_command('layout', directory)}"


def _stage_of(name: str) -> str:
    """The stage that writes the file `name` of a model directory."""
    by_requant = name.startswith(("tables", "experts/")) and not name.startswith("experts/fp4/")
    return "requant" if by_requant else "layout"


def checksum_specs(config: ModelConfig, planes: list[str]) -> dict[str, TensorSpec]:
    """Entries of CHECKSUMS: per plane int64 [L, E], and int64 [number of dense tensors] in the order of sorted names."""
    slabs = TensorSpec("I64", (config.num_hidden_layers, config.n_routed_experts))
    return {DENSE_CHECKSUMS: TensorSpec("I64", (len(dense_tensors(config)),)), **dict.fromkeys(planes, slabs)}


def write_checksums(directory: Path, checksums: dict[str, Tensor]) -> None:
    """Replaces CHECKSUMS, whole or not at all; `checksums` as in `checksum_specs`, NO_CHECKSUM where nothing is written."""
    specs = {name: TensorSpec("I64", tuple(tensor.shape)) for name, tensor in sorted(checksums.items())}
    with atomic_file(directory / CHECKSUMS) as file:
        file.write(safetensors_header(specs))
        for name in specs:
            file.write(byte_view(checksums[name]))


def read_checksums(directory: Path) -> dict[str, Tensor]:
    """The entries of CHECKSUMS, as in `checksum_specs`; ArtifactError if the file is missing or damaged."""
    file = SafetensorsFile(directory / CHECKSUMS, ArtifactError, f"run: {stage_command('layout', directory)}")
    try:
        return {name: file.read(name) for name in file.entries}
    finally:
        file.close()


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
        self.raw_config, self.config = self._read_config()
        self.planes = {name: self.manifest.planes[name] for name in self.manifest.complete_planes()}
        self._check_planes()
        self._check_checksums()
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

    def close(self) -> None:
        """Releases the descriptor; a second call does nothing."""
        self._dense.close()

    def _remedy(self, name: str) -> str:
        if name == MANIFEST:  # no command mends what it says of the others
            return _start_over(self.directory)
        return f"run: {stage_command(_stage_of(name), self.directory)}"

    def _error(self, path: Path, problem: str) -> ArtifactError:
        return ArtifactError(f"{path}: {problem}; {self._remedy(path.relative_to(self.directory).as_posix())}")

    def _check_finished(self) -> None:
        stages, present = self.manifest.stages, self.manifest.complete_planes()
        layout_done = "layout" in stages and stages["layout"].done
        if layout_done and any(planes <= set(present) for planes in FP4_PLANE_SETS):
            return
        unfinished = next((name for name, stage in stages.items() if not stage.done), None)
        problem = f"prep {unfinished} did not finish" if unfinished else "planes are missing"
        remedy = f"run: {stage_command(unfinished, self.directory)}" if unfinished else _start_over(self.directory)
        raise ArtifactError(
            f"{self.directory / MANIFEST}: {problem} (whole planes: {', '.join(present) or 'none'}), expected fp4 or base and residual; {remedy}"
        )

    def _check_sizes(self) -> None:
        needed: dict[str, int | None] = dict.fromkeys((CONFIG, DENSE, CHECKSUMS))
        for name, expected in (needed | self.manifest.files).items():
            path = self.directory / name
            wanted = "a file of prep" if expected is None else f"{expected:,} bytes"
            if not path.is_file():
                raise self._error(path, f"file is missing, expected {wanted}")
            if expected is not None and path.stat().st_size != expected:
                raise self._error(path, f"{path.stat().st_size:,} bytes, expected {wanted}")

    def _read_config(self) -> tuple[dict[str, Any], ModelConfig]:
        path = self.directory / CONFIG
        try:
            raw = json.loads(path.read_bytes())
            config = ModelConfig.from_json(raw, path)
        except (ValueError, AttributeError, CheckpointError) as cause:
            raise self._error(path, f"not the checkpoint's config ({cause}), expected its copy") from cause
        if config_record(config) != self.manifest.config:
            raise self._error(path, f"not the config that {MANIFEST} records, expected the same")
        return raw, config

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

    def _check_checksums(self) -> None:
        file = SafetensorsFile(self.directory / CHECKSUMS, ArtifactError, self._remedy(CHECKSUMS))
        try:  # entries of a plane that is being written are not looked at
            expected = checksum_specs(self.config, list(self.planes))
            self._check_specs(file, expected, known=set(expected) | set(file.entries))
        finally:
            file.close()

    def _check_specs(
        self, file: SafetensorsFile, expected: dict[str, TensorSpec], known: set[str] | None = None
    ) -> None:
        for name, spec in expected.items():
            entry = file.entries.get(name)
            if entry is None:
                raise self._error(file.path, f"tensor {name} is missing, expected {spec}")
            if entry.spec != spec:
                raise self._error(file.path, f"tensor {name} is {entry.spec}, expected {spec}")
        unknown = sorted(set(file.entries) - (known or set(expected)))
        if unknown:
            raise self._error(file.path, f"tensor {unknown[0]} is not one of the model's, expected none besides them")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears at `path`, whole and synced, when the block ends; after an error nothing appears.

    Raises:
        ArtifactError: The system refused to write; what the block itself raises as OSError is reported the same way.
    """
    temporary = partial_path(path)
    try:
        make_directory(path.parent)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException as cause:
        with suppress(OSError):  # an unfinished file holds the space that the next try needs; `cause` matters more
            temporary.unlink()
        if isinstance(cause, OSError):
            raise ArtifactError(
                f"{path}: writing failed ({cause.strerror or cause}), expected room and permission; mend that and run the same command again, it continues where it stopped"
            ) from cause
        raise


def make_directory(path: Path) -> None:
    """Creates `path` with its parents so that they survive a power cut; nothing if it is there."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
