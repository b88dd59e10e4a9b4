"""The shipped demo model: where it lies, and its preparation on first use. Owns no other model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from runtime.artifact import MANIFEST, read_manifest
from runtime.errors import ArtifactError

DEMO_NAME = "demo"
DEMO_DIRECTORY = Path(__file__).parents[1] / "artifacts" / DEMO_NAME


def prepared_demo() -> Path:
    """The demo's model directory; `prep layout` is run first unless it is whole.

    Preparation is a command of its own, since the runtime does not import `prep`.

    Raises:
        ArtifactError: The shipped checkpoint is not there, or the command failed (its own message stands above).
    """
    checkpoint, model = DEMO_DIRECTORY / "checkpoint", DEMO_DIRECTORY / "model"
    if _is_prepared(model):
        return model
    if not checkpoint.is_dir():
        raise ArtifactError(
            f"{checkpoint}: no such directory, expected the shipped demo checkpoint; run from a clone of the repository"
            " or name a model directory"
        )
    print("preparing the demo model (once)", file=sys.stderr)
    command = [sys.executable, "-m", "prep", "layout", str(checkpoint), str(model)]
    finished = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if finished.returncode:
        raise ArtifactError(
            f"{model}: prep layout ended with exit code {finished.returncode}, expected 0; remove the directory and try again"
        )
    return model


def _is_prepared(model: Path) -> bool:
    if not (model / MANIFEST).exists():
        return False
    stage = read_manifest(model).stages.get("layout")
    return stage is not None and stage.done
