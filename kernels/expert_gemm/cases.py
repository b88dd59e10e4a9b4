"""The grouped expert GEMM at V4-Flash's shapes, for each kind of expert; 64 experts stand for a layer's 256."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cases import TWO_ROUNDINGS, Case
from kernels.expert_gemm import Experts, Routed, expert_gemm
from kernels.expert_gemm.reference import Matrices, expert_gemm_reference
from kernels.expert_gemv.slabs import ADDRESS_UNIT, FP4, SPLIT, TWO_BIT, Rows, int2_rows, quad2_rows, split_rows
from kernels.formats import (
    GROUP_SIZE,
    PLANES,
    Matrix,
    dequantize_fp4,
    dequantize_int2,
    dequantize_quad2,
    split_slab,
)
from kernels.split import SplitTable, dequantize_base, dequantize_split, split_fp4

HIDDEN, WIDTH, EXPERTS, TOPK, LIMIT = 4096, 2048, 64, 6, 10.0
KINDS = {"fp4": FP4, "int2": TWO_BIT, "quad2": TWO_BIT, "base": TWO_BIT, "split": SPLIT}
SCALE_BYTES = 2  # neighbouring exponents that random groups take


@dataclass(frozen=True)
class Layer:
    """Random experts of given precisions, one of whose codes a layer has, and all that is needed to read them.

    slabs: Per expert the slab, and the residual's or None; the addresses in `experts` are theirs.
    levels: float16 [3, 256, 4] of quad2. tables: Of split, for w1, w3 and w2.
    """

    precisions: tuple[str, ...]
    experts: Experts
    rows: Rows
    slabs: tuple[tuple[Tensor, Tensor | None], ...]
    levels: Tensor
    tables: tuple[SplitTable, SplitTable, SplitTable]
    hidden: int
    width: int

    def matrices(self, index: int) -> Matrices:
        """w1, w3 and w2 of an expert in float32, by the definitions of the formats."""
        precision, (slab, residual) = self.precisions[index], self.slabs[index]
        plane = PLANES["base" if precision == "split" else precision]
        parts = split_slab(slab, plane, self.hidden, self.width)
        others = parts if residual is None else split_slab(residual, PLANES["residual"], self.hidden, self.width)
        factors = self.experts.normalisers[index]
        first, second, third = (self._matrix(precision, parts[i], others[i], factors[i], i) for i in range(3))
        return first, second, third

    def _matrix(self, precision: str, matrix: Matrix, residual: Matrix, factor: Tensor, index: int) -> Tensor:
        if precision == "fp4":
            return dequantize_fp4(matrix)
        if precision == "int2":
            return dequantize_int2(matrix, factor)
        if precision == "quad2":
            return dequantize_quad2(matrix, self.levels[index], factor)
        table = self.tables[index]
        return dequantize_base(matrix, table) if precision == "base" else dequantize_split(matrix, residual, table)


def make_layer(
    precisions: Sequence[str], hidden: int, width: int, generator: torch.Generator, exponent: int | None = None
) -> Layer:
    """Experts whose products have values near 1 for inputs near 1, or with scales of 2^(exponent-127) as given."""
    device = generator.device
    exponent = 126 - (hidden.bit_length() - 1) // 2 if exponent is None else exponent
    levels = torch.randn(3, 256, 4, generator=generator, device=device) * 2.0 ** (exponent - 126)
    rows = torch.arange(256, device=device)
    exponents, partitions = exponent + rows % SCALE_BYTES, rows // SCALE_BYTES % 4
    table = SplitTable(
        exponents.byte(), partitions.byte(), torch.randn(256, 4, generator=generator, device=device).half()
    )
    tables = (table, table, table)
    slabs = tuple(_slabs(precision, hidden, width, exponent, table, generator) for precision in precisions)
    addresses = [[0 if s is None else s.data_ptr() // ADDRESS_UNIT for s in pair] for pair in slabs]
    factors = torch.rand(len(precisions), 3, generator=generator, device=device) + 0.5
    for index, precision in enumerate(precisions):
        factors[index] *= {"int2": 2.0 ** (exponent - 127), "quad2": 1.0}.get(precision, 0.0)
        factors[index] += precision not in ("int2", "quad2")
    experts = Experts(
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.tensor([KINDS[precision] for precision in precisions], dtype=torch.int32, device=device),
        factors,
    )
    if "int2" in precisions:
        table_rows = int2_rows(device)
    else:
        table_rows = quad2_rows(levels.half()) if "quad2" in precisions else split_rows(tables)
    return Layer(tuple(precisions), experts, table_rows, slabs, levels.half(), tables, hidden, width)


def _slabs(
    precision: str, hidden: int, width: int, exponent: int, table: SplitTable, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """One expert's slab of random weights, and its residual slab."""
    first: list[Tensor] = []
    second: list[Tensor] = []
    for rows, columns in ((width, hidden), (width, hidden), (hidden, width)):
        groups = _random(0, 256, rows, columns // GROUP_SIZE, generator)
        codes = _random(0, 256, rows, columns // (2 if precision in ("fp4", "split") else 4), generator)
        if precision == "fp4":
            groups = exponent + groups % SCALE_BYTES
        if precision == "int2":
            groups = groups % 32 + 40  # E4M3 from 2^-2 to below 4
        if precision == "split":
            base, residual = split_fp4(Matrix(codes, table.exponents[groups.int()]), groups, table)
            codes = base.codes
            second.append(residual.codes.flatten())
        first += [codes.flatten(), groups.flatten()]
    return torch.cat(first), torch.cat(second) if second else None


def _random(low: int, high: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, (rows, columns), generator=generator, device=generator.device, dtype=torch.uint8)


@dataclass(frozen=True)
class Inputs:
    """One call's tensors."""

    x: Tensor
    routed: Routed
    layer: Layer
    hidden: Tensor
    out: Tensor


def make_inputs(layer: Layer, tokens: int, topk: int, generator: torch.Generator) -> Inputs:
    """Random tokens with distinct picks, of the whole call where the experts suffice; `out` is zeros, as for picks that no call
    computes.
    """
    device, experts = generator.device, len(layer.precisions)
    x = torch.randn(tokens, layer.hidden, generator=generator, device=device).bfloat16()
    if tokens * topk <= experts:
        picks = torch.randperm(experts, generator=generator, device=device)[: tokens * topk].view(tokens, topk)
    else:
        picks = torch.rand(tokens, experts, generator=generator, device=device).argsort(1)[:, :topk].contiguous()
    weights = torch.rand(tokens, topk, generator=generator, device=device) + 0.1
    hidden = torch.empty(tokens * topk, layer.width, dtype=torch.bfloat16, device=device)
    return Inputs(x, Routed(picks, weights), layer, hidden, torch.zeros(tokens, topk, layer.hidden, device=device))


def run(inputs: Inputs) -> Tensor:
    """The operator."""
    kinds = {KINDS[precision] for precision in inputs.layer.precisions}
    layer = inputs.layer
    return expert_gemm(
        inputs.x, inputs.routed, layer.experts, layer.rows, inputs.hidden, inputs.out, limit=LIMIT, kinds=kinds
    )


def reference(inputs: Inputs) -> Tensor:
    """Its definition, one expert dequantised at a time."""
    (picks, weights), layer = inputs.routed, inputs.layer
    total = torch.zeros_like(inputs.out, dtype=torch.float32)
    for index in range(len(layer.precisions)):
        own = torch.where(picks == index, 0, -1)
        total += expert_gemm_reference(inputs.x, own, weights, [layer.matrices(index)], LIMIT)
    return total


def cases() -> list[Case]:
    """Few tokens first; a mixed layer last."""
    single = [_case(name, (name,), tokens) for tokens in (8, 1024) for name in KINDS]
    return [*single, _case("fp4 and quad2", ("fp4", "quad2"), 1024), _case("split and base", ("split", "base"), 1024)]


def _case(name: str, precisions: tuple[str, ...], tokens: int) -> Case:
    """Expert e has precision e modulo their number."""

    def make(seed: int, device: torch.device) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        layer = make_layer(precisions * (EXPERTS // len(precisions)), HIDDEN, WIDTH, generator)
        return make_inputs(layer, tokens, TOPK, generator)

    planes = {"split": ("base", "residual")}
    bytes_of = [sum(PLANES[p].slab_bytes(HIDDEN, WIDTH) for p in planes.get(name, (name,))) for name in precisions]
    called = min(EXPERTS, tokens * TOPK)
    return Case(
        op="expert_gemm",
        name=f"{name} {EXPERTS} experts T{tokens}",
        make=make,
        run=run,
        reference=reference,
        read_bytes=called * sum(bytes_of) // len(bytes_of),
        tolerance=TWO_ROUNDINGS,
    )
