"""`prep all`: every stage once, in order; what is finished is skipped; a dry run adds up and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer
from typer.testing import CliRunner

from prep import all_stages
from prep.all_stages import AllOptions, describe_all, plan_all, run_all
from prep.cli import app
from runtime import open_model
from runtime.errors import StrawError

WORDS = "the experts of a layer are read from the drive while the card computes and waits for them again "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, max_position_embeddings=128, num_hash_layers=1)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": WORDS[i:] * 3}) + "\n" for i in range(12)))
    return file


@pytest.fixture
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = all_stages.Settings
    monkeypatch.setattr(
        all_stages, "Settings", lambda device: settings(device=device, steps=3, width=32, batch_tokens=64)
    )


def test_each_stage_runs_once(checkpoint: Path, text: Path, tmp_path: Path, short_training: None) -> None:
    model, options = tmp_path / "model", AllOptions(codec="clip")
    assert run_all(checkpoint, model, [text], options) == [
        "layout: done",
        "requant: done",
        "trace: done",
        "train-predictor: done",
    ]
    session = open_model(model, prefetch="predictor", slots="4,2,2,0")
    assert len(list(session.generate([1, 2, 3], 4))) > 0
    before = {file: file.stat().st_mtime_ns for file in model.rglob("*.bin")}
    (model / "predictor.safetensors").unlink()
    lines = run_all(checkpoint, model, [text], options)
    assert lines[:3] == ["layout: was finished", "requant: was finished", "trace: was finished"]
    assert lines[3] == "train-predictor: done"
    assert {file: file.stat().st_mtime_ns for file in model.rglob("*.bin")} == before


def test_an_interrupted_run_goes_on(
    checkpoint: Path, text: Path, tmp_path: Path, short_training: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = tmp_path / "model", AllOptions(codec="clip")

    def cut(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(all_stages, "trace", cut)
        run_all(checkpoint, model, [text], options)
    assert run_all(checkpoint, model, [text], options)[1:3] == ["requant: was finished", "trace: done"]


def test_a_dry_run_adds_up_and_writes_nothing(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    stages = plan_all(checkpoint, model, [text], AllOptions(tokens=600))
    table = describe_all(checkpoint, model, [text], AllOptions(tokens=600))
    assert f"{sum(stage.new_bytes for stage in stages):,} bytes" in table.splitlines()[5]
    trace = next(stage for stage in stages if stage.name == "trace")
    assert trace.new_bytes == 600 * (4 + 5 * (2 * 256 + 6 * 2))  # token id; of 5 layers D = 256 in bf16 and K = 2 picks
    assert not model.exists()


def test_bytes_of_the_stages_are_those_written(
    checkpoint: Path, text: Path, tmp_path: Path, short_training: None
) -> None:
    model, options = tmp_path / "model", AllOptions(codec="clip")
    planned = {stage.name: stage.new_bytes for stage in plan_all(checkpoint, model, [text], options)}
    run_all(checkpoint, model, [text], options)
    written = {
        "requant": sum(file.stat().st_size for file in (model / "experts" / "int2").iterdir()),
        "trace": sum(file.stat().st_size for file in (model / "trace").iterdir()),
    }
    for name, size in written.items():
        assert planned[name] == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize(
    ("lines", "message"),
    [(1, "1 documents in .* expected at least 3"), (0, "empty, expected one document a line")],
)
def test_too_little_text_is_said_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, lines: int, message: str
) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text((json.dumps({"text": WORDS}) + "\n") * lines)
    with pytest.raises(StrawError, match=message):
        run_all(checkpoint, tmp_path / "model", [file], AllOptions())
    assert not (tmp_path / "model").exists()


def test_the_command(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    invoke: Callable[..., object] = CliRunner().invoke
    result = invoke(app, ["all", str(checkpoint), str(tmp_path / "m"), "--text", str(text), "--dry-run"])
    assert result.exit_code == 0, result.output  # type: ignore[attr-defined]
    assert "in all" in result.output  # type: ignore[attr-defined]
