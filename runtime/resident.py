"""Every routed expert held on the device as FP4 slabs: the provider for models that fit. Owns its slabs; reads each once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.expert import expert_ffn
from kernels.formats import PLANES, dequantize_fp4, split_slab
from runtime.config import ModelConfig


class SlabSource(Protocol):
    """What gives FP4 slabs: a checkpoint or a model directory."""

    config: ModelConfig

    def read_slab(self, layer_idx: int, expert_id: int) -> Tensor:
        """uint8 [slab_bytes] on the CPU."""
        ...


class ResidentExperts:
    """An ExpertProvider (runtime.models.experts) with all experts in the device's memory, packed as released."""

    def __init__(self, source: SlabSource, dtype: torch.dtype, device: torch.device, round_inputs: bool) -> None:
        config = source.config
        self._hidden, self._width = config.hidden_size, config.moe_intermediate_size
        self._limit, self._dtype, self._round_inputs = config.swiglu_limit, dtype, round_inputs
        slab_bytes = PLANES["fp4"].slab_bytes(self._hidden, self._width)
        shape = (config.num_hidden_layers, config.n_routed_experts, slab_bytes)
        self._slabs = torch.empty(shape, dtype=torch.uint8, device=device)
        for layer_idx in range(config.num_hidden_layers):
            for expert_id in range(config.n_routed_experts):
                self._slabs[layer_idx, expert_id] = source.read_slab(layer_idx, expert_id)

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Each pick's weighted output, float32 [T, K, D]; each expert computes all its tokens of the call at once."""
        output = torch.empty(*topk_ids.shape, x.shape[-1], device=x.device)
        for expert_id in topk_ids.unique().tolist():
            tokens, ranks = (topk_ids == expert_id).nonzero(as_tuple=True)
            output[tokens, ranks] = self._expert(layer_idx, expert_id, x[tokens], topk_weights[tokens, ranks]).float()
        return output

    def _expert(self, layer_idx: int, expert_id: int, x: Tensor, route_weights: Tensor) -> Tensor:
        matrices = split_slab(self._slabs[layer_idx, expert_id], PLANES["fp4"], self._hidden, self._width)
        w1, w3, w2 = (dequantize_fp4(matrix, self._dtype) for matrix in matrices)
        return expert_ffn(
            x, w1, w3, w2, limit=self._limit, route_weights=route_weights, round_inputs=self._round_inputs
        )
