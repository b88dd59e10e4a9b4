"""A token before its attention: the compressors' products, `prepare`, and where a position ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_layers import CPU, F32_TOLERANCE, at, indexed_layer, poisoned, random, small_layer
from on_a_card import on_devices

import kernels.decode_attention as op
from kernels.cases import ONE_ROUNDING, Case, relative_rms
from kernels.decode_attention import Layer, reference
from kernels.decode_attention.cases import cases, in_float32
from kernels.norm.reference import rms_norm_reference


@on_devices
@pytest.mark.parametrize("position", [3, 1000, 65_535, 1_048_575])
def test_angles_are_exact_at_every_position(device: torch.device, position: int) -> None:
    layer = small_layer(device=device)
    workspace, queries = poisoned(layer), random(layer.num_heads, layer.width, device=device)
    op.launch_prepare(queries, random(layer.width, device=device), None, at(position, device), layer, workspace)
    expected = reference.rope(rms_norm_reference(queries, None, 1e-6), position, layer.frequencies)
    bound = 2e-6 if device == CPU else 4e-6  # a card's rsqrt is off by two units in the last place
    assert (workspace.queries - expected).abs().max() < bound


@on_devices
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e4])
def test_rule_b_is_exact(device: torch.device, scale: float) -> None:
    layer, expected = (small_layer(device=device, round_kv=True) for _ in range(2))
    queries, position = random(3, layer.width, device=device), at(5, device)
    layer.kv_norm.mul_(scale)
    expected.kv_norm.mul_(scale)
    kv = random(layer.width, seed=9, device=device)
    kv[:7] *= 1e-4  # E4M3's subnormals
    op.launch_prepare(queries, kv, None, position, layer, poisoned(layer))
    reference.prepare(queries, kv, None, position, expected)
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


def step(layer: Layer, position: int, kernels: bool, rows: torch.Tensor | None = None) -> None:
    """`prepare` of one token by the kernel or by the public function; `rows` are its compressors' products."""
    device, workspace = layer.window_ring.device, poisoned(layer)
    workspace.rows.copy_(random(layer.num_rows, seed=4, device=device) if rows is None else rows)
    queries, kv = random(3, layer.width, device=device), random(layer.width, device=device)
    index_queries = random(layer.index_heads, layer.index_width, device=device)
    if kernels:
        op.launch_prepare(queries, kv, index_queries, at(position, device), layer, workspace)
    else:
        op.prepare(queries, kv, at(position, device), layer, workspace, index_queries)


@on_devices
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "public"])
@pytest.mark.parametrize(("position", "written"), [(15, [3]), (19, []), (31, [])])
def test_no_entry_beyond_the_context(position: int, written: list[int], kernels: bool, device: torch.device) -> None:
    """Four entries fit; what lies behind them in memory is somebody else's."""
    layer, memories = indexed_layer(device), []
    for name in ("pool", "index_pool"):
        pool = getattr(layer, name)
        memories.append(torch.full((12, pool.entries.shape[1]), 7.0, device=device))
        layer = replace(layer, **{name: replace(pool, entries=memories[-1][:5])})
    step(layer, position, kernels)
    for memory in memories:
        assert (memory != 7).any(1).nonzero().flatten().tolist() == written


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@on_devices
def test_nan_stays_nan(device: torch.device) -> None:
    """Rule B works on bits, which would make a zero of a card's own NaN; an infinity leaves it in its own channel."""
    cards_own = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for bad in (cards_own.to(device), torch.inf):
        layer, expected = (small_layer(device=device, round_kv=True) for _ in range(2))
        queries, kv = random(3, layer.width, device=device), random(layer.width, device=device)
        queries[1, 5] = kv[3] = bad
        workspace = poisoned(layer)
        op.launch_prepare(queries, kv, None, at(5, device), layer, workspace)
        defined = reference.prepare(queries, kv, None, at(5, device), expected)
        pairs = [(workspace.queries, defined["queries"]), (layer.window_ring, expected.window_ring)]
        for found, theirs in pairs:
            assert theirs.isnan().any() and found[theirs.isnan()].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@on_devices
@pytest.mark.parametrize("part", [0, 1], ids=["value", "gate"])
def test_nan_reaches_the_entry(part: int, device: torch.device) -> None:
    layer = indexed_layer(device)
    rows = random(layer.num_rows, seed=4, device=device)
    for first, size in ((0, 256), (512, 128)):  # of the compressor, of the indexer's
        rows[first + part * size + size - 1] = torch.nan  # the half that the newest window reads
    step(layer, 7, True, rows)
    for pool in (layer.pool, layer.index_pool):
        assert pool is not None and pool.entries[1].isnan().all()


def test_wrong_rows_are_named() -> None:
    a, weight, out = torch.ones(8), torch.ones(3, 8), torch.empty(3)
    with pytest.raises(ValueError, match=r"compressor_rows: a: got shape \[\], expected \[D\]"):
        op.compressor_rows(torch.tensor(1.0), weight, out)
    with pytest.raises(ValueError, match=r"weight: got shape \[3, 7\], expected \[R, 8\]"):
        op.compressor_rows(a, weight[:, :7], out)
    with pytest.raises(ValueError, match=r"out: got shape \[2\], expected \[>= 3\]"):
        op.compressor_rows(a, weight, out[:2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name.startswith("prepare")], ids=lambda case: case.name
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
