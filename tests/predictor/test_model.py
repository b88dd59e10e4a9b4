"""The predictor's networks and file: what is saved comes back, another model's file and a damaged one are refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from predictor.baselines import LinearProbe, NextRouter, RouterWeights
from predictor.errors import PredictorError
from predictor.model import RouterPredictor, load, save
from predictor.trace_files import TraceShape

SHAPE = TraceShape(hidden_size=20, num_experts=9, num_layers=5, num_picks=2)
AHEAD, WIDTH = (2, 3), 16
Kind = RouterPredictor | LinearProbe | NextRouter


def routers(seed: int = 5) -> list[RouterWeights | None]:
    random = torch.Generator().manual_seed(seed)
    drawn = [
        RouterWeights(torch.randn(9, 20, generator=random).bfloat16(), torch.randn(9, generator=random))
        for _ in range(SHAPE.num_layers)
    ]
    return [None, *drawn[1:]]


def build(kind: str, seed: int = 0) -> Kind:
    random = torch.Generator().manual_seed(seed)
    if kind == "mlp":
        return RouterPredictor(SHAPE, AHEAD, WIDTH, random)
    if kind == "linear":
        probe = LinearProbe(SHAPE, AHEAD)
        torch.nn.init.normal_(probe.weight, generator=random)
        return probe
    return NextRouter(SHAPE, AHEAD, routers())


def states(tokens: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, SHAPE.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def reload(path: Path, shape: TraceShape = SHAPE, fingerprint: str = "f") -> Kind:
    found = load(path, shape=shape, fingerprint=fingerprint, routers=routers())
    assert isinstance(found, Kind)
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "predictor.safetensors", build("mlp"), "f")
    return tmp_path / "predictor.safetensors"


@pytest.mark.parametrize("kind", ["mlp", "linear", "next-router"])
def test_load_gives_the_scores_of_what_was_saved(kind: str, tmp_path: Path) -> None:
    predictor = build(kind)
    save(tmp_path / "p", predictor, "f")
    found = reload(tmp_path / "p")
    assert (found.kind, found.lookaheads, found.shape, found.width) == (kind, AHEAD, SHAPE, predictor.width)
    for layer_idx in range(SHAPE.num_layers):
        assert torch.equal(found.scores(layer_idx, states()), predictor.scores(layer_idx, states()))
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_scores_of_a_layer_are_those_of_all_layers_at_once(kind: str) -> None:
    predictor = build(kind)
    assert isinstance(predictor, RouterPredictor | LinearProbe)
    hidden = torch.stack([states(seed=seed) for seed in range(SHAPE.num_layers)], dim=1)
    together = predictor(hidden)
    assert together.shape == (4, SHAPE.num_layers, len(AHEAD), SHAPE.num_experts)
    for layer_idx in range(SHAPE.num_layers):
        alone = predictor.scores(layer_idx, hidden[:, layer_idx])
        torch.testing.assert_close(alone, together[:, layer_idx])
    assert not torch.allclose(predictor.scores(0, hidden[:, 0]), predictor.scores(1, hidden[:, 0]))


def test_mlp_is_the_network_of_the_article() -> None:
    predictor = build("mlp")
    assert isinstance(predictor, RouterPredictor)
    x = states().float()
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    x = torch.cat([x, predictor.layers[3].expand(4, -1)], dim=-1)
    x = torch.nn.functional.silu(predictor.enter(x))
    x = torch.nn.functional.silu(predictor.middle(x))
    torch.testing.assert_close(predictor.scores(3, states()), predictor.heads(x).view(4, 2, 9), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_scores_ask_for_no_value(kind: str) -> None:
    """A tensor on "meta" has none: control flow that hangs on one, or a wait for the device, would raise."""
    predictor = build(kind)
    assert isinstance(predictor, torch.nn.Module)
    got = predictor.to("meta").scores(1, states().to("meta"))
    assert (got.shape, got.dtype) == ((4, 2, 9), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mlp", "linear", "next-router"])
def test_scores_can_be_captured(kind: str, tmp_path: Path) -> None:
    save(tmp_path / "p", build(kind), "f")
    on_card = [router and RouterWeights(*(tensor.cuda() for tensor in router)) for router in routers()]
    predictor = load(tmp_path / "p", shape=SHAPE, fingerprint="f", routers=on_card, device="cuda", dtype=torch.bfloat16)
    x, graph = states().cuda(), torch.cuda.CUDAGraph()
    predictor.scores(1, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = predictor.scores(1, x)
    x.copy_(states(seed=9))
    graph.replay()
    torch.testing.assert_close(captured, predictor.scores(1, x))


def test_next_router_applies_the_router_of_the_layer_ahead() -> None:
    predictor, x = build("next-router"), states()
    router = routers()[4]
    assert router is not None
    expected = torch.log1p((x.float() @ router.weight.float().T).exp()).sqrt() + router.bias
    torch.testing.assert_close(predictor.scores(2, x)[:, 0], expected)
    assert not predictor.scores(2, x)[:, 1].any(), "layer 5 does not exist"
    assert not NextRouter(SHAPE, (0,), routers()).scores(0, x).any(), "layer 0 has no router"
    with pytest.raises(ValueError, match="routers: got 0, expected one or None for each of 5 layers"):
        NextRouter(SHAPE, AHEAD, [])


def test_low_precision_weights_give_nearly_the_same(saved: Path) -> None:
    exact = reload(saved).scores(2, states())
    low = load(saved, shape=SHAPE, fingerprint="f", routers=routers(), dtype=torch.bfloat16).scores(2, states())
    assert low.dtype == torch.float32
    error = (low - exact).square().mean().sqrt() / exact.std()
    assert 0 < error < 0.03


@pytest.mark.parametrize("field", ["hidden_size", "num_experts", "num_layers", "num_picks", "fingerprint"])
def test_another_models_file_is_refused_by_name(field: str, saved: Path) -> None:
    shape, fingerprint = (SHAPE, "g") if field == "fingerprint" else (replace(SHAPE, **{field: 7}), "f")
    with pytest.raises(PredictorError, match=rf"{field} is \w+, expected (7|g); .*run: prep train-predictor"):
        reload(saved, shape, fingerprint)


@pytest.mark.parametrize("place", [40, -1, -5_000])
def test_a_flipped_bit_is_found(place: int, saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[place] ^= 1
    saved.write_bytes(content)
    with pytest.raises(PredictorError, match=r"predictor\.safetensors"):
        reload(saved)


@pytest.mark.parametrize("length", [0, 7, 300, -1])
def test_a_cut_file_is_refused(length: int, saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:length])
    with pytest.raises(PredictorError, match=r"predictor\.safetensors: cannot be read .*; run: prep train-predictor"):
        reload(saved)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match=r"absent: cannot be read .*run: prep train-predictor"):
        reload(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kind": "oracle"}, "kind is oracle, expected mlp, linear or next-router"),
        ({"kind": "linear"}, "tensor bias is missing"),
        ({"width": 17}, r"tensor enter.bias is \(16,\), expected \(17,\)"),
        ({"lookaheads": [2, "3"]}, r"lookaheads \[2, '3'\] and width 16, expected small numbers"),
        ({"width": 10**9}, r"width 1000000000, expected small numbers"),
        ({"version": 0}, "version is 0, expected 1"),
    ],
)
def test_a_config_that_says_otherwise_is_refused(change: dict[str, Any], problem: str, saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        config = json.loads(file.metadata()["predictor"])
    save_file(load_file(saved), saved, {"predictor": json.dumps(config | change)})
    with pytest.raises(PredictorError, match=problem):
        reload(saved)


@pytest.mark.parametrize("metadata", [None, {"kind": "mlp"}, {"predictor": "{"}, {"predictor": "[]"}])
def test_a_file_of_another_kind_is_refused(metadata: dict[str, str] | None, saved: Path) -> None:
    save_file(load_file(saved), saved, metadata)
    with pytest.raises(PredictorError, match=r"predictor\.safetensors: .*expected .*; run: prep train-predictor"):
        reload(saved)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_ends_early_leaves_the_old_file(
    error: BaseException, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def stop(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(PredictorError if isinstance(error, OSError) else KeyboardInterrupt):
        save(saved, build("mlp", seed=1), "f")
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
