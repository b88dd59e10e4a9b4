"""The manifest of a model directory: what is there, how it lies, which stage writes it and what repairs it. Owns all file names.

Whoever writes there adds a file first and its line in the manifest second, and removes the line first and the file second:
then the manifest is true at every moment.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.formats import CODES, PLANES
from runtime.config import ModelConfig
from runtime.errors import ArtifactError, CheckpointError
from runtime.files import atomic_file

SCHEMA_VERSION = 1
BYTE_ORDER = 1  # of the parts inside a slab: kernels.formats.split_slab
ALIGNMENT_BYTES = 4096  # O_DIRECT reads want whole pages
MANIFEST = "manifest.json"
CONFIG = "config.json"
DENSE = "dense.safetensors"
TABLES = "tables.safetensors"
CHECKSUMS = "checksums.safetensors"
HEAT = "heat.safetensors"
PREDICTOR = "predictor.safetensors"
TRACE = "trace"  # a directory
CODECS = {"clip": "int2", "quad": "quad2", "split": "split"}  # what prep requant calls the way to a code


def expert_file(plane: str, layer_idx: int) -> str:
    """Name, relative to the model directory, of the file with all slabs of one layer in one plane."""
    return f"experts/{plane}/layer_{layer_idx:03d}.bin"


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
    files: dict[str, int]  # relative name -> bytes of each finished file but this one, CHECKSUMS and TABLES
    stages: dict[str, Stage]

    def complete_planes(self) -> list[str]:
        """Names of the planes of which every layer is there."""
        layers = range(self.config["num_hidden_layers"])
        return [plane for plane in self.planes if all(expert_file(plane, idx) in self.files for idx in layers)]

    def complete_codes(self) -> list[str]:
        """Names of the 2-bit codes of which every plane is whole."""
        present = set(self.complete_planes())
        return [code for code, (planes, _) in CODES.items() if present.issuperset(planes)]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Puts `manifest` in the place of the one in `directory`; a reader sees the old one or this one, nothing between."""
    content = {"schema_version": SCHEMA_VERSION, **asdict(manifest)}
    content["checksum"] = manifest_checksum(content)
    with atomic_file(directory / MANIFEST) as file:
        file.write(json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")


def manifest_checksum(content: dict[str, Any]) -> int:
    """CRC-32 of a manifest's JSON object, its own entry "checksum" left out; `prep verify` compares it."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def read_manifest(directory: Path) -> Manifest:
    """The manifest of `directory`, complete or not.

    Raises:
        ArtifactError: It is missing, damaged or of another schema version.
    """
    path = directory / MANIFEST
    again = start_over(directory)
    try:
        raw = json.loads(path.read_bytes())
        version = raw["schema_version"]
        if version == SCHEMA_VERSION:
            return _manifest_from_json(raw)
    except OSError as cause:
        raise ArtifactError(
            f"{path}: cannot be read ({cause.strerror}), expected in every model directory; run: {stage_command('layout', directory)}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise ArtifactError(
            f"{path}: not a manifest ({cause!r}), expected JSON of schema version {SCHEMA_VERSION}; {again}"
        ) from cause
    raise ArtifactError(f"{path}: schema version {version!r}, expected {SCHEMA_VERSION}; {again}")


def _manifest_from_json(raw: dict[str, Any]) -> Manifest:
    manifest = Manifest(
        config=dict(raw["config"]),
        fingerprint=_typed("fingerprint", raw["fingerprint"], str),
        shards={name: _typed(name, digest, str) for name, digest in raw["shards"].items()},
        planes={name: PlaneRecord(**record) for name, record in raw["planes"].items()},
        code=_typed("code", raw["code"], str, type(None)),
        files={name: _count(name, size_bytes) for name, size_bytes in raw["files"].items()},
        stages={name: Stage(**stage) for name, stage in raw["stages"].items()},
    )
    _count("num_hidden_layers", manifest.config["num_hidden_layers"], 1)  # complete_planes counts on it
    _count("checksum", raw.get("checksum", 0))
    for record in manifest.planes.values():
        _count("slab_bytes", record.slab_bytes, 1)
        _count("slab_stride_bytes", record.slab_stride_bytes, record.slab_bytes)
        _count("byte_order", record.byte_order)
    for name in manifest.files:
        if Path(name).is_absolute():
            raise ValueError(f"file {name}, expected a name relative to the directory")
    for stage in manifest.stages.values():
        _typed("settings", stage.settings, dict)
        _typed("done", stage.done, bool)
    return manifest


def _typed(what: str, value: Any, *kinds: type) -> Any:
    """`value` if its type is one of `kinds`, else TypeError."""
    if type(value) not in kinds:
        raise TypeError(f"{what} is {value!r}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _count(what: str, value: Any, least: int = 0) -> int:
    """`value` if it is an integer of at least `least`, else TypeError or ValueError."""
    if _typed(what, value, int) < least:
        raise ValueError(f"{what} is {value}, expected at least {least}")
    return value


def config_record(config: ModelConfig) -> dict[str, Any]:
    """`config` as it stands in a manifest that has been written and read."""
    return json.loads(json.dumps(config.to_json()))


def stage_command(stage: str, directory: Path) -> str:
    """The command line that begins or completes `stage`."""
    return f"prep {stage} CHECKPOINT {directory}" if stage == "layout" else f"prep {stage} {directory}"


def start_over(directory: Path, manifest: Manifest | None = None) -> str:
    """What to do when no command mends the directory; `manifest` tells who made it."""
    origin = "synth" if manifest is not None and "synth" in manifest.stages else "layout"
    return f"remove {directory} and run: {stage_command(origin, directory)}"


def requant_stage(code: str) -> str:
    """The name, in the manifest and on the command line, of the stage that writes the planes of `code`."""
    codec = next(codec for codec, its_code in CODECS.items() if its_code == code)
    return f"requant --codec {codec}"


def stage_of(name: str, code: str | None, entry: str | None = None) -> str:
    """The stage that writes the file `name`, or `entry` of TABLES or CHECKSUMS, of a model directory in which `code` is in use."""
    folder, _, rest = name.partition("/")
    part = entry or (rest.partition("/")[0] if folder == "experts" else "")
    owners = (its for its, (planes, tables) in CODES.items() if part in (*planes, *(table.name for table in tables)))
    owner = next(owners, code if name == TABLES else None)
    return "layout" if owner is None else requant_stage(owner)


def remedy(directory: Path, manifest: Manifest, name: str, entry: str | None = None) -> str:
    """What to do when the file `name`, or only `entry` of it, is missing or of another size: the end of a message."""
    if name == MANIFEST:  # no command mends what it says of the others
        return start_over(directory, manifest)
    stage = stage_of(name, manifest.code or next(iter(manifest.complete_codes()), None), entry)
    holds_fp4 = stage == requant_stage("split") or (name == TABLES and entry is None)
    if holds_fp4 and "fp4" not in manifest.complete_planes():
        return start_over(directory, manifest)  # base and residual with the tables of SPLIT are all the FP4 there was
    if stage == "layout" and "synth" in manifest.stages:
        return start_over(directory, manifest)  # it has no source
    return f"run: {stage_command(stage, directory)}"


def content_remedy(directory: Path, manifest: Manifest, name: str, entry: str | None = None) -> str:
    """What to do when the file `name` has its size but not its content: a command sees by its absence that it is to be mended.

    TABLES stays, for it may hold the only copy of another code's rows: requant finds the bad ones of `entry` by their CRC-32.
    """
    cure = remedy(directory, manifest, name, entry)
    return cure if name == TABLES or cure.startswith("remove") else f"remove {directory / name} and {cure}"


def read_model_config(directory: Path, manifest: Manifest) -> tuple[dict[str, Any], ModelConfig]:
    """Content and meaning of CONFIG in a model directory with this manifest.

    Raises:
        ArtifactError: It is not the config that the manifest records.
    """
    path, remedy = directory / CONFIG, f"run: {stage_command('layout', directory)}"
    try:
        raw = json.loads(path.read_bytes())
        config = ModelConfig.from_json(raw, path)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, CheckpointError) as cause:
        raise ArtifactError(f"{path}: not the checkpoint's config ({cause}), expected its copy; {remedy}") from cause
    if config_record(config) != manifest.config:
        raise ArtifactError(f"{path}: not the config that {MANIFEST} records, expected the same; {remedy}")
    return raw, config
