"""Recall against hand-counted numbers, what is trained on and what is not, and that a planted rule is learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from planted_trace import PLANTED, write_planted_trace
from torch import Tensor

from predictor.baselines import Frequency, LinearProbe, PreviousToken, use_shares
from predictor.batches import Batch, in_order, load_batch, runs, shuffled, take_documents
from predictor.errors import PredictorError
from predictor.evaluate import Recall, evaluate, from_hidden, measured_ks, recall_sums, reference_k
from predictor.model import RouterPredictor
from predictor.trace_files import TraceShape
from predictor.traces import Trace
from predictor.train import TrainSettings, batch_loss, fit, learning_share

AHEAD = (2, 3)
CPU = torch.device("cpu")
FAST = TrainSettings(steps=24, batch_tokens=64)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_planted_trace(tmp_path_factory.mktemp("planted"))


def ignore(*_: object) -> None:
    """A listener with no interest."""


def mlp(seed: int = 0, width: int = 48) -> RouterPredictor:
    return RouterPredictor(PLANTED, AHEAD, width, torch.Generator().manual_seed(seed))


def measure(trace: Trace, tokens: Tensor, **scorers: Callable[[int, Batch], Tensor]) -> dict[str, Recall]:
    return evaluate(scorers, trace, tokens, AHEAD, CPU, ignore)


@pytest.mark.parametrize(
    ("scores", "ids", "k", "expected"),
    [
        ([9, 7, 5, 3], [0, 1], 2, 1.0),
        ([9, 7, 5, 3], [0, 2], 2, 0.5),
        ([9, 7, 5, 3], [3, 2], 2, 0.0),
        ([9, 7, 5, 3], [3, 2], 3, 0.5),
        ([9, 7, 5, 3], [3, 2], 9, 1.0),
        ([1, 1, 1, 1], [3, 2], 3, 0.75),  # chance: k / E
        ([9, 1, 1, 1], [1, 2], 2, 1 / 3),  # one place left for three equals
        ([9, 1, 1, 1], [0, 2], 2, (1 + 1 / 3) / 2),
        ([9, 5, 5, 1], [1, 2], 2, 0.5),  # one of the two, whichever comes first
        ([9, 5, 5, 1], [1, 2], 3, 1.0),
        ([float("nan"), 5, 4, 3], [0, 1], 2, 0.5),  # no number wins nothing, and pushes the others down
        ([float("nan")] * 4, [0, 1], 2, 0.0),
        ([float("-inf"), 5, 4, 3], [0, 1], 2, 0.5),
    ],
)
def test_recall_is_what_a_hand_counts(scores: list[float], ids: list[int], k: int, expected: float) -> None:
    got = recall_sums(torch.tensor([scores, scores]), torch.tensor([ids, ids[::-1]]), [k])
    assert got.tolist() == pytest.approx([2 * expected])


def test_recall_by_layer_and_lookahead_counts_what_exists(trace: Trace) -> None:
    """An oracle for +2 that knows nothing of +3; what lies behind the last layer is not asked for."""

    def oracle(layer_idx: int, batch: Batch) -> Tensor:
        scores = torch.zeros(len(batch.ids), 2, PLANTED.num_experts)
        scores[:, 0].scatter_(1, batch.ids[:, layer_idx + 2], 1.0)
        return scores

    recall = measure(trace, torch.arange(300), oracle=oracle)["oracle"]
    chance = 2 / PLANTED.num_experts
    rows = recall.shares[recall.ks.index(2)].nan_to_num(-1.0)
    assert rows[0].tolist() == [-1, -1, 1, 1, 1]
    assert rows[1].tolist() == pytest.approx([-1, -1, -1, chance, chance])
    assert recall.at(2, 2) == 1
    assert recall.at(2, layers=[3]) == pytest.approx((1 + chance) / 2)
    assert recall.at(2, layers=[2]) == 1


@pytest.mark.parametrize(
    ("num_experts", "num_picks", "ks"),
    [(256, 6, (6, 8, 12, 16, 24)), (48, 6, (6, 8, 12, 16, 24)), (384, 6, (6, 8, 12, 16, 18, 24)), (8, 2, (2, 6))],
)
def test_ks_and_the_reference(num_experts: int, num_picks: int, ks: tuple[int, ...]) -> None:
    shape = TraceShape(32, num_experts, 4, num_picks)
    assert measured_ks(shape) == ks
    assert reference_k(shape) == {256: 12, 48: 6, 384: 18, 8: 2}[num_experts]


def test_loss_is_the_mean_over_the_layers_that_exist(trace: Trace) -> None:
    batch, model = load_batch(trace, torch.arange(40), CPU), mlp()
    logits, terms = model(batch.hidden), []
    for place, lookahead in enumerate(AHEAD):
        for layer_idx in range(PLANTED.num_layers - lookahead):
            for token in range(40):
                picked = torch.zeros(PLANTED.num_experts)
                picked[batch.ids[token, layer_idx + lookahead]] = 1
                share = logits[token, layer_idx, place].sigmoid()
                terms.append(-(picked * share.log() + (1 - picked) * (1 - share).log()).mean())
    assert batch_loss(model, batch).item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)


def test_what_ends_behind_the_last_layer_is_not_trained(trace: Trace) -> None:
    probe = LinearProbe(PLANTED, AHEAD)
    batch_loss(probe, load_batch(trace, torch.arange(200), CPU)).backward()
    assert probe.bias.grad is not None
    is_trained = probe.bias.grad.view(PLANTED.num_layers, len(AHEAD), -1).ne(0).any(-1)
    assert is_trained.tolist() == [[True, True], [True, True], [True, False], [False, False], [False, False]]


def test_a_planted_rule_is_learned_and_nothing_else(trace: Trace) -> None:
    """The rule ties layer l + 2 to layer l; neither counts nor layer l - 1 (which +3 sees) know anything of it."""
    train, held_out = trace.split(0.15, seed=1)
    model = RouterPredictor(PLANTED, (2,), 64, torch.Generator().manual_seed(0))
    fit(model, trace, train, train[:0], TrainSettings(steps=500, batch_tokens=64, learning_rate=5e-3), ignore)
    frequency = Frequency(use_shares(trace, train), (2,))
    scorers = {"mlp": from_hidden(model), "frequency": frequency, "previous": PreviousToken(frequency)}
    recall = evaluate(scorers, trace, held_out, (2,), CPU, ignore)
    assert recall["mlp"].at(2) > 0.9
    assert recall["frequency"].at(2) < 0.35
    assert recall["previous"].at(2) < 0.35


@pytest.mark.gpu
def test_a_planted_rule_is_learned_on_a_card(trace: Trace) -> None:
    train, held_out = trace.split(0.15, seed=1)
    card = torch.device("cuda")
    model = RouterPredictor(PLANTED, (2,), 64, torch.Generator().manual_seed(0)).to(card)
    fit(model, trace, train, held_out, TrainSettings(steps=500, batch_tokens=64, learning_rate=5e-3), ignore)
    previous = PreviousToken(Frequency(use_shares(trace, train).to(card), (2,)))
    recall = evaluate({"mlp": from_hidden(model), "previous": previous}, trace, held_out, (2,), card, ignore)
    assert recall["mlp"].at(2) > 0.9
    assert recall["previous"].at(2) < 0.35


def test_probe_learns_a_linear_rule(trace: Trace) -> None:
    train, held_out = trace.split(0.15, seed=1)
    probe = LinearProbe(PLANTED, AHEAD)
    fit(probe, trace, train, train[:0], TrainSettings(steps=200, batch_tokens=64, learning_rate=3e-2), ignore)
    recall = measure(trace, held_out, probe=from_hidden(probe))["probe"]
    assert recall.at(2, 2) > 0.85
    assert recall.at(2, 3) < 0.35


def test_training_is_reproducible(trace: Trace) -> None:
    train, held_out = trace.split(0.15)
    ends = []
    for seed in (3, 3, 4):
        model = mlp(0)
        torch.manual_seed(seed * 100 + len(ends))  # the program's own generator must not matter
        settings = TrainSettings(steps=12, batch_tokens=64, seed=seed)
        checks = fit(model, trace, train, held_out, settings, ignore)
        ends.append((checks, torch.cat([tensor.flatten() for tensor in model.state_dict().values()])))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])
    assert not torch.equal(ends[0][1], ends[2][1])
    assert torch.equal(mlp(1).enter.weight, mlp(1).enter.weight)


def test_fit_leaves_the_best_state_it_saw(trace: Trace) -> None:
    """A few tokens are soon learned by heart, so that the last check is not the best one."""
    watched = torch.arange(1000, 1300)
    model = mlp()
    settings = TrainSettings(steps=80, batch_tokens=64, learning_rate=1e-2)
    checks = fit(model, trace, torch.arange(30), watched, settings, ignore)
    best = min(check.loss for check in checks)
    assert best < checks[-1].loss
    parts = [(len(part), batch_loss(model, load_batch(trace, part, CPU)).item()) for part in in_order(watched, 64)]
    assert sum(count * loss for count, loss in parts) / len(watched) == pytest.approx(best, rel=1e-6)


def test_every_step_is_told(trace: Trace) -> None:
    told: list[int] = []
    checks = fit(mlp(), trace, torch.arange(500), torch.arange(900, 1000), FAST, lambda step, loss: told.append(step))
    assert told == list(range(1, 25))
    assert [check.step for check in checks] == [*range(2, 25, 2)]


def test_learning_rate_rises_and_falls() -> None:
    shares = [learning_share(step, 100) for step in range(100)]
    assert shares[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert 0 < shares[-1] < 0.001
    assert learning_share(0, 1) == 1.0


def test_a_loss_that_is_no_number_ends_the_training(trace: Trace) -> None:
    model = mlp()
    torch.nn.init.constant_(model.enter.bias, torch.nan)
    with pytest.raises(PredictorError, match="loss is nan at step 2, expected a number"):
        fit(model, trace, torch.arange(500), torch.arange(0), FAST, ignore)


def test_a_model_with_too_few_layers_has_nothing_to_predict(trace: Trace) -> None:
    model = LinearProbe(TraceShape(24, 12, 2, 2), AHEAD)
    with pytest.raises(PredictorError, match=r"2 layers, expected more than 2 \(the shortest lookahead\)"):
        fit(model, trace, torch.arange(9), torch.arange(0), FAST, ignore)


def test_runs_are_cut_where_tokens_are_not_neighbours() -> None:
    tokens = torch.tensor([9, 3, 4, 5, 6, 7, 20, 21, 22])
    assert [run.tolist() for run in runs(tokens, 3)] == [[3, 4, 5], [6, 7], [9], [20, 21, 22]]


def test_a_pass_takes_every_token_once_in_whole_runs(trace: Trace) -> None:
    tokens, _ = trace.split(0.15)
    batches = shuffled(tokens, 64, torch.Generator().manual_seed(0))
    passes = []
    for _ in range(2):
        taken = [next(batches)]
        while sum(map(len, taken)) < len(tokens):
            taken.append(next(batches))
        passes.append(torch.cat(taken))
    for one in passes:
        assert torch.equal(one.sort().values, tokens)
        assert (one.diff() == 1).float().mean() > 0.9
    assert not torch.equal(*passes)


def test_documents_are_taken_whole(trace: Trace) -> None:
    tokens, held_out = trace.split(0.15)
    taken, rest = take_documents(trace, tokens, 0.25, seed=0)
    owners = [set((part // 100).tolist()) for part in (held_out, taken, rest)]
    assert torch.equal(torch.cat([taken, rest]).sort().values, tokens)
    assert not owners[0] & owners[1] and not owners[0] & owners[2] and not owners[1] & owners[2]
    assert len(taken) == 800, "8 of 34 documents"
    assert len(take_documents(trace, tokens, 0.001, seed=0)[0]) == 100, "the smallest, rather than none"
    assert len(take_documents(trace, torch.arange(100), 0.5, seed=0)[0]) == 0, "never the only one"


def test_previous_token_of_the_same_document(trace: Trace) -> None:
    tokens = torch.tensor([100, 101, 0, 1])
    batch = load_batch(trace, tokens, CPU)
    assert (batch.previous[[0, 2]] == -1).all()
    assert torch.equal(batch.previous[[1, 3]], trace.ids(torch.tensor([100, 0])))
    shares = torch.rand(PLANTED.num_layers, PLANTED.num_experts, generator=torch.Generator().manual_seed(0))
    scores = PreviousToken(Frequency(shares, AHEAD))(1, batch)
    by_use = shares[4].argsort(descending=True)
    assert torch.equal(scores[0, 1].argsort(descending=True), by_use)
    before = batch.previous[1, 4]
    expected = sorted(by_use.tolist(), key=lambda expert_id: expert_id not in before.tolist())
    assert scores[1, 1].argsort(descending=True).tolist() == expected


def test_frequency_counts_the_tokens_that_picked_an_expert(trace: Trace) -> None:
    shares = use_shares(trace, torch.arange(250))
    ids = trace.ids(torch.arange(250))
    for layer_idx, expert_id in ((0, 0), (4, 11), (2, 5)):
        expected = (ids[:, layer_idx] == expert_id).any(-1).float().mean()
        torch.testing.assert_close(shares[layer_idx, expert_id], expected)
    torch.testing.assert_close(shares.sum(-1), torch.full((PLANTED.num_layers,), 2.0))


def test_a_pick_that_is_no_expert_is_named(tmp_path: Path) -> None:
    damaged = write_planted_trace(tmp_path, documents=2)
    content = bytearray((tmp_path / "shard-00000.safetensors").read_bytes())
    ids = damaged.ids(torch.arange(200)).transpose(0, 1).short().numpy().tobytes()
    place = content.find(ids)
    assert place > 0
    content[place : place + 2] = (12).to_bytes(2, "little")
    (tmp_path / "shard-00000.safetensors").write_bytes(content)
    damaged = Trace.open(tmp_path)
    with pytest.raises(PredictorError, match="picks from 0 to 12, expected 0 to 11; the trace is damaged"):
        load_batch(damaged, torch.arange(20), CPU)
