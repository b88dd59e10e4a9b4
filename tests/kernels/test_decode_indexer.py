"""The indexer's scores and its choice: exact among ties, stale keys and NaN, in one level and in two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_layers import CPU, at, poisoned, random, small_layer
from on_a_card import on_devices
from torch import Tensor

import kernels.decode_attention as op
from kernels.decode_attention import Layer, Workspace, reference
from kernels.decode_attention.cases import make_layer


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


def with_integers(device: torch.device, dtype: torch.dtype) -> tuple[Layer, Workspace]:
    """Small integers, so that every order of summing gives the same bits: the choice must be the definition's."""
    layer = make_layer(4, 300, device, dtype, seed=0, width=64, index_heads=5, index_topk=10)
    assert layer.index_pool is not None
    integers, workspace = torch.Generator().manual_seed(3), poisoned(layer)
    for tensor in (workspace.index_queries, layer.index_pool.entries, workspace.rows):
        tensor.copy_(torch.randint(-2, 3, tensor.shape, generator=integers))
    return layer, workspace


def expect_the_definitions_choice(layer: Layer, workspace: Workspace) -> list[int]:
    position = at(290, layer.window_ring.device)
    op.launch_select(position, layer, workspace, portable=position.device == CPU)
    found = workspace.indices.clone()
    reference.select_all(position, layer, workspace)
    assert torch.equal(found, workspace.indices)
    return found.tolist()


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores(dtype: torch.dtype, device: torch.device) -> None:
    expect_the_definitions_choice(*with_integers(device, dtype))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan])
def test_a_score_of_nan_is_chosen_first(bad: float, dtype: torch.dtype, device: torch.device) -> None:
    """As in the definition's sort: it then spoils the attention, where a card's own maximum would make a zero of it."""
    layer, workspace = with_integers(device, dtype)
    assert layer.index_pool is not None
    layer.index_pool.entries[[5, 40], 7] = bad
    assert {5, 40} <= set(expect_the_definitions_choice(layer, workspace))
    workspace.index_queries[2, 0] = bad
    assert expect_the_definitions_choice(layer, workspace) == list(range(10))


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
