"""The demo model computed by the kernels: as the model's own float32 forward, in the interpreter here and in bfloat16 on a card."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from kernel_forward import PRECISIONS, DefinedExperts, GatheredExperts, KernelForward
from plain_model import PlainModel
from torch import Tensor

import kernels.decode_attention as attention
import kernels.fp8_linear as fp8
import kernels.hyper_connections as hyper
import kernels.router as routing
from kernels import dense_layer, norm, tuning
from kernels.cases import TWO_ROUNDINGS, relative_rms
from kernels.expert_gemv.cases import LEVELS
from kernels.formats import Matrix
from runtime.artifact import ModelDirectory
from runtime.demo import DEMO_DIRECTORY, prepared_demo
from runtime.documents import token_sequences
from runtime.models.deepseek_v4.build import build_model
from runtime.models.deepseek_v4.state import State
from runtime.models.rounding import ActivationRounding
from runtime.resident import FP4, TWO_BIT, ResidentExperts
from runtime.tokenizer import require_tokenizer_in

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT32_CHAIN = 1e-4  # two float32 programs that differ in the order of sums and in exponentials: seen 1e-5
KL_TOLERANCE = 1e-3  # nats a token, the bound that the kernels promise; the runtime's own bfloat16 forward: 8e-4
LONGEST = 250  # tokens of a document: past the window of 128, and one entry of ratio 128
SMALL = (0, 2, 3)  # a layer of each kind: window and hash router, ratio 4, ratio 128
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no card")


@pytest.fixture(scope="module")
def source() -> ModelDirectory:
    return ModelDirectory(prepared_demo())


def documents(directory: Path, num_tokens: int) -> list[list[int]]:
    """The beginnings of every sixth held-out document until there are `num_tokens`."""
    tokenizer, found = require_tokenizer_in(directory), []
    for line in (DEMO_DIRECTORY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[::6]:
        found.append(token_sequences(tokenizer, json.loads(line)["text"], LONGEST)[0][:num_tokens])
        num_tokens -= len(found[-1])
    assert num_tokens == 0 and max(map(len, found)) == LONGEST
    return [document for document in found if document]


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the layer launch its kernels on CPU tensors too, in their portable branches, instead of the definitions."""

    def rows(a: Tensor, weight: Tensor, out: Tensor) -> None:
        attention.launch_rows(a, weight, out, {"ROWS": 128, "num_warps": 4})  # few programs: each costs the interpreter

    def prepare(
        queries: Tensor,
        kv: Tensor,
        position: Tensor,
        memory: attention.Layer,
        workspace: attention.Workspace,
        index_queries: Tensor | None,
    ) -> None:
        attention.launch_prepare(queries, kv, index_queries, position, memory, workspace)

    def launch(x: Tensor, matrices: tuple[Matrix, ...], out: Tensor, limit: float = 0.0) -> None:
        config = fp8.candidates(x, matrices)[0] | {"ROWS": 128}
        fp8._launch(x, matrices, out, limit, True, config)

    def linear(x: Tensor, matrix: Matrix, out: Tensor) -> None:
        launch(x[:, None], (matrix,), out[:, None])

    def grouped(x: Tensor, matrix: Matrix, out: Tensor) -> None:
        launch(x, (matrix,), out)

    def swiglu(x: Tensor, w1: Matrix, w3: Matrix, out: Tensor, *, limit: float) -> None:
        launch(x[:, None], (w1, w3), out[:, None], limit)

    for name, function in (
        ("compressor_rows", rows),
        ("prepare", prepare),
        ("select", attention.launch_select),
        ("attend", attention.launch_attend),
        ("fp8_linear", linear),
        ("fp8_grouped_linear", grouped),
        ("fp8_swiglu", swiglu),
        ("hc_pre", hyper.launch_pre),
        ("hc_post", hyper.launch_post),
        ("hc_post_pre", hyper.launch_post_pre),
        ("rms_norm", norm.launch_rms_norm),
        ("router", routing.launch_router),
    ):
        monkeypatch.setattr(dense_layer, name, function)


def open_small(source: ModelDirectory) -> tuple[KernelForward, State, ResidentExperts]:
    """A layer of each kind in float32, another state for the model's own forward, and its experts."""
    forward = KernelForward.open(source, CPU, torch.float32, layer_ids=SMALL, context=256)
    state = State(forward.model.config, forward.state.context, torch.float32, CPU)
    state.layers = [state.layers[each] for each in SMALL]
    return forward, state, ResidentExperts(source, torch.float32, CPU, False)


def compare(source: ModelDirectory, first: int, last: int, damage: bool = False) -> float:
    """Relative error of the logits of tokens first … last-1 by the kernels' layers after `first` of the model's own.

    What the tokens leave behind is compared too.
    """
    forward, state, experts = open_small(source)
    tokens = torch.tensor(documents(source.directory, 2000)[0][:last])
    with torch.inference_mode():
        expected = forward.model.logits(forward.model.forward(tokens, state, experts))[first:]
        forward.model.forward(tokens[:first], forward.state, experts)
        if damage:
            forward.layers[1].weights.ffn_norm.mul_(1.01)
        logits = torch.stack([forward.step(int(token)) for token in tokens[first:]])
    for ours, theirs in zip(forward.state.layers, state.layers, strict=True):
        assert damage or close(ours.window_ring, theirs.window_ring)
        for pool, other in zip(ours.compressors(), theirs.compressors(), strict=True):
            assert damage or close(pool.entries[:-1], other.entries[:-1])
    return relative_rms(logits, expected)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the relative RMS error is small; both may be zeros."""
    return bool((ours - theirs).norm() <= FLOAT32_CHAIN * theirs.norm())


@INTERPRETED
def test_a_token_in_the_interpreter(source: ModelDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It completes a window of either ratio."""
    interpret(monkeypatch)
    assert compare(source, 127, 128) <= FLOAT32_CHAIN


@INTERPRETED
def test_tokens_by_the_definitions(source: ModelDirectory) -> None:
    """The order of the operators and the translation of the weights, at the start of a sequence and past the window."""
    assert compare(source, 1, 10) <= FLOAT32_CHAIN
    assert compare(source, 125, 133) <= FLOAT32_CHAIN


@INTERPRETED
def test_damage_of_one_per_cent_is_seen(source: ModelDirectory) -> None:
    assert compare(source, 125, 129, damage=True) > 10 * FLOAT32_CHAIN


@INTERPRETED
@pytest.mark.parametrize(("plane", "precision"), PRECISIONS.items())
def test_experts_are_found_by_their_addresses(source: ModelDirectory, plane: str, precision: str) -> None:
    """Six picks in the interpreter by either operator: the slabs, normalisers and table rows of the experts asked for."""
    generator = torch.Generator().manual_seed(0)
    gathered = GatheredExperts(source, SMALL, plane, CPU)
    x = torch.randn(1, source.config.hidden_size, generator=generator)
    chosen = routing.Picks(torch.tensor([[17, 3, 5, 7, 11, 13]]), torch.rand(1, 6, generator=generator))
    expected = DefinedExperts(source, SMALL, torch.float32, precision)(1, x, chosen)
    assert relative_rms(gathered(1, x, chosen), expected) <= LEVELS
    assert relative_rms(gathered.by_gemm(1, x, chosen), expected) <= TWO_ROUNDINGS


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every kernel in its first configuration: to time the others, which give the same bits, would take a minute or two."""
    table: dict[str, tuning.Config] = {}
    monkeypatch.setattr(tuning, "_own", lambda card: table)
    monkeypatch.setattr(tuning, "_run_us", lambda run, device: 0.0)
    monkeypatch.setattr(tuning, "user_directory", lambda: tmp_path)


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize(
    ("plane", "precision", "num_tokens"), [("fp4", FP4, 2000), ("quad2", TWO_BIT, 500)], ids=["fp4", "quad2"]
)
def test_logits_in_bfloat16_stay_near_float32(
    source: ModelDirectory, plane: str, precision: str, num_tokens: int
) -> None:
    """Token by token, the whole model one captured graph, against the eager float32 forward of the same precision."""
    forward = KernelForward.open(source, CUDA, torch.bfloat16, plane=plane)
    graph = forward.capture()
    exact = PlainModel(
        build_model(source, torch.float32, CUDA, ActivationRounding()),
        ResidentExperts(source, torch.float32, CUDA, False, precision=precision),
        torch.float32,
        CUDA,
    )
    divergence = []
    for token_ids in documents(source.directory, num_tokens):
        ids = torch.tensor(token_ids, device=CUDA)
        divergence.append(divergences(exact.logits(ids), forward.replay(graph, ids)))
    mean, largest = float(torch.cat(divergence).mean()), float(torch.cat(divergence).max())
    logging.getLogger(__name__).info("%s: KL per token %.2e, largest %.2e", plane, mean, largest)
    assert mean <= KL_TOLERANCE


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
def test_a_replay_gives_the_eager_bits(source: ModelDirectory) -> None:
    """Two runs of one graph and one run without it: the same logits."""
    forward = KernelForward.open(source, CUDA, torch.bfloat16)
    graph = forward.capture()
    ids = torch.tensor(documents(source.directory, 2000)[1][:140], device=CUDA)
    replayed = [forward.replay(graph, ids) for _ in range(2)]
    forward.state.reset()
    eager = torch.stack([forward.step(int(token)) for token in ids])
    assert torch.equal(*replayed) and torch.equal(replayed[0], eager)


def divergences(exact: Tensor, ours: Tensor) -> Tensor:
    """KL divergence of each token's distribution from the exact one, [T] nats."""
    expected = exact.double().log_softmax(-1)
    return (expected.exp() * (expected - ours.double().log_softmax(-1))).sum(-1)
