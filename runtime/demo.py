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
    """The demo's model directory; `prep layout` and `prep requant` are run first unless they have been.

    Preparation is a command of its own, since the runtime does not import `prep`.

    Raises:
        ArtifactError: The shipped checkpoint is not there, or a command failed (its own message stands above).
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
    _prep("layout", checkpoint, model)
    _prep("requant", model)
    return model


def _prep(*arguments: object) -> None:
    command = [sys.executable, "-m", "prep", *map(str, arguments)]
    finished = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if finished.returncode:
        raise ArtifactError(
            f"{DEMO_DIRECTORY / 'model'}: {' '.join(command[2:4])} ended with exit code {finished.returncode}, expected 0; remove the directory and try again"
        )


def _is_prepared(model: Path) -> bool:
    if not (model / MANIFEST).exists():
        return False
    manifest = read_manifest(model)
    return manifest.code is not None and all(stage.done for stage in manifest.stages.values())
