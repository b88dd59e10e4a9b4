"""The FP8-block products at V4-Flash's shapes: one token, then eight, then prefill."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cases import ONE_ROUNDING, Case
from kernels.formats import BLOCK_SIZE, Matrix, dequantize_fp8_block, quantize_fp8_block
from kernels.fp8_linear import fp8_grouped_linear, fp8_linear, fp8_swiglu
from kernels.fp8_linear.reference import fp8_grouped_linear_reference, fp8_linear_reference, fp8_swiglu_reference

LIMIT = 10.0  # swiglu_limit
SHAPES = (  # name, rows N, columns K
    ("wq_b", 32768, 1024),
    ("wo_b", 4096, 8192),
    ("wq_a", 1024, 4096),
    ("wkv", 512, 4096),
    ("shared w2", 4096, 2048),
    ("indexer wq_b", 8192, 1024),
)


@dataclass(frozen=True)
class Inputs:
    """x [T, K] or [T, G, K], one matrix or w1 and w3, their bfloat16 values for the library, and the output."""

    x: Tensor
    matrices: tuple[Matrix, ...]
    dense: tuple[Tensor, ...]
    out: Tensor


def cases() -> list[Case]:
    """Decode first."""
    decode = [_linear(name, rows, columns, tokens) for tokens in (1, 8) for name, rows, columns in SHAPES]
    others = [make(tokens) for tokens in (1, 8) for make in (_grouped, _swiglu)]
    prefill = [_linear(name, rows, columns, tokens) for tokens in (64, 4096) for name, rows, columns in SHAPES[:2]]
    return [*decode, *others, *prefill, _grouped(4096), _swiglu(4096)]


def make_matrix(rows: int, columns: int, generator: torch.Generator) -> Matrix:
    """Gaussian weights of variance 1/K, so that the products have variance 1, rounded to FP8 blocks."""
    weight = torch.randn(rows, columns, generator=generator, device=generator.device) * columns**-0.5
    return quantize_fp8_block(weight)


def _inputs(
    x: tuple[int, ...], weights: int, rows: int, out: tuple[int, ...], seed: int, device: torch.device
) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    matrices = tuple(make_matrix(rows, x[-1], generator) for _ in range(weights))
    activations = torch.randn(x, generator=generator, device=device).bfloat16()
    dense = tuple(dequantize_fp8_block(matrix, torch.bfloat16) for matrix in matrices)
    return Inputs(activations, matrices, dense, torch.empty(out, dtype=torch.bfloat16, device=device))


def _read_bytes(rows: int, columns: int) -> int:
    return rows * columns + rows * columns // BLOCK_SIZE**2


def _linear(name: str, rows: int, columns: int, tokens: int) -> Case:
    return Case(
        op="fp8_linear",
        name=f"{name} {rows}x{columns} T{tokens}",
        make=lambda seed, device: _inputs((tokens, columns), 1, rows, (tokens, rows), seed, device),
        run=lambda inputs: fp8_linear(inputs.x, inputs.matrices[0], inputs.out),
        reference=lambda inputs: fp8_linear_reference(inputs.x, inputs.matrices[0]),
        read_bytes=_read_bytes(rows, columns),
        tolerance=ONE_ROUNDING,
        library=("bf16 matmul", lambda inputs: F.linear(inputs.x, inputs.dense[0])),
    )


def _grouped(tokens: int) -> Case:
    def library(inputs: Inputs) -> Tensor:
        return torch.bmm(inputs.x.transpose(0, 1), inputs.dense[0].unflatten(0, (8, -1)).transpose(1, 2))

    return Case(
        op="fp8_linear",
        name=f"wo_a 8x1024x4096 T{tokens}",
        make=lambda seed, device: _inputs((tokens, 8, 4096), 1, 8192, (tokens, 8, 1024), seed, device),
        run=lambda inputs: fp8_grouped_linear(inputs.x, inputs.matrices[0], inputs.out),
        reference=lambda inputs: fp8_grouped_linear_reference(inputs.x, inputs.matrices[0]),
        read_bytes=_read_bytes(8192, 4096),
        tolerance=ONE_ROUNDING,
        library=("bf16 bmm", library),
    )


def _swiglu(tokens: int) -> Case:
    def library(inputs: Inputs) -> Tensor:
        gate, up = (F.linear(inputs.x, weight) for weight in inputs.dense)
        return F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)

    return Case(
        op="fp8_linear",
        name=f"shared w1 w3 SwiGLU 2048x4096 T{tokens}",
        make=lambda seed, device: _inputs((tokens, 4096), 2, 2048, (tokens, 2048), seed, device),
        run=lambda inputs: fp8_swiglu(inputs.x, inputs.matrices[0], inputs.matrices[1], inputs.out, limit=LIMIT),
        reference=lambda inputs: fp8_swiglu_reference(inputs.x, inputs.matrices[0], inputs.matrices[1], LIMIT),
        read_bytes=2 * _read_bytes(2048, 4096),
        tolerance=ONE_ROUNDING,
        library=("bf16 matmul, four kernels", library),
    )
