"""ModelConfig: what it keeps, what it refuses and how it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from random_checkpoint import TINY

from runtime.config import ModelConfig, read_json
from runtime.errors import CheckpointError

SOURCE = Path("there/config.json")


def test_fields_keep_the_checkpoints_names_and_values() -> None:
    config = ModelConfig.from_json(TINY, SOURCE)
    assert config.hidden_size == 256
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 16
    assert config.layer_ratios == (0, 4, 128, 4, 128)


@pytest.mark.parametrize("scaling", [TINY["rope_scaling"], None])
def test_json_gives_back_an_equal_config(scaling: dict | None) -> None:
    config = ModelConfig.from_json(TINY | {"rope_scaling": scaling}, SOURCE)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json())), SOURCE) == config


# (overrides, what the message must name)
REFUSED = [
    ({"model_type": "llama"}, "model_type is 'llama', expected 'deepseek_v4'"),
    ({"model_type": None}, "model_type is None"),
    ({"compress_ratios": [0, 4]}, "compress_ratios"),
    ({"compress_ratios": [0, 4, 128, 4, 64, 0]}, "compress_ratios"),
    ({"compress_ratios": "none"}, "wrong type"),
    ({"hidden_size": 250}, "hidden_size is 250, expected a positive multiple of 128"),
    ({"hidden_size": 256.5}, "wrong type"),
    ({"vocab_size": "512"}, "wrong type"),
    ({"use_cache": True, "num_attention_heads": True}, "wrong type"),
    ({"o_groups": 3}, "o_groups is 3, expected a divisor of num_attention_heads"),
    ({"n_routed_experts": 1}, "n_routed_experts is 1"),
    ({"num_hash_layers": 6}, "num_hash_layers is 6"),
    ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8', expected 'fp4'"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED)
def test_refusal_is_one_line_that_names_the_key(overrides: dict, named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(TINY | overrides, SOURCE)
    message = str(caught.value)
    assert named in message
    assert "config.json" in message
    assert "expected" in message or "wrong type" in message
    assert "\n" not in message


@pytest.mark.parametrize("key", ["compress_ratios", "hidden_size", "eos_token_id"])
def test_missing_key_is_named(key: str) -> None:
    raw = {name: value for name, value in TINY.items() if name != key}
    with pytest.raises(CheckpointError, match=f"there/config.json: key {key} is missing, expected"):
        ModelConfig.from_json(raw, SOURCE)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00"])
def test_read_json_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=f"{path}: cannot be read .No such file"):
        read_json(path)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path}: not JSON"):
        read_json(path)
