"""A file that appears whole or not at all, for the predictor's own files. Owns no format and no message."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    """Puts a file of these contents in the place of `path`, so that it survives a power cut; OSError leaves the old one."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            for content in contents:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):  # it holds the space that the next try needs; the cause matters more
            temporary.unlink()
        raise


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
