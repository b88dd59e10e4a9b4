"""ModelConfig: what it keeps, what it refuses and how it says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from random_checkpoint import TINY

from prep.released_config import V4_FLASH
from runtime.config import ModelConfig, read_json
from runtime.errors import CheckpointError

SOURCE = Path("there/config.json")
FLOATS = (
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
    "hc_eps",
    "rms_norm_eps",
)
COUNTS = (
    "sliding_window",
    "index_n_heads",
    "index_topk",
    "index_head_dim",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
)


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


@pytest.mark.parametrize("raw", [V4_FLASH, Path("tests/golden/tiny_raw"), Path("artifacts/demo/checkpoint")], ids=str)
def test_configs_in_use_pass(raw: dict | Path) -> None:
    if isinstance(raw, Path):
        raw = read_json(Path(__file__).parents[2] / raw / "config.json")
    assert ModelConfig.from_json(raw, SOURCE).hidden_size == raw["hidden_size"]


def test_yarn_numbers_are_converted() -> None:
    scaling = ModelConfig.from_json(TINY, SOURCE).rope_scaling
    assert scaling is not None
    assert [type(value) for value in (scaling.factor, scaling.beta_fast, scaling.beta_slow)] == [float] * 3


def yarn(**changes: object) -> dict:
    """Overrides that change rope_scaling's values."""
    return {"rope_scaling": TINY["rope_scaling"] | changes}


# (overrides, what the message must name)
REFUSED = [
    ({"model_type": "llama"}, "model_type is 'llama', expected 'deepseek_v4'"),
    ({"model_type": None}, "model_type is None"),
    ({"compress_ratios": [0, 4]}, "compress_ratios"),
    ({"compress_ratios": [0, 4, 128, 4, 64, 0]}, "compress_ratios"),
    ({"compress_ratios": "none"}, "compress_ratios is 'none', expected a list of integers"),
    ({"compress_ratios": [0, 4, 128, [4], 128]}, "compress_ratios is [4], expected an integer"),
    ({"compress_ratios": {}}, "compress_ratios is {}"),
    ({"hidden_size": 250}, "hidden_size is 250, expected a positive multiple of 128"),
    ({"hidden_size": 256.5}, "hidden_size is 256.5, expected an integer"),
    ({"vocab_size": "512"}, "vocab_size is '512', expected an integer"),
    ({"use_cache": True, "num_attention_heads": True}, "num_attention_heads is True"),
    ({"o_groups": 3}, "o_groups is 3, expected a divisor of num_attention_heads"),
    ({"n_routed_experts": 1}, "n_routed_experts is 1"),
    ({"num_hash_layers": 6}, "num_hash_layers is 6"),
    ({"expert_dtype": "fp8"}, "expert_dtype is 'fp8', expected 'fp4'"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
    *(({"rope_scaling": value}, "rope_scaling is") for value in (5, 0, [1], [], "yarn", {}, True)),
    (yarn(factor="16"), "rope_scaling.factor is '16', expected a finite number"),
    (
        yarn(original_max_position_embeddings=65536.0),
        "original_max_position_embeddings is 65536.0, expected an integer",
    ),
    *((yarn(**{key: 0}), f"rope_scaling.{key} is 0") for key in ("factor", "beta_fast", "beta_slow")),
    *((yarn(beta_fast=value), "rope_scaling.beta_fast is") for value in (-1, 1e308, 5e-324, math.nan, 10**400)),
    *((yarn(original_max_position_embeddings=value), "original_max_position") for value in (0, -1, 10**300)),
    *(({key: value}, key) for key in ("rope_theta", "compress_rope_theta") for value in (0, 1, -5, None)),
    *(({key: value}, key) for key in FLOATS for value in (math.nan, math.inf, -math.inf, 10**400, -1)),
    *(({key: 0}, key) for key in FLOATS if key != "hc_eps"),
    *(({key: value}, key) for key in COUNTS for value in (0, -1, 10**400)),
    *(({key: value}, key) for key in ("bos_token_id", "eos_token_id") for value in (-1, 512)),
    (
        {"sliding_window": 10**12, "max_position_embeddings": 10**13},
        "sliding_window is 1000000000000, expected between",
    ),
    ({"sliding_window": 601, "max_position_embeddings": 600}, "sliding_window is 601, expected between 1 and 600"),
    ({"index_head_dim": 63}, "index_head_dim is 63, expected at least qk_rope_head_dim"),
    ({"hc_sinkhorn_iters": 10**12}, "hc_sinkhorn_iters"),
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED)
def test_refusal_is_one_line_that_names_the_key(overrides: dict, named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(TINY | overrides, SOURCE)
    message = str(caught.value)
    assert named in message
    assert "config.json" in message
    assert "expected" in message
    assert "\n" not in message


@pytest.mark.parametrize("raw", [[], [TINY], 5, None, "x", True])
def test_another_json_value_than_an_object_is_refused(raw: object) -> None:
    with pytest.raises(CheckpointError, match=r"^there/config.json: holds .*, expected a JSON object; fetch"):
        ModelConfig.from_json(raw, SOURCE)


@pytest.mark.parametrize("key", ["compress_ratios", "hidden_size", "eos_token_id"])
def test_missing_key_is_named(key: str) -> None:
    raw = {name: value for name, value in TINY.items() if name != key}
    with pytest.raises(CheckpointError, match=f"there/config.json: key {key} is missing, expected"):
        ModelConfig.from_json(raw, SOURCE)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[" * 100_000, b"9" * 5000])
def test_read_json_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=f"{path}: cannot be read .No such file"):
        read_json(path)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path}: not JSON"):
        read_json(path)
