"""The shapes of V4-Flash: each launch group of a decode step, and the whole attention of a layer of each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kernels.decode_attention as op
from kernels.cases import ONE_ROUNDING, TWO_ROUNDINGS, Case
from kernels.decode_attention import reference
from kernels.decode_attention.layer import Layer, Pool, Workspace, allocate_workspace

HIDDEN, HEADS, WIDTH, WINDOW, TAIL = 4096, 64, 512, 128, 64
INDEX_HEADS, INDEX_WIDTH, INDEX_TOPK = 64, 128, 512
FLOAT32_SUMS = 1e-5  # outputs that no bfloat16 rounding touches


@dataclass(frozen=True, slots=True)
class Inputs:
    """One token in one layer. `out` takes the result, `result` is what the case compares."""

    layer: Layer
    workspace: Workspace
    position: Tensor
    a: Tensor
    weight: Tensor
    queries: Tensor
    kv: Tensor
    index_queries: Tensor
    out: Tensor

    def tensors(self) -> list[Tensor]:
        """Everything that a case reads, for a copy of one input's values into another."""
        layer, workspace = self.layer, self.workspace
        pools = [pool for pool in (layer.pool, layer.index_pool) if pool is not None]
        memory = [t for pool in pools for t in (pool.ape, pool.norm, pool.values, pool.gates, pool.entries)]
        scratch = [workspace.queries, workspace.index_queries, workspace.rows, workspace.indices]
        given = [self.position, self.a, self.weight, self.queries, self.kv, self.index_queries]
        return [layer.kv_norm, layer.sink, layer.window_ring, *memory, *scratch, *given]


def make_layer(
    ratio: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    *,
    width: int = WIDTH,
    index_heads: int = INDEX_HEADS,
    index_topk: int = INDEX_TOPK,
) -> Layer:
    """A layer of random weights whose memory looks like that of a long sequence."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(kind)

    def pool(size: int) -> Pool:
        overlap = 2 if ratio == 4 else 1
        shape = (overlap * ratio, overlap * size)
        ape = random(ratio, shape[1], kind=torch.float32)
        values, gates = random(*shape, kind=torch.float32), random(*shape, kind=torch.float32)
        return Pool(ratio, ape, random(size), values, gates, random(context // ratio + 1, size))

    return Layer(
        kv_norm=random(width),
        sink=random(HEADS, kind=torch.float32),
        frequencies=1.0 / 160_000.0 ** (torch.arange(TAIL // 2, device=device) / (TAIL // 2)),
        window_ring=random(WINDOW, width),
        norm_eps=1e-6,
        pool=pool(width) if ratio else None,
        index_pool=pool(INDEX_WIDTH) if ratio == 4 else None,
        index_heads=index_heads if ratio == 4 else 0,
        index_topk=index_topk if ratio == 4 else 0,
    )


def make(ratio: int, context: int, position: int, seed: int, device: torch.device) -> Inputs:
    """Random inputs of a token at `position`; what the indexer multiplies are small integers, so that its choice is exact."""
    generator = torch.Generator(device).manual_seed(seed + 1000)
    dtype = torch.bfloat16
    layer = make_layer(ratio, context, device, dtype, seed)
    workspace = allocate_workspace([layer])

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    workspace.queries.copy_(random(HEADS, WIDTH))
    workspace.rows.copy_(random(layer.num_rows))
    if layer.selects:
        assert layer.index_pool is not None
        visible = reference.visible_entries(torch.tensor(position), layer.index_pool)
        order = torch.randperm(visible, generator=generator, device=device)[:INDEX_TOPK]
        workspace.indices[: order.shape[0]] = order.sort().values
        heads = workspace.rows[layer.num_rows - INDEX_HEADS :]
        for tensor in (workspace.index_queries, layer.index_pool.entries, heads):
            tensor.copy_(torch.randint(-2, 3, tensor.shape, generator=generator, device=device))
    return Inputs(
        layer=layer,
        workspace=workspace,
        position=torch.tensor(position, device=device),
        a=random(HIDDEN),
        weight=random(layer.num_rows, HIDDEN),
        queries=random(HEADS, WIDTH),
        kv=random(WIDTH),
        index_queries=random(INDEX_HEADS, INDEX_WIDTH),
        out=torch.full((HEADS, WIDTH), torch.nan, dtype=dtype, device=device),
    )


def cases() -> list[Case]:
    """Decode of one token near the end of contexts of 4,096 and 65,536 tokens, in layers of ratio 0, 4 and 128."""
    shapes = [("window", 0, 4096, 4093), ("ratio 128", 128, 65_536, 65_530)]
    ratio4 = [("ratio 4, context 4096", 4, 4096, 4093), ("ratio 4, context 65536", 4, 65_536, 65_530)]
    result = [_rows("rows, ratio 128", 128), _rows("rows, ratio 4", 4)]
    completing = [("ratio 128, window completed", 128, 65_536, 65_535), ("ratio 4, window completed", 4, 4096, 4095)]
    for name, ratio, context, position in [*shapes, ratio4[1], *completing]:
        result.append(_prepare(f"prepare, {name}", ratio, context, position))
    for name, ratio, context, position in [*ratio4, ("ratio 4, context 1048576", 4, 1 << 20, (1 << 20) - 6)]:
        result.append(_select(f"select, {name}", ratio, context, position))
    for name, ratio, context, position in [
        *shapes,
        ("ratio 128, context 1048576", 128, 1 << 20, (1 << 20) - 6),
        *ratio4,
    ]:
        result.append(_attend(f"attend, {name}", ratio, context, position))
    # 512 entries visible: all launches of a layer that selects, and no near tie whose side would be chance
    for name, ratio, context, position in [*shapes, ("ratio 4, 512 entries", 4, 4096, 2046)]:
        result.append(_layer(f"layer, {name}", ratio, context, position))
    return result


def _rows(name: str, ratio: int) -> Case:
    def run(inputs: Inputs) -> Tensor:
        return op.compressor_rows(inputs.a, inputs.weight, inputs.workspace.rows)

    def library(inputs: Inputs) -> Tensor:
        return torch.mv(inputs.weight, inputs.a)

    rows = make_layer(ratio, 512, torch.device("cpu"), torch.bfloat16, 0).num_rows
    return Case(
        "decode_attention", name, _maker(ratio, 4096, 4093), run,
        lambda inputs: reference.compressor_rows(inputs.a, inputs.weight), rows * HIDDEN * 2, FLOAT32_SUMS,
        ("bf16 mv", library),
    )  # fmt: skip


def _prepare(name: str, ratio: int, context: int, position: int) -> Case:
    """Its result is the queries; the ring, the entries and the rest are the test's to compare, for a copy would be timed."""

    def run(inputs: Inputs) -> Tensor:
        given = (inputs.queries, inputs.kv, inputs.position, inputs.layer, inputs.workspace)
        op.prepare(*given, inputs.index_queries if ratio == 4 else None)
        return inputs.workspace.queries

    def expected(inputs: Inputs) -> Tensor:
        layer, workspace = in_float32(inputs)
        index_queries = inputs.index_queries if layer.selects else None
        reference.prepare_all(inputs.queries, inputs.kv, index_queries, inputs.position, layer, workspace)
        return workspace.queries

    layer = make_layer(ratio, 512, torch.device("cpu"), torch.bfloat16, 0)
    read = HEADS * WIDTH * 2 + (INDEX_HEADS * INDEX_WIDTH * 2 if ratio == 4 else 0) + layer.num_rows * 8
    if ratio and (position + 1) % ratio == 0:
        read += layer.num_rows * (2 if ratio == 4 else 1) * ratio * 4
    return Case("decode_attention", name, _maker(ratio, context, position), run, expected, read, ONE_ROUNDING)


def _select(name: str, ratio: int, context: int, position: int) -> Case:
    def run(inputs: Inputs) -> Tensor:
        return op.select(inputs.position, inputs.layer, inputs.workspace)

    def expected(inputs: Inputs) -> Tensor:
        workspace = replace(inputs.workspace, indices=inputs.workspace.indices.clone())
        reference.select_all(inputs.position, inputs.layer, workspace)
        return workspace.indices.float()

    read = (position + 1) // ratio * INDEX_WIDTH * 2
    return Case("decode_attention", name, _maker(ratio, context, position), run, expected, read, 0.0)


def _attend(name: str, ratio: int, context: int, position: int) -> Case:
    def run(inputs: Inputs) -> Tensor:
        return op.attend(inputs.position, inputs.layer, inputs.workspace, inputs.out)

    def expected(inputs: Inputs) -> Tensor:
        return reference.attend_all(inputs.workspace.queries, inputs.position, inputs.layer, inputs.workspace.indices)

    read = _key_bytes(ratio, position)
    return Case("decode_attention", name, _maker(ratio, context, position), run, expected, read, TWO_ROUNDINGS)


def _layer(name: str, ratio: int, context: int, position: int) -> Case:
    def run(inputs: Inputs) -> Tensor:
        layer, workspace = inputs.layer, inputs.workspace
        if ratio:
            op.compressor_rows(inputs.a, inputs.weight, workspace.rows)
        index_queries = inputs.index_queries if ratio == 4 else None
        op.prepare(inputs.queries, inputs.kv, inputs.position, layer, workspace, index_queries)
        if layer.selects:
            op.select(inputs.position, layer, workspace)
        return op.attend(inputs.position, layer, workspace, inputs.out)

    def expected(inputs: Inputs) -> Tensor:
        layer, workspace = in_float32(inputs)
        workspace.rows[: layer.num_rows] = reference.compressor_rows(inputs.a, inputs.weight)
        index_queries = inputs.index_queries if layer.selects else None
        reference.prepare_all(inputs.queries, inputs.kv, index_queries, inputs.position, layer, workspace)
        if layer.selects:
            reference.select_all(inputs.position, layer, workspace)
        return reference.attend_all(workspace.queries, inputs.position, layer, workspace.indices)

    rows = make_layer(ratio, 512, torch.device("cpu"), torch.bfloat16, 0).num_rows
    read = rows * HIDDEN * 2 + _key_bytes(ratio, position)
    return Case("decode_attention", name, _maker(ratio, context, position), run, expected, read, TWO_ROUNDINGS)


def _key_bytes(ratio: int, position: int) -> int:
    compressed = 0 if ratio == 0 else (position + 1) // ratio
    return (WINDOW + (min(compressed, INDEX_TOPK) if ratio == 4 else compressed)) * WIDTH * 2


def _maker(ratio: int, context: int, position: int) -> Callable[[int, torch.device], Inputs]:
    return lambda seed, device: make(ratio, context, position, seed, device)


def in_float32(inputs: Inputs) -> tuple[Layer, Workspace]:
    """The memory and the scratch copied to float32, so that the definition rounds nothing and disturbs nothing."""

    def pool(source: Pool | None) -> Pool | None:
        if source is None:
            return None
        values, gates, entries = source.values.clone(), source.gates.clone(), source.entries.float()
        return replace(source, values=values, gates=gates, entries=entries)

    layer, workspace = inputs.layer, inputs.workspace
    ring, pools = layer.window_ring.float(), (pool(layer.pool), pool(layer.index_pool))
    return replace(layer, window_ring=ring, pool=pools[0], index_pool=pools[1]), replace(
        workspace,
        queries=workspace.queries.float(),
        index_queries=workspace.index_queries.float(),
        rows=workspace.rows.clone(),
        indices=workspace.indices.clone(),
    )
