"""What `prep requant` computes on batches of experts: FP4 matrices out of slabs, a layer's tables, slabs of a 2-bit code.

Joins the solvers to the planes and tables of `kernels.formats.CODES`; knows no file. Results are the same bytes on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import CODES, PLANES, Matrix, split_slab
from kernels.split import merge_split
from prep.solvers.clip import solve_clip
from prep.solvers.quad import solve_quad, train_quad
from prep.solvers.split import solve_split, train_split
from runtime.config import ModelConfig
from runtime.tables import Tables, empty_tables, split_table

SAMPLE_EXPERTS = 8  # of a layer, to train its tables on; more did not lower the error of others (prep.study)
Matrices = tuple[Matrix, Matrix, Matrix]  # w1, w3, w2, each batched over experts


class Shape(NamedTuple):
    """D and F of an expert."""

    hidden: int
    width: int


class Solved(NamedTuple):
    """One projection of some experts in a code: a matrix for each plane, and normalisers [B] float32 where the code has them."""

    planes: dict[str, Matrix]
    normalisers: Tensor | None = None


def fp4_matrices(slabs: Mapping[str, Tensor], shape: Shape, split_rows: Tables | None = None) -> Matrices:
    """FP4 of experts [B], from slabs of fp4 or else of base and residual.

    Args:
        slabs: Plane -> [B, at least slab_bytes] uint8.
        shape: D and F.
        split_rows: SPLIT's tables of the layer (`runtime.tables.layer_tables`) on the slabs' device; base and residual need them.

    Raises:
        ValueError: Base, residual or a table is damaged.
    """
    if "fp4" in slabs:
        return split_slab(slabs["fp4"], PLANES["fp4"], *shape)
    assert split_rows is not None, f"{list(slabs)} without tables"
    parts = (split_slab(slabs[plane], PLANES[plane], *shape) for plane in ("base", "residual"))
    w1, w3, w2 = (
        merge_split(base, residual, split_table(split_rows, projection))
        for projection, (base, residual) in enumerate(zip(*parts, strict=True))
    )
    return w1, w3, w2


def sample_of(num_experts: int) -> list[int]:
    """The experts of a layer that its tables are trained on: evenly spread, the same in every run."""
    count = min(SAMPLE_EXPERTS, num_experts)
    return [place * num_experts // count for place in range(count)]


def train(code: str, sample: Matrix, present: Tensor | None) -> Tables:
    """The code's table of one layer and projection by name, without normalisers, on the CPU.

    Args:
        code: A name in CODES.
        sample: FP4 [B, N, K] of the experts in `sample_of`.
        present: [256] bool, the exponents of all the layer's experts; SPLIT needs them.

    Raises:
        ValueError: A scale byte is 255.
    """
    if code == "quad2":
        return {"quad2.levels": train_quad(sample).cpu()}
    if code == "split":
        assert present is not None
        table = train_split(sample, present)
        return {f"split.{name}": part.cpu() for name, part in table._asdict().items()}
    return {}


def placeholder_tables(config: ModelConfig, code: str) -> Tables:
    """Tables that can be solved with and say nothing: for measuring how long that takes."""
    tables = empty_tables(config, code)
    if code == "split":
        tables["split.exponents"][:] = torch.arange(256).clamp(max=254)
    return tables


def solve(code: str, matrix: Matrix, projection: int, rows: Tables) -> Solved:
    """One projection (0: w1, 1: w3, 2: w2) of experts [B] in `code`.

    rows: The layer's tables on the matrix's device (`runtime.tables.layer_tables`). ValueError: a scale byte is 255.
    """
    if code == "int2":
        coded, normalisers = solve_clip(matrix)
        return Solved({"int2": coded}, normalisers)
    if code == "quad2":
        coded, normalisers = solve_quad(matrix, rows["quad2.levels"][projection])
        return Solved({"quad2": coded}, normalisers)
    base, residual = solve_split(matrix, split_table(rows, projection))
    return Solved({"base": base, "residual": residual})


def encode(code: str, matrices: Matrices, rows: Tables, slabs: Mapping[str, Tensor]) -> Tensor | None:
    """Fills `slabs` with experts [B] in `code`; their normalisers [B, 3] where the code has them.

    Args:
        code: A name in CODES.
        matrices: FP4, each [B, N, K].
        rows: The layer's tables on the same device.
        slabs: Plane -> [B, at least slab_bytes] uint8 on the same device; what lies behind the slab is left alone.

    Raises:
        ValueError: A scale byte is 255.
    """
    width, hidden = matrices[0].codes.shape[-2], 2 * matrices[0].codes.shape[-1]
    targets = {plane: split_slab(slabs[plane], PLANES[plane], hidden, width) for plane in CODES[code].planes}
    normalisers = []
    for projection, matrix in enumerate(matrices):
        solved = solve(code, matrix, projection, rows)
        for plane, part in solved.planes.items():
            _copy(part, targets[plane][projection])
        normalisers.append(solved.normalisers)
    present = [one for one in normalisers if one is not None]
    return torch.stack(present, -1) if present else None


def _copy(source: Matrix, target: Matrix) -> None:
    target.codes.copy_(source.codes)
    if source.scales is not None and target.scales is not None:
        target.scales.copy_(source.scales)
