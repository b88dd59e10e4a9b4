"""The definition of an expert: where the clamps bite, and that the route weight comes before w2."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.expert import expert_ffn

ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("gate", "up", "clamped_gate", "clamped_up"),
    [(30.0, 1.0, 10.0, 1.0), (-30.0, 1.0, -30.0, 1.0), (1.0, 30.0, 1.0, 10.0), (1.0, -30.0, 1.0, -10.0)],
    ids=["gate above", "gate below is left", "up above", "up below"],
)
@pytest.mark.parametrize("routed", [False, True])
def test_clamps(gate: float, up: float, clamped_gate: float, clamped_up: float, routed: bool) -> None:
    weights = torch.tensor([0.25]) if routed else None
    result = expert_ffn(ONE, ONE * gate, ONE * up, ONE * 3, limit=10.0, route_weights=weights)
    expected = F.silu(torch.tensor(clamped_gate)) * clamped_up * 3 * (0.25 if routed else 1)
    assert torch.allclose(result, expected.view(1, 1))


def test_the_route_weight_is_rounded_with_the_hidden_activations() -> None:
    """In bfloat16 the order shows: weight, rounding, w2."""
    generator = torch.Generator().manual_seed(0)
    x, w1, w3, w2 = (torch.randn(128, 128, generator=generator).bfloat16() for _ in range(4))
    weights = torch.rand(128, generator=generator)
    hidden = F.silu(F.linear(x, w1).float().clamp(max=1.0)) * F.linear(x, w3).float().clamp(-1.0, 1.0)
    expected = F.linear((hidden * weights[:, None]).bfloat16(), w2)
    assert torch.equal(expert_ffn(x, w1, w3, w2, limit=1.0, route_weights=weights), expected)


def test_rounded_inputs_differ() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w1, w3, w2 = (torch.randn(128, 128, generator=generator) for _ in range(4))
    exact, rounded = (expert_ffn(x, w1, w3, w2, limit=10.0, round_inputs=choice) for choice in (False, True))
    assert 1e-3 < (rounded - exact).norm() / exact.norm() < 0.1
