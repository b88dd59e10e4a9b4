"""From training weights to the released checkpoint: which tensors are rounded to FP4 or FP8, and the files.

The same two rounding functions of `kernels.formats` make the forward's weights in the rounding-aware fifth of the
training and the shipped codes, so what is trained is what is shipped.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artifacts.demo.forward import Weights
from kernels.formats import Matrix, dequantize_fp4, dequantize_fp8_block, quantize_fp4, quantize_fp8_block
from prep.released_config import V4_FLASH
from runtime.checkpoint import dense_tensors, write_checkpoint
from runtime.config import ModelConfig

SHARD_BYTES = 12_000_000

CONFIG: dict[str, Any] = V4_FLASH | {
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 0],
    "head_dim": 128,
    "hidden_size": 256,
    "index_n_heads": 16,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 128,
    "n_routed_experts": 48,
    "num_attention_heads": 4,
    "num_hash_layers": 2,
    "num_hidden_layers": 8,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "vocab_size": 8192,
}
GENERATION = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
EXPERT_MATRICES = ("w1", "w3", "w2")


def demo_config() -> ModelConfig:
    """The demo's shape."""
    return ModelConfig.from_json(CONFIG, Path("config.json"))


def fp8_names(config: ModelConfig) -> list[str]:
    """Names of the matrices that the release stores as FP8 blocks."""
    return [name for name, spec in dense_tensors(config).items() if spec.dtype == "F8_E4M3"]


def expert_names(config: ModelConfig) -> list[str]:
    """Names of the stacked expert matrices, which the release stores as MXFP4."""
    layers = range(config.num_hidden_layers)
    return [f"layers.{layer}.ffn.experts.{matrix}" for layer in layers for matrix in EXPERT_MATRICES]


@contextmanager
def rounded(weights: Weights, config: ModelConfig) -> Iterator[None]:
    """Within, `weights` hold the values of the shipped codes; afterwards the masters again, bit for bit.

    A backward pass inside thus yields the gradient at the rounded weights, which the caller applies to the masters: the
    straight-through estimate. bfloat16 tensors are left alone: the forward rounds them in use.
    """
    names = expert_names(config) + fp8_names(config)
    masters = {name: weights[name].detach().clone() for name in names}
    with torch.no_grad():
        for name in expert_names(config):
            weights[name].copy_(dequantize_fp4(quantize_fp4(weights[name])))
        for name in fp8_names(config):
            weights[name].copy_(dequantize_fp8_block(quantize_fp8_block(weights[name])))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, master in masters.items():
                weights[name].copy_(master)


def released_tensors(weights: Weights, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Raw names with tensors in their released dtypes, root first, then layer by layer."""
    types = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
    for name, spec in dense_tensors(config).items():
        if spec.dtype in types:
            yield name, weights[name].detach().to("cpu", types[spec.dtype])
        elif spec.dtype == "F8_E4M3":
            codes, scales = quantize_fp8_block(weights[name].detach().cpu())
            yield name, codes
            assert scales is not None
            yield name.replace(".weight", ".scale"), scales.view(torch.float8_e8m0fnu)
    for name in expert_names(config):
        stacked = quantize_fp4(weights[name].detach().cpu())
        yield from _expert_tensors(name, stacked)


def _expert_tensors(name: str, stacked: Matrix) -> Iterator[tuple[str, Tensor]]:
    stem, matrix = name.rsplit(".", 1)
    assert stacked.scales is not None
    for expert, (codes, scales) in enumerate(zip(stacked.codes, stacked.scales, strict=True)):
        yield f"{stem}.{expert}.{matrix}.weight", codes.view(torch.int8)
        yield f"{stem}.{expert}.{matrix}.scale", scales.view(torch.float8_e8m0fnu)


def export(weights: Weights, directory: Path) -> None:
    """Write config.json, generation_config.json, the index and the shards; the tokenizer's files are there already."""
    write_checkpoint(directory, CONFIG, released_tensors(weights, demo_config()), SHARD_BYTES)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION, indent=1) + "\n", encoding="utf-8")
