"""Every routed expert held on the device in one precision: the provider for models that fit. Owns its slabs; reads each once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.formats import CODES, PLANES
from runtime.artifact import ModelDirectory
from runtime.config import ModelConfig
from runtime.errors import ArtifactError
from runtime.expert_weights import ExpertWeights, Matrices
from runtime.ladder import Rung

FP4, TWO_BIT = "fp4", "2bit"
PRECISIONS = (FP4, TWO_BIT)


class SlabSource(Protocol):
    """What gives FP4 slabs: a checkpoint or a model directory."""

    config: ModelConfig

    def read_slab(self, layer_idx: int, expert_id: int) -> Tensor:
        """uint8 [slab_bytes] on the CPU."""
        ...


def precision_planes(source: SlabSource, precision: str, code: str | None = None) -> tuple[str, ...]:
    """The planes that `source` spells `precision` in.

    Args:
        source: A checkpoint, which has FP4 only, or a model directory.
        precision: One of PRECISIONS.
        code: The 2-bit code; None is the one in use. Under "split" FP4 is base and residual even if fp4 is there.

    Raises:
        ValueError: Another precision.
        ArtifactError: The source has no such code.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, expected {' or '.join(PRECISIONS)}")
    if not isinstance(source, ModelDirectory):
        if precision == TWO_BIT:
            raise ArtifactError(
                "a released checkpoint has no 2-bit precision, expected a model directory; run: prep layout, then prep requant"
            )
        return ("fp4",)
    code = code or source.code
    if precision == TWO_BIT:
        if code not in source.codes:
            found = ", ".join(source.codes) or "none"
            raise ArtifactError(
                f"{source.directory}: code {code} is not present, expected one of those that are ({found}); run: prep requant {source.directory}"
            )
        return CODES[code].planes[:1]
    return ("base", "residual") if code == "split" or "fp4" not in source.planes else ("fp4",)


class ResidentExperts:
    """An ExpertProvider (runtime.models.experts) with all experts in the device's memory, packed as stored."""

    def __init__(
        self,
        source: SlabSource,
        dtype: torch.dtype,
        device: torch.device,
        round_inputs: bool,
        *,
        precision: str = FP4,
        code: str | None = None,
    ) -> None:
        """Reads every expert of `source` once.

        Args:
            source: A checkpoint or a model directory, not needed afterwards.
            dtype: Of activations and of the weights they are multiplied with.
            device: Where the slabs lie.
            round_inputs: As in `kernels.expert.expert_ffn`.
            precision: What every expert is served at, FP4 or TWO_BIT.
            code: As in `precision_planes`.

        Raises:
            StrawError: The source has no such precision, or could not be read.
        """
        self.planes = precision_planes(source, precision, code)
        self._rung = Rung.FP4 if precision == FP4 else Rung.TWO_BIT
        if isinstance(source, ModelDirectory):
            present, tables, code = list(source.planes), source.read_tables(), code or source.code
        else:
            present, tables, code = ["fp4"], {}, None
        self._weights = ExpertWeights(
            source.config, present, code, tables, dtype=dtype, device=device, round_inputs=round_inputs
        )
        self._slabs = {plane: _read_all(source, plane, device) for plane in self.planes}

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Each pick's weighted output, float32 [T, K, D]; each expert computes all its tokens of the call at once."""
        output = torch.empty(*topk_ids.shape, x.shape[-1], device=x.device)
        for expert_id in topk_ids.unique().tolist():
            tokens, ranks = (topk_ids == expert_id).nonzero(as_tuple=True)
            slabs = self._slabs_of(layer_idx, expert_id)
            picks = self._weights.apply(layer_idx, expert_id, self._rung, slabs, x[tokens], topk_weights[tokens, ranks])
            output[tokens, ranks] = picks.float()
        return output

    def weights(self, layer_idx: int, expert_id: int) -> Matrices:
        """w1, w3 and w2 of one expert at this precision, newly allocated in the provider's dtype."""
        return self._weights.matrices(layer_idx, expert_id, self._rung, self._slabs_of(layer_idx, expert_id))

    def _slabs_of(self, layer_idx: int, expert_id: int) -> dict[str, Tensor]:
        return {plane: slabs[layer_idx, expert_id] for plane, slabs in self._slabs.items()}


def _read_all(source: SlabSource, plane: str, device: torch.device) -> Tensor:
    """[L, E, slab_bytes] uint8 of one plane on `device`."""
    config = source.config
    slab_bytes = PLANES[plane].slab_bytes(config.hidden_size, config.moe_intermediate_size)
    shape = (config.num_hidden_layers, config.n_routed_experts, slab_bytes)
    slabs = torch.empty(shape, dtype=torch.uint8, device=device)
    for layer_idx in range(config.num_hidden_layers):
        for expert_id in range(config.n_routed_experts):
            slabs[layer_idx, expert_id] = (
                source.read_slab(layer_idx, expert_id, plane)
                if isinstance(source, ModelDirectory)
                else source.read_slab(layer_idx, expert_id)
            )
    return slabs
