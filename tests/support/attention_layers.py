"""Small layers for the tests of one token's attention: random weights and memory, scratch full of NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode_attention import Layer, Pool, Workspace, allocate_workspace

CPU = torch.device("cpu")
F32_TOLERANCE = 2e-5  # both sides in float32; the exponentials differ by a few units in the last place


def random(*shape: int, seed: int = 0, scale: float = 1.0, device: torch.device = CPU) -> Tensor:
    """Gaussian, the same values on every device."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


def at(position: int, device: torch.device = CPU) -> Tensor:
    return torch.tensor(position, dtype=torch.int64, device=device)


def small_pool(width: int, capacity: int = 4, ratio: int = 4, seed: int = 0, device: torch.device = CPU) -> Pool:
    """A compressor that has seen many tokens."""
    overlap = 2 if ratio == 4 else 1
    memory = (overlap * ratio, overlap * width)
    ape, values = random(ratio, memory[1], seed=seed, device=device), random(*memory, seed=seed + 1, device=device)
    gates, norm = random(*memory, seed=seed + 2, device=device), random(width, seed=seed + 3, device=device)
    return Pool(ratio, ape, norm, values, gates, random(capacity + 1, width, seed=seed + 4, device=device))


def small_layer(
    width: int = 128,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    *,
    tail: int = 64,
    **rest: object,
) -> Layer:
    """Three heads and a window of 50; `rest` as in Layer."""
    return Layer(
        kv_norm=random(width, seed=1, device=device),
        sink=random(3, seed=2, device=device),
        frequencies=1.0 / 160_000.0 ** (torch.arange(tail // 2, device=device) / (tail // 2)),
        window_ring=random(50, width, seed=3, device=device).to(dtype),
        norm_eps=1e-6,
        **rest,  # type: ignore[arg-type]
    )


def indexed_layer(device: torch.device = CPU, capacity: int = 4, **rest: object) -> Layer:
    """With a compressor of 128 channels and an indexer of three heads of 64 that chooses two entries."""
    pools = [small_pool(128, capacity, seed=10, device=device), small_pool(64, capacity, seed=20, device=device)]
    given = {"pool": pools[0], "index_pool": pools[1], "index_heads": 3, "index_topk": 2} | rest
    return small_layer(device=device, **given)


def poisoned(layer: Layer) -> Workspace:
    """Its scratch, all NaN or the largest integer."""
    workspace = allocate_workspace([layer])
    for name in Workspace.__slots__:
        buffer = getattr(workspace, name)
        buffer.fill_(torch.nan if buffer.is_floating_point() else 0x7FFFFFFF)
    return workspace
