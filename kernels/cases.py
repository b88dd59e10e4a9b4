"""What a kernel is measured and checked on: a Case is one operator at one shape. Owns no operator and no number.

`kernels.bench` times the cases of every operator; the GPU tests check the same ones, so no number can belong to a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ONE_ROUNDING = 2e-3  # relative RMS error of one bfloat16 rounding: 1.6e-3 to 1.8e-3 seen on Gaussian values
TWO_ROUNDINGS = 4e-3  # with a bfloat16 value in between


@dataclass(frozen=True)
class Case:
    """One operator at one shape.

    op: Directory name under kernels/, as in the measurement files. name: Shape and format, unique within the operator.
    make: (seed, device) -> inputs with their outputs preallocated; other seeds give other memory and other values.
    run: Inputs -> result, by the fast kernels; neither allocates nor synchronises after its first call.
    reference: Inputs -> float32 result, by the definition.
    read_bytes: The fewest bytes that must be read: weights and state once.
    tolerance: Largest relative RMS error.
    library: (name, function) of the best kernel elsewhere for the same work, or None.
    """

    op: str
    name: str
    make: Callable[[int, torch.device], Any]
    run: Callable[[Any], Tensor]
    reference: Callable[[Any], Tensor]
    read_bytes: int
    tolerance: float
    library: tuple[str, Callable[[Any], Tensor]] | None = None


def relative_rms(result: Tensor, reference: Tensor) -> float:
    """‖result - reference‖ / ‖reference‖ in float64; NaN where either has one."""
    reference = reference.double()
    return float((result.double() - reference).norm() / reference.norm())
