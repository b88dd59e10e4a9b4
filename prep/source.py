"""The release a model directory is made from: what tells it from another, and which of its shards may be gone."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from prep.consume import files_by_shard
from runtime.checkpoint import Checkpoint
from runtime.errors import CheckpointError
from runtime.manifest import CONFIG, MANIFEST, read_manifest


def open_source(source: Path, directory: Path) -> Checkpoint:
    """The checkpoint; only shards that a manifest in `directory` knows may be missing."""
    known = read_manifest(directory).shards if (directory / MANIFEST).is_file() else {}
    return Checkpoint(source, consumed=known)


def require_shards(checkpoint: Checkpoint, todo: Collection[str]) -> None:
    """Returns if the missing shards are of no use to the files still to write.

    Raises:
        CheckpointError: One is; it names shard and file.
    """
    if not checkpoint.consumed:
        return
    needed = files_by_shard(checkpoint)
    for shard in sorted(checkpoint.consumed):
        wanted = sorted(needed[shard].intersection(todo))
        if wanted:
            raise CheckpointError(
                f"{checkpoint.directory / shard}: file is missing, expected it to write {wanted[0]}; fetch it again"
            )


def source_shards(checkpoint: Checkpoint, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Shard name -> its size and the SHA-256 of its header; of a consumed shard what is `known` of it."""
    names = sorted(set(checkpoint.shard_of.values()))
    read = {name: _shard_digest(checkpoint.directory / name) for name in names if name not in checkpoint.consumed}
    return read if known is None else {name: read.get(name) or known[name] for name in names}


def source_fingerprint(checkpoint: Checkpoint, shards: dict[str, str]) -> str:
    """SHA-256 over config.json, the index's names and `source_shards`: tells one release from another by headers only."""
    digest = hashlib.sha256((checkpoint.directory / CONFIG).read_bytes())
    for pairs in (checkpoint.shard_of, shards):
        for name in sorted(pairs):
            digest.update(f"\n{name} {pairs[name]}".encode())
    return digest.hexdigest()


def _shard_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
    return f"{path.stat().st_size} {hashlib.sha256(length + header).hexdigest()}"
