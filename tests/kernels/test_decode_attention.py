"""One token's attention: against the model's own modules step by step, against the definition, and at every rule's edge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from on_a_card import check_case
from torch import Tensor

import kernels.decode_attention as op
from kernels.cases import ONE_ROUNDING, TWO_ROUNDINGS, Case, relative_rms
from kernels.decode_attention import reference
from kernels.decode_attention.cases import cases, in_float32, make_layer
from kernels.decode_attention.layer import Layer, Pool, Workspace
from runtime.models.deepseek_v4.attention import Attention
from runtime.models.deepseek_v4.compressor import Compressor
from runtime.models.deepseek_v4.indexer import Indexer
from runtime.models.deepseek_v4.layers import Linear, rms_norm
from runtime.models.deepseek_v4.state import CompressorState, LayerState

F32_TOLERANCE = 2e-5  # both sides in float32; the exponentials differ by a few units in the last place
CPU = torch.device("cpu")
ROWS = {"ROWS": 128, "num_warps": 4}  # few programs: the interpreter pays by the program


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def at(position: int) -> Tensor:
    return torch.tensor(position, dtype=torch.int64)


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


def poisoned(layer: Layer) -> Workspace:
    workspace = op.allocate_workspace([layer])
    for name in Workspace.__slots__:
        buffer = getattr(workspace, name)
        buffer.fill_(torch.nan if buffer.is_floating_point() else 0x7FFFFFFF)
    return workspace


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


@pytest.mark.parametrize("position", [3, 1000, 65_535, 1_048_575])
def test_angles_are_exact_at_every_position(position: int) -> None:
    layer = small_layer()
    workspace, queries = poisoned(layer), random(layer.num_heads, layer.width)
    op.launch_prepare(queries, random(layer.width), None, at(position), layer, workspace)
    expected = reference.rope(reference.rms_norm(queries, None, 1e-6), position, layer.frequencies)
    assert (workspace.queries - expected).abs().max() < 2e-6


def small_layer(width: int = 128, dtype: torch.dtype = torch.float32, round_kv: bool = False) -> Layer:
    return Layer(
        kv_norm=random(width, seed=1),
        sink=random(3, seed=2),
        frequencies=1.0 / 160_000.0 ** (torch.arange(32) / 32),
        window_ring=random(50, width, seed=3).to(dtype),
        norm_eps=1e-6,
        round_kv=round_kv,
    )


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_rule_b_is_exact(scale: float) -> None:
    layer, expected = small_layer(round_kv=True), small_layer(round_kv=True)
    layer.kv_norm.mul_(scale)
    expected.kv_norm.mul_(scale)
    kv = random(layer.width, seed=9)
    kv[:7] *= 1e-4  # E4M3's subnormals
    op.launch_prepare(random(3, layer.width), kv, None, at(5), layer, poisoned(layer))
    reference.prepare(random(3, layer.width), kv, None, at(5), expected)
    differing = (layer.window_ring != expected.window_ring)[5, : layer.width - layer.tail]
    assert differing.sum() <= 1  # a value on a boundary may fall to either side
    assert torch.allclose(layer.window_ring, expected.window_ring, rtol=0.07, atol=1e-9)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (7, 63), (13, 1100), (5, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(rows: int, hidden: int, dtype: torch.dtype) -> None:
    a, weight = random(hidden).to(dtype), random(rows, hidden, seed=1).to(dtype)
    results = []
    for config in op.ROWS_CANDIDATES:
        out = torch.full((rows + 1,), torch.nan)
        op.launch_rows(a, weight, out, config)
        assert out[rows].isnan()
        results.append(out[:rows])
    assert relative_rms(results[0], reference.compressor_rows(a, weight)) < F32_TOLERANCE
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("position", [0, 40, 49, 50, 5000])
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_attention_in_bfloat16(position: int, scale: float) -> None:
    """The portable products; rows that nobody may see hold NaN."""
    layer = small_layer(dtype=torch.bfloat16)
    layer.window_ring[position + 1 :] = torch.nan
    workspace = poisoned(layer)
    workspace.queries.copy_(random(3, layer.width, scale=scale))
    out = torch.full((3, layer.width), torch.nan)  # the interpreter's stores to bfloat16 cut off instead of rounding
    op.launch_attend(at(position), layer, workspace, out, portable=True)
    expected = reference.attend_all(workspace.queries, at(position), layer, workspace.indices)
    assert relative_rms(out, expected) < F32_TOLERANCE
    again = torch.full_like(out, torch.nan)
    op.launch_attend(at(position), layer, workspace, again, portable=True)
    assert torch.equal(out, again)


@pytest.mark.parametrize("damaged", ["queries", "ring", "sink"])
def test_damage_of_one_percent_is_seen(damaged: str) -> None:
    layer = small_layer()
    workspace = poisoned(layer)
    workspace.queries.copy_(random(3, layer.width))
    layer.sink.fill_(4.0)
    expected = reference.attend_all(workspace.queries, at(30), layer, workspace.indices)
    {"queries": workspace.queries, "ring": layer.window_ring, "sink": layer.sink}[damaged].mul_(1.01)
    out = torch.empty(3, layer.width)
    op.launch_attend(at(30), layer, workspace, out)
    assert relative_rms(out, expected) > TWO_ROUNDINGS


def test_a_zero_key_and_a_large_sink_are_normal() -> None:
    layer = small_layer()
    layer.window_ring.zero_()
    workspace = poisoned(layer)
    workspace.queries.copy_(random(3, layer.width))
    out = torch.empty(3, layer.width)
    op.launch_attend(at(60), layer, workspace, out)
    assert torch.equal(out, torch.zeros_like(out))
    layer.sink.fill_(1e4)
    layer.window_ring.fill_(1.0)
    op.launch_attend(at(60), layer, workspace, out)
    assert torch.equal(out, torch.zeros_like(out))


def test_long_contexts_take_longer_splits() -> None:
    """40 splits at most; 1,300 entries of width 16 in splits of 64 keys."""
    pool = Pool(128, torch.zeros(128, 16), torch.ones(16), *torch.zeros(2, 128, 16), random(1301, 16, seed=5))
    base = small_layer(16)
    layer = replace(base, pool=pool, frequencies=base.frequencies[:4])
    workspace = poisoned(layer)
    workspace.queries.copy_(random(3, 16))
    assert layer.split.blocks == 2
    for position in (127, 128 * 1300):
        out = torch.full((3, 16), torch.nan)
        op.launch_attend(at(position), layer, workspace, out)
        assert relative_rms(out, reference.attend_all(workspace.queries, at(position), layer, workspace.indices)) < 1e-5


def sortable(values: Tensor) -> Tensor:
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) | -0x80000000)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "negative", "subnormal", "rising", "falling"])
@pytest.mark.parametrize("visible", [0, 8, 9, 257, 777])
def test_the_choice_is_exact(kind: str, visible: int, levels: int) -> None:
    topk, capacity = 8, 777
    values = random(capacity)
    made = {
        "ties": (values * 2).round(),
        "all equal": torch.ones(capacity),
        "negative": -values.abs(),
        "subnormal": values * 1e-41,
        "rising": torch.arange(capacity).float(),
        "falling": -torch.arange(capacity).float(),
    }.get(kind, values)
    keys = sortable(made)
    keys[visible:] = -1  # stale keys that would win
    workspace = replace(
        poisoned(small_layer()),
        indices=torch.full((topk,), -7, dtype=torch.int32),
        chunk_keys=torch.full((4, topk), -1, dtype=torch.int32),
        chunk_indices=torch.full((4, topk), -7, dtype=torch.int32),
    )
    op.launch_choice(keys, at(visible * 4 + 2), capacity, 4, topk, workspace, chunk=1024 if levels == 1 else 256)
    expected = reference.select(made[:visible], topk)
    assert torch.equal(workspace.indices[: min(visible, topk)].long(), expected)
    assert (workspace.indices[visible:] == -7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores(dtype: torch.dtype) -> None:
    """Small integers, so that every order of summing gives the same bits: the choice must be the definition's."""
    layer = make_layer(4, 300, CPU, dtype, seed=0, width=64, index_heads=5, index_topk=10)
    assert layer.index_pool is not None
    integers = torch.Generator().manual_seed(3)
    workspace = poisoned(layer)
    for tensor in (workspace.index_queries, layer.index_pool.entries, workspace.rows):
        tensor.copy_(torch.randint(-2, 3, tensor.shape, generator=integers))
    op.launch_select(at(290), layer, workspace, portable=True)
    found = workspace.indices.clone()
    op.select(at(290), layer, workspace)
    assert torch.equal(found, workspace.indices)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("queries", lambda x: x[:, :-1], "queries: "),
        ("kv", lambda x: x.double()[:5], "kv: "),
        ("position", lambda x: x.int(), "position: "),
    ],
)
def test_wrong_inputs_are_named(name: str, change, message: str) -> None:  # type: ignore[no-untyped-def]
    layer = small_layer()
    inputs = {"queries": random(3, layer.width), "kv": random(layer.width), "position": at(0)}
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        op.prepare(**inputs, layer=layer, workspace=poisoned(layer))


def test_wrong_widths_are_named() -> None:
    with pytest.raises(ValueError, match="head width is 96"):
        small_layer(96)


CASES = cases()
IDS = [case.name for case in CASES]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_cases(case: Case) -> None:
    check_case(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name.startswith("prepare")], ids=lambda case: case.name
)
def test_prepare_writes_the_memory(case: Case) -> None:
    inputs = case.make(0, torch.device("cuda"))
    layer, workspace = in_float32(inputs)
    case.run(inputs)
    given = (inputs.queries, inputs.kv, inputs.index_queries if layer.selects else None, inputs.position)
    reference.prepare_all(*given, layer, workspace)
    assert relative_rms(inputs.layer.window_ring, layer.window_ring) < ONE_ROUNDING / 5  # one row of 128
    if layer.selects:
        assert relative_rms(inputs.workspace.index_queries, workspace.index_queries) < ONE_ROUNDING
    row = int(inputs.position) // layer.ratio if layer.ratio else 0
    for found, expected in ((inputs.layer.pool, layer.pool), (inputs.layer.index_pool, layer.index_pool)):
        if found is not None and expected is not None:
            assert torch.equal(found.values, expected.values)
            assert torch.equal(found.gates, expected.gates)
            assert relative_rms(found.entries[row], expected.entries[row]) < ONE_ROUNDING
            expected.entries[row] = found.entries[row]
            assert torch.equal(found.entries.float(), expected.entries)  # and no other entry


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2624, 1024, 37])
def test_candidates_give_equal_bits(rows: int) -> None:
    weight, a = random(rows, 4096).bfloat16().cuda(), random(4096).bfloat16().cuda()
    results = []
    for config in op.ROWS_CANDIDATES:
        out = torch.full((rows,), torch.nan, device="cuda")
        op.launch_rows(a, weight, out, config)
        results.append(out)
    assert all(torch.equal(result, results[0]) for result in results)


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


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [1024, 16_384, 20_000, 262_144])
@pytest.mark.parametrize("kind", ["random", "ties", "all equal"])
def test_the_choice_is_exact_at_full_size(capacity: int, kind: str) -> None:
    values = {"random": random(capacity), "ties": random(capacity).mul(3).round(), "all equal": torch.ones(capacity)}
    keys = sortable(values[kind]).cuda()
    layer = make_layer(4, capacity * 4, torch.device("cuda"), torch.bfloat16, seed=0)
    workspace = op.allocate_workspace([layer])
    for visible in (3, 512, 513, capacity // 2 + 1, capacity):
        op.launch_choice(keys, at(visible * 4).cuda(), capacity, 4, 512, workspace)
        expected = reference.select(values[kind][:visible], 512)
        assert torch.equal(workspace.indices[: expected.shape[0]].cpu().long(), expected)
