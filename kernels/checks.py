"""One check of one tensor, for every operator. Owns the wording of its errors, and no rule of an operator."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32)
FLOAT32 = (torch.float32,)
INTEGERS = (torch.int32, torch.int64)


def expect(
    op: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    *,
    more_rows: bool = False,
) -> None:
    """Nothing if `tensor` is contiguous and as said.

    Args:
        op: Operator, the first word of the error.
        name: Of the argument.
        tensor: Of any number of dimensions, none too.
        shape: Sizes; a letter stands for any size.
        dtypes: Those allowed.
        device: Where it must be.
        more_rows: The first dimension may be longer.

    Raises:
        ValueError: It is not.
    """
    if not _fits(tensor, shape, more_rows):
        sizes = [str(size) for size in shape]
        if more_rows:
            sizes[0] = f">= {sizes[0]}"
        raise ValueError(
            f"{op}: {name}: got shape {list(tensor.shape)}, expected [{', '.join(sizes)}]; pass a tensor of that shape"
        )
    if tensor.dtype not in dtypes:
        raise ValueError(f"{op}: {name}: got {tensor.dtype}, expected {' or '.join(map(str, dtypes))}; convert it")
    if tensor.device != device:
        raise ValueError(f"{op}: {name}: got a tensor on {tensor.device}, expected {device}; move it there")
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name}: got strides {tensor.stride()}, expected contiguous; pass .contiguous()")


def _fits(tensor: Tensor, shape: tuple[int | str, ...], more_rows: bool) -> bool:
    if tensor.ndim != len(shape):
        return False
    for dimension, (found, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        longer = more_rows and dimension == 0 and isinstance(size, int) and found > size
        if isinstance(size, int) and found != size and not longer:
            return False
    return True
