"""The rows that V4-Flash norms in a step and in a prefill, and its head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.norm as op
from kernels.cases import ONE_ROUNDING, Case
from kernels.norm import reference

EPS = 1e-6
FLOAT32_SUMS = 1e-5  # an output that no bfloat16 rounding touches
ROWS = (  # name, rows, width, with a weight
    ("hidden", 1, 4096, True),
    ("query latent", 1, 1024, True),
    ("queries by head", 64, 512, False),
    ("hidden", 8, 4096, True),
    ("hidden", 512, 4096, True),
    ("queries by head", 512 * 64, 512, False),
)
VOCAB, HIDDEN = 129_280, 4096


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is multiplied, by what, and where the result goes."""

    x: Tensor
    weight: Tensor | None
    out: Tensor

    def tensors(self) -> list[Tensor]:
        """Everything that a case reads, for a copy of one input's values into another."""
        return [self.x] if self.weight is None else [self.x, self.weight]


def make_rows(rows: int, width: int, weighted: bool, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    """Gaussian rows, and weights near 1."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, device=device).to(dtype)
    weight = 1 + 0.1 * torch.randn(width, generator=generator, device=device)
    return Inputs(x, weight.to(dtype) if weighted else None, torch.empty_like(x))


def make_head(vocab: int, hidden: int, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    """A Gaussian head and hidden state."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(vocab, hidden, generator=generator, device=device, dtype=dtype) / hidden**0.5
    x = torch.randn(hidden, generator=generator, device=device).to(dtype)
    return Inputs(x, weight, torch.empty(vocab, device=device))


def cases() -> list[Case]:
    """Decode first, the head last."""
    return [*(_norm_case(*row) for row in ROWS), _head_case()]


def _norm_case(name: str, rows: int, width: int, weighted: bool) -> Case:
    return Case(
        op="norm",
        name=f"{name} {rows}x{width}",
        make=lambda seed, device: make_rows(rows, width, weighted, torch.bfloat16, seed, device),
        run=lambda inputs: op.rms_norm(inputs.x, inputs.weight, EPS, inputs.out),
        reference=lambda inputs: reference.rms_norm_reference(inputs.x, inputs.weight, EPS),
        read_bytes=rows * width * 2 + (width * 2 if weighted else 0),
        tolerance=ONE_ROUNDING,
        library=("torch rms_norm", lambda inputs: F.rms_norm(inputs.x, (width,), inputs.weight, EPS)),
    )


def _head_case() -> Case:
    return Case(
        op="norm",
        name=f"head {VOCAB}x{HIDDEN} bf16",
        make=lambda seed, device: make_head(VOCAB, HIDDEN, torch.bfloat16, seed, device),
        run=lambda inputs: op.head(inputs.x, inputs.weight, inputs.out),
        reference=lambda inputs: reference.head_reference(inputs.x, inputs.weight),
        read_bytes=VOCAB * HIDDEN * 2,
        tolerance=FLOAT32_SUMS,
        library=("torch linear, bf16 logits", lambda inputs: F.linear(inputs.x[None], inputs.weight)),
    )
