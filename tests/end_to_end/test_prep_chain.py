"""The chain a user runs: prep layout, prep requant, prep verify, then the runtime opens what came out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_checkpoint import write_random_checkpoint

from runtime import open_model
from runtime.artifact import ModelDirectory
from runtime.manifest import CODECS
from runtime.resident import ResidentExperts

LIMIT_SECONDS = 200
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, num_hidden_layers=2, n_routed_experts=4)
    return directory


def prep(*arguments: object) -> str:
    """Stdout of the command, which must succeed."""
    command = [sys.executable, "-m", "prep", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        pytest.param("clip", [], marks=pytest.mark.slow),
        pytest.param("quad", [], marks=pytest.mark.slow),
        ("split", ["--consume", "--yes"]),
    ],
)
def test_layout_requant_verify_open(checkpoint: Path, tmp_path: Path, codec: str, options: list[str]) -> None:
    model = tmp_path / "model"
    prep("layout", checkpoint, model)
    prep("requant", model, "--codec", codec, "--device", "cpu", *options)
    assert prep("verify", model, "--deep") == f"{model}: whole\n"
    assert torch.equal(
        open_model(model, device="cpu").logits(TOKENS), open_model(checkpoint, device="cpu").logits(TOKENS)
    )
    with ModelDirectory(model) as opened:
        assert opened.code == CODECS[codec]
        experts = ResidentExperts(opened, torch.float32, torch.device("cpu"), False, precision="2bit")
    assert all(bool(weight.isfinite().all()) for weight in experts.weights(1, 3))
