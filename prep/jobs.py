"""What the long jobs share: one writer at a time, room on the disk, same settings on resume, progress. Owns no format."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from runtime.artifact import byte_view
from runtime.errors import ArtifactError
from runtime.files import make_directory
from runtime.manifest import MANIFEST, Manifest

LOCK = ".lock"


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Keeps other writers out of `directory`, created if missing; the system frees it when the process dies.

    Raises:
        ArtifactError: Another process writes there, or the directory cannot be written.
    """
    path = directory / LOCK
    try:
        make_directory(directory)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as cause:
        raise ArtifactError(
            f"{path}: cannot be written ({cause.strerror}), expected a directory that prep may fill; name another"
        ) from cause
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise ArtifactError(
                f"{path}: held by another process that writes this model directory, expected none; wait for it to end"
            ) from cause
        yield
    finally:
        os.close(descriptor)


def free_disk_bytes(directory: Path) -> int:
    """Bytes a user may still write on the disk where `directory` is or would be created."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def require_free_disk(directory: Path, needed_bytes: int, what: str) -> None:
    """Raises ArtifactError unless `needed_bytes` more fit on the disk of `directory`; `what` names what needs them."""
    free_bytes = free_disk_bytes(directory)
    if free_bytes < needed_bytes:
        raise ArtifactError(
            f"{directory}: {free_bytes:,} bytes free on its disk, expected at least {needed_bytes:,} for {what}; free some space or name a directory on another disk"
        )


def require_same_settings(directory: Path, manifest: Manifest, stage: str, settings: dict[str, Any]) -> None:
    """Raises ArtifactError if `stage` was begun in `directory` with other settings than these."""
    begun = manifest.stages.get(stage)
    if begun is not None and begun.settings != settings:
        raise ArtifactError(
            f"{directory / MANIFEST}: prep {stage} was begun with {begun.settings}, expected {settings}; use the same settings or another model directory"
        )


def same_form(a: Tensor, b: Tensor) -> bool:
    """Whether shape and dtype are equal."""
    return a.shape == b.shape and a.dtype == b.dtype


def pwrite_all(descriptor: int, content: Tensor, offset_bytes: int) -> None:
    """Writes all bytes of `content`, on the CPU, at `offset_bytes`; OSError if the system refuses."""
    view = byte_view(content)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset_bytes + done)


def progress(total_bytes: int, what: str) -> tqdm:
    """A bar on stderr that counts bytes, with rate and time left; silent when stderr is no terminal."""
    return tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, disable=None)


class ExpertBar(tqdm):
    """Counts experts on stderr with rate, GB/s and time left; silent when stderr is no terminal."""

    bytes_each = 0  # read and written for one expert

    @property
    def format_dict(self) -> dict[str, Any]:
        """What a line is made of, GB/s added."""
        parts = super().format_dict
        rate = self.bytes_each * (parts["n"] - parts["initial"]) / parts["elapsed"] / 1e9 if parts["elapsed"] else 0.0
        return parts | {"postfix": f"{rate:.2f} GB/s"}


def expert_progress(total_experts: int, what: str, bytes_each: int) -> ExpertBar:
    """A bar over `total_experts`; `bytes_each` are moved for one."""
    bar = ExpertBar(total=total_experts, desc=what, unit="expert", disable=None)
    bar.bytes_each = bytes_each
    return bar


def say(line: str) -> None:
    """A warning for people, on stderr, past any progress bar."""
    tqdm.write(f"warning: {line}", file=sys.stderr)
