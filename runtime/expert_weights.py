"""What an expert computes from its slabs: planes to matrices, matrices to outputs. Owns the 2-bit tables; no slab, no tier."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from kernels.expert import expert_ffn
from kernels.formats import CODES, PLANES, Matrix, dequantize_fp4, dequantize_int2, dequantize_quad2, split_slab
from kernels.split import dequantize_base, dequantize_split
from runtime.config import ModelConfig
from runtime.ladder import Rung
from runtime.tables import PROJECTIONS, Tables, layer_tables, split_table

Matrices = tuple[Tensor, Tensor, Tensor]  # w1, w3, w2


class ExpertWeights:
    """The arithmetic of every expert in both precisions, on one device in one dtype."""

    def __init__(
        self,
        config: ModelConfig,
        planes: Collection[str],
        code: str | None,
        tables: Tables,
        *,
        dtype: torch.dtype,
        device: torch.device,
        round_inputs: bool = False,
    ) -> None:
        """Chooses the planes of each precision.

        Args:
            config: Gives D, F and the clamp.
            planes: Those present.
            code: The 2-bit code in use, or None.
            tables: Its tables for all layers (`runtime.tables`); moved to `device`.
            dtype: Of activations and dequantised matrices.
            device: Of the slabs and activations it will be given.
            round_inputs: Activation rounding A.
        """
        self.config, self._dtype, self._round_inputs = config, dtype, round_inputs
        self._tables = {name: tensor.to(device) for name, tensor in tables.items()}
        # Under SPLIT, FP4 is base + residual even where the fp4 files are still there: cached bytes are never held twice.
        in_parts = code == "split" or "fp4" not in planes
        two_bit = () if code is None else CODES[code].planes[:1]
        self._planes = {Rung.FP4: ("base", "residual") if in_parts else ("fp4",), Rung.TWO_BIT: two_bit, Rung.DROP: ()}

    def planes(self, rung: Rung) -> tuple[str, ...]:
        """The planes that make up a precision; none if the model has not got it."""
        return self._planes[rung]

    def apply(
        self, layer_idx: int, expert_id: int, rung: Rung, slabs: Mapping[str, Tensor], x: Tensor, route_weights: Tensor
    ) -> Tensor:
        """[T, D] in x's dtype: the expert's outputs for x [T, D], weighted by route_weights [T] float32.

        Args:
            layer_idx: With `expert_id` names the expert, whose tables are used.
            expert_id: See `layer_idx`.
            rung: FP4 or 2-bit.
            slabs: Its slab in each of `planes(rung)`, uint8 [at least slab_bytes].
            x: Activations.
            route_weights: Applied before w2.
        """
        w1, w3, w2 = self.matrices(layer_idx, expert_id, rung, slabs)
        limit, rounding = self.config.swiglu_limit, self._round_inputs
        return expert_ffn(x, w1, w3, w2, limit=limit, route_weights=route_weights, round_inputs=rounding)

    def matrices(self, layer_idx: int, expert_id: int, rung: Rung, slabs: Mapping[str, Tensor]) -> Matrices:
        """w1, w3 [F, D] and w2 [D, F] in the chosen dtype; arguments as in `apply`."""
        shape = (self.config.hidden_size, self.config.moe_intermediate_size)
        parts = {plane: split_slab(slabs[plane], PLANES[plane], *shape) for plane in self._planes[rung]}
        w1, w3, w2 = (
            self._dequantise(
                layer_idx, expert_id, projection, {plane: part[projection] for plane, part in parts.items()}
            )
            for projection in range(PROJECTIONS)
        )
        return w1, w3, w2

    def _dequantise(self, layer_idx: int, expert_id: int, projection: int, parts: Mapping[str, Matrix]) -> Tensor:
        """One matrix of the planes in `parts`."""
        if "fp4" in parts:
            return dequantize_fp4(parts["fp4"], self._dtype)
        if "int2" in parts:
            normaliser = self._tables["int2.normalisers"][layer_idx, expert_id, projection]
            return dequantize_int2(parts["int2"], normaliser, self._dtype)
        if "quad2" in parts:
            levels = self._tables["quad2.levels"][layer_idx, projection]
            normaliser = self._tables["quad2.normalisers"][layer_idx, expert_id, projection]
            return dequantize_quad2(parts["quad2"], levels, normaliser, self._dtype)
        table = split_table(layer_tables(self._tables, "split", layer_idx), projection)
        if "residual" in parts:
            return dequantize_split(parts["base"], parts["residual"], table, self._dtype)
        return dequantize_base(parts["base"], table, self._dtype)
