"""Files that appear whole or not at all, and names that survive a power cut. Owns no format and no file's name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from runtime.errors import ArtifactError


def partial_path(path: Path) -> Path:
    """Where the content of `path` lies until it is whole."""
    return path.with_name(path.name + ".partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name under which the block writes and syncs a file, which appears at `path` when it ends; after an error nothing does.

    Raises:
        ArtifactError: The system refused to write; what the block itself raises as OSError is reported the same way.
    """
    temporary = partial_path(path)
    try:
        make_directory(path.parent)
        yield temporary
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException as cause:
        with suppress(OSError):  # an unfinished file holds the space that the next try needs; `cause` matters more
            temporary.unlink()
        if isinstance(cause, OSError):
            raise writing_failed(path, cause) from cause
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears at `path`, whole and synced, when the block ends; errors as in `replacing`."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def writing_failed(path: Path, cause: OSError) -> ArtifactError:
    """What to raise when the system refused to write `path`."""
    return ArtifactError(
        f"{path}: writing failed ({cause.strerror or cause}), expected room and permission; mend that and run the same command again, it continues where it stopped"
    )


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


def remove_file(path: Path) -> None:
    """Removes `path`, and a link's target with it; its blocks are free even while another thread holds it open.

    Nothing happens if it is gone. Content that has another name stays.

    Raises:
        ArtifactError: The system refused.
    """
    try:
        for name in {path.resolve(), path}:
            if name.is_symlink() or name.exists():
                _unlink(name)
                sync_directory(name.parent)
    except OSError as cause:
        raise ArtifactError(
            f"{path}: cannot be removed ({cause.strerror or cause}), expected permission; mend that and run the same command again"
        ) from cause


def _unlink(path: Path) -> None:
    """The name goes first: a process killed in between leaves no file of another length under it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # a link, or not ours to write: whoever has it open keeps its blocks until then
        path.unlink()
        return
    try:
        is_only_name = os.fstat(descriptor).st_nlink == 1
        path.unlink()
        if is_only_name:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
