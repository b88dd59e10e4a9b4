"""The released checkpoint: its reader against the safetensors library, its tensor table against the release's totals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from random_checkpoint import TINY, write_random_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file

from kernels.formats import PLANES, split_slab
from runtime.checkpoint import INDEX, Checkpoint, dense_layer_tensors, expert_tensors, model_tensors, write_checkpoint
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.safetensors_file import TensorSpec

V4_FLASH = TINY | {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers, not to be changed."""
    directory = tmp_path_factory.mktemp("original")
    write_random_checkpoint(directory, num_hidden_layers=3, n_routed_experts=4, compress_ratios=[0, 4, 128, 0])
    return directory


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "source"))


def draft_stage(config: ModelConfig, stage_idx: int) -> dict[str, TensorSpec]:
    """The released draft block: a layer without compressor and with a learned router, two projections, an own head mix."""
    hidden, streams = config.hidden_size, config.hc_mult
    plain = config.layer_ratios.index(0)
    prefix = f"layers.{plain}."
    block = dense_layer_tensors(config, plain)
    for expert_id in range(config.n_routed_experts):
        block |= expert_tensors(config, plain, expert_id)
    specs = {name.removeprefix(prefix): spec for name, spec in block.items()}
    specs.pop("ffn.gate.tid2eid", None)
    specs["ffn.gate.bias"] = TensorSpec("F32", (config.n_routed_experts,))
    for name in ("e_proj", "h_proj"):
        specs[f"{name}.weight"] = TensorSpec("F8_E4M3", (hidden, hidden))
        specs[f"{name}.scale"] = TensorSpec("F8_E8M0", (hidden // 128, hidden // 128))
    specs |= {f"{name}.weight": TensorSpec("BF16", (hidden,)) for name in ("enorm", "hnorm", "norm")}
    specs["hc_head_fn"] = TensorSpec("F32", (streams, streams * hidden))
    specs |= {"hc_head_base": TensorSpec("F32", (streams,)), "hc_head_scale": TensorSpec("F32", (1,))}
    return {f"mtp.{stage_idx}.{name}": spec for name, spec in specs.items()}


def add_draft_stages(directory: Path, count: int) -> list[str]:
    """Appends shards with draft tensors, whose payload nobody may read, to a checkpoint; their names."""
    raw = json.loads((directory / "config.json").read_text())
    config = ModelConfig.from_json(raw, directory / "config.json")
    index = json.loads((directory / INDEX).read_text())
    names: list[str] = []
    for stage_idx in range(count):
        shard = f"model-draft-{stage_idx}.safetensors"
        tensors = {
            name: torch.zeros(spec.size_bytes, dtype=torch.uint8)
            for name, spec in draft_stage(config, stage_idx).items()
        }
        save_file(tensors, directory / shard)
        index["weight_map"] |= dict.fromkeys(tensors, shard)
        names += tensors
    (directory / INDEX).write_text(json.dumps(index))
    return names


def library_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor as the safetensors library reads it."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (no mapping)
                yield name, shard.get_tensor(name)


def write_raw(path: Path, tensors: dict[str, tuple], payload_bytes: int) -> None:
    """A safetensors file of zeros with this header: name -> dtype, shape, data_offsets."""
    keys = ("dtype", "shape", "data_offsets")
    header = json.dumps({name: dict(zip(keys, values, strict=True)) for name, values in tensors.items()}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(payload_bytes))


def test_v4_flash_table_has_the_released_names_and_bytes() -> None:
    config = ModelConfig.from_json(V4_FLASH, Path("config.json"))
    main, draft = model_tensors(config), draft_stage(config, 0)
    assert (len(main), sum(spec.size_bytes for spec in main.values())) == (67_612, 156_015_698_140)
    assert (len(draft), sum(spec.size_bytes for spec in draft.values())) == (1_575, 3_593_787_756)
    assert len(main | draft) == 69_187
    assert sum(spec.size_bytes for spec in (main | draft).values()) == 159_609_485_896


@pytest.mark.parametrize("shard_bytes", [100_000, 4_000_000, 1_000_000_000])
def test_every_tensor_is_read_as_the_library_reads_it(original: Path, tmp_path: Path, shard_bytes: int) -> None:
    raw = json.loads((original / "config.json").read_text())
    write_checkpoint(tmp_path, raw, library_tensors(original), shard_bytes)
    with closing(Checkpoint(tmp_path)) as checkpoint:
        names = set()
        for name, expected in library_tensors(tmp_path):
            found = checkpoint.read(name)
            assert found.dtype == expected.dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
            names.add(name)
        assert names == set(model_tensors(checkpoint.config))
        assert (len(set(checkpoint.shard_of.values())) > 20) == (shard_bytes == 100_000)


def test_slab_holds_the_experts_matrices(original: Path) -> None:
    with closing(Checkpoint(original)) as checkpoint:
        slab = checkpoint.read_slab(1, 3)
        for part, matrix in zip(("w1", "w3", "w2"), split_slab(slab, PLANES["fp4"], 256, 128), strict=True):
            stem = f"layers.1.ffn.experts.3.{part}"
            assert matrix.scales is not None
            assert torch.equal(matrix.codes, checkpoint.read(f"{stem}.weight").view(torch.uint8))
            assert torch.equal(matrix.scales, checkpoint.read(f"{stem}.scale").view(torch.uint8))


# (draft stages, compress_ratios): the April release and the 0731 one
@pytest.mark.parametrize(("stages", "ratios"), [(1, [0, 4, 128, 0]), (3, [0, 4, 128, 0, 0, 0])])
def test_draft_stages_are_known_and_unread(source: Path, stages: int, ratios: list[int]) -> None:
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"compress_ratios": ratios}))
    names = add_draft_stages(source, stages)
    with closing(Checkpoint(source)) as checkpoint:
        assert sorted(checkpoint.draft_tensors()) == sorted(names)
        assert checkpoint.config.layer_ratios == (0, 4, 128)
        assert not any(name.startswith("mtp.") for name in model_tensors(checkpoint.config))


def test_opening_reads_headers_only(source: Path) -> None:
    """A shard whose payload is a hole of 40 GB opens at once: nothing but its header is looked at."""
    header = json.dumps({"mtp.0.huge": {"dtype": "U8", "shape": [40 << 30], "data_offsets": [0, 40 << 30]}}).encode()
    with (source / "model-huge.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (40 << 30))
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["mtp.0.huge"] = "model-huge.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    Checkpoint(source).close()


def test_tensors_of_another_model_are_refused(source: Path) -> None:
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["model.layers.0.q_proj.weight"] = next(iter(index["weight_map"].values()))
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 tensors that config.json does not imply, first 'model\.layers\.0"):
        Checkpoint(source)


@pytest.mark.parametrize("name", ["", ".", "..", "a\0b", "a\nb", "../model.safetensors", "/etc/passwd", "\ud800"])
def test_a_shard_name_that_is_no_file_name_is_refused(source: Path, name: str) -> None:
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["norm.weight"] = name
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=f"{INDEX}: shard '.*', expected the name of a file here; fetch"
    ) as caught:
        Checkpoint(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, "[]", '{"weight_map": {"norm.weight": 5}}'])
@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_damaged_json_is_refused_by_name(source: Path, name: str, content: str) -> None:
    (source / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"^{source / name}: .*, expected .*; "):
        Checkpoint(source)


@pytest.mark.parametrize("metadata", [None, 5, [], "x", {"total_size": "many"}])
def test_the_indexs_metadata_does_not_matter(source: Path, metadata: object) -> None:
    index = json.loads((source / INDEX).read_text())
    (source / INDEX).write_text(json.dumps(index | {"metadata": metadata}))
    Checkpoint(source).close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("count", [10**9, 10**300])
def test_more_experts_than_the_index_can_hold_are_refused_at_once(source: Path, count: int) -> None:
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"n_routed_experts": count}))
    with pytest.raises(CheckpointError, match=rf"{INDEX}: [0-9,]+ tensors, expected more than the [0-9,]+ of the"):
        Checkpoint(source)


@pytest.mark.parametrize("dtype", ["F64", "F4", 5, None])
def test_an_unknown_dtype_in_a_draft_stage_does_not_matter(source: Path, dtype: object) -> None:
    write_raw(source / "model-draft.safetensors", {"mtp.0.new": (dtype, [2], [0, 16])}, 16)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["mtp.0.new"] = "model-draft.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    with closing(Checkpoint(source)) as checkpoint:
        assert checkpoint.draft_tensors() == ["mtp.0.new"]
        with pytest.raises(CheckpointError, match=r"model-draft.safetensors: mtp.0.new is .*, expected one of BF16"):
            checkpoint.read("mtp.0.new")


def test_a_shard_cut_after_opening_fails_in_the_read(source: Path) -> None:
    with closing(Checkpoint(source)) as checkpoint:
        shard = source / checkpoint.shard_of["norm.weight"]
        with shard.open("r+b") as file:
            file.truncate(100_000)
        with pytest.raises(CheckpointError, match=f"{shard}: .* ends after [0-9,]+ bytes, expected"):
            for name in checkpoint.shard_of:
                checkpoint.read(name)
