"""Attention of one token (decode) in few launches, everything masked by the device-side position, so one graph serves every step.

A layer's calls, in this order, with their launches: `compressor_rows` (1, layers with a compressor), `prepare` (1), `select` (2,
or 3 beyond 16,384 entries; layers where `Layer.selects`), `attend` (2). The projections around them are other operators'.
Nothing allocates, synchronises or, after each function's first call, compiles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.checks import FLOAT32, FLOATS, expect
from kernels.decode_attention import reference
from kernels.decode_attention.compressor_kernel import prepare_kernel, rows_kernel
from kernels.decode_attention.indexer_kernel import scores_kernel, select_kernel
from kernels.decode_attention.kernel import attend_kernel, combine_kernel
from kernels.decode_attention.layer import (
    SELECT_CHUNK,
    SPLIT_BLOCK,
    Layer,
    Pool,
    Workspace,
    allocate_workspace,
    num_chunks,
)
from kernels.tuning import Config, choose

__all__ = ["Layer", "Pool", "Workspace", "allocate_workspace", "attend", "compressor_rows", "prepare", "select"]

ROWS_CANDIDATES: list[Config] = [{"ROWS": rows, "num_warps": 4} for rows in (4, 8, 2)]


def compressor_rows(a: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """out[r] = weight[r] · a in float32: every product that a layer's compressors and indexer take from its input.

    Args:
        a: [D] bfloat16 or float32, normalised activations of the token.
        weight: [R, D] bfloat16 or float32: wkv, wgate, then the indexer's wkv, wgate and weights_proj, one below the other.
        out: [at least R] float32, usually `Workspace.rows`.

    Returns:
        `out`.

    Raises:
        ValueError: A shape, dtype, device or layout is not as above.
    """
    expect("compressor_rows", "a", a, ("D",), FLOATS, a.device)
    expect("compressor_rows", "weight", weight, ("R", a.shape[0]), FLOATS, a.device)
    expect("compressor_rows", "out", out, (weight.shape[0],), FLOAT32, a.device, more_rows=True)
    if a.device.type == "cpu":
        out[: weight.shape[0]] = reference.compressor_rows(a, weight)
        return out

    def launch(config: Config) -> None:
        launch_rows(a, weight, out, config)

    key = f"rows {weight.shape[0]}x{weight.shape[1]} {str(weight.dtype).removeprefix('torch.')}"
    launch(choose("decode_attention", key, ROWS_CANDIDATES, launch, a.device))
    return out


def prepare(
    queries: Tensor,
    kv: Tensor,
    position: Tensor,
    layer: Layer,
    workspace: Workspace,
    index_queries: Tensor | None = None,
) -> None:
    """Everything between the projections and the attention, in one launch.

    Writes `workspace.queries` (norm, RoPE), the token's row of the ring (the row it replaces has just left the window), both
    compressors' memories with the entry that the token completes, and `workspace.index_queries` (RoPE).

    Args:
        queries: [H, d] bfloat16 or float32, wq_b's output.
        kv: [d] likewise, wkv's output.
        position: int64 scalar on the device, from 0 up and below ratio * capacity of the pools. Nobody can check that without
            waiting for the device: the entries of later tokens are not kept, and the attention does not see them.
        layer: Its memory is modified.
        workspace: `rows` holds this token's products where the layer has a compressor.
        index_queries: [index_heads, di], the indexer's wq_b's output; needed where the layer selects.

    Raises:
        ValueError: A shape, dtype, device or layout is not as above.
    """
    device = layer.window_ring.device
    expect("prepare", "queries", queries, (layer.num_heads, layer.width), FLOATS, device)
    expect("prepare", "kv", kv, (layer.width,), FLOATS, device)
    if layer.selects and index_queries is None:
        raise ValueError("prepare: index_queries: None, expected the indexer's in a layer that selects; pass them")
    if index_queries is not None:
        expect("prepare", "index_queries", index_queries, (layer.index_heads, layer.index_width), FLOATS, device)
    _check_step("prepare", position, layer, workspace)
    run = reference.prepare_all if device.type == "cpu" else launch_prepare
    run(queries, kv, index_queries if layer.selects else None, position, layer, workspace)


def select(position: Tensor, layer: Layer, workspace: Workspace) -> Tensor:
    """The entries that the token attends to: the best index_topk of the visible ones, exactly, the lowest among equal ones.

    Args:
        position: int64 scalar on the device.
        layer: With an index_pool; where it does not select, nothing is done: the attention sees every visible entry.
        workspace: As `compressor_rows` and `prepare` left it.

    Returns:
        `workspace.indices`, int32, ascending. The count is min(index_topk, (position + 1) // ratio); what follows is undefined.

    Raises:
        ValueError: A shape, dtype, device or layout is not as above.
    """
    _check_step("select", position, layer, workspace)
    if layer.selects:
        (reference.select_all if position.device.type == "cpu" else launch_select)(position, layer, workspace)
    return workspace.indices


def attend(position: Tensor, layer: Layer, workspace: Workspace, out: Tensor) -> Tensor:
    """out [H, d]: each head's attention over the window and the compressed entries, with the inverse RoPE, in two launches.

    Args:
        position: int64 scalar on the device.
        layer: As `prepare` left it.
        workspace: As `prepare` and `select` left it.
        out: [H, d] bfloat16 or float32, overwritten.

    Returns:
        `out`.

    Raises:
        ValueError: A shape, dtype, device or layout is not as above.
    """
    expect("attend", "out", out, (layer.num_heads, layer.width), FLOATS, layer.window_ring.device)
    _check_step("attend", position, layer, workspace)
    if position.device.type == "cpu":
        return out.copy_(reference.attend_all(workspace.queries, position, layer, workspace.indices))
    launch_attend(position, layer, workspace, out)
    return out


def launch_rows(a: Tensor, weight: Tensor, out: Tensor, config: Config) -> None:
    """`compressor_rows` without checks, in one configuration."""
    rows, hidden = weight.shape
    grid = (-(-rows // config["ROWS"]),)
    rows_kernel[grid](a, weight, out, rows, hidden, BLOCK_D=1024, **config)


def launch_prepare(
    queries: Tensor, kv: Tensor, index_queries: Tensor | None, position: Tensor, layer: Layer, workspace: Workspace
) -> None:
    """`prepare` without checks."""
    pool, index_pool = layer.pool, layer.index_pool
    index_programs = 0 if index_queries is None else layer.index_heads
    prepare_kernel[(layer.num_heads + 3 + index_programs,)](
        queries, workspace.queries, kv, layer.kv_norm, layer.window_ring, workspace.rows,
        *_pool_tensors(pool), index_queries, workspace.index_queries, *_pool_tensors(index_pool),
        layer.frequencies, position, 0 if pool is None else pool.capacity, layer.norm_eps,
        H=layer.num_heads, D=layer.width, TAIL=layer.tail, W=layer.window_ring.shape[0], RATIO=layer.ratio,
        DI=layer.index_width, HAS_INDEX_QUERIES=index_queries is not None,
        RULE_KV="B" if layer.round_kv else "", RULE_ENTRIES="B" if pool is not None and pool.rounding else "",
        RULE_INDEX_ENTRIES="C" if index_pool is not None and index_pool.rounding else "",
        RULE_INDEX_QUERIES="C" if layer.round_index else "", num_warps=4,
    )  # fmt: skip


def launch_select(position: Tensor, layer: Layer, workspace: Workspace, portable: bool = False) -> None:
    """`select` without checks, in a layer that selects. `portable`: float32 products whatever the dtype."""
    assert layer.index_pool is not None
    entries, capacity = layer.index_pool.entries, layer.index_pool.capacity
    weights = workspace.rows[layer.num_rows - layer.index_heads :]
    portable = portable or entries.dtype == torch.float32
    block = 16 if portable else 64  # float32 products of 64 entries would not fit the registers
    scores_kernel[(-(-capacity // block),)](
        workspace.index_queries, weights, entries, workspace.keys, position, capacity,
        HI=layer.index_heads, DI=layer.index_width, RATIO=layer.ratio,
        BLOCK_H=_power_of_two(layer.index_heads, 16), BLOCK_N=block, PORTABLE=portable, num_warps=4,
    )  # fmt: skip
    launch_choice(workspace.keys, position, capacity, layer.ratio, layer.index_topk, workspace)


def launch_choice(
    keys: Tensor,
    position: Tensor,
    capacity: int,
    ratio: int,
    topk: int,
    workspace: Workspace,
    chunk: int = SELECT_CHUNK,
) -> None:
    """The choice among sortable keys; in two levels where they are more than `chunk`, a power of two of at least topk."""
    shared = {"RATIO": ratio, "TOPK": topk, "FIRST_CHUNK": chunk, "GROUPS": _power_of_two(topk, 1)}
    chunks = -(-capacity // chunk)
    if chunks == 1:
        size = _power_of_two(capacity, 256)
        select_kernel[(1,)](
            keys, None, None, workspace.indices, position, capacity,
            CHUNK=size, SECOND=False, num_warps=_select_warps(size), **shared,
        )  # fmt: skip
        return
    select_kernel[(chunks,)](
        keys, None, workspace.chunk_keys, workspace.chunk_indices, position, capacity,
        CHUNK=chunk, SECOND=False, num_warps=_select_warps(chunk), **shared,
    )  # fmt: skip
    size = _power_of_two(chunks * topk, 256)
    select_kernel[(1,)](
        workspace.chunk_keys, workspace.chunk_indices, None, workspace.indices, position, capacity,
        CHUNK=size, SECOND=True, num_warps=_select_warps(size), **shared,
    )  # fmt: skip


def launch_attend(position: Tensor, layer: Layer, workspace: Workspace, out: Tensor, portable: bool = False) -> None:
    """`attend` without checks. `portable`: float32 products whatever the dtype."""
    heads, width, split = layer.num_heads, layer.width, layer.split
    portable = portable or layer.window_ring.dtype == torch.float32
    shape = {
        "H": heads, "D": width, "W": layer.window_ring.shape[0], "RATIO": layer.ratio, "SLOTS": layer.slots,
        "WINDOW_SPLITS": split.window,
    }  # fmt: skip
    step = (
        SPLIT_BLOCK // 2 if portable else SPLIT_BLOCK
    )  # float32 tiles of 32 keys do not fit the shared memory of sm_86
    attend_kernel[(split.count, -(-heads // 16))](
        workspace.queries, layer.window_ring, None if layer.pool is None else layer.pool.entries,
        workspace.indices if layer.selects else None, position, workspace.sums, workspace.maxima, workspace.weights,
        width**-0.5 * math.log2(math.e),
        BLOCK_H=16, BLOCK_K=step, BLOCKS=split.keys // step, PORTABLE=portable, num_warps=4, num_stages=2, **shape,
    )  # fmt: skip
    block = min(128, width)
    combine_kernel[(heads, width // block)](
        workspace.sums, workspace.maxima, workspace.weights, layer.sink, layer.frequencies, position, out,
        TAIL=layer.tail, SPLIT_KEYS=split.keys, BLOCK_S=_power_of_two(split.count, 2), BLOCK_D=block, num_warps=4, **shape,
    )  # fmt: skip


def _pool_tensors(pool: Pool | None) -> tuple[Tensor | None, ...]:
    return (None,) * 5 if pool is None else (pool.ape, pool.norm, pool.values, pool.gates, pool.entries)


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def _select_warps(size: int) -> int:
    """Sixteen keys a thread, four warps at least and the card's 32 at most."""
    return min(32, max(4, size // 512))


def _check_step(op: str, position: Tensor, layer: Layer, workspace: Workspace) -> None:
    """The position is one, and the shared buffers have this layer's widths and at least its lengths."""
    ring, heads, width, splits = layer.window_ring, layer.num_heads, layer.width, layer.split.count
    expect(op, "position", position, (), (torch.int64,), ring.device)
    expect(op, "workspace.queries", workspace.queries, (heads, width), (ring.dtype,), ring.device)
    for name, shape in (("sums", (splits, heads, width)), ("maxima", (splits, heads)), ("weights", (splits, heads))):
        expect(op, f"workspace.{name}", getattr(workspace, name), shape, FLOAT32, ring.device, more_rows=True)
    expect(op, "workspace.rows", workspace.rows, (layer.num_rows,), FLOAT32, ring.device, more_rows=True)
    if layer.selects:
        assert layer.index_pool is not None
        _check_choice(op, layer, layer.index_pool.capacity, workspace)


def _check_choice(op: str, layer: Layer, capacity: int, workspace: Workspace) -> None:
    device, int32 = layer.window_ring.device, (torch.int32,)
    shape = (layer.index_heads, layer.index_width)
    expect(op, "workspace.index_queries", workspace.index_queries, shape, (layer.window_ring.dtype,), device)
    expect(op, "workspace.keys", workspace.keys, (capacity,), int32, device, more_rows=True)
    expect(op, "workspace.indices", workspace.indices, (layer.index_topk,), int32, device)
    if num_chunks(capacity) > 1:
        shape = (num_chunks(capacity), layer.index_topk)
        expect(op, "workspace.chunk_keys", workspace.chunk_keys, shape, int32, device, more_rows=True)
        expect(op, "workspace.chunk_indices", workspace.chunk_indices, shape, int32, device, more_rows=True)
