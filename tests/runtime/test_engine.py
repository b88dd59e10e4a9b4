"""Session: what the Python API promises, on a random checkpoint and on the model directory made from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_checkpoint import write_random_checkpoint

from prep.layout import layout
from runtime import open_model
from runtime.engine import PREFILL_CHUNK, Session
from runtime.errors import ArtifactError, ContextFullError, StrawError

TOKENS = torch.randint(2, 512, (300,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, max_position_embeddings=600)
    return directory


@pytest.fixture(scope="module")
def session(checkpoint: Path) -> Session:
    return open_model(checkpoint)


@pytest.fixture(autouse=True)
def _empty(session: Session) -> None:
    session.reset()


def test_a_model_directory_gives_the_bits_of_its_checkpoint(checkpoint: Path, session: Session, tmp_path: Path) -> None:
    layout(checkpoint, tmp_path / "model")
    assert torch.equal(open_model(tmp_path / "model").logits(TOKENS[:40]), session.logits(TOKENS[:40]))


def test_logits_prefill_and_steps_agree(session: Session) -> None:
    assert len(TOKENS) > PREFILL_CHUNK
    every = session.logits(TOKENS)
    assert every.shape == (300, session.config.vocab_size)
    assert every.dtype == torch.float32
    assert session.token_ids == []
    assert torch.allclose(session.prefill(TOKENS[:297]), every[296], atol=2e-5)
    for position in range(297, 300):
        assert torch.allclose(session.step(TOKENS[position]), every[position], atol=2e-5)


def test_logits_leaves_the_sequence_as_it_was(session: Session) -> None:
    session.prefill(TOKENS[:10])
    before = session.snapshot()
    session.logits(TOKENS[50:90])
    after = session.step(5)
    session.restore(before)
    assert torch.equal(session.step(5), after)


def test_generate_is_the_argmax_of_the_logits(session: Session) -> None:
    generated = list(session.generate(TOKENS[:20], max_new_tokens=8))
    logits = session.logits(TOKENS[:20] + generated)
    assert logits[19:-1].argmax(-1).tolist() == generated


def test_generate_twice_gives_the_same(session: Session) -> None:
    draws = [list(session.generate(TOKENS[:20], 12, temperature=1.0, top_p=0.9, seed=4)) for _ in range(2)]
    assert draws[0] == draws[1]
    assert list(session.generate(TOKENS[:20], 12, temperature=1.0, top_p=0.9, seed=5)) != draws[0]


def test_a_continued_prompt_computes_only_its_new_part(session: Session) -> None:
    answer = list(session.generate(TOKENS[:20], max_new_tokens=4))
    held = session.token_ids
    assert held == TOKENS[:20] + answer[:3]  # the last token is given out, not yet read
    before = session.stats()["prefill_tokens"]
    list(session.generate(TOKENS[:20] + answer + TOKENS[30:35], max_new_tokens=1))
    assert session.stats()["prefill_tokens"] == before + 1 + 5


def test_generation_stops_after_eos(checkpoint: Path, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    eos = session.config.eos_token_id
    wanted = iter([7, 8, eos, 9])

    def step(token_id: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next(wanted)), 512).float()

    monkeypatch.setattr(session, "step", step)
    monkeypatch.setattr(session, "prefill", lambda ids: step(0))
    assert list(session.generate([1, 2], max_new_tokens=10)) == [7, 8, eos]


def test_snapshot_restore_reset(session: Session) -> None:
    session.prefill(TOKENS[:30])
    snapshot = session.snapshot()
    expected = session.step(3)
    session.reset()
    session.prefill(TOKENS[40:100])
    session.restore(snapshot)
    assert session.token_ids == TOKENS[:30]
    assert torch.equal(session.step(3), expected)


def test_a_full_context_is_one_clear_line_and_loses_nothing(checkpoint: Path) -> None:
    small = open_model(checkpoint, context=32)
    small.prefill(TOKENS[:30])
    with pytest.raises(ContextFullError, match=r"30 tokens held and 3 more to come, expected at most 32"):
        small.prefill(TOKENS[:3])
    assert small.token_ids == TOKENS[:30]
    small.prefill(TOKENS[30:32])
    with pytest.raises(ContextFullError):
        small.step(1)


def test_a_failing_forward_leaves_an_empty_sequence(session: Session) -> None:
    expected = session.prefill(TOKENS[:10])
    session.reset()

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    session.observer = interrupt
    with pytest.raises(KeyboardInterrupt):
        session.prefill(TOKENS[:10])
    session.observer = None
    assert session.token_ids == []
    assert torch.equal(session.prefill(TOKENS[:10]), expected)


def test_an_interrupt_waits_for_the_chunk_to_end(session: Session) -> None:
    session.prefill(TOKENS[:10])
    session.interrupt()
    with pytest.raises(KeyboardInterrupt):
        session.step(3)
    assert session.token_ids == TOKENS[:10]
    session.step(3)


def test_a_late_interrupt_is_not_meant_for_the_next_answer(session: Session) -> None:
    expected = list(session.generate(TOKENS[:10], 3))
    session.interrupt()
    assert list(session.generate(TOKENS[:10], 3)) == expected


def test_another_prompt_of_greater_length_is_computed_anew(session: Session) -> None:
    expected = list(session.generate(TOKENS[100:140], 4))
    session.reset()
    list(session.generate(TOKENS[:10], 4))
    assert list(session.generate(TOKENS[100:140], 4)) == expected


def test_a_closed_session_says_so(checkpoint: Path) -> None:
    closed = open_model(checkpoint, device="cpu:0")
    assert closed.logits(TOKENS[:3]).dtype == torch.float32
    closed.close()
    with pytest.raises(StrawError, match="it was closed"):
        closed.step(1)


def test_the_observer_sees_every_router(session: Session) -> None:
    seen = []
    session.observer = lambda layer_idx, x, ids, weights: seen.append((layer_idx, x.shape, ids.shape, weights.clone()))
    session.prefill(TOKENS[:5])
    session.observer = None
    assert [entry[0] for entry in seen] == list(range(session.config.num_hidden_layers))
    assert all(entry[1] == (5, 256) and entry[2] == (5, 2) for entry in seen)
    for *_, weights in seen:
        assert torch.all(weights[:, 0] >= weights[:, 1])
        assert torch.allclose(weights.sum(1), torch.tensor(1.5))


@pytest.mark.parametrize("ids", [[], [-1], [512]])
def test_token_ids_outside_the_vocabulary(session: Session, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="expected one or more ids below 512"):
        session.prefill(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu', expected cpu or one of"),
        ({"device": "cuda:²"}, "device is 'cuda:²', expected"),
        ({"device": "cuda:99"}, "device is 'cuda:99', expected cpu or one of"),
        ({"dtype": "int8"}, "dtype is 'int8', expected float32 or bfloat16"),
        ({"context": 601}, "context is 601 tokens, expected 1 to 600"),
        ({"context": 0}, "context is 0 tokens"),
        ({"ladder": "1,2"}, "prep requant"),
        ({"ladder": "3"}, "not a ladder"),
        ({"prefetch": "predictor"}, "--prefetch: .* is a released checkpoint"),
        ({"slots": "1,2,3,4"}, "--slots: .* is a released checkpoint"),
    ],
)
def test_options_that_cannot_be_met(checkpoint: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(StrawError, match=message):
        open_model(checkpoint, **options)  # type: ignore[arg-type]


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"neither manifest\.json nor"):
        open_model(tmp_path)
    with pytest.raises(ArtifactError, match="no such directory"):
        open_model(tmp_path / "absent")


def test_bfloat16_stays_near_float32(checkpoint: Path, session: Session) -> None:
    exact, rounded = session.logits(TOKENS[:60]), open_model(checkpoint, dtype="bfloat16").logits(TOKENS[:60])
    divergence = torch.nn.functional.kl_div(
        rounded.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < 5e-2
