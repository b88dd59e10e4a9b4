"""The experiments' algorithms against what is known of them: the solvers' own errors, and their limits where they change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import build_tokenizer
from torch import Tensor

from kernels.formats import INT2_LEVELS, dequantize_fp4, dequantize_int2, dequantize_quad2, quantize_fp4
from prep.experiments import captured, measure
from prep.experiments.captured import Seen, Weights, read_rows
from prep.experiments.errors import expert_errors, outcome
from prep.experiments.measure import run_experiments
from prep.experiments.methods import (
    Layer,
    choose_levels,
    code_rows,
    equalised,
    fed_back,
    low_rank,
    nearest,
    plain,
    weighted,
)
from prep.solvers.clip import solve_clip
from prep.solvers.quad import solve_quad, train_quad
from runtime.errors import StrawError

HIDDEN, WIDTH, EXPERTS = 64, 32, 2


def random_matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def inputs(tokens: int, seed: int) -> Tensor:
    """Strongly correlated channels of unequal size, the same law for every seed."""
    mixing = random_matrix(HIDDEN, HIDDEN, seed=1) + 2 * random_matrix(HIDDEN, 2, seed=2) @ random_matrix(
        2, HIDDEN, seed=3
    )
    return random_matrix(tokens, HIDDEN, seed=seed) * 8 @ mixing


@pytest.fixture(scope="module")
def layer() -> Layer:
    """Two experts with every token, and the tables that `prep requant` would give them."""
    fp4 = [quantize_fp4(random_matrix(EXPERTS, *shape, seed=10 + place)) for place, shape in enumerate(
        [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)])]  # fmt: skip
    levels = [train_quad(matrix, groups=256) for matrix in fp4]
    tables = {
        "int2.normalisers": torch.stack([solve_clip(m).normalisers for m in fp4], -1)[None],
        "quad2.normalisers": torch.stack([solve_quad(m, t).normalisers for m, t in zip(fp4, levels, strict=True)], -1)[
            None
        ],
        "quad2.levels": torch.stack(levels)[None],
    }
    w1, w3, w2 = (dequantize_fp4(matrix) for matrix in fp4)
    rows: dict[str, Weights] = {code: code_rows(tables, code, 0, [0, 1]) for code in ("int2", "quad2")}
    seen = Seen(inputs(2048, seed=20), torch.tensor([[0, 1]]).expand(2048, 2))
    fresh = inputs(256, seed=21)
    return Layer(0, [0, 1], (w1, w3, w2), rows, seen, [fresh, fresh], 10.0)


def test_plain_codes_have_the_solvers_error(layer: Layer) -> None:
    for projection, exact in enumerate(layer.exact):
        fp4 = quantize_fp4(exact)
        levels = train_quad(fp4, groups=256)
        solved = {
            "int2": dequantize_int2(*solve_clip(fp4)),
            "quad2": dequantize_quad2(*(coded := solve_quad(fp4, levels))[:1], levels, coded.normalisers),
        }
        for code, values in solved.items():
            expected = float((values - exact).norm())
            assert float((plain(code)(layer, projection) - exact).norm()) == pytest.approx(expected, rel=1e-5), (
                f"{code=} {projection=}"
            )


def test_zeros_round_up_and_down_by_turns() -> None:
    levels = torch.tensor(INT2_LEVELS).expand(1, 1, 1, 4)
    values = nearest(torch.zeros(1, 1, 32), levels)
    assert values[0, 0, :4].tolist() == [0.5, -0.5, 0.5, -0.5]


def test_a_channel_that_matters_is_served_first() -> None:
    weights, importance = torch.full((1, 1, 32), 0.1), torch.ones(1, 32)
    weights[..., 0], rows = 1.0, torch.tensor([[[-0.3, -0.1, 0.1, 0.3], [-1.0, -0.5, 0.5, 1.0]]])
    assert choose_levels(weights, rows, importance)[0, 0, 0, 3] == pytest.approx(0.3)
    importance[0, 0] = 100.0
    assert choose_levels(weights, rows, importance)[0, 0, 0, 3] == pytest.approx(1.0)


def test_feedback_helps_with_many_tokens_and_vanishes_under_damping(layer: Layer) -> None:
    plain_error = outcome([layer], plain("quad2"))
    assert outcome([layer], fed_back("quad2", 2048, 0.01))["w1"] < 0.8 * plain_error["w1"]
    for projection in range(3):
        damped = fed_back("quad2", 2048, 1e9)(layer, projection)
        assert torch.equal(damped, plain("quad2")(layer, projection)), f"{projection=}"


def test_methods_without_effect_are_the_plain_code(layer: Layer) -> None:
    even = Layer(**{**vars(layer), "calibration": Seen(torch.eye(HIDDEN), torch.zeros(HIDDEN, 1, dtype=torch.int64))})
    for method in (weighted("quad2", own=False), fed_back("quad2", HIDDEN, 0.1)):
        assert torch.equal(method(even, 0), plain("quad2")(even, 0))
    torch.testing.assert_close(equalised("int2", 0.0)(layer, 0), plain("int2")(layer, 0))


def test_full_rank_is_exact_and_an_exact_expert_has_no_error(layer: Layer) -> None:
    w1, w3, w2 = layer.exact
    assert (low_rank(w1, WIDTH) - w1).abs().max() < 1e-6
    errors = expert_errors((w1[0], w3[0], w2[0]), (w1[0], w3[0], w2[0]), layer.fresh[0], 10.0)
    assert set(errors.values()) == {0.0}


def test_every_experiment_runs(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TOKENS", (64, 512))
    results = run_experiments([layer])
    assert not any(one["wins"] for name in ("low-rank sketch", "low-rank correction") for one in results[name].values())
    flat = [one for variants in results.values() for one in variants.values()]
    assert len(results) == 6 and all(0 < one["expert"] < 5 for one in flat)


def test_halves_share_no_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "ROW", 8)
    monkeypatch.setattr(captured, "CALIBRATION_ROWS", 2)
    monkeypatch.setattr(captured, "FRESH_ROWS", 1)
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": letter * 9}) + "\n" for letter in "abab"))
    calibration, fresh = read_rows(path, build_tokenizer(), 0, 1)
    assert calibration.shape == (2, 9) and fresh.shape == (1, 9)
    assert not (set(calibration.flatten().tolist()) - {0, 1}) & (set(fresh.flatten().tolist()) - {0, 1})
    path.write_text("\n".join(json.dumps({"text": "a"}) for _ in range(2)))
    with pytest.raises(StrawError, match="add text"):
        read_rows(path, build_tokenizer(), 0, 1)
