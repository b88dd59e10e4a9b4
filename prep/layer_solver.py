"""FP4 of one layer's experts to the slabs of a code, a batch at a time, on a device. Owns the copies there and back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from prep.codecs import Matrices, Shape, encode, fp4_matrices
from prep.requant_plan import RequantPlan
from prep.slab_io import Batch, Blocks
from runtime.errors import ArtifactError
from runtime.manifest import expert_file
from runtime.tables import Tables, layer_tables


class LayerSolver:
    """Solves batches of one layer on a device; normalisers go straight into the plan's tables."""

    def __init__(self, plan: RequantPlan, layer_idx: int, device: torch.device) -> None:
        self._plan, self._layer_idx, self._device = plan, layer_idx, device
        self._rows = _on(device, layer_tables(plan.tables, plan.code, layer_idx))
        split = split_tables_of(plan)
        self._split_rows = None if split is None else _on(device, layer_tables(split, "split", layer_idx))

    def solve(self, batch: Batch, blocks: Blocks, target: Blocks) -> None:
        """Fills the first `batch.number` slabs of `target`, in host memory, from `blocks`.

        Raises:
            ArtifactError: The FP4 is damaged.
        """
        here = {plane: block.to(self._device, non_blocking=True) for plane, block in blocks.items()}
        try:
            matrices = fp4_matrices(here, shape_of(self._plan), self._split_rows)
            normalisers = self._encode(matrices, batch.number, target)
        except ValueError as cause:
            raise ArtifactError(
                f"{self._directory_file()}: experts {batch.first} to {batch.first + batch.number - 1} cannot be coded ({cause}), expected a released checkpoint's; fetch that again and lay it out anew"
            ) from cause
        if normalisers is not None:
            place = slice(batch.first, batch.first + batch.number)
            self._plan.tables[f"{self._plan.code}.normalisers"][self._layer_idx, place] = normalisers.cpu()

    def _encode(self, matrices: Matrices, number: int, target: Blocks) -> Tensor | None:
        wanted = {plane: block[:number] for plane, block in target.items()}
        if self._device.type == "cpu":
            return encode(self._plan.code, matrices, self._rows, wanted)
        there = {plane: torch.zeros_like(block, device=self._device) for plane, block in wanted.items()}
        normalisers = encode(self._plan.code, matrices, self._rows, there)
        for plane, block in wanted.items():
            block.copy_(there[plane])
        return normalisers

    def _directory_file(self) -> Path:
        return self._plan.directory / expert_file(self._plan.source[0], self._layer_idx)


def shape_of(plan: RequantPlan) -> Shape:
    """D and F of the plan's experts."""
    return Shape(plan.config.hidden_size, plan.config.moe_intermediate_size)


def split_tables_of(plan: RequantPlan) -> Tables | None:
    """The tables that FP4 needs: SPLIT's where it is taken from base and residual."""
    return plan.tables if "base" in plan.source else None


def _on(device: torch.device, rows: Tables) -> Tables:
    return {name: row.to(device) for name, row in rows.items()}
