"""Snapshots, resets and the position as a mask: what a State promises beyond parity of the logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_model import PlainModel

TINY_RAW = Path(__file__).parents[1] / "golden" / "tiny_raw"
TOKENS = torch.randint(2, 512, (200,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    return PlainModel.open(TINY_RAW)


@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 129])
def test_restore_then_the_same_tokens_gives_the_same_bits(plain: PlainModel, length: int) -> None:
    state = plain.state()
    plain.logits(TOKENS[:length], state)
    snapshot = state.snapshot()
    expected = plain.logits(TOKENS[length : length + 20], state)
    plain.logits(TOKENS[100:140], state)
    state.restore(snapshot)
    assert state.length == length
    assert torch.equal(plain.logits(TOKENS[length : length + 20], state), expected)


def test_a_snapshot_survives_a_reset_and_another_sequence(plain: PlainModel) -> None:
    state = plain.state()
    plain.logits(TOKENS[:50], state)
    snapshot = state.snapshot()
    expected = plain.logits(TOKENS[50:60], state)
    state.reset()
    plain.logits(TOKENS.flip(0), state)
    state.restore(snapshot)
    assert torch.equal(plain.logits(TOKENS[50:60], state), expected)


def test_reset_forgets_everything(plain: PlainModel) -> None:
    state = plain.state()
    fresh = plain.logits(TOKENS[:40], state)
    plain.logits(TOKENS.flip(0)[:130], state)
    state.reset()
    assert torch.equal(plain.logits(TOKENS[:40], state), fresh)


def test_the_context_size_changes_no_choice(plain: PlainModel) -> None:
    small, large = plain.logits(TOKENS, plain.state(200)), plain.logits(TOKENS, plain.state(1600))
    assert torch.allclose(small, large, atol=1e-5)


def test_a_step_never_asks_the_host_for_the_position(plain: PlainModel) -> None:
    """One graph must serve every step: the same step function on a meta-like position gives the same result when only the
    device scalar differs, so a state moved by hand to another length decodes as one that walked there."""
    walked, jumped = plain.state(), plain.state()
    plain.logits(TOKENS[:77], walked)
    for target, source in zip(jumped._live(512), walked._live(512), strict=True):
        target.copy_(source)
    jumped.position.copy_(walked.position)  # the host's `length` stays 0
    assert torch.equal(plain.logits(TOKENS[77:78], walked), plain.logits(TOKENS[77:78], jumped))
