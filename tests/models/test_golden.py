"""The forward pass against logits of transformers and of the official model file (tests/golden/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_model import PlainModel
from safetensors.torch import load_file
from tolerances import LOGITS_FLOAT32

from runtime.models.rounding import ActivationRounding

GOLDEN = Path(__file__).parents[1] / "golden"

ROUNDINGS = [
    ("hf", ActivationRounding()),
    ("plain", ActivationRounding()),
    ("qdq_act", ActivationRounding(linear=True)),
    ("qdq_kv", ActivationRounding(kv=True)),
    ("qdq_idx", ActivationRounding(indexer=True)),
    ("qdq_all", ActivationRounding(linear=True, kv=True, indexer=True)),
]


@pytest.mark.parametrize(("name", "rounding"), ROUNDINGS, ids=[name for name, _ in ROUNDINGS])
def test_logits_are_those_of_other_programs(name: str, rounding: ActivationRounding) -> None:
    golden = load_file(GOLDEN / "tiny.safetensors")
    expected = golden[f"{name}_fp32_logits"][0]
    logits = PlainModel.open(GOLDEN / "tiny_raw", rounding).logits(golden["input_ids"][0])
    assert (logits[: len(expected)] - expected).abs().max() <= LOGITS_FLOAT32


def test_rounding_rules_change_the_logits_they_should() -> None:
    """The golden test is not blind: without rule A or B the first positions already differ from the rounded ones."""
    golden = load_file(GOLDEN / "tiny.safetensors")
    logits = PlainModel.open(GOLDEN / "tiny_raw").logits(golden["input_ids"][0])
    for name in ("qdq_act", "qdq_kv"):
        assert (logits[:6] - golden[f"{name}_fp32_logits"][0]).abs().max() > 10 * LOGITS_FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_kept_in_fp8_give_the_same_bits(dtype: torch.dtype) -> None:
    token_ids = load_file(GOLDEN / "tiny.safetensors")["input_ids"][0][:40]
    kept, dequantised = (PlainModel.open(GOLDEN / "tiny_raw", dtype=dtype, keep_fp8=keep) for keep in (True, False))
    assert torch.equal(kept.logits(token_ids), dequantised.logits(token_ids))


def test_one_percent_in_one_scale_is_seen() -> None:
    golden = load_file(GOLDEN / "tiny.safetensors")
    plain = PlainModel.open(GOLDEN / "tiny_raw")
    plain.model.blocks[2].attention.kv_norm.mul_(1.01)
    logits = plain.logits(golden["input_ids"][0])
    assert (logits - golden["hf_fp32_logits"][0]).abs().max() > 10 * LOGITS_FLOAT32
    assert torch.isfinite(logits).all()
