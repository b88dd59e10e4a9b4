"""Random checkpoints in the released raw form, for tests: the golden vectors' tiny family, any field overridden."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.formats import quantize_fp4, quantize_fp8_block
from prep.released_config import V4_FLASH
from runtime.checkpoint import model_tensors, write_checkpoint
from runtime.config import ModelConfig
from runtime.safetensors_file import TensorSpec

TINY: dict[str, Any] = V4_FLASH | {
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "head_dim": 128,
    "hidden_size": 256,
    "index_n_heads": 16,
    "index_topk": 8,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "num_hidden_layers": 5,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "sliding_window": 16,
    "vocab_size": 512,
}


def write_random_checkpoint(
    directory: Path, seed: int = 0, shard_bytes: int = 4_000_000, **overrides: Any
) -> dict[str, Any]:
    """The config (TINY with `overrides`) of the checkpoint it writes; random weights that keep activations near 1."""
    raw = TINY | overrides
    config = ModelConfig.from_json(raw, directory / "config.json")
    generator = torch.Generator().manual_seed(seed)
    write_checkpoint(directory, raw, _tensors(config, generator), shard_bytes)
    return raw


def _tensors(config: ModelConfig, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for name, spec in model_tensors(config).items():
        if spec.dtype in ("F8_E4M3", "I8"):
            scale_name = name.removesuffix("weight") + "scale"
            yield from zip((name, scale_name), _quantised(spec, generator), strict=True)
        elif spec.dtype != "F8_E8M0":
            yield name, _plain(name, spec, config, generator)


def _quantised(spec: TensorSpec, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    packing = 2 if spec.dtype == "I8" else 1
    rows, columns = spec.shape[0], spec.shape[1] * packing
    weight = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
    codes, scales = quantize_fp4(weight) if packing == 2 else quantize_fp8_block(weight)
    return codes.view(torch.int8) if packing == 2 else codes, scales.view(torch.float8_e8m0fnu)


def _plain(name: str, spec: TensorSpec, config: ModelConfig, generator: torch.Generator) -> Tensor:
    if name.endswith("tid2eid"):
        scores = torch.rand(spec.shape[0], config.n_routed_experts, generator=generator)
        return scores.topk(spec.shape[1]).indices
    noise = torch.randn(spec.shape, generator=generator)
    if name.endswith("norm.weight"):
        value = 1 + 0.1 * noise
    elif len(spec.shape) == 1:
        value = 0.3 * noise + (0.5 if name.endswith("_scale") else 0)
    elif name == "embed.weight" or name.endswith(".ape"):
        value = noise
    else:
        value = noise / math.sqrt(spec.shape[-1])
    return value.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)
