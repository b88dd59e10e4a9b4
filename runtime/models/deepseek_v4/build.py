"""Builds a DeepseekV4 from released dense tensors: names in, placed and dequantised weights out. Owns the name mapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.formats import Matrix
from runtime.config import ModelConfig
from runtime.models.deepseek_v4.attention import Attention
from runtime.models.deepseek_v4.compressor import Compressor
from runtime.models.deepseek_v4.hyper_connections import HyperConnection, HyperHead
from runtime.models.deepseek_v4.indexer import Indexer
from runtime.models.deepseek_v4.layers import Fp8Matrix, Linear, Weight, dense, rope_frequencies
from runtime.models.deepseek_v4.model import Block, DeepseekV4
from runtime.models.deepseek_v4.moe import MixtureOfExperts, Router
from runtime.models.rounding import ActivationRounding


class DenseSource(Protocol):
    """What gives dense tensors by their released names: a checkpoint or a model directory."""

    config: ModelConfig

    def read(self, name: str) -> Tensor:
        """The tensor as released, on the CPU."""
        ...


def build_model(
    source: DenseSource, dtype: torch.dtype, device: torch.device, rounding: ActivationRounding, keep_fp8: bool = False
) -> DeepseekV4:
    """The model with its dense weights in `dtype` on `device`; float32 tensors (router bias, hyper-connections) stay float32.

    FP8 matrices are dequantised here, exactly; with `keep_fp8` at each use instead, which takes half the memory and gives the
    same bits. The embedding stays in host memory.
    """
    config, place = source.config, _Placer(source, dtype, device, rounding, keep_fp8)
    return DeepseekV4(
        config=config,
        embed=source.read("embed.weight").to(dtype),
        blocks=tuple(_block(place, config, layer_idx) for layer_idx in range(config.num_hidden_layers)),
        hyper_head=HyperHead(
            fn=place.plain("hc_head_fn"),
            base=place.plain("hc_head_base"),
            scale=place.plain("hc_head_scale"),
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        ),
        norm=place.plain("norm.weight"),
        head=place.plain("head.weight"),
    )


@dataclass(frozen=True, slots=True)
class _Placer:
    source: DenseSource
    dtype: torch.dtype
    device: torch.device
    rounding: ActivationRounding
    keep_fp8: bool

    def plain(self, name: str) -> Tensor:
        tensor = self.source.read(name)
        return tensor.to(self.device, self.dtype if tensor.dtype == torch.bfloat16 else tensor.dtype)

    def matrix(self, stem: str) -> Weight:
        scales = self.source.read(f"{stem}.scale").view(torch.uint8).to(self.device)
        matrix = Fp8Matrix(Matrix(self.source.read(f"{stem}.weight").to(self.device), scales), self.dtype)
        return matrix if self.keep_fp8 else dense(matrix)

    def linear(self, stem: str) -> Linear:
        return Linear(self.matrix(stem), self.rounding.linear)


def _block(place: _Placer, config: ModelConfig, layer_idx: int) -> Block:
    prefix = f"layers.{layer_idx}"
    return Block(
        attn_hc=_hyper_connection(place, config, f"{prefix}.hc_attn"),
        attn_norm=place.plain(f"{prefix}.attn_norm.weight"),
        attention=_attention(place, config, layer_idx),
        ffn_hc=_hyper_connection(place, config, f"{prefix}.hc_ffn"),
        ffn_norm=place.plain(f"{prefix}.ffn_norm.weight"),
        moe=_moe(place, config, layer_idx),
    )


def _hyper_connection(place: _Placer, config: ModelConfig, stem: str) -> HyperConnection:
    return HyperConnection(
        fn=place.plain(f"{stem}_fn"),
        base=place.plain(f"{stem}_base"),
        scale=place.plain(f"{stem}_scale"),
        num_streams=config.hc_mult,
        sinkhorn_iters=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )


def _attention(place: _Placer, config: ModelConfig, layer_idx: int) -> Attention:
    stem, ratio = f"layers.{layer_idx}.attn", config.layer_ratios[layer_idx]
    frequencies = rope_frequencies(config, compressed=ratio > 0).to(place.device)
    compressor = _compressor(place, config, f"{stem}.compressor", frequencies) if ratio else None
    return Attention(
        wq_a=place.linear(f"{stem}.wq_a"),
        q_norm=place.plain(f"{stem}.q_norm.weight"),
        wq_b=place.linear(f"{stem}.wq_b"),
        wkv=place.linear(f"{stem}.wkv"),
        kv_norm=place.plain(f"{stem}.kv_norm.weight"),
        sink=place.plain(f"{stem}.attn_sink"),
        wo_a=place.matrix(f"{stem}.wo_a"),
        wo_b=place.linear(f"{stem}.wo_b"),
        compressor=compressor,
        indexer=_indexer(place, config, f"{stem}.indexer", frequencies) if ratio == 4 else None,
        frequencies=frequencies,
        num_heads=config.num_attention_heads,
        num_groups=config.o_groups,
        norm_eps=config.rms_norm_eps,
        round_kv=place.rounding.kv,
    )


def _compressor(
    place: _Placer, config: ModelConfig, stem: str, frequencies: Tensor, for_indexer: bool = False
) -> Compressor:
    return Compressor(
        wkv=place.plain(f"{stem}.wkv.weight"),
        wgate=place.plain(f"{stem}.wgate.weight"),
        ape=place.plain(f"{stem}.ape"),
        norm=place.plain(f"{stem}.norm.weight"),
        frequencies=frequencies,
        norm_eps=config.rms_norm_eps,
        round_kv=place.rounding.kv and not for_indexer,
        round_indexer=place.rounding.indexer and for_indexer,
    )


def _indexer(place: _Placer, config: ModelConfig, stem: str, frequencies: Tensor) -> Indexer:
    return Indexer(
        wq_b=place.linear(f"{stem}.wq_b"),
        weights_proj=place.plain(f"{stem}.weights_proj.weight"),
        compressor=_compressor(place, config, f"{stem}.compressor", frequencies, for_indexer=True),
        num_heads=config.index_n_heads,
        topk=config.index_topk,
        round_queries=place.rounding.indexer,
    )


def _moe(place: _Placer, config: ModelConfig, layer_idx: int) -> MixtureOfExperts:
    stem = f"layers.{layer_idx}.ffn"
    hashed = layer_idx < config.num_hash_layers
    router = Router(
        weight=place.plain(f"{stem}.gate.weight"),
        bias=None if hashed else place.plain(f"{stem}.gate.bias"),
        token_to_experts=place.plain(f"{stem}.gate.tid2eid") if hashed else None,
        topk=config.num_experts_per_tok,
        scaling=config.routed_scaling_factor,
    )
    return MixtureOfExperts(
        layer_idx=layer_idx,
        router=router,
        w1=place.matrix(f"{stem}.shared_experts.w1"),
        w3=place.matrix(f"{stem}.shared_experts.w3"),
        w2=place.matrix(f"{stem}.shared_experts.w2"),
        limit=config.swiglu_limit,
        round_inputs=place.rounding.linear,
    )
