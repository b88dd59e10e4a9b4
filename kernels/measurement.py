"""The frame of a measurement file (`artifacts/measurements/`): what ran where, on which versions of what. Measures nothing.

Here and not higher up because the lowest benchmark, of kernels, needs it, and imports go down only.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def document(what: str, module: str, results: Any, drive: str | Path | None = None) -> dict[str, Any]:
    """The content of one measurement file, with the command line of this very process.

    Args:
        what: One line.
        module: As in `python -m module`.
        results: Anything that JSON can hold.
        drive: In words, or a directory on it; None where no drive matters.
    """
    return {
        "what": what,
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "machine": _machine(drive),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "kernel": platform.release(),
        },
        "commit": _commit(),
        "results": results,
    }


def _machine(drive: str | Path | None) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    if isinstance(drive, Path):
        drive = _output("findmnt", "-n", "-o", "SOURCE,FSTYPE", "--target", str(drive))
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cores = len(os.sched_getaffinity(0))
    return {"card": card, "cpu": cpu, "cores": cores, "threads": torch.get_num_threads(), "drive": drive}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """HEAD, with a mark if the tree differs from it; None outside a repository."""
    head = _output("git", "rev-parse", "HEAD")
    return head and head + (" and uncommitted changes" if _output("git", "status", "--porcelain") else "")


def _output(*command: str) -> str | None:
    """What a program prints; None where there is no such program or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
