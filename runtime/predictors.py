"""From `--prefetch` to a prefetcher: what the model's own tables and the trained predictor have to say. Owns no guess."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from predictor.baselines import RouterWeights
from predictor.model import load
from predictor.trace_files import TraceShape
from runtime.artifact import ModelDirectory
from runtime.config import ModelConfig
from runtime.errors import StrawError
from runtime.manifest import PREDICTOR
from runtime.models.deepseek_v4.model import DeepseekV4
from runtime.prefetch import DriveBudget, Prefetcher

OFF, HASH, LEARNED = "off", "hash", "predictor"


def trace_shape(config: ModelConfig) -> TraceShape:
    """The sizes of a model that its traces and its predictor depend on."""
    return TraceShape(config.hidden_size, config.n_routed_experts, config.num_hidden_layers, config.num_experts_per_tok)


def prefetcher_maker(
    prefetch: str, source: ModelDirectory, model: DeepseekV4, dtype: torch.dtype, device: torch.device
) -> Callable[[DriveBudget], Prefetcher] | None:
    """What `--prefetch` asks for, to be given a budget; None for "off".

    Raises:
        StrawError: It is no such choice, or there is no predictor in the model directory.
        PredictorError: The predictor is damaged or of another model.
    """
    if prefetch not in (OFF, HASH, LEARNED):
        raise StrawError(f"prefetch is {prefetch!r}, expected off, hash or predictor; correct --prefetch")
    if prefetch == OFF:
        return None
    routers = [block.moe.router for block in model.blocks]
    tables: dict[int, Tensor] = {
        layer_idx: router.token_to_experts.cpu()
        for layer_idx, router in enumerate(routers)
        if router.token_to_experts is not None
    }
    predictor = None
    if prefetch == LEARNED:
        path = source.directory / PREDICTOR
        if not path.exists():
            raise StrawError(
                f"{path}: no such file, expected a trained predictor; run: prep trace {source.directory} --text FILE and prep train-predictor {source.directory}, or use --prefetch hash"
            )
        predictor = load(
            path,
            shape=trace_shape(source.config),
            fingerprint=source.fingerprint,
            routers=[None if router.bias is None else RouterWeights(router.weight, router.bias) for router in routers],
            device=device,
            dtype=dtype,
        )
    config = source.config
    return lambda budget: Prefetcher(tables, predictor, config.num_hidden_layers, config.num_experts_per_tok, budget)
