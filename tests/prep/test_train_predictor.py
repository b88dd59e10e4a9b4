"""`prep train-predictor`: what is kept, what is told, and that bad input and interrupts cost one line and no file."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_trace import write_planted_trace
from random_checkpoint import write_random_checkpoint

import prep.train_predictor
from predictor.baselines import NextRouter
from predictor.errors import PredictorError
from predictor.evaluate import Recall
from predictor.model import load
from predictor.trace_files import TraceShape, read_record, write_record
from predictor.traces import Trace
from prep.cli import main
from prep.layout import layout
from prep.predictor_report import describe, draw, to_json, verdict
from prep.train_predictor import Outcome, Settings, choose, read_routers, train_predictor
from runtime.artifact import ModelDirectory
from runtime.errors import StrawError
from runtime.models.deepseek_v4.moe import Router
from runtime.predictors import trace_shape

SHAPE = TraceShape(hidden_size=256, num_experts=8, num_layers=5, num_picks=2)
QUICK = Settings(steps=4, batch_tokens=32, width=16, device="cpu", held_out=0.15)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory with a planted trace of its shape and fingerprint."""
    root = tmp_path_factory.mktemp("predictor")
    write_random_checkpoint(root / "source", num_hash_layers=3)
    layout(root / "source", root / "model")
    with ModelDirectory(root / "model") as model:
        trace = {"shape": SHAPE, "documents": 6, "document_tokens": 40, "fingerprint": model.fingerprint}
    write_planted_trace(root / "model" / "trace", **trace)
    return root / "model"


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[Any, str, str]:
    """Exit code, stdout and stderr of `prep train-predictor` in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["train-predictor", *map(str, arguments)])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def reopen(path: Path, directory: Path) -> Any:
    with ModelDirectory(directory) as model:
        routers = read_routers(model, torch.device("cpu"))
        return load(path, shape=trace_shape(model.config), fingerprint=model.fingerprint, routers=routers)


def test_command_writes_predictor_picture_and_one_document(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in model.iterdir()}
    options = [
        "--steps",
        "30",
        "--batch",
        "32",
        "--width",
        "16",
        "--device",
        "cpu",
        "--held-out",
        "0.15",
        "--seed",
        "1",
    ]
    code, out, _ = run(capsys, model, *options)
    assert code == 0
    told = json.loads(out.splitlines()[-1])
    assert set(told["recall"]) == {"mlp", "mlp-quarter", "linear", "next-router", "previous-token", "frequency"}
    assert told["model"] == {**asdict(SHAPE), "num_hash_layers": 3}
    assert told["tokens"] == {"train": 160, "watched": 40, "held_out": 40}
    assert told["recall"]["mlp"]["by_layer@2"]["+3"][:3] == [None] * 3
    assert "hash layers, whose picks follow from the token id" in out
    assert (model / "recall.png").read_bytes()[:4] == b"\x89PNG"
    found = reopen(model / "predictor.safetensors", model)
    assert found.kind == told["saved_kind"]
    assert found.scores(0, torch.zeros(3, 256)).shape == (3, 2, 8)
    assert {path.name for path in model.iterdir()} == before | {"predictor.safetensors", "recall.png"}


def test_a_trained_predictor_that_wins_is_kept(model: Path, tmp_path: Path) -> None:
    """+2 is planted, so that training has something to win over the next router; --out goes elsewhere."""
    out = tmp_path / "new" / "p.safetensors"
    outcome = train_predictor(model, replace(QUICK, kind="linear", steps=60, out=out))
    assert outcome.saved_kind == "linear"
    assert reopen(out, model).kind == "linear"
    assert not (model / "predictor.safetensors").exists()
    assert "linear" in verdict(outcome)


def test_the_same_seed_gives_the_same_file(model: Path, tmp_path: Path) -> None:
    outcomes = [train_predictor(model, replace(QUICK, out=tmp_path / name, kind="linear", steps=60)) for name in "ab"]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert torch.equal(*(outcome.recall["linear"].shares.nan_to_num() for outcome in outcomes))


def test_next_router_is_kept_where_training_wins_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a rate of nothing the MLP stays as drawn, at chance."""
    monkeypatch.setattr(prep.train_predictor, "LEARNING_RATES", {"mlp": 0.0, "linear": 0.0})
    monkeypatch.setattr(prep.train_predictor, "MARGIN", 1.0)
    outcome = train_predictor(model, QUICK)
    assert outcome.saved_kind == "next-router"
    assert "next-router, which is as good without training" in describe(outcome).splitlines()[-1]
    found = reopen(model / "predictor.safetensors", model)
    assert isinstance(found, NextRouter)
    assert found.scores(1, torch.randn(3, 256)).any()


def test_choice_by_hand() -> None:
    def recall(routed: float, hashed: float) -> Recall:
        shares = torch.full((2, 2, 5), routed, dtype=torch.float64)
        shares[:, :, :3] = hashed
        return Recall((2, 6), (2, 3), shares)

    def chosen(trained: float, router: float) -> str:
        return choose({"mlp": recall(trained, 0.0), "next-router": recall(router, 0.9)}, "mlp", SHAPE, 3)

    assert chosen(0.60, 0.59) == "mlp"
    assert chosen(0.60, 0.596) == "next-router"
    assert chosen(0.60, 0.70) == "next-router"


def test_next_router_chooses_as_the_models_own_router(model: Path) -> None:
    with ModelDirectory(model) as opened:
        routers = read_routers(opened, torch.device("cpu"))
    assert [router is None for router in routers] == [True, True, True, False, False]
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    for layer_idx in (3, 4):
        weights = routers[layer_idx]
        assert weights is not None
        own = Router(weights.weight, weights.bias, None, topk=2, scaling=1.5)
        ids, _ = own(x, torch.zeros(50, dtype=torch.int64))
        scores = NextRouter(SHAPE, (2,), routers).scores(layer_idx - 2, x)[:, 0]
        assert torch.equal(scores.topk(2).indices.sort().values, ids.sort().values)


def test_documents_stay_apart(model: Path) -> None:
    parts = prep.train_predictor.split(Trace.open(model / "trace"), QUICK)
    owners = [set((tokens // 40).tolist()) for tokens in parts]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 6


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--steps", "0"], "--steps is 0, expected more than 0; correct it"),
        (["--epochs", "nan"], "--epochs is nan, expected more than 0; correct it"),
        (["--epochs", "inf"], "--epochs is inf, expected more than 0; correct it"),
        (["--batch", "-1"], "--batch is -1, expected more than 0; correct it"),
        (["--width", "0"], "--width is 0, expected 1 to 16384; correct it"),
        (["--held-out", "1"], "--held-out is 1.0, expected a share between 0 and 1; correct it"),
        (["--device", "tpu"], "device is 'tpu', expected cpu"),
        (["--trace", "nowhere"], "nowhere/trace.json: cannot be read"),
        (["--out", "."], "--out is ., expected a file to write; name one in that directory"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], problem: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, model, *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert problem in err
    assert not (model / "predictor.safetensors").exists()


@pytest.mark.parametrize("case", ["another model's", "routing-only", "one document", "unfinished"])
def test_a_trace_that_cannot_serve_is_one_line(case: str, model: Path) -> None:
    directory = model / "trace"
    record = read_record(directory)
    if case == "another model's":
        write_record(directory, replace(record, fingerprint="other"))
    elif case == "routing-only":
        write_record(directory, replace(record, has_hidden=False))
    elif case == "one document":
        write_planted_trace(directory, shape=SHAPE, documents=1, fingerprint=record.fingerprint)
    else:
        write_record(directory, replace(record, done=False))
    with pytest.raises(PredictorError, match=r"\w; .*\w|name another directory") as raised:
        train_predictor(model, QUICK)
    assert "\n" not in str(raised.value)
    assert not (model / "predictor.safetensors").exists()


def test_an_interrupt_leaves_the_old_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "predictor.safetensors").write_bytes(b"old")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prep.train_predictor, "evaluate", stop)
    with pytest.raises(StrawError, match="interrupted, the file is as it was; run the same command again"):
        train_predictor(model, QUICK)
    assert (model / "predictor.safetensors").read_bytes() == b"old"
    assert not list(model.glob("*.partial"))


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    shares = torch.full((2, 2, 5), 0.5, dtype=torch.float64)
    shares[:, 0, :2] = shares[:, 1, :3] = torch.nan
    names = ("mlp", "mlp-quarter", "linear", "next-router", "previous-token", "frequency")
    recall = {name: Recall((2, 6), (2, 3), shares) for name in names}
    counts = {"train": 1000, "watched": 50, "held_out": 100}
    return Outcome(tmp_path / "p.safetensors", SHAPE, 2, "mlp", "mlp", recall, {}, counts, {}, 1.0)


def test_report_says_when_a_count_is_as_good(outcome: Outcome) -> None:
    best = {"next-router": Recall((2, 6), (2, 3), torch.zeros(2, 2, 5, dtype=torch.float64))}
    told = verdict(replace(outcome, recall={**outcome.recall, **best}))
    assert "mlp, which tells no more than previous-token (mlp 50.0%, previous-token 50.0% at recall@2)" in told


def test_report_says_when_the_probe_is_better(outcome: Outcome) -> None:
    worse = {"mlp": Recall((2, 6), (2, 3), torch.full((2, 2, 5), 0.4, dtype=torch.float64))}
    line = "linear does better than mlp (50.0%, 40.0% at recall@2)"
    assert line in describe(replace(outcome, recall={**outcome.recall, **worse}))
    assert line not in describe(outcome)


def test_report_is_json_without_nan(outcome: Outcome) -> None:
    told = json.loads(json.dumps(to_json(outcome), allow_nan=False))
    assert told["chance"] == {"2": 0.25, "6": 0.75}
    assert told["recall"]["mlp"]["routed"] == {"+2": {"2": 0.5, "6": 0.5}, "+3": {"2": 0.5, "6": 0.5}}


def test_without_matplotlib_one_line_says_so(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = draw(outcome)
    assert told.endswith("not drawn, matplotlib is missing; run: pip install 'straw[plot]'")
    assert not outcome.out.with_name("recall.png").exists()
