"""What the decode kernels work on: one layer's weights and memory, and the scratch that all layers share. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import FLOAT32, FLOATS, expect

SPLIT_BLOCK = 32  # keys of one step of the attention
MAX_SPLITS = 40  # more keys than 40 blocks: longer splits, so that the partial sums stay near 5 MB
SELECT_CHUNK = 16384  # keys that one program of the selection holds in registers
RULE_B_GROUP, RULE_C_GROUP = 64, 32  # values under one scale
OP = "decode_attention.Layer"


@dataclass(frozen=True, slots=True)
class Pool:
    """One compressor: its weights, and its memory, which `prepare` modifies.

    ape: [ratio, C] float32. norm: [e]. values, gates: [span, C] float32, token t in row t mod span. entries: [N + 1, e], entry
    i in row i, the last row never read. C = 2e and span = 2 ratio where windows overlap (ratio 4), else C = e and span = ratio.
    rounding: Rule B in the attention's, rule C in the indexer's.

    Before the first token gates are -inf and values finite: the first windows reach back before it, with weight 0.
    """

    ratio: int
    ape: Tensor
    norm: Tensor
    values: Tensor
    gates: Tensor
    entries: Tensor
    rounding: bool = False

    @property
    def capacity(self) -> int:
        """Entries that fit in the context."""
        return self.entries.shape[0] - 1

    @property
    def num_rows(self) -> int:
        """Values and gates of one token."""
        return 2 * self.values.shape[1]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's attention without its projections; the tensors are the caller's, on one device, and checked here once.

    kv_norm: [d]. sink: [H] float32. frequencies: [r] float32, the RoPE tail is 2r channels. window_ring: [W, d], token t in row
    t mod W. pool: None in window-only layers. index_pool: None outside ratio 4. round_kv: Rule B. round_index: Rule C on queries.

    pool and index_pool: Of one ratio and one capacity.

    Raises:
        ValueError: A shape or dtype is not as above, d or the indexer's width is not a power of two of at least 16, 2r is none
            or wider than they are, or the indexer lacks a pool, heads or index_topk.
    """

    kv_norm: Tensor
    sink: Tensor
    frequencies: Tensor
    window_ring: Tensor
    norm_eps: float
    pool: Pool | None = None
    index_pool: Pool | None = None
    index_heads: int = 0
    index_topk: int = 0
    round_kv: bool = False
    round_index: bool = False

    def __post_init__(self) -> None:
        device = self.window_ring.device
        expect(OP, "window_ring", self.window_ring, ("W", "d"), FLOATS, device)
        expect(OP, "kv_norm", self.kv_norm, (self.width,), FLOATS, device)
        expect(OP, "sink", self.sink, ("H",), FLOAT32, device)
        expect(OP, "frequencies", self.frequencies, ("r",), FLOAT32, device)
        if self.pool is not None:
            _check_pool("pool", self.pool, self.width, self.window_ring)
        if self.index_pool is not None:
            _check_indexer(self, self.index_pool)
        _check_widths(self)

    @property
    def width(self) -> int:
        """d."""
        return self.window_ring.shape[1]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.sink.shape[0]

    @property
    def tail(self) -> int:
        """Channels that RoPE turns."""
        return 2 * self.frequencies.shape[0]

    @property
    def ratio(self) -> int:
        """Tokens of one compressed entry; 0 in window-only layers."""
        return 0 if self.pool is None else self.pool.ratio

    @property
    def index_width(self) -> int:
        """Channels of one of the indexer's heads; 0 without an indexer."""
        return 0 if self.index_pool is None else self.index_pool.norm.shape[0]

    @property
    def num_rows(self) -> int:
        """Products that `compressor_rows` gives: values, gates, the indexer's values, gates and head weights."""
        pools = [pool for pool in (self.pool, self.index_pool) if pool is not None]
        return sum(pool.num_rows for pool in pools) + (self.index_heads if self.index_pool is not None else 0)

    @property
    def selects(self) -> bool:
        """Whether more entries fit in the context than the attention may see."""
        return self.index_pool is not None and self.index_pool.capacity > self.index_topk

    @property
    def slots(self) -> int:
        """Most compressed entries that one token attends to."""
        if self.pool is None:
            return 0
        return self.index_topk if self.selects else self.pool.capacity

    @property
    def split(self) -> Split:
        """How the keys are cut; it follows from the shape alone, so the order of every sum does too."""
        blocks = 1
        while (
            -(-self.window_ring.shape[0] // (SPLIT_BLOCK * blocks)) + -(-self.slots // (SPLIT_BLOCK * blocks))
            > MAX_SPLITS
        ):
            blocks *= 2
        keys = SPLIT_BLOCK * blocks
        return Split(blocks, -(-self.window_ring.shape[0] // keys), -(-self.slots // keys))


@dataclass(frozen=True, slots=True)
class Split:
    """Splits of `blocks` * SPLIT_BLOCK keys: those of the window first, then those of the compressed entries."""

    blocks: int
    window: int
    compressed: int

    @property
    def keys(self) -> int:
        """Of one split."""
        return self.blocks * SPLIT_BLOCK

    @property
    def count(self) -> int:
        """Of all splits."""
        return self.window + self.compressed


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch of one token in one layer, large enough for every layer it was made for; the kernels write all of it.

    queries: [H, d]. index_queries: [HI, di]. rows: [R] float32. keys: [N] int32. indices: [index_topk] int32. chunk_keys,
    chunk_indices: [chunks, index_topk] int32, empty where one chunk is enough. sums: [splits, H, d] float32. maxima, weights:
    [splits, H] float32.
    """

    queries: Tensor
    index_queries: Tensor
    rows: Tensor
    keys: Tensor
    indices: Tensor
    chunk_keys: Tensor
    chunk_indices: Tensor
    sums: Tensor
    maxima: Tensor
    weights: Tensor


def allocate_workspace(layers: list[Layer]) -> Workspace:
    """Scratch for any of `layers`, uninitialised, on their device; layers that run one after another share it."""
    ring = layers[0].window_ring
    heads, width = layers[0].num_heads, layers[0].width
    selecting = [layer for layer in layers if layer.selects]
    topk = max((layer.index_topk for layer in selecting), default=0)
    entries = max((layer.index_pool.capacity for layer in selecting if layer.index_pool is not None), default=0)
    chunks = num_chunks(entries) if num_chunks(entries) > 1 else 0
    splits = max(layer.split.count for layer in layers)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ring.device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=ring.device)

    return Workspace(
        queries=torch.empty(heads, width, dtype=ring.dtype, device=ring.device),
        index_queries=torch.empty(
            max(layer.index_heads for layer in layers),
            max(layer.index_width for layer in layers),
            dtype=ring.dtype,
            device=ring.device,
        ),
        rows=floats(max(layer.num_rows for layer in layers)),
        keys=integers(entries),
        indices=integers(topk),
        chunk_keys=integers(chunks, topk),
        chunk_indices=integers(chunks, topk),
        sums=floats(splits, heads, width),
        maxima=floats(splits, heads),
        weights=floats(splits, heads),
    )


def num_chunks(entries: int) -> int:
    """Programs of the selection's first level."""
    return -(-entries // SELECT_CHUNK)


def _check_widths(layer: Layer) -> None:
    """Those that the kernels are written for."""
    widths = {"head width": layer.width}
    if layer.index_pool is not None:
        widths["indexer's width"] = layer.index_width
    for name, width in widths.items():
        if width < 16 or width & (width - 1):
            raise ValueError(f"{OP}: {name} is {width}, expected a power of two of at least 16; use the reference")
    narrowest = min(widths.values())
    if not 0 < layer.tail <= narrowest or layer.tail & (layer.tail - 1):
        raise ValueError(
            f"{OP}: RoPE tail is {layer.tail}, expected a power of two from 2 to {narrowest}, the narrowest head; "
            "pass half as many frequencies"
        )
    rule_b = layer.round_kv or (layer.pool is not None and layer.pool.rounding)
    if rule_b and ((layer.width - layer.tail) % RULE_B_GROUP or layer.width < RULE_B_GROUP):
        channels = f"{layer.width - layer.tail} channels before the RoPE tail"
        raise ValueError(f"{OP}: {channels}, expected groups of {RULE_B_GROUP} for rule B; use the reference")
    rule_c = layer.index_pool is not None and (layer.round_index or layer.index_pool.rounding)
    if rule_c and layer.index_width < RULE_C_GROUP:
        found = f"indexer's width is {layer.index_width}"
        raise ValueError(f"{OP}: {found}, expected at least a group of {RULE_C_GROUP} for rule C; use the reference")


def _check_indexer(layer: Layer, index_pool: Pool) -> None:
    """The indexer chooses among the entries of a compressor that keeps step with its own."""
    if layer.pool is None:
        raise ValueError(f"{OP}: index_pool without a pool, expected both; pass the compressor that it chooses from")
    expect(OP, "index_pool.norm", index_pool.norm, ("di",), FLOATS, layer.window_ring.device)
    _check_pool("index_pool", index_pool, layer.index_width, layer.window_ring)
    ratios, capacities = (layer.pool.ratio, index_pool.ratio), (layer.pool.capacity, index_pool.capacity)
    if len(set(ratios)) > 1 or len(set(capacities)) > 1:
        raise ValueError(
            f"{OP}: pools of ratios {ratios} and capacities {capacities}, expected equal ones; allocate both for one context"
        )
    if layer.index_heads < 1 or layer.index_topk < 1:
        found = f"{layer.index_heads} index_heads and index_topk {layer.index_topk}"
        raise ValueError(f"{OP}: {found} with an index_pool, expected at least 1 of both; pass the config's")
    if layer.selects and num_chunks(index_pool.capacity) * layer.index_topk > SELECT_CHUNK:
        found = f"index_topk {layer.index_topk} of {index_pool.capacity} entries"
        raise ValueError(
            f"{OP}: {found}, expected at most {SELECT_CHUNK // num_chunks(index_pool.capacity)}; shorten the context"
        )


def _check_pool(name: str, pool: Pool, width: int, ring: Tensor) -> None:
    if pool.ratio not in (4, 128):
        raise ValueError(f"{OP}: {name} has ratio {pool.ratio}, expected 4 or 128; use the reference")
    overlap = 2 if pool.ratio == 4 else 1
    memory, device = (overlap * pool.ratio, overlap * width), ring.device
    expect(OP, f"{name}.ape", pool.ape, (pool.ratio, memory[1]), FLOAT32, device)
    expect(OP, f"{name}.norm", pool.norm, (width,), FLOATS, device)
    expect(OP, f"{name}.values", pool.values, memory, FLOAT32, device)
    expect(OP, f"{name}.gates", pool.gates, memory, FLOAT32, device)
    expect(OP, f"{name}.entries", pool.entries, (1, width), (ring.dtype,), device, more_rows=True)
