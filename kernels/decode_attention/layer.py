"""What the decode kernels work on: one layer's weights and memory, and the scratch that all layers share. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SPLIT_BLOCK = 32  # keys of one step of the attention
MAX_SPLITS = 40  # more keys than 40 blocks: longer splits, so that the partial sums stay near 5 MB
SELECT_CHUNK = 16384  # keys that one program of the selection holds in registers
ROUNDING_GROUP = 64


@dataclass(frozen=True, slots=True)
class Pool:
    """One compressor: its weights, and its memory, which `prepare` modifies.

    ape: [ratio, C] float32. norm: [e]. values, gates: [span, C] float32, token t in row t mod span. entries: [N + 1, e], entry
    i in row i, the last row never read. C = 2e and span = 2 ratio where windows overlap (ratio 4), else C = e and span = ratio.
    rounding: Rule B in the attention's, rule C in the indexer's.
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

    Raises:
        ValueError: A shape or dtype is not as above, or d, 2r, or the indexer's width is not a power of two.
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
        dtype, device = self.window_ring.dtype, self.window_ring.device
        check("window_ring", self.window_ring, (self.window_ring.shape[0], self.width), dtype, device)
        check("kv_norm", self.kv_norm, (self.width,), self.kv_norm.dtype, device)
        check("sink", self.sink, (self.num_heads,), torch.float32, device)
        check("frequencies", self.frequencies, (self.tail // 2,), torch.float32, device)
        for name, width in (
            ("head width", self.width),
            ("RoPE tail", self.tail),
            ("indexer's width", self.index_width),
        ):
            if width & (width - 1) or (width and width < 16 and name != "RoPE tail"):
                raise ValueError(
                    f"{name} is {width}, expected a power of two of at least 16; use the reference operators"
                )
        if self.round_kv and (self.width - self.tail) % ROUNDING_GROUP:
            raise ValueError(
                f"{self.width - self.tail} channels before the RoPE tail, expected groups of {ROUNDING_GROUP}"
            )
        for pool, width in ((self.pool, self.width), (self.index_pool, self.index_width)):
            if pool is not None:
                _check_pool(pool, width, dtype, device)

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


def check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError unless `tensor` is contiguous and has this shape, dtype and device."""
    found = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.is_contiguous())
    if found != (shape, dtype, device, True):
        raise ValueError(
            f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device}{'' if found[3] else ', not contiguous'}, "
            f"expected contiguous {list(shape)} {dtype} on {device}; make it so before the call"
        )


def _check_pool(pool: Pool, width: int, dtype: torch.dtype, device: torch.device) -> None:
    overlap = 2 if pool.ratio == 4 else 1
    memory = (overlap * pool.ratio, overlap * width)
    if pool.ratio not in (4, 128):
        raise ValueError(f"compressor of ratio {pool.ratio}, expected 4 or 128; use the reference operators")
    check("compressor's ape", pool.ape, (pool.ratio, memory[1]), torch.float32, device)
    check("compressor's norm", pool.norm, (width,), pool.norm.dtype, device)
    check("compressor's values", pool.values, memory, torch.float32, device)
    check("compressor's gates", pool.gates, memory, torch.float32, device)
    check("compressor's entries", pool.entries, (pool.capacity + 1, width), dtype, device)
