"""ModelConfig: the shape of one model, from a released `config.json`, checked once. Keys keep the checkpoint's names."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from runtime.errors import CheckpointError

MODEL_TYPE = "deepseek_v4"
FP8_BLOCK = 128  # rows and columns of one FP8 scale block
FP4_GROUP = 32  # weights along K of one FP4 scale
LONGEST_WINDOW = 1_000_000
POSITIVE = (
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts_per_tok",
    "hc_mult",
    "index_n_heads",
    "index_topk",
    "max_position_embeddings",
    "routed_scaling_factor",
    "swiglu_limit",
    "rms_norm_eps",
)
ALIGNED = ("hidden_size", "head_dim", "q_lora_rank", "o_lora_rank", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN's parameters, used on the compressed-attention layers only (facts: at every length, amplitude 1)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a DeepSeek-V4 model; field names are those of the released `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: int

    def __post_init__(self) -> None:
        for name, ok, rule in self._rules():
            if not ok:
                raise CheckpointError(
                    f"config.json: {name} is {brief(getattr(self, name))}, expected {rule}; use the config.json released with the weights"
                )

    def _rules(self) -> list[tuple[str, bool, str]]:
        positive = [(name, getattr(self, name) > 0, "a positive number") for name in POSITIVE]
        aligned = [
            (n, getattr(self, n) > 0 and getattr(self, n) % FP8_BLOCK == 0, f"a positive multiple of {FP8_BLOCK}")
            for n in ALIGNED
        ]
        return [*positive, *aligned, *self._shape_rules(), *self._value_rules()]

    def _value_rules(self) -> list[tuple[str, bool, str]]:
        longest = min(self.max_position_embeddings, LONGEST_WINDOW)
        token_ids = ("bos_token_id", "eos_token_id")
        return [
            ("sliding_window", 0 < self.sliding_window <= longest, f"between 1 and {longest}, at most the context"),
            ("index_head_dim", self.index_head_dim >= self.qk_rope_head_dim, "at least qk_rope_head_dim"),
            *((name, getattr(self, name) > 1, "more than 1") for name in ("rope_theta", "compress_rope_theta")),
            ("hc_sinkhorn_iters", 1 <= self.hc_sinkhorn_iters <= 1000, "between 1 and 1000"),
            ("hc_eps", self.hc_eps >= 0, "0 or more"),
            *((name, 0 <= getattr(self, name) < self.vocab_size, "a token below vocab_size") for name in token_ids),
        ]

    def _shape_rules(self) -> list[tuple[str, bool, str]]:
        layers = len(self.compress_ratios)
        return [
            (
                "compress_ratios",
                layers >= self.num_hidden_layers,
                f"at least {self.num_hidden_layers} numbers, one a layer (found {layers})",
            ),
            ("compress_ratios", set(self.compress_ratios) <= {0, 4, 128}, "only 0, 4 and 128"),
            (
                "o_groups",
                self.o_groups > 0 and self.num_attention_heads % self.o_groups == 0,
                "a divisor of num_attention_heads",
            ),
            (
                "qk_rope_head_dim",
                0 < self.qk_rope_head_dim <= self.head_dim and self.qk_rope_head_dim % 2 == 0,
                "even and at most head_dim",
            ),
            ("n_routed_experts", self.n_routed_experts >= self.num_experts_per_tok, "at least num_experts_per_tok"),
            ("n_shared_experts", self.n_shared_experts == 1, "1"),
            ("num_hash_layers", 0 <= self.num_hash_layers <= self.num_hidden_layers, "between 0 and num_hidden_layers"),
        ]

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each layer, the draft stages' entries left out."""
        return self.compress_ratios[: self.num_hidden_layers]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` turns back into an equal ModelConfig."""
        scaling = None if self.rope_scaling is None else {"type": "yarn", **asdict(self.rope_scaling)}
        return {"model_type": MODEL_TYPE, **asdict(self), "rope_scaling": scaling}

    @classmethod
    def from_json(cls, raw: Any, source: Path) -> ModelConfig:
        """The checked shape of the model that `raw`, the content of the config.json at `source`, describes.

        Raises:
            CheckpointError: No JSON object, another model type, a missing key, or a value the model cannot have.
        """
        if not isinstance(raw, dict):
            raise CheckpointError(f"{source}: holds {brief(raw)}, expected a JSON object; fetch config.json again")
        if raw.get("model_type") != MODEL_TYPE:
            raise CheckpointError(
                f"{source}: model_type is {brief(raw.get('model_type'))}, expected {MODEL_TYPE!r}; this program runs DeepSeek-V4 checkpoints only"
            )
        required = [f.name for f in fields(cls) if f.name != "rope_scaling"]
        missing = [key for key in required if key not in raw]
        if missing:
            raise CheckpointError(
                f"{source}: key {', '.join(missing)} is missing, expected every key of the released config.json; fetch that file again"
            )
        _require_variant(raw, source)
        values = {f.name: _convert(f.name, str(f.type), raw[f.name], source) for f in fields(cls) if f.name in required}
        return cls(**values, rope_scaling=_rope_scaling(raw.get("rope_scaling"), source))


def _convert(name: str, annotation: str, value: Any, source: Path) -> Any:
    """`value` as the annotated type; a float where an integer is due, a text, or no finite number, is an error."""
    if annotation.startswith("tuple") and isinstance(value, list | tuple):
        return tuple(_convert(name, "int", v, source) for v in value)
    allowed = {"int": (int,), "float": (int, float)}.get(annotation, ())
    if isinstance(value, allowed) and not isinstance(value, bool) and _is_finite(value):
        return float(value) if annotation == "float" else value
    kind = {"int": "an integer", "float": "a finite number"}.get(annotation, "a list of integers")
    raise CheckpointError(f"{source}: {name} is {brief(value)}, expected {kind}; fetch config.json again")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _require_variant(raw: dict[str, Any], source: Path) -> None:
    """The choices this forward pass is written for; a checkpoint that makes others is refused by name."""
    expected = {"expert_dtype": "fp4", "scoring_func": "sqrtsoftplus", "hidden_act": "silu", "norm_topk_prob": True}
    expected |= {"tie_word_embeddings": False, "num_key_value_heads": 1}
    for key, value in expected.items():
        if raw.get(key, value) != value:
            raise CheckpointError(
                f"{source}: {key} is {brief(raw[key])}, expected {value!r}; this variant of the architecture is not supported"
            )


def _rope_scaling(raw: Any, source: Path) -> RopeScaling | None:
    if raw is None:
        return None
    types = {f.name: str(f.type) for f in fields(RopeScaling)}
    kind = raw.get("type", raw.get("rope_type")) if isinstance(raw, dict) else None
    if kind != "yarn" or any(name not in raw for name in types):
        raise CheckpointError(
            f"{source}: rope_scaling is {brief(raw)}, expected type yarn with {', '.join(types)}; use the released config.json"
        )
    values = {n: _convert(f"rope_scaling.{n}", annotation, raw[n], source) for n, annotation in types.items()}
    for name, value in values.items():
        if not 1e-9 <= value <= 1e9:  # what keeps the logarithms of its angles finite
            raise CheckpointError(
                f"{source}: rope_scaling.{name} is {brief(value)}, expected between 1e-9 and 1e9; use the released config.json"
            )
    return RopeScaling(**values)


def read_json(path: Path) -> Any:
    """The content of a JSON file of a checkpoint.

    Raises:
        CheckpointError: The file is missing, is not JSON, is is nested too deeply or has a number of thousands of digits.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}), expected it in every released checkpoint; fetch it again or name another directory"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, thousands of digits; nested too deeply
        raise CheckpointError(f"{path}: not JSON ({error}), expected a JSON file; fetch it again") from error
