"""The tables and normalisers of the 2-bit codes in memory, by the names of tables.safetensors. Owns no file and no row's meaning.

A code's tensors are named and shaped in `kernels.formats.CODES`; the first dimension is always the layer. Rows of a layer that
is not written yet are zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kernels.formats import CODES
from kernels.split import SplitTable
from runtime.config import ModelConfig
from runtime.safetensors_file import TORCH_DTYPES, TensorSpec

PROJECTIONS = 3  # w1, w3, w2: the second dimension of a table
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Tables = dict[str, Tensor]


def table_specs(config: ModelConfig, codes: Iterable[str]) -> dict[str, TensorSpec]:
    """Name -> spec of the tensors that `codes` have in TABLES."""
    tensors = [tensor for code in codes for tensor in CODES[code].tables]
    sizes = (config.num_hidden_layers, config.n_routed_experts)
    return {tensor.name: TensorSpec(DTYPE_NAMES[tensor.dtype], tensor.sizes(*sizes)) for tensor in tensors}


def empty_tables(config: ModelConfig, code: str) -> Tables:
    """Zeros in the place of each of the code's tensors."""
    specs = table_specs(config, [code])
    return {name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for name, spec in specs.items()}


def layer_tables(tables: Mapping[str, Tensor], code: str, layer_idx: int) -> Tables:
    """The code's tensors of one layer, without the first dimension; views."""
    return {tensor.name: tables[tensor.name][layer_idx] for tensor in CODES[code].tables}


def split_table(layer: Mapping[str, Tensor], projection: int) -> SplitTable:
    """The rows of SPLIT for w1 (0), w3 (1) or w2 (2), from `layer_tables`."""
    parts = (layer[f"split.{part}"][projection] for part in ("exponents", "partitions", "levels"))
    return SplitTable(*parts)
