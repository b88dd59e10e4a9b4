"""What measuring commands print beside their tables: one JSON document, and one line after Ctrl-C. Owns no number in it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from runtime.errors import StrawError

RESUMES = "interrupted; the same command goes on where it stopped"


@contextmanager
def told_at_interrupt(line: str) -> Iterator[None]:
    """Within: Ctrl-C ends the program with this line."""
    try:
        yield
    except KeyboardInterrupt:
        raise StrawError(line) from None


def print_measurement(measurement: dict[str, Any], out: Path | None = None) -> None:
    """The document as the last line, and in a file if one is named."""
    if out is not None:
        save_measurement(measurement, out)
    typer.echo(json.dumps(_with_command(measurement)))


def save_measurement(measurement: dict[str, Any], path: Path) -> None:
    """The document at `path`, whole or not at all."""
    from runtime.files import atomic_file

    with atomic_file(path) as file:
        file.write(json.dumps(_with_command(measurement), indent=1).encode() + b"\n")


def _with_command(measurement: dict[str, Any]) -> dict[str, Any]:
    return measurement | {"command": shlex.join(["runtime", *sys.argv[1:]])}
