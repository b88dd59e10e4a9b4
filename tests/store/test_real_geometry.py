"""V4-Flash's real shapes with few experts: 64 heads of 512, slabs of 13 MB, streamed through the smallest legal pools."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prep.synth import synth
from prep.synth_plan import SynthSettings
from prep.verify import verify
from runtime import open_model
from runtime.artifact import ModelDirectory
from runtime.engine import Session

NUM_EXPERTS, NUM_PICKS, VOCAB = 8, 6, 1024
TOKENS = torch.randint(2, VOCAB, (4,), generator=torch.Generator().manual_seed(5)).tolist()
DISK_BYTES = {"split": 259_414_652, "quad": 316_037_756}
EXPERT_BYTES = {
    "split": {"base": 7_077_888, "residual": 6_291_456},
    "quad": {"fp4": 13_369_344, "quad2": 7_077_888},
}
LAYOUTS = ("split", "quad")
pytestmark = pytest.mark.timeout(250)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A directory of each layout, made when first asked for, removed at the end: 576 MB that pytest would keep."""

    class Made(dict[str, Path]):
        def __missing__(self, codec: str) -> Path:
            directory = tmp_path_factory.mktemp("real") / codec
            settings = SynthSettings(layers=1, experts=NUM_EXPERTS, vocab=VOCAB, codec=codec)
            synth(directory, settings)
            self[codec] = directory
            return directory

    made = Made()
    yield made
    for directory in made.values():
        shutil.rmtree(directory)


@contextmanager
def opened(directory: Path, **options: object) -> Iterator[Session]:
    session = open_model(directory, **options)  # type: ignore[arg-type]
    try:
        yield session
    finally:
        session.close()


def run(directory: Path, **options: object) -> Tensor:
    """Logits [T, V] of a short prefill and two steps, all finite and of a sane size."""
    with opened(directory, **options) as session:
        logits = [session.prefill(TOKENS[:2]), *(session.step(token_id) for token_id in TOKENS[2:])]
        session._experts.check_balance()  # type: ignore[attr-defined]
    found = torch.stack(logits)
    assert bool(found.isfinite().all())
    assert 0.1 < float(found.std()) < 10
    return found


@pytest.mark.parametrize("layout", [pytest.param("split", marks=pytest.mark.slow), "quad"])
def test_sizes_are_as_stated(models: dict[str, Path], layout: str) -> None:
    directory = models[layout]
    with ModelDirectory(directory) as model:
        sizes = {plane: record.slab_stride_bytes for plane, record in model.planes.items()}
        slabs_and_dense = sum(size for name, size in model.manifest.files.items() if name.endswith((".bin", "tensors")))
        assert (model.config.head_dim, model.config.num_attention_heads, model.config.layer_ratios) == (512, 64, (0,))
    assert sizes == EXPERT_BYTES[layout]
    assert slabs_and_dense == DISK_BYTES[layout]
    assert not (directory / ".unique").exists()
    assert verify(directory) == []


@pytest.mark.slow  # 20 s: every step converts six experts of 25 million weights
@pytest.mark.parametrize("layout", LAYOUTS)
def test_streaming_changes_nothing(models: dict[str, Path], layout: str) -> None:
    held = run(models[layout], slots=(NUM_EXPERTS, 0, 0, 0))
    assert torch.equal(run(models[layout], slots=(NUM_PICKS, 0, 0, 0)), held)


@pytest.mark.slow
def test_both_layouts_give_the_same_at_exact(models: dict[str, Path]) -> None:
    split, two_copies = (run(models[layout], slots=(NUM_PICKS, 1, 0, 0)) for layout in LAYOUTS)
    assert torch.equal(split, two_copies)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_two_bit_ladder_runs(models: dict[str, Path], layout: str) -> None:
    exact = run(models[layout], slots=(NUM_PICKS, 0, 0, 0))
    mixed = run(models[layout], ladder="2,4", slots=(NUM_PICKS, 0, NUM_PICKS, 0))
    assert not torch.equal(mixed, exact)


def test_one_token_through_the_smallest_pools(models: dict[str, Path]) -> None:
    """The quick one: a token at exact, and the same token at 2-bit for the picks behind the second."""
    with opened(models["quad"], slots=(NUM_PICKS, 0, 0, 0)) as session:
        exact = session.prefill(TOKENS[:1])
    with opened(models["quad"], slots=(NUM_EXPERTS, 0, 0, 0)) as session:
        assert torch.equal(session.prefill(TOKENS[:1]), exact)
    with opened(models["quad"], ladder="2,6", slots=(NUM_PICKS, 0, NUM_PICKS, 0)) as session:
        mixed = session.prefill(TOKENS[:1])
    assert bool(mixed.isfinite().all())
    assert 0 < float((mixed - exact).norm() / exact.norm()) < 1
