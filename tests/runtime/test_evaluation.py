"""Scores and figures against independent computations, on the shipped demo and on made-up numbers; the text that is read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_tokenizer import build_tokenizer
from torch import Tensor

from prep.layout import layout
from runtime import open_model
from runtime.documents import read_documents, token_sequences
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.evaluation import (
    PIECE,
    RESAMPLES,
    STATISTICS,
    HeldOut,
    Scores,
    figures,
    forward_all,
    forward_under,
    per_token,
    read_held_out,
    score,
)
from runtime.ruled_store import parse_residency

DEMO = Path(__file__).parents[2] / "artifacts" / "demo"
LENGTH = PIECE + 20  # more logits than are made at once
NO_TRAFFIC: Counter[str] = Counter()


@pytest.fixture(scope="module")
def session() -> Session:
    return open_model(DEMO / "checkpoint", context=512)


@pytest.fixture(scope="module")
def sequence(session: Session) -> HeldOut:
    assert session.tokenizer is not None
    text = next(read_documents([DEMO / "heldout.jsonl"])).text
    return HeldOut("demo", token_sequences(session.tokenizer, text, LENGTH)[0])


@pytest.fixture(scope="module")
def exact(session: Session, sequence: HeldOut) -> Tensor:
    return forward_all(session, sequence.inputs)


def test_loss_is_that_of_the_sessions_logits(session: Session, sequence: HeldOut, exact: Tensor) -> None:
    found = score(session, sequence, exact, exact, NO_TRAFFIC)
    logits = session.logits(sequence.inputs)
    expected = F.cross_entropy(logits.double(), torch.tensor(sequence.targets), reduction="none")
    assert len(found.nll) == LENGTH - 1
    # The logits are made in other pieces, so their last bits may differ.
    assert np.abs(np.array(found.nll) - expected.numpy()).max() <= 1e-5
    assert np.mean(found.nll) == pytest.approx(float(expected.mean()), abs=1e-6)


@pytest.mark.slow
def test_loss_is_that_of_transformers(session: Session, sequence: HeldOut) -> None:
    from transformers import DeepseekV4ForCausalLM

    short = HeldOut("demo", sequence.token_ids[:100])
    theirs = DeepseekV4ForCausalLM.from_pretrained(DEMO / "checkpoint", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = theirs(torch.tensor([short.inputs])).logits[0]
    expected = F.cross_entropy(logits.double(), torch.tensor(short.targets), reduction="none")
    hidden = forward_all(session, short.inputs)
    found = score(session, short, hidden, hidden, NO_TRAFFIC)
    assert np.abs(np.array(found.nll) - expected.numpy()).max() <= 1e-4


def test_exact_against_itself(session: Session, sequence: HeldOut, exact: Tensor) -> None:
    found = figures([score(session, sequence, exact, forward_all(session, sequence.inputs), NO_TRAFFIC)])
    exactly = {"loss_difference": 0, "perplexity_ratio": 1, "kl_mean": 0, "kl_p99": 0, "agreement": 1}
    assert {name: found[name]["value"] for name in exactly} == exactly


def test_kl_and_agreement_of_other_states(session: Session, sequence: HeldOut, exact: Tensor) -> None:
    hidden = exact + 0.2 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    found = score(session, sequence, exact, hidden, NO_TRAFFIC)
    ours, theirs = (session._model_logits(states).log_softmax(-1) for states in (exact, hidden))
    kl = F.kl_div(theirs, ours, reduction="none", log_target=True).sum(-1)
    assert np.abs(np.array(found.kl) - kl.numpy()).max() <= 1e-4
    assert found.agrees == (ours.argmax(-1) == theirs.argmax(-1)).tolist()
    assert 0 < sum(found.agrees) < len(found.agrees)
    assert min(found.kl) > 0


@pytest.mark.gpu
def test_on_a_card_exact_is_itself_and_the_loss_that_of_the_cpu(
    session: Session, sequence: HeldOut, exact: Tensor
) -> None:
    card = open_model(DEMO / "checkpoint", context=512, device="cuda", dtype="float32")
    hidden = forward_all(card, sequence.inputs)
    found = score(card, sequence, hidden, forward_all(card, sequence.inputs), NO_TRAFFIC)
    assert figures([found])["perplexity_ratio"]["value"] == 1 and all(found.agrees)
    expected = score(session, sequence, exact, exact, NO_TRAFFIC)
    assert np.abs(np.array(found.nll) - np.array(expected.nll)).max() <= 1e-3
    card.close()


def test_real_pools_token_by_token(session: Session, sequence: HeldOut, tmp_path: Path) -> None:
    """Cold passes are alike, a warm one reads less, and both are as near to the chunks as float32 is."""
    inputs = sequence.inputs[:4]
    layout(DEMO / "checkpoint", tmp_path / "model")
    starved = open_model(tmp_path / "model", slots=(60, 40, 0, 0), context=64)
    cold, again, warm = (forward_under(starved, parse_residency(text), inputs) for text in ("cold", "cold", "warm"))
    assert cold[1] == again[1] and torch.equal(cold[0], again[0])
    assert 0 < warm[1]["read fp4"] < cold[1]["read fp4"]
    assert warm[1]["FP4"] == cold[1]["FP4"] == 4 * 8 * 6
    assert torch.allclose(cold[0], forward_all(session, inputs), atol=1e-4)


def made_up(document: str, differences: list[float], kl: list[float], agrees: list[bool]) -> Scores:
    return Scores(document, [1.0] * len(kl), [1.0 + gap for gap in differences], kl, agrees, {"FP4": 6 * len(kl)})


def test_figures_of_made_up_scores() -> None:
    first = made_up("a", [0.0, 0.5, -0.1, 0.2], [0.1, 0.2, 0.3, 0.4], [True, True, False, True])
    second = made_up("b", [0.4], [9.0], [False])
    found = figures([first, second])
    values = {name: found[name]["value"] for name in STATISTICS}
    assert (found["tokens"], found["clusters"], found["clusters_are"]) == (5, 2, "documents")
    assert values == pytest.approx(
        {
            "exact_loss": 1.0,
            "loss": 1.2,
            "loss_difference": 0.2,
            "perplexity_ratio": np.exp(0.2),
            "kl_mean": 2.0,
            "kl_median": 0.3,
            "kl_p99": np.quantile([0.1, 0.2, 0.3, 0.4, 9.0], 0.99),
            "agreement": 0.6,
        }
    )
    assert per_token([first, second]) == {"FP4": 6.0}


def test_the_standard_error_is_that_over_documents() -> None:
    """Tokens of a document go together: against the plain formula on document means of equal length."""
    random = np.random.default_rng(3)
    means = random.normal(size=200)
    scores = [made_up(str(n), [mean] * 5, [mean**2] * 5, [mean > 0] * 5) for n, mean in enumerate(means)]
    found = figures(scores)
    plain = means.std(ddof=1) / len(means) ** 0.5
    slack = 4 / (2 * RESAMPLES) ** 0.5  # four deviations of a deviation of so many samples
    assert found["loss_difference"]["standard_error"] == pytest.approx(plain, rel=slack)
    assert found["perplexity_ratio"]["standard_error"] == pytest.approx(plain * np.exp(means.mean()), rel=slack)


def test_one_document_has_the_spread_of_its_sequences() -> None:
    one, other = made_up("a", [0.1], [0.1], [True]), made_up("a", [0.9], [0.9], [False])
    assert figures([one, other])["clusters_are"] == "sequences"
    assert figures([one, other])["loss"]["standard_error"] > 0.1
    assert figures([one])["loss"]["standard_error"] is None
    alike = [made_up(name, [0.1], [0.1], [True]) for name in "ab"]
    assert figures(alike)["loss"]["standard_error"] == pytest.approx(0, abs=1e-12)


def test_scores_survive_json(session: Session, sequence: HeldOut, exact: Tensor) -> None:
    short = HeldOut("demo", sequence.token_ids[:10])
    found = score(session, short, exact[:9], 1.01 * exact[:9], Counter({"FP4": 3}))
    assert Scores(**json.loads(json.dumps(asdict(found)))) == found


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    (tmp_path / "a.txt").write_text("hello world " * 8)
    (tmp_path / "b.jsonl").write_text('{"text": "hello"}\n{"text": "hello world hello world"}\n')
    return [tmp_path / "a.txt", tmp_path / "b.jsonl"]


def test_held_out_text_in_sequences(texts: list[Path]) -> None:
    tokenizer = build_tokenizer()
    whole = read_held_out(tokenizer, texts, context=1000)
    cut = read_held_out(tokenizer, texts, context=7)
    assert [one.document for one in whole] == ["a.txt", "b.jsonl:1", "b.jsonl:2"]
    assert all(one.token_ids[0] == 0 and len(one.token_ids) <= 7 for one in cut)
    assert [token for one in cut for token in one.targets] == [token for one in whole for token in one.targets]
    assert whole[0].inputs[1:] == whole[0].targets[:-1]


def test_files_of_one_name_are_two_documents(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "x.txt" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"hello {path.parent.name}")
    found = read_held_out(build_tokenizer(), paths, context=100)
    assert [one.document for one in found] == list(map(str, paths))


@pytest.mark.parametrize(
    ("tokens", "document_tokens", "expected"), [(20, None, 20), (None, 1, 3), (2, 1, 2), (1, 9, 1)]
)
def test_limits_of_held_out_text(
    texts: list[Path], tokens: int | None, document_tokens: int | None, expected: int
) -> None:
    found = read_held_out(build_tokenizer(), texts, context=7, tokens=tokens, document_tokens=document_tokens)
    assert sum(len(one.targets) for one in found) == expected
    assert all(one.targets for one in found)


def test_a_context_without_room(texts: list[Path]) -> None:
    with pytest.raises(StrawError, match="context is 1, expected at least 2"):
        read_held_out(build_tokenizer(), texts, context=1)
