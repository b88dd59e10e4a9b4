"""One token's attention: against the model's own modules step by step, against the definition, and at every rule's edge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_layers import CPU, F32_TOLERANCE, at, indexed_layer, poisoned, random, small_layer, small_pool
from on_a_card import check_case, on_devices
from torch import Tensor

import kernels.decode_attention as op
from kernels.cases import ONE_ROUNDING, TWO_ROUNDINGS, Case, relative_rms
from kernels.decode_attention import Layer, Pool, reference
from kernels.decode_attention.cases import cases, make_layer
from runtime.models.deepseek_v4.attention import Attention
from runtime.models.deepseek_v4.compressor import Compressor
from runtime.models.deepseek_v4.indexer import Indexer
from runtime.models.deepseek_v4.layers import Linear, rms_norm
from runtime.models.deepseek_v4.state import CompressorState, LayerState

ROWS = {"ROWS": 128, "num_warps": 4}  # few programs: the interpreter pays by the program


def model(ratio: int, topk: int, context: int, rounding: bool) -> tuple[Attention, LayerState]:
    """A small attention of the runtime with 3 heads of 64 channels, and its state."""
    hidden, width, heads, index_heads, index_width = 48, 64, 3, 5, 32
    frequencies = 1.0 / 100.0 ** (torch.arange(8) / 8)

    def compressor(size: int, seed: int) -> tuple[Compressor, CompressorState]:
        overlap = 2 if ratio == 4 else 1
        channels, span = overlap * size, overlap * ratio
        weights = Compressor(
            wkv=random(channels, hidden, seed=seed, scale=0.2),
            wgate=random(channels, hidden, seed=seed + 1, scale=0.2),
            ape=random(ratio, channels, seed=seed + 2),
            norm=random(size, seed=seed + 3),
            frequencies=frequencies,
            norm_eps=1e-6,
            round_indexer=rounding and size == index_width,
        )
        memory = torch.empty(2, span, channels)
        state = CompressorState(ratio, memory[0], memory[1], torch.zeros(context // ratio + 1, size))
        state.reset()
        return weights, state

    main, main_state = compressor(width, 10) if ratio else (None, None)
    second, second_state = compressor(index_width, 20) if ratio == 4 else (None, None)
    indexer = None
    if second is not None:
        wq_b = Linear(random(index_heads * index_width, 32, seed=30), False)
        indexer = Indexer(wq_b, random(index_heads, hidden, seed=31), second, index_heads, topk, rounding)
    attention = Attention(
        wq_a=Linear(random(32, hidden, seed=1), False),
        q_norm=random(32, seed=2),
        wq_b=Linear(random(heads * width, 32, seed=3), False),
        wkv=Linear(random(width, hidden, seed=4), False),
        kv_norm=random(width, seed=5),
        sink=random(heads, seed=6),
        wo_a=torch.eye(heads * width),
        wo_b=Linear(torch.eye(heads * width), False),
        compressor=main,
        indexer=indexer,
        frequencies=frequencies,
        num_heads=heads,
        num_groups=1,
        norm_eps=1e-6,
        round_kv=False,
    )
    return attention, LayerState(torch.zeros(9, width), main_state, second_state)


def layer_of(attention: Attention, state: LayerState) -> tuple[Layer, Tensor]:
    """The kernels' view of a runtime layer on a copy of its memory, and the matrix of the compressors' rows."""

    def pool(weights: Compressor, memory: CompressorState, rounding: bool) -> Pool:
        copies = (memory.values.clone(), memory.gates.clone(), memory.entries.clone())
        return Pool(memory.ratio, weights.ape, weights.norm, *copies, rounding=rounding)

    compressor, indexer = attention.compressor, attention.indexer
    parts = [torch.empty(0, 48)]
    if compressor is not None:
        parts += [compressor.wkv, compressor.wgate]
    if indexer is not None:
        parts += [indexer.compressor.wkv, indexer.compressor.wgate, indexer.weights_proj]
    layer = Layer(
        kv_norm=attention.kv_norm,
        sink=attention.sink,
        frequencies=attention.frequencies,
        window_ring=state.window_ring.clone(),
        norm_eps=attention.norm_eps,
        pool=pool(compressor, state.compressor, False) if compressor and state.compressor else None,
        index_pool=pool(indexer.compressor, state.indexer, indexer.round_queries)
        if indexer and state.indexer
        else None,
        index_heads=indexer.num_heads if indexer else 0,
        index_topk=indexer.topk if indexer else 0,
        round_index=indexer.round_queries if indexer else False,
    )
    return layer, torch.cat(parts)


def step(attention: Attention, layer: Layer, weight: Tensor, a: Tensor, position: int, kernels: bool) -> Tensor:
    """[H, d] of one token, by the launched kernels in the interpreter or by the public functions (here the reference)."""
    workspace, where = poisoned(layer), at(position)
    out = torch.full((layer.num_heads, layer.width), torch.nan)
    q_rank = rms_norm(attention.wq_a(a), attention.q_norm, attention.norm_eps)
    queries, kv = attention.wq_b(q_rank).view(layer.num_heads, -1), attention.wkv(a)
    index_queries = attention.indexer.wq_b(q_rank).view(layer.index_heads, -1) if attention.indexer else None
    if not kernels:
        op.compressor_rows(a, weight, workspace.rows)
        op.prepare(queries, kv, where, layer, workspace, index_queries)
        op.select(where, layer, workspace)
        return op.attend(where, layer, workspace, out)
    if weight.shape[0]:
        op.launch_rows(a, weight, workspace.rows, ROWS)
    op.launch_prepare(queries, kv, index_queries if layer.selects else None, where, layer, workspace)
    if layer.selects:
        op.launch_select(where, layer, workspace)
    op.launch_attend(where, layer, workspace, out)
    return out


STEPS = [
    # ratio, topk, context, tokens before, steps, rounding
    (0, 0, 64, 0, 2, False),
    (0, 0, 64, 8, 2, False),
    (4, 3, 64, 0, 4, False),  # the first window has none before it
    (4, 3, 64, 14, 3, False),  # three entries visible, then a choice of three of four
    (4, 3, 64, 41, 3, True),
    (4, 16, 64, 30, 2, False),  # every entry fits: no choice
    (128, 0, 512, 0, 1, False),
    (128, 0, 512, 126, 3, False),
    (128, 0, 512, 383, 1, False),
]


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize(("ratio", "topk", "context", "before", "steps", "rounding"), STEPS)
def test_steps_equal_the_model(
    ratio: int, topk: int, context: int, before: int, steps: int, rounding: bool, kernels: bool
) -> None:
    """Output, ring, open windows and entries after each of a few tokens, on the state that the model's prefill left."""
    attention, state = model(ratio, topk, context, rounding)
    tokens = random(before + steps, 48, seed=7)
    if before:
        attention(tokens[:before], state, at(0))
    layer, weight = layer_of(attention, state)
    for position in range(before, before + steps):
        a = tokens[position]
        result = step(attention, layer, weight, a, position, kernels)
        assert relative_rms(result.flatten(), attention(a[None], state, at(position))[0]) < F32_TOLERANCE
        assert torch.allclose(layer.window_ring, state.window_ring, rtol=1e-5, atol=1e-5)
        for pool, memory in ((layer.pool, state.compressor), (layer.index_pool, state.indexer)):
            if pool is not None and memory is not None:
                assert torch.allclose(pool.values, memory.values, rtol=1e-5, atol=1e-5)
                assert torch.allclose(pool.gates, memory.gates, rtol=1e-5, atol=1e-5)
                assert torch.allclose(pool.entries[:-1], memory.entries[:-1], rtol=1e-4, atol=1e-5)


@on_devices
@pytest.mark.parametrize("position", [0, 40, 49, 50, 5000])
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_attention_in_bfloat16(device: torch.device, position: int, scale: float) -> None:
    """The portable products; rows that nobody may see hold NaN."""
    layer = small_layer(dtype=torch.bfloat16, device=device)
    layer.window_ring[position + 1 :] = torch.nan
    workspace = poisoned(layer)
    workspace.queries.copy_(random(3, layer.width, scale=scale, device=device))
    out = torch.full(
        (3, layer.width), torch.nan, device=device
    )  # the interpreter's stores to bfloat16 cut off instead of rounding
    op.launch_attend(at(position, device), layer, workspace, out, portable=True)
    expected = reference.attend_all(workspace.queries, at(position, device), layer, workspace.indices)
    assert relative_rms(out, expected) < F32_TOLERANCE
    again = torch.full_like(out, torch.nan)
    op.launch_attend(at(position, device), layer, workspace, again, portable=True)
    assert torch.equal(out, again)


@on_devices
@pytest.mark.parametrize("damaged", ["queries", "ring", "sink"])
def test_damage_of_one_percent_is_seen(device: torch.device, damaged: str) -> None:
    layer = small_layer(device=device)
    workspace = poisoned(layer)
    workspace.queries.copy_(random(3, layer.width, device=device))
    layer.sink.fill_(4.0)
    expected = reference.attend_all(workspace.queries, at(30, device), layer, workspace.indices)
    {"queries": workspace.queries, "ring": layer.window_ring, "sink": layer.sink}[damaged].mul_(1.01)
    out = torch.empty(3, layer.width, device=device)
    op.launch_attend(at(30, device), layer, workspace, out)
    assert relative_rms(out, expected) > TWO_ROUNDINGS


@on_devices
def test_a_zero_key_and_a_large_sink_are_normal(device: torch.device) -> None:
    layer = small_layer(device=device)
    layer.window_ring.zero_()
    workspace = poisoned(layer)
    workspace.queries.copy_(random(3, layer.width, device=device))
    out = torch.empty(3, layer.width, device=device)
    op.launch_attend(at(60, device), layer, workspace, out)
    assert torch.equal(out, torch.zeros_like(out))
    layer.sink.fill_(1e4)
    layer.window_ring.fill_(1.0)
    op.launch_attend(at(60, device), layer, workspace, out)
    assert torch.equal(out, torch.zeros_like(out))


@on_devices
def test_long_contexts_take_longer_splits(device: torch.device) -> None:
    """40 splits at most; 1,300 entries of width 16 in splits of 64 keys."""
    pool = small_pool(16, capacity=1300, ratio=128, seed=5, device=device)
    layer = small_layer(16, device=device, tail=8, pool=pool)
    workspace = poisoned(layer)
    workspace.queries.copy_(random(3, 16, device=device))
    assert layer.split.blocks == 2
    for position in (at(127, device), at(128 * 1300, device)):
        out = torch.full((3, 16), torch.nan, device=device)
        op.launch_attend(position, layer, workspace, out)
        assert relative_rms(out, reference.attend_all(workspace.queries, position, layer, workspace.indices)) < 1e-5


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@on_devices
@pytest.mark.parametrize("place", [0, 40])
def test_nan_stays_nan(place: int, device: torch.device) -> None:
    """In a key for all heads, in a query for its head: a card's own maximum would drop it. The card's products are bfloat16."""
    layer = small_layer(dtype=torch.float32 if device == CPU else torch.bfloat16, device=device)
    workspace, out = poisoned(layer), torch.zeros(3, layer.width, device=device)
    workspace.queries.copy_(random(3, layer.width, device=device))
    workspace.queries[1, place] = torch.nan
    op.launch_attend(at(60, device), layer, workspace, out)
    assert out[1].isnan().all() and out[::2].isfinite().all()
    workspace.queries[1, place] = 1
    layer.window_ring[place, 3] = torch.nan
    op.launch_attend(at(60, device), layer, workspace, out)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("queries", lambda x: x[:, :-1], r"prepare: queries: got shape \[3, 127\], expected \[3, 128\]"),
        ("queries", lambda x: x.to(torch.int8), "queries: got torch.int8, expected torch.bfloat16 or torch.float32"),
        ("kv", lambda x: x.double(), "kv: got torch.float64"),
        ("queries", lambda x: x.T.contiguous().T, r"queries: got strides \(1, 3\), expected contiguous"),
        ("position", lambda x: x.int(), "position: got torch.int32, expected torch.int64"),
    ],
    ids=["shape", "int8", "float64", "layout", "position"],
)
def test_wrong_inputs_are_named(name: str, change, message: str) -> None:  # type: ignore[no-untyped-def]
    layer = small_layer()
    inputs = {"queries": random(3, layer.width), "kv": random(layer.width), "position": at(0)}
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        op.prepare(**inputs, layer=layer, workspace=poisoned(layer))


def test_wrong_outputs_and_scratch_are_named() -> None:
    layer = indexed_layer()
    workspace, out = poisoned(layer), torch.empty(3, layer.width)
    with pytest.raises(ValueError, match=r"attend: out: got torch.int32, expected"):
        op.attend(at(0), layer, workspace, out.int())
    for name in ("maxima", "weights", "sums", "keys", "indices"):
        damaged = replace(workspace, **{name: getattr(workspace, name)[:-1].contiguous()})
        with pytest.raises(ValueError, match=rf"attend: workspace.{name}: got shape"):
            op.attend(at(0), layer, damaged, out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": None}, "index_pool without a pool"),
        ({"index_topk": 0}, "3 index_heads and index_topk 0 with an index_pool"),
        ({"index_heads": 0}, "0 index_heads and index_topk 2 with an index_pool"),
        ({"index_pool": small_pool(64, capacity=5)}, r"pools of ratios \(4, 4\) and capacities \(4, 5\)"),
        ({"index_pool": small_pool(64, ratio=128)}, r"pools of ratios \(4, 128\)"),
        ({"index_pool": small_pool(32)}, "RoPE tail is 64, expected a power of two from 2 to 32"),
        ({"index_pool": small_pool(96)}, "indexer's width is 96"),
        (
            {
                "pool": small_pool(128, capacity=20_000),
                "index_pool": small_pool(64, capacity=20_000),
                "index_topk": 9000,
            },
            "index_topk 9000 of 20000 entries, expected at most 8192",
        ),
        ({"pool": small_pool(64)}, r"pool.ape: got shape \[4, 128\], expected \[4, 256\]"),
        ({"sink": torch.ones(3).half()}, "sink: got torch.float16, expected torch.float32"),
        ({"window_ring": torch.ones(50, 128).half()}, "window_ring: got torch.float16"),
        ({"frequencies": torch.ones(0)}, "RoPE tail is 0"),
        ({"frequencies": torch.ones(16), "round_kv": True}, "96 channels before the RoPE tail, expected groups of 64"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_layers_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(indexed_layer(), **change)


def test_wrong_widths_are_named() -> None:
    with pytest.raises(ValueError, match="head width is 96"):
        small_layer(96)
    with pytest.raises(ValueError, match="RoPE tail is 64, expected a power of two from 2 to 32"):
        small_layer(32)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    check_case(case)


@pytest.mark.gpu
def test_portable_products_equal_the_fast_ones() -> None:
    device = torch.device("cuda")
    layer = make_layer(4, 65_536, device, torch.bfloat16, seed=0)
    workspace, position = op.allocate_workspace([layer]), at(60_000).to(device)
    for tensor in (workspace.queries, workspace.index_queries, workspace.rows):
        tensor.normal_()
    chosen, outs = [], []
    for portable in (False, True):
        op.launch_select(position, layer, workspace, portable)
        chosen.append(set(workspace.indices.tolist()))
        op.launch_attend(position, layer, workspace, out := torch.empty(64, 512, device=device), portable)
        outs.append(out)
    assert len(chosen[0] & chosen[1]) >= layer.index_topk - 2  # near ties may fall to either side
    workspace.indices.copy_(torch.tensor(sorted(chosen[0])))
    op.launch_attend(position, layer, workspace, outs[0])
    op.launch_attend(position, layer, workspace, outs[1], portable=True)
    assert relative_rms(outs[0], outs[1]) < ONE_ROUNDING
