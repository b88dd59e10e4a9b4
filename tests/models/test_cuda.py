"""The forward pass on a CUDA device: parity in float32, closeness in bfloat16, and one captured graph for every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_model import PlainModel
from safetensors.torch import load_file
from tolerances import LOGITS_FLOAT32
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "tiny.safetensors")


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    return PlainModel.open(GOLDEN / "tiny_raw", device="cuda")


def test_float32_logits_are_those_of_other_programs(plain: PlainModel, golden: dict[str, Tensor]) -> None:
    logits = plain.logits(golden["input_ids"][0]).cpu()
    assert (logits - golden["hf_fp32_logits"][0]).abs().max() <= LOGITS_FLOAT32


def test_decode_equals_prefill(plain: PlainModel, golden: dict[str, Tensor]) -> None:
    tokens, state = golden["input_ids"][0][:140], plain.state()
    expected = plain.logits(tokens)
    plain.logits(tokens[:100], state)
    for position in range(100, 140):
        logits = plain.logits(tokens[position : position + 1], state)[0]
        assert (logits - expected[position]).abs().max() <= LOGITS_FLOAT32, position


def test_bfloat16_stays_near_float32(golden: dict[str, Tensor]) -> None:
    plain = PlainModel.open(GOLDEN / "tiny_raw", device="cuda", dtype=torch.bfloat16)
    rounded = plain.logits(golden["input_ids"][0][:60]).cpu().log_softmax(-1)
    exact = golden["hf_fp32_logits"][0][:60].log_softmax(-1)
    assert torch.nn.functional.kl_div(rounded, exact, log_target=True, reduction="batchmean") < 5e-2


def test_one_captured_graph_serves_every_step(plain: PlainModel, golden: dict[str, Tensor]) -> None:
    """The attention half of each kind of layer, captured once at one position, replayed at others."""
    model, tokens = plain.model, golden["input_ids"][0].cuda()
    eager, captured = plain.state(), plain.state()
    for state in (eager, captured):
        plain.logits(tokens[:30], state)
    streams = torch.empty(1, 4, model.config.hidden_size, device="cuda")

    def attend(state: object) -> list[Tensor]:
        pairs = zip(model.blocks, state.layers, strict=True)  # type: ignore[attr-defined]
        return [block.attend(streams, layer, state.position, 1e-6) for block, layer in pairs]  # type: ignore[attr-defined]

    with torch.inference_mode():
        snapshot = captured.snapshot()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            attend(captured)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = attend(captured)
        captured.restore(snapshot)
        for position in range(30, 160):
            streams.copy_(
                torch.randn(1, 4, model.config.hidden_size, generator=torch.Generator().manual_seed(position))
            )
            expected = attend(eager)
            graph.replay()
            for layer_idx, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
                assert torch.allclose(ours, theirs, atol=1e-5), (position, layer_idx)
            eager.advance(1)
            captured.advance(1)
