"""The model directory: what `prep layout` wrote comes back, and whatever is not as written is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from safetensors import safe_open

from prep.layout import layout
from runtime.artifact import ModelDirectory, checksum, read_checksums, safetensors_header, write_checksums, write_tables
from runtime.checkpoint import Checkpoint, dense_tensors
from runtime.config import ModelConfig
from runtime.errors import ArtifactError
from runtime.files import atomic_file, partial_path, remove_file
from runtime.manifest import (
    CHECKSUMS,
    DENSE,
    TABLES,
    Manifest,
    PlaneRecord,
    Stage,
    expert_file,
    manifest_checksum,
    read_manifest,
    write_manifest,
)
from runtime.safetensors_file import TensorSpec
from runtime.tables import empty_tables

LAYERS, EXPERTS = 2, 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write_random_checkpoint(directory, num_hidden_layers=LAYERS, n_routed_experts=EXPERTS, shard_bytes=1_000_000)
    return directory


@pytest.fixture(scope="module")
def pristine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "pristine"
    layout(source, directory)
    return directory


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def test_it_reads_what_the_checkpoint_reads(source: Path, pristine: Path) -> None:
    with closing(Checkpoint(source)) as checkpoint, ModelDirectory(pristine) as model:
        assert model.config == checkpoint.config
        assert model.raw_config == checkpoint.raw_config
        assert (list(model.planes), model.code) == (["fp4"], None)
        for name in dense_tensors(model.config):
            found, expected = model.read(name), checkpoint.read(name)
            assert name in model
            assert found.dtype == expected.dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
        for layer_idx in range(LAYERS):
            for expert_id in range(EXPERTS):
                assert torch.equal(model.read_slab(layer_idx, expert_id), checkpoint.read_slab(layer_idx, expert_id))


def test_the_safetensors_library_reads_the_dense_file(pristine: Path) -> None:
    with ModelDirectory(pristine) as model, safe_open(pristine / DENSE, framework="pt") as file:
        assert set(file.keys()) == set(dense_tensors(model.config))
        for name in file.keys():  # noqa: SIM118  (no mapping)
            assert torch.equal(file.get_tensor(name).view(torch.uint8), model.read(name).view(torch.uint8)), name


def test_checksums_are_crc32_of_slabs_and_dense_tensors(pristine: Path) -> None:
    with ModelDirectory(pristine) as model:
        found = model.read_checksums()
        stride, slab_bytes = model.planes["fp4"].slab_stride_bytes, model.planes["fp4"].slab_bytes
        assert {name: tensor.shape for name, tensor in found.items()} == {
            "fp4": (LAYERS, EXPERTS),
            "dense": (len(dense_tensors(model.config)),),
            "file:config.json": (1,),
        }
        content = model.expert_path("fp4", 1).read_bytes()
        for expert_id in range(EXPERTS):
            expected = zlib.crc32(content[expert_id * stride :][:slab_bytes])
            assert found["fp4"][1, expert_id] == expected == checksum(model.read_slab(1, expert_id))
        assert found["dense"].tolist() == [checksum(model.read(name)) for name in sorted(dense_tensors(model.config))]


def test_padding_is_zero_and_slabs_are_aligned(pristine: Path) -> None:
    with ModelDirectory(pristine) as model:
        record = model.planes["fp4"]
        assert record == PlaneRecord(slab_bytes=52_224, slab_stride_bytes=53_248, byte_order=1)
        content = model.expert_path("fp4", 0).read_bytes()
        assert len(content) == EXPERTS * record.slab_stride_bytes
        for expert_id in range(EXPERTS):
            assert not any(content[expert_id * record.slab_stride_bytes + record.slab_bytes :][: 53_248 - 52_224])


def test_v4_flash_slabs_need_no_padding() -> None:
    class Geometry:
        hidden_size, moe_intermediate_size = 4096, 2048

    expected = {"fp4": 13_369_344, "int2": 7_077_888, "quad2": 7_077_888, "base": 7_077_888, "residual": 6_291_456}
    for plane, slab_bytes in expected.items():
        assert PlaneRecord.of(plane, Geometry()) == PlaneRecord(slab_bytes, slab_bytes, 1)  # type: ignore[arg-type]


def test_manifest_round_trip(tmp_path: Path) -> None:
    planes = {"fp4": PlaneRecord(10, 4096, 1), "int2": PlaneRecord(5, 4096, 1)}
    stages = {"layout": Stage({"plane": "fp4"}, done=True), "requant": Stage({"codec": "clip"})}
    files = {expert_file("fp4", idx): 8192 for idx in range(2)} | {expert_file("int2", 0): 8192}
    manifest = Manifest({"num_hidden_layers": 2}, "f" * 64, {"a": "1 b"}, planes, "int2", files, stages)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert manifest.complete_planes() == ["fp4"]
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def _as_split(model: Path, planes: tuple[str, ...]) -> None:
    """Turns `model` into what `prep requant --codec split --consume` leaves, with `planes` present and fp4 gone."""
    manifest = read_manifest(model)
    config = ModelConfig.from_json(json.loads((model / "config.json").read_text()), model)
    files = {name: size for name, size in manifest.files.items() if not name.startswith("experts/")}
    records = {plane: PlaneRecord.of(plane, config) for plane in planes}
    for plane, record in records.items():
        for layer_idx in range(LAYERS):
            path = model / expert_file(plane, layer_idx)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes([layer_idx]) * (EXPERTS * record.slab_stride_bytes))
            files[expert_file(plane, layer_idx)] = path.stat().st_size
    checksums = read_checksums(model) | dict.fromkeys(planes, torch.zeros(LAYERS, EXPERTS, dtype=torch.int64))
    shutil.rmtree(model / "experts" / "fp4")
    write_checksums(model, checksums)
    write_tables(model, empty_tables(config, "split"))
    write_manifest(model, replace(manifest, planes=records, files=files, code="split"))


def test_base_and_residual_make_a_valid_directory(model: Path) -> None:
    _as_split(model, ("base", "residual"))
    with ModelDirectory(model) as opened:
        assert set(opened.planes) == {"base", "residual"}
        assert opened.code == "split"
        assert opened.read_slab(1, 0, "residual").tolist() == [1] * opened.planes["residual"].slab_bytes
        with pytest.raises(ArtifactError, match="plane fp4 is not present, expected one of base, residual"):
            opened.read_slab(0, 0)


def _as_two_copies(model: Path) -> None:
    """Adds what `prep requant --codec clip` leaves: int2 planes of zeros, their tables and checksums."""
    manifest = read_manifest(model)
    config = ModelConfig.from_json(json.loads((model / "config.json").read_text()), model)
    record = PlaneRecord.of("int2", config)
    files = dict(manifest.files)
    for layer_idx in range(LAYERS):
        path = model / expert_file("int2", layer_idx)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(EXPERTS * record.slab_stride_bytes))
        files[expert_file("int2", layer_idx)] = path.stat().st_size
    write_checksums(model, read_checksums(model) | {"int2": torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)})
    write_tables(model, empty_tables(config, "int2"))
    write_manifest(model, replace(manifest, planes=manifest.planes | {"int2": record}, files=files, code="int2"))


def test_tables_come_back(model: Path) -> None:
    _as_two_copies(model)
    config = ModelConfig.from_json(json.loads((model / "config.json").read_text()), model)
    tables = empty_tables(config, "int2")
    tables["int2.normalisers"][1, 2] = torch.tensor([1.0, 2.0, 3.0])
    write_tables(model, tables | empty_tables(config, "quad2"))  # quad2 is not whole: not shown
    with ModelDirectory(model) as opened:
        assert (opened.code, opened.codes, list(opened.read_tables())) == ("int2", ["int2"], ["int2.normalisers"])
        assert torch.equal(opened.read_tables()["int2.normalisers"], tables["int2.normalisers"])


TABLE_DAMAGES: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("gone", lambda m: (m / TABLES).unlink(), [TABLES, "No such file"]),
    ("torn", lambda m: _resize(m / TABLES, -1), [TABLES, "its header says"]),
    ("of none", lambda m: write_tables(m, {}), [TABLES, "tensor int2.normalisers is missing, expected F32 [2, 4, 3]"]),
    ("directory", lambda m: _make_directory(m / TABLES), [TABLES, "a directory, expected a file of prep; remove it"]),
    (
        "checksums",
        lambda m: write_checksums(m, {name: t for name, t in read_checksums(m).items() if name != "int2"}),
        [CHECKSUMS, "tensor int2 is missing, expected I64 [2, 4]"],
    ),
    ("plane", lambda m: (m / expert_file("int2", 1)).unlink(), [expert_file("int2", 1), "file is missing"]),
]


@pytest.mark.parametrize(("damage", "named"), [case[1:] for case in TABLE_DAMAGES], ids=[c[0] for c in TABLE_DAMAGES])
def test_damage_to_a_code_names_its_command(model: Path, damage: Callable[[Path], object], named: list[str]) -> None:
    _as_two_copies(model)
    damage(model)
    with pytest.raises(ArtifactError) as caught:
        ModelDirectory(model)
    assert all(part in str(caught.value) for part in named), caught.value
    assert str(caught.value).endswith(f"run: prep requant --codec clip {model}")


def test_a_code_in_use_must_be_there(model: Path) -> None:
    write_manifest(model, replace(read_manifest(model), code="quad2"))
    with pytest.raises(ArtifactError, match=r"code quad2 is in use, expected one whose planes are whole \(none\)"):
        ModelDirectory(model)


def test_the_manifest_carries_its_own_checksum(model: Path) -> None:
    content = json.loads((model / "manifest.json").read_text())
    assert content["checksum"] == manifest_checksum(content)
    assert manifest_checksum(content | {"code": "int2"}) != content["checksum"]


def test_removing_frees_a_file_that_is_open_and_spares_another_name(tmp_path: Path) -> None:
    alone, shared, link, target = (tmp_path / name for name in ("alone", "shared", "link", "target"))
    for path in (alone, shared, target):
        path.write_bytes(b"12345")
    (tmp_path / "other").hardlink_to(shared)
    link.symlink_to(target)
    with alone.open("rb") as held:
        for path in (alone, shared, link, tmp_path / "never was"):
            remove_file(path)
        assert os.fstat(held.fileno()).st_size == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert (tmp_path / "other").read_bytes() == b"12345"


@pytest.mark.parametrize("planes", [("base",), ("residual",), ("int2",)])
def test_planes_without_fp4_values_are_refused(model: Path, planes: tuple[str, ...]) -> None:
    _as_split(model, planes)
    with pytest.raises(ArtifactError, match=f"whole planes: {planes[0]}.*expected fp4 or base and residual"):
        ModelDirectory(model)


def test_a_plane_being_written_beside_fp4_is_not_seen(model: Path) -> None:
    manifest = read_manifest(model)
    record = PlaneRecord.of("int2", ModelConfig.from_json(json.loads((model / "config.json").read_text()), model))
    path = model / expert_file("int2", 0)
    path.parent.mkdir()
    path.write_bytes(bytes(EXPERTS * record.slab_stride_bytes))
    stages = manifest.stages | {"requant": Stage({"codec": "clip"})}
    files = manifest.files | {expert_file("int2", 0): path.stat().st_size}
    write_checksums(model, read_checksums(model) | {"int2": torch.full((LAYERS, EXPERTS), -1)})
    write_manifest(model, replace(manifest, planes=manifest.planes | {"int2": record}, files=files, stages=stages))
    with ModelDirectory(model) as opened:
        assert list(opened.planes) == ["fp4"]


def _edit_manifest(model: Path, edit: Callable[[dict], object]) -> None:
    raw = json.loads((model / "manifest.json").read_text())
    edit(raw)
    (model / "manifest.json").write_text(json.dumps(raw))


def _resize(path: Path, by: int) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + by)


def _write_dense(model: Path, edit: Callable[[dict[str, TensorSpec]], object]) -> None:
    """Puts a dense file with edited specs in place, and its size in the manifest."""
    config = ModelConfig.from_json(json.loads((model / "config.json").read_text()), model)
    specs = dense_tensors(config)
    edit(specs)
    header = safetensors_header(specs)
    (model / DENSE).write_bytes(header + bytes(sum(spec.size_bytes for spec in specs.values())))
    _edit_manifest(model, lambda raw: raw["files"].update({DENSE: (model / DENSE).stat().st_size}))


def _write_config(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    _edit_manifest(model, lambda raw: raw["files"].update({"config.json": len(text)}))


def _other_config(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    _write_config(model, json.dumps(raw | {"sliding_window": 8}))


def _edited(*place: str, **values: object) -> Callable[[Path], None]:
    """Damage: `values` put into the manifest's object at `place`."""

    def edit(raw: dict) -> None:
        for key in place:
            raw = raw[key]
        raw.update(values)

    return lambda model: _edit_manifest(model, edit)


def _make_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


SLABS = expert_file("fp4", 1)
# (id, damage, what the one line must hold: the file, what was found, what was expected)
DAMAGES: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("no manifest", lambda m: (m / "manifest.json").unlink(), ["manifest.json", "cannot be read"]),
    ("torn manifest", lambda m: _resize(m / "manifest.json", -9), ["manifest.json", "not a manifest", "expected JSON"]),
    ("list manifest", lambda m: (m / "manifest.json").write_text("[]"), ["manifest.json", "not a manifest"]),
    ("schema", lambda m: _edit_manifest(m, lambda raw: raw.update(schema_version=2)), ["schema version 2, expected 1"]),
    ("key gone", lambda m: _edit_manifest(m, lambda raw: raw.pop("files")), ["manifest.json", "'files'"]),
    (
        "layers infinite",
        _edited("config", num_hidden_layers=float("inf")),
        ["not a manifest", "num_hidden_layers is inf"],
    ),
    ("layers none", _edited("config", num_hidden_layers=0), ["num_hidden_layers is 0, expected at least 1"]),
    ("size infinite", _edited("files", **{DENSE: float("inf")}), [f"{DENSE} is inf"]),
    ("size of a text", _edited("files", **{DENSE: "5"}), [f"{DENSE} is '5'"]),
    ("absolute name", _edited("files", **{"/etc/hosts": 5}), ["file /etc/hosts"]),
    ("fingerprint 5", _edited(fingerprint=5), ["fingerprint is 5, expected str"]),
    ("fingerprint null", _edited(fingerprint=None), ["fingerprint is None"]),
    ("code 5", _edited(code=5), ["code is 5, expected str or NoneType"]),
    ("checksum", _edited(checksum="x"), ["checksum is 'x', expected int"]),
    ("stride 0", _edited("planes", "fp4", slab_stride_bytes=0), ["slab_stride_bytes is 0, expected at least"]),
    ("stride x", _edited("planes", "fp4", slab_stride_bytes="x"), ["slab_stride_bytes is 'x'"]),
    ("done 1", _edited("stages", "layout", done=1), ["done is 1, expected bool"]),
    ("settings", _edited("stages", "layout", settings=[]), ["settings is []"]),
    ("deep manifest", lambda m: (m / "manifest.json").write_text("[" * 100_000), ["not a manifest (RecursionError"]),
    ("many digits", lambda m: (m / "manifest.json").write_text("9" * 5_000), ["not a manifest (ValueError"]),
    ("deep config", lambda m: _write_config(m, "[" * 100_000), ["config.json", "not the checkpoint's config"]),
    ("checksums a directory", lambda m: _make_directory(m / CHECKSUMS), [CHECKSUMS, "a directory, expected", "remove"]),
    ("slabs a directory", lambda m: _make_directory(m / SLABS), [SLABS, "a directory, expected 212,992 bytes"]),
    ("slabs longer", lambda m: _resize(m / SLABS, 1), [SLABS, "212,993 bytes, expected 212,992 bytes"]),
    ("slabs shorter", lambda m: _resize(m / SLABS, -4096), [SLABS, "208,896 bytes, expected 212,992 bytes"]),
    ("slabs gone", lambda m: (m / SLABS).unlink(), [SLABS, "file is missing, expected 212,992 bytes"]),
    ("dense shorter", lambda m: _resize(m / DENSE, -1), [DENSE, "bytes, expected"]),
    ("dense tensor gone", lambda m: _write_dense(m, lambda s: s.pop("norm.weight")), [DENSE, "norm.weight is missing"]),
    (
        "dense dtype",
        lambda m: _write_dense(m, lambda s: s.update({"norm.weight": TensorSpec("F16", (256,))})),
        [DENSE, "norm.weight is F16 [256], expected BF16 [256]"],
    ),
    (
        "dense shape",
        lambda m: _write_dense(m, lambda s: s.update({"norm.weight": TensorSpec("BF16", (128,))})),
        [DENSE, "norm.weight is BF16 [128], expected BF16 [256]"],
    ),
    (
        "dense stranger",
        lambda m: _write_dense(m, lambda s: s.update({"odd": TensorSpec("BF16", (1,))})),
        [DENSE, "tensor odd is not one of the model's"],
    ),
    ("config not json", lambda m: _write_config(m, "{"), ["config.json", "not the checkpoint's config"]),
    ("config of another", _other_config, ["config.json", "not the config that manifest.json records"]),
    ("checksums gone", lambda m: (m / CHECKSUMS).unlink(), [CHECKSUMS, "file is missing"]),
    ("checksums torn", lambda m: _resize(m / CHECKSUMS, -1), [CHECKSUMS, "bytes, its header says"]),
    ("checksums of none", lambda m: write_checksums(m, {}), [CHECKSUMS, "tensor dense is missing, expected I64"]),
    (
        "byte order",
        lambda m: _edit_manifest(m, lambda raw: raw["planes"]["fp4"].update(byte_order=2)),
        ["manifest.json", "byte_order=2", "byte_order=1"],
    ),
    (
        "stage open",
        lambda m: _edit_manifest(m, lambda raw: raw["stages"]["layout"].update(done=False)),
        ["manifest.json", "prep layout did not finish", "expected fp4 or base and residual"],
    ),
    (
        "layer unrecorded",
        lambda m: _edit_manifest(m, lambda raw: raw["files"].pop(SLABS)),
        ["whole planes: none", "expected fp4 or base and residual"],
    ),
]


@pytest.mark.parametrize(("damage", "named"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_damage_is_one_line_with_file_found_expected_remedy(
    model: Path, damage: Callable[[Path], object], named: list[str]
) -> None:
    damage(model)
    with pytest.raises(ArtifactError) as caught:
        ModelDirectory(model)
    message = str(caught.value)
    assert all(part in message for part in named), message
    assert message.startswith(str(model))
    assert "expected" in message or "says" in message
    assert message.endswith(f"run: prep layout CHECKPOINT {model}")
    assert "\n" not in message


def test_the_repair_the_message_names_repairs(source: Path, model: Path) -> None:
    for name in (SLABS, DENSE, "config.json"):
        _resize(model / name, -1)
    layout(source, model)
    ModelDirectory(model).close()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere: no such directory, expected a model directory; run: prep layout"):
        ModelDirectory(tmp_path / "nowhere")


def test_a_slab_file_cut_after_opening_fails_in_the_read(model: Path) -> None:
    with ModelDirectory(model) as opened:
        _resize(model / SLABS, -53_248)
        opened.read_slab(1, 2)
        with pytest.raises(
            ArtifactError, match=f"{SLABS}: expert 3 ends after 0 bytes, expected 52,224; run: prep layout"
        ):
            opened.read_slab(1, 3)
        (model / SLABS).unlink()
        with pytest.raises(ArtifactError, match=f"{SLABS}: reading expert 0 failed"):
            opened.read_slab(1, 0)


def test_closing_twice_is_allowed(pristine: Path) -> None:
    model = ModelDirectory(pristine)
    model.close()
    model.close()


def test_atomic_file_leaves_the_old_content_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with atomic_file(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError), atomic_file(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert not partial_path(path).exists()
