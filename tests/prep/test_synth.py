"""`prep synth` on the tiny shape (real shapes: tests/store/test_real_geometry.py): links, bytes, interruption, refusals."""

from __future__ import annotations

import fcntl
import math
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_checkpoint import TINY, write_random_checkpoint
from torch import Tensor

from kernels.formats import CODES, PLANES, Matrix, dequantize_fp4, dequantize_fp8_block, split_slab
from prep import jobs, table_training
from prep import synth as synth_module
from prep.cli import main
from prep.codecs import train
from prep.layout import layout
from prep.random_weights import dense_chunks, fill_slab, random_of
from prep.released_config import RELEASED_CONFIGS
from prep.requant import requant
from prep.synth import UNIQUE, synth
from prep.synth_plan import SynthSettings, describe_synth, plan_synth
from prep.verify import verify
from runtime import open_model
from runtime.artifact import ModelDirectory
from runtime.errors import ArtifactError, StrawError
from runtime.manifest import CODECS, expert_file, read_manifest
from runtime.safetensors_file import TensorSpec

SETTINGS = SynthSettings(unique_layers=2, layers=5, experts=4, codec="split")
trained: dict[tuple[Any, ...], Any] = {}


def train_once(code: str, sample: Matrix, present: Tensor | None) -> dict[str, Tensor]:
    """`train`, each sample once a session: the same result, without the time."""
    key = (code, zlib.crc32(sample.codes.contiguous().numpy().data))
    if key not in trained:
        trained[key] = train(code, sample, present)
    return trained[key]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RELEASED_CONFIGS, "v4-flash", TINY)
    monkeypatch.setattr(table_training, "train", train_once)


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def refused(expected: str, directory: Path, settings: SynthSettings = SETTINGS) -> None:
    with pytest.raises(StrawError, match=expected) as error:
        synth(directory, settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("codec", ["quad", "clip", "split", None])
def test_a_directory_is_whole(tiny: None, tmp_path: Path, codec: str | None) -> None:
    directory = tmp_path / "model"
    synth(directory, replace(SETTINGS, codec=codec))
    with ModelDirectory(directory) as model:
        two_bit = () if codec is None else CODES[CODECS[codec]].planes
        assert set(model.planes) == set(two_bit if codec == "split" else ("fp4", *two_bit))
        assert model.config.layer_ratios == (0, 4, 128, 4, 128)
    assert verify(directory, deep=True) == []
    assert not (directory / UNIQUE).exists()
    assert {path.suffix for path in directory.rglob("*.partial")} == set()
    logits = open_model(directory, slots=(2, 0, 0, 0)).logits(range(2, 40))
    assert bool(logits.isfinite().all()) and 0.1 < float(logits.std()) < 10


def test_layers_are_links_to_the_unique_ones(tiny: None, tmp_path: Path) -> None:
    plan = synth(tmp_path / "model", SETTINGS)
    for plane in plan.planes:
        stats = [(tmp_path / "model" / expert_file(plane, idx)).stat() for idx in range(5)]
        assert [stat.st_ino for stat in stats] == [stats[idx % 2].st_ino for idx in range(5)]
        assert Counter(stat.st_nlink for stat in stats) == {3: 3, 2: 2}
    with ModelDirectory(tmp_path / "model") as model:
        rows, tables = model.read_checksums(), model.read_tables()
        assert torch.equal(rows["base"][0], rows["base"][4])
        assert not torch.equal(rows["base"][0], rows["base"][1])
        assert torch.equal(tables["split.levels"][1], tables["split.levels"][3])


def test_one_layer_twice(tiny: None, tmp_path: Path) -> None:
    synth(tmp_path / "model", SynthSettings(layers=2, experts=4, codec=None))
    first, second = ((tmp_path / "model" / expert_file("fp4", idx)).stat() for idx in range(2))
    assert first.st_ino == second.st_ino


def test_the_seed_decides(tiny: None, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        synth(tmp_path / name, replace(SETTINGS, codec=None, seed=seed))
    a, b, c = (files_of(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in a if a[name] == c[name]} == {"config.json", ".lock"}


STEPS = {
    "dense_chunks": 2,
    "write_fp4": 2,
    "fill_slab": 6,
    "requant": 2,
    "_drop_fp4": 1,
    "make_directory": 5,
    "write_tables": 1,
    "write_checksums": 4,
    "write_manifest": 7,
}
FAST_STEPS = ("dense_chunks", "make_directory")


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """Filled by the first test that needs it: the files of an uninterrupted run."""
    return {}


@pytest.mark.parametrize(
    ("step", "call"),
    [pytest.param(*item, marks=[] if item[0] in FAST_STEPS else [pytest.mark.slow]) for item in STEPS.items()],
)
def test_an_interrupted_run_opens_for_nobody_and_resumes_to_the_same_bytes(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes], step: str, call: int
) -> None:
    directory, original, calls = tmp_path / "model", getattr(synth_module, step), []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(step)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    if not whole:
        synth(tmp_path / "whole", SETTINGS)
        whole.update(files_of(tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(synth_module, step, interrupted)
        synth(directory, SETTINGS)
    with pytest.raises(ArtifactError, match=r"prep synth did not finish .*run: prep synth"):
        ModelDirectory(directory)
    with pytest.raises(ArtifactError, match="prep layout did not finish"):
        requant(directory, "clip")
    synth(directory, SETTINGS)
    assert files_of(directory) == whole


def test_a_finished_run_does_nothing(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synth(tmp_path / "model", SETTINGS)
    (tmp_path / "model" / UNIQUE / "000").mkdir(parents=True)  # killed between the manifest and its removal
    monkeypatch.setattr(jobs, "free_disk_bytes", lambda directory: 0)
    assert synth(tmp_path / "model", SETTINGS).is_done
    assert not (tmp_path / "model" / UNIQUE).exists()


def test_another_code_can_be_added(tiny: None, tmp_path: Path) -> None:
    """And consumption of fp4 takes nothing from its other names."""
    directory = tmp_path / "model"
    synth(directory, replace(SETTINGS, codec="clip"))
    requant(directory, "split", consume=True)
    assert verify(directory, deep=True) == []
    assert not list(directory.glob("experts/fp4/*"))


def test_what_is_lost_is_made_anew(tiny: None, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    synth(directory, replace(SETTINGS, codec=None))
    (directory / expert_file("fp4", 3)).unlink()
    refused(
        rf"layer_003.bin: file is missing.*remove {directory} and run: prep synth",
        directory,
        replace(SETTINGS, codec=None),
    )


def test_foreign_directories_are_refused(tiny: None, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    refused("holds a.txt and no manifest.json, expected an empty directory", tmp_path / "notes")
    refused("a file, expected an empty directory", tmp_path / "notes" / "a.txt")
    write_random_checkpoint(tmp_path / "source")
    layout(tmp_path / "source", tmp_path / "model")
    refused("made by prep layout, expected prep synth", tmp_path / "model")
    synth(tmp_path / "synth", replace(SETTINGS, codec=None))
    refused("prep synth was begun with", tmp_path / "synth")
    with pytest.raises(ArtifactError, match="made from source synthetic"):
        layout(tmp_path / "source", tmp_path / "synth")
    assert read_manifest(tmp_path / "synth").stages["synth"].done


def test_a_small_disk_and_another_writer_are_refused(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "free_disk_bytes", lambda directory: 1000)
        refused("1,000 bytes free on its disk, expected at least", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / jobs.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused("held by another process", tmp_path / "model")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"layers": 44}, "layers is 44, expected 1 to 43"),
        ({"layers": 2, "unique_layers": 3}, "unique-layers is 3, expected 1 to 2"),
        ({"unique_layers": 0}, "unique-layers is 0"),
        ({"experts": 5}, "experts is 5, expected 6 to"),
        ({"vocab": 1}, "vocab is 1, expected 2 to"),
    ],
)
def test_counts_out_of_range_are_refused(tmp_path: Path, wrong: dict[str, int], expected: str) -> None:
    refused(expected, tmp_path / "model", SynthSettings(**wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codec", "unique", "gigabytes"), [("quad", 1, 14.08), ("quad", 2, 19.32), ("split", 2, 15.69)]
)
def test_the_full_size_is_as_stated(tmp_path: Path, codec: str, unique: int, gigabytes: float) -> None:
    plan = plan_synth(tmp_path / "model", SynthSettings(codec=codec, unique_layers=unique))
    assert round(plan.disk_bytes / 1e9, 2) == gigabytes
    assert Counter(plan.config.layer_ratios) == {0: 2, 4: 21, 128: 20}
    assert (plan.config.layer_ratios[42], plan.config.num_hash_layers, plan.config.vocab_size) == (4, 3, 129_280)
    assert f"{plan.disk_bytes:,} bytes" in describe_synth(tmp_path / "model", plan.settings)


def test_one_real_layer_is_a_hash_layer_with_a_window_only() -> None:
    raw = SynthSettings(layers=1).raw_config()
    assert (raw["compress_ratios"], raw["num_hash_layers"], raw["n_routed_experts"]) == ([0, 0], 1, 256)


def test_matrices_keep_the_size_of_what_goes_in() -> None:
    for hidden, width in ((4096, 2048), (256, 128)):
        slab = torch.full((PLANES["fp4"].slab_bytes(hidden, width) + 5,), 255, dtype=torch.uint8)
        fill_slab(slab, hidden, width, random_of(0, 1))
        assert slab[-5:].tolist() == [255] * 5
        for matrix in split_slab(slab, PLANES["fp4"], hidden, width):
            weights = dequantize_fp4(matrix)
            assert float(weights.std() * math.sqrt(weights.shape[1])) == pytest.approx(1, abs=0.03)
    for rows, columns in ((1024, 4096), (2048, 1024), (512, 8192)):
        codes, scales = (
            np.frombuffer(b"".join(dense_chunks(name, TensorSpec(kind, shape), 8, random_of(0, name))), np.uint8)
            for name, kind, shape in (
                ("w.weight", "F8_E4M3", (rows, columns)),
                ("w.scale", "F8_E8M0", (rows // 128, columns // 128)),
            )
        )
        matrix = Matrix(
            torch.tensor(codes).view(rows, columns).view(torch.float8_e4m3fn),
            torch.tensor(scales).view(rows // 128, -1),
        )
        weights = dequantize_fp8_block(matrix)
        assert float(weights.std() * math.sqrt(columns)) == pytest.approx(1, abs=0.1)


def test_hash_routes_name_different_experts() -> None:
    pieces = dense_chunks("layers.0.ffn.gate.tid2eid", TensorSpec("I64", (999, 6)), 7, random_of(0))
    picks = np.frombuffer(b"".join(pieces), np.int64).reshape(999, 6)
    assert all(len(set(row)) == 6 for row in picks.tolist())
    assert set(picks.flatten().tolist()) == set(range(7))


def test_the_command(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "model"
    arguments = ["synth", str(directory), "--layers", "2", "--experts", "4", "--codec", "none", "--device", "cpu"]
    for options, code, text in (
        (["--dry-run"], 0, "free disk"),
        ([], 0, "complete, 2 layers"),
        (["--seed", "3"], 1, ""),
        (["--codec", "int4"], 2, ""),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *options])
        assert (ended.value.code or 0) == code
        assert text in capsys.readouterr().out
        assert directory.exists() == (options != ["--dry-run"])
    assert verify(directory) == []
