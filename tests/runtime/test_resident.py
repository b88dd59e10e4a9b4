"""All experts resident at one precision: the same bits from either spelling of FP4, and each 2-bit code's own values."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from random_checkpoint import write_random_checkpoint

from kernels.expert import expert_ffn
from kernels.formats import CODES, PLANES, dequantize_fp4, dequantize_int2, dequantize_quad2, split_slab
from kernels.split import dequantize_base
from prep.layout import layout
from prep.requant import requant, use_code
from runtime.artifact import ModelDirectory
from runtime.checkpoint import Checkpoint
from runtime.errors import ArtifactError
from runtime.manifest import CODECS
from runtime.resident import ResidentExperts, SlabSource, precision_planes
from runtime.tables import layer_tables, split_table

EXPERTS, CPU = 3, torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write_random_checkpoint(directory, num_hidden_layers=2, n_routed_experts=EXPERTS)
    return directory


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ "all" has fp4 and every code, "split" base and residual only, "plain" fp4 only."""
    root = tmp_path_factory.mktemp("whole")
    layout(source, root / "plain")
    shutil.copytree(root / "plain", root / "all")
    for codec in CODECS:
        requant(root / "all", codec)
    shutil.copytree(root / "all", root / "split")
    requant(root / "split", "split", consume=True)
    return {name: root / name for name in ("plain", "all", "split")}


def outputs(source: SlabSource, **options: str | None) -> torch.Tensor:
    """What two layers give for a few tokens."""
    experts = ResidentExperts(source, torch.float32, CPU, round_inputs=False, **options)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    x, weights = torch.randn(7, 256, generator=random), torch.rand(7, 2, generator=random)
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:2] for _ in range(7)])
    return torch.stack([experts(layer_idx, x, ids, weights) for layer_idx in range(2)])


def test_fp4_is_the_same_from_checkpoint_fp4_and_split(source: Path, whole: dict[str, Path]) -> None:
    with closing(Checkpoint(source)) as checkpoint:
        expected = outputs(checkpoint)
    assert bool(expected.isfinite().all())
    for name in whole:
        with ModelDirectory(whole[name]) as model:
            assert torch.equal(outputs(model), expected), name
            assert torch.equal(outputs(model, code="split" if name != "plain" else None), expected), name


@pytest.mark.parametrize("code", CODES)
def test_each_code_serves_its_own_values(whole: dict[str, Path], code: str) -> None:
    with ModelDirectory(whole["all"]) as model:
        experts = ResidentExperts(model, torch.float32, CPU, False, precision="2bit", code=code)
        plane, layer = CODES[code].planes[0], layer_tables(model.read_tables(), code, 1)
        assert experts.planes == (plane,)
        for expert_id in range(EXPERTS):
            matrices = split_slab(model.read_slab(1, expert_id, plane), PLANES[plane], 256, 128)
            for projection, (matrix, found) in enumerate(zip(matrices, experts.weights(1, expert_id), strict=True)):
                if code == "int2":
                    expected = dequantize_int2(matrix, layer["int2.normalisers"][expert_id, projection])
                elif code == "quad2":
                    normaliser = layer["quad2.normalisers"][expert_id, projection]
                    expected = dequantize_quad2(matrix, layer["quad2.levels"][projection], normaliser)
                else:
                    expected = dequantize_base(matrix, split_table(layer, projection))
                assert torch.equal(found, expected)


@pytest.mark.parametrize(("code", "bound"), [("int2", 0.36), ("quad2", 0.33), ("split", 0.34)])
def test_two_bits_are_near_fp4(whole: dict[str, Path], code: str, bound: float) -> None:
    """Weights and outputs; a wrong table, byte or normaliser gives an error near 1 or above."""
    with ModelDirectory(whole["all"]) as model:
        coarse = ResidentExperts(model, torch.float32, CPU, False, precision="2bit", code=code)
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
        for layer_idx in range(2):
            slab = split_slab(model.read_slab(layer_idx, 2), PLANES["fp4"], 256, 128)
            exact, found = [dequantize_fp4(matrix) for matrix in slab], coarse.weights(layer_idx, 2)
            for a, b in zip(exact, found, strict=True):
                assert float((a - b).norm() / a.norm()) < bound
            a, b = expert_ffn(x, *exact, limit=10.0), expert_ffn(x, *found, limit=10.0)
            assert float((a - b).norm() / a.norm()) < 2 * bound


def test_the_code_in_use_is_the_one_served(whole: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole["all"], tmp_path / "model"))
    use_code(copy, "quad2")
    with ModelDirectory(copy) as model:
        assert precision_planes(model, "2bit") == ("quad2",)
        assert precision_planes(model, "fp4") == ("fp4",)
        assert precision_planes(model, "fp4", "split") == ("base", "residual")
    with ModelDirectory(whole["split"]) as model:
        assert precision_planes(model, "fp4", "int2") == ("base", "residual")


def test_a_precision_that_is_not_there_is_named(source: Path, whole: dict[str, Path]) -> None:
    with closing(Checkpoint(source)) as checkpoint, pytest.raises(ArtifactError, match="has no 2-bit precision"):
        outputs(checkpoint, precision="2bit")
    with ModelDirectory(whole["plain"]) as model:
        with pytest.raises(ArtifactError, match=r"code None is not present, expected .*\(none\); run: prep requant"):
            outputs(model, precision="2bit")
        with pytest.raises(ValueError, match="precision is 'int2', expected fp4 or 2bit"):
            outputs(model, precision="int2")
