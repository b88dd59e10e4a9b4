"""The yardstick: a kernel that reads so many bytes of device memory and does nothing with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.timing import graph_us, num_sets


@triton.jit
def _sweep_kernel(data, out, count, BLOCK: tl.constexpr):
    """The largest of BLOCK words of `data` to out[program]: a read of everything."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    words = tl.load(data + offsets, mask=offsets < count, other=0)
    tl.store(out + tl.program_id(0), tl.max(words, 0))


def sweep_us(read_bytes: int, device: torch.device) -> float:
    """Microseconds to read so many bytes of device memory, by the best of a few block sizes."""
    count = -(-read_bytes // 64) * 16  # whole 16-byte loads
    sets = [torch.randint(2**31 - 1, (count,), dtype=torch.int32, device=device) for _ in range(num_sets(read_bytes))]
    out = torch.empty(-(-count // 1024), dtype=torch.int32, device=device)

    def launch(data: Tensor, block: int, warps: int) -> Callable[[], object]:
        return lambda: _sweep_kernel[(-(-count // block),)](data, out, count, BLOCK=block, num_warps=warps)

    shapes = ((1024, 4), (4096, 4), (8192, 8), (16384, 8))
    return min(graph_us([launch(data, block, warps) for data in sets]) for block, warps in shapes)
