"""What `prep synth` makes of its settings, how large that is and how far a directory is. Reads the manifest only, writes nothing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.formats import CODES
from prep.jobs import LOCK, free_disk_bytes, require_same_settings
from prep.released_config import RELEASED_CONFIGS
from runtime.artifact import dense_file_specs, safetensors_header
from runtime.config import ModelConfig
from runtime.errors import ArtifactError, StrawError
from runtime.files import partial_path
from runtime.manifest import CODECS, CONFIG, MANIFEST, Manifest, PlaneRecord, Stage, config_record, read_manifest

STAGE = "synth"
VERSION = 1  # of the drawing of weights; a directory begun with another is not completed
SLACK_BYTES = 64 << 20  # for the small files, each twice while it is replaced


@dataclass(frozen=True, slots=True)
class SynthSettings:
    """What decides the bytes: counts cut from the released model `config`, and the way to the 2-bit precision."""

    config: str = "v4-flash"
    unique_layers: int = 1
    layers: int | None = None  # None: as released, in the next two also
    experts: int | None = None
    vocab: int | None = None
    codec: str | None = "quad"
    seed: int = 0

    def raw_config(self) -> dict[str, Any]:
        """The content of config.json, in the released form.

        Raises:
            StrawError: A count is outside its range.
        """
        released = RELEASED_CONFIGS[self.config]
        layers = released["num_hidden_layers"] if self.layers is None else self.layers
        experts = released["n_routed_experts"] if self.experts is None else self.experts
        vocab = released["vocab_size"] if self.vocab is None else self.vocab
        _require_between("layers", layers, 1, released["num_hidden_layers"])
        _require_between("unique-layers", self.unique_layers, 1, layers)
        _require_between("experts", experts, released["num_experts_per_tok"], 2**16)
        _require_between("vocab", vocab, 2, 2**24)
        return released | {
            "num_hidden_layers": layers,
            "num_hash_layers": min(layers, released["num_hash_layers"]),
            "compress_ratios": [*released["compress_ratios"][:layers], 0],  # the draft stage has an entry
            "n_routed_experts": experts,
            "vocab_size": vocab,
        }


def _require_between(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise StrawError(f"{option} is {value:,}, expected {least:,} to {most:,}; correct --{option}")


@dataclass(frozen=True, slots=True)
class SynthPlan:
    """What a run would make, and how far it is; `manifest` is the one to begin or go on with."""

    directory: Path
    settings: SynthSettings
    raw_config: dict[str, Any]
    config: ModelConfig
    manifest: Manifest

    @property
    def code(self) -> str | None:
        """The 2-bit code of the directory."""
        return None if self.settings.codec is None else CODECS[self.settings.codec]

    @property
    def planes(self) -> dict[str, PlaneRecord]:
        """Geometry of the planes that stay: FP4 as split has it, or fp4 and the code's."""
        names = () if self.code is None else CODES[self.code].planes
        kept = names if self.code == "split" else ("fp4", *names)
        return {plane: PlaneRecord.of(plane, self.config) for plane in kept}

    @property
    def dense_bytes(self) -> int:
        """Bytes of DENSE."""
        specs = dense_file_specs(self.config)
        return len(safetensors_header(specs)) + sum(spec.size_bytes for spec in specs.values())

    @property
    def layer_bytes(self) -> dict[str, int]:
        """Plane -> bytes of one layer's file."""
        return {plane: self.config.n_routed_experts * record.slab_stride_bytes for plane, record in self.planes.items()}

    @property
    def disk_bytes(self) -> int:
        """Bytes that the finished directory takes."""
        return self.dense_bytes + self.settings.unique_layers * sum(self.layer_bytes.values())

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the disk while it is made: SPLIT is made from an fp4 file that goes afterwards."""
        fp4_bytes = self.config.n_routed_experts * PlaneRecord.of("fp4", self.config).slab_stride_bytes
        return self.disk_bytes + (fp4_bytes if "fp4" not in self.planes else 0) + SLACK_BYTES

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to make."""
        return self.manifest.stages[STAGE].done


def describe_synth(directory: Path, settings: SynthSettings) -> str:
    """What `synth` would write and whether it fits, as lines of text; writes nothing."""
    plan = plan_synth(directory, settings)
    layers, unique = plan.config.num_hidden_layers, settings.unique_layers
    sizes = {
        "dense tensors": plan.dense_bytes,
        **{f"{plane}, a layer": size for plane, size in plan.layer_bytes.items()},
        f"on disk, {unique} unique": plan.disk_bytes,
        "while it is made": plan.peak_bytes,
        f"seen as {layers} layers": plan.dense_bytes + layers * sum(plan.layer_bytes.values()),
        "free disk": free_disk_bytes(directory),
    }
    lines = [f"{what:<20}{size:>20,} bytes {size / 1e9:>10.2f} GB" for what, size in sizes.items()]
    if plan.code is not None:
        lines.append(f"{'experts to solve':<20}{unique * plan.config.n_routed_experts:>20,}")
    return "\n".join(lines)


def plan_synth(directory: Path, settings: SynthSettings) -> SynthPlan:
    """How far `directory` is; reads the manifest only, writes nothing; errors as in `synth`."""
    raw = settings.raw_config()
    config = ModelConfig.from_json(raw, directory / CONFIG)
    wanted = {**asdict(settings), "version": VERSION}
    if not (directory / MANIFEST).exists():
        _require_empty(directory)
        digest = hashlib.sha256(json.dumps([raw, wanted], sort_keys=True).encode()).hexdigest()
        begun = Manifest(config_record(config), f"synthetic {digest}", {}, {}, None, {}, {STAGE: Stage(wanted)})
        return SynthPlan(directory, settings, raw, config, begun)
    found = read_manifest(directory)
    if STAGE not in found.stages:
        raise ArtifactError(
            f"{directory / MANIFEST}: made by prep {' and '.join(found.stages)}, expected prep synth; name another directory"
        )
    require_same_settings(directory, found, STAGE, wanted)
    return SynthPlan(directory, settings, raw, config, found)


def _require_empty(directory: Path) -> None:
    """A directory without a manifest is ours only if a first run left nothing but its beginnings there."""
    beginnings = {LOCK, partial_path(directory / MANIFEST).name}
    found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    foreign = [name for name in found if name not in beginnings]
    if foreign or (directory.exists() and not directory.is_dir()):
        what = f"holds {foreign[0]} and no {MANIFEST}" if foreign else "a file"
        raise ArtifactError(f"{directory}: {what}, expected an empty directory or none; name another or remove it")
