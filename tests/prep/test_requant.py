"""`prep requant` as a function and as a killed process: bytes, interruption, consumption, locks, disk, repair."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.formats import CODES, PLANES, Matrix, dequantize_fp4, split_slab, unpack_codes
from kernels.split import merge_split
from prep import requant as requant_module
from prep import table_training
from prep.codecs import Shape, encode, fp4_matrices, train
from prep.consume import consume_fp4_layer
from prep.jobs import LOCK
from prep.layout import layout
from prep.requant import describe_requant, requant, use_code
from prep.requant_plan import plan_requant, unfinished_layers
from prep.solvers.split import exponents_present
from runtime.artifact import ModelDirectory, read_checksums, read_tables, write_checksums, write_tables
from runtime.errors import ArtifactError
from runtime.manifest import CHECKSUMS, CODECS, MANIFEST, TABLES, expert_file, read_manifest, write_manifest
from runtime.tables import layer_tables, split_table

LAYERS, EXPERTS = 2, 5  # five: the last batch is not full
SHAPE = Shape(256, 128)
trained: dict[tuple[Any, ...], Any] = {}


def train_once(code: str, sample: Matrix, present: Tensor | None) -> dict[str, Tensor]:
    """`train`, each sample once a session: the same result, without the time."""
    key = (code, zlib.crc32(sample.codes.contiguous().numpy().data))
    if key not in trained:
        trained[key] = train(code, sample, present)
    return trained[key]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_training, "train", train_once)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write_random_checkpoint(directory, num_hidden_layers=LAYERS, n_routed_experts=EXPERTS)
    edit_tensors(directory, lambda name: ".experts." in name and name.endswith("weight"), put_minus_zeros)
    return directory


def edit_tensors(directory: Path, is_meant: Callable[[str], bool], edit: Callable[[Tensor], object]) -> None:
    """Lets `edit` change the bytes of the tensors whose names are meant."""
    for shard in directory.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            if is_meant(name):
                edit(tensor.view(torch.uint8))
        save_file(tensors, shard)


def put_minus_zeros(codes: Tensor) -> None:
    """-0 beside other codes, and whole groups of it."""
    if codes.dtype == torch.uint8 and codes.shape[-1] in (64, 128):
        codes[::7, 3::5] = codes[::7, 3::5] & 0xF0 | 8
        codes[5, :16] = 0x88


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "model"
    layout(source, directory)
    return directory


@pytest.fixture(scope="module")
def whole(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Codec -> what an uninterrupted run leaves; "consumed" after split with consumption."""
    root, made = tmp_path_factory.mktemp("whole"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_training, "train", train_once)
        for codec in (*CODECS, "consumed"):
            made[codec] = Path(shutil.copytree(plain, root / codec))
            is_consumed = codec == "consumed"
            requant(made[codec], "split" if is_consumed else codec, consume=is_consumed)
    return made


@pytest.fixture
def model(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_manifest_is_true(model: Path) -> None:
    for name, size_bytes in read_manifest(model).files.items():
        assert (model / name).stat().st_size == size_bytes, name


@pytest.mark.parametrize("codec", CODECS)
def test_every_slab_and_table_is_what_the_solver_gives(whole: dict[str, Path], codec: str) -> None:
    code = CODECS[codec]
    with ModelDirectory(whole[codec]) as model:
        assert (model.code, model.codes) == (code, [code])
        assert model.manifest.stages[f"requant --codec {codec}"].done
        tables, checksums = model.read_tables(), model.read_checksums()
        for layer_idx in range(LAYERS):
            slabs = torch.stack([model.read_slab(layer_idx, e) for e in range(EXPERTS)])
            matrices = fp4_matrices({"fp4": slabs}, SHAPE)
            rows = layer_tables(tables, code, layer_idx)
            for projection, matrix in enumerate(matrices):
                assert matrix.scales is not None
                table = train_once(code, matrix, exponents_present(matrix.scales))
                assert all(torch.equal(rows[name][projection], part) for name, part in table.items())
            wanted = {
                p: torch.zeros(EXPERTS, PLANES[p].slab_bytes(*SHAPE), dtype=torch.uint8) for p in CODES[code].planes
            }
            normalisers = encode(code, matrices, rows, wanted)
            if normalisers is not None:
                assert torch.equal(rows[f"{code}.normalisers"], normalisers)
            for plane, slabs in wanted.items():
                for expert_id, slab in enumerate(slabs):
                    assert torch.equal(model.read_slab(layer_idx, expert_id, plane), slab)
                    assert checksums[plane][layer_idx, expert_id] == zlib.crc32(slab.numpy().data)


@pytest.mark.parametrize("codec", CODECS)
def test_padding_is_zero(whole: dict[str, Path], codec: str) -> None:
    for plane, record in read_manifest(whole[codec]).planes.items():
        content = (whole[codec] / expert_file(plane, 1)).read_bytes()
        assert len(content) == EXPERTS * record.slab_stride_bytes
        for begin in range(0, len(content), record.slab_stride_bytes):
            assert not any(content[begin + record.slab_bytes : begin + record.slab_stride_bytes])


def test_split_gives_every_code_and_exponent_back(whole: dict[str, Path]) -> None:
    with ModelDirectory(whole["split"]) as model:
        tables = model.read_tables()
        for layer_idx, expert_id in itertools.product(range(LAYERS), range(EXPERTS)):
            exact, base, residual = (
                split_slab(model.read_slab(layer_idx, expert_id, plane), PLANES[plane], *SHAPE)
                for plane in ("fp4", "base", "residual")
            )
            for projection in range(3):
                table = split_table(layer_tables(tables, "split", layer_idx), projection)
                merged = merge_split(base[projection], residual[projection], table)
                codes = unpack_codes(exact[projection].codes, 4)
                assert torch.equal(unpack_codes(merged.codes, 4), codes.where(codes != 8, 0))
                assert torch.equal(merged.scales, exact[projection].scales)
                assert torch.equal(dequantize_fp4(merged), dequantize_fp4(exact[projection]))


@pytest.mark.parametrize("codec", ["clip", "quad"])
def test_base_and_residual_are_as_good_a_source_as_fp4(whole: dict[str, Path], tmp_path: Path, codec: str) -> None:
    model = Path(shutil.copytree(whole["consumed"], tmp_path / "model"))
    requant(model, codec)
    code = CODECS[codec]
    with ModelDirectory(model) as got, ModelDirectory(whole[codec]) as expected:
        assert (got.code, set(got.planes)) == (code, {"base", "residual", code})
        for name, table in expected.read_tables().items():
            assert torch.equal(got.read_tables()[name], table)
        for idx in range(LAYERS):
            assert got.expert_path(code, idx).read_bytes() == expected.expert_path(code, idx).read_bytes()


def test_the_default_is_quad(model: Path, whole: dict[str, Path]) -> None:
    requant(model)
    assert contents(model) == contents(whole["quad"])


def test_a_finished_run_is_a_no_op(whole: dict[str, Path]) -> None:
    for codec in CODECS:
        before = {path: path.stat().st_mtime_ns for path in whole[codec].rglob("*")}
        assert requant(whole[codec], codec).todo == []
        assert {path: path.stat().st_mtime_ns for path in whole[codec].rglob("*")} == before


def test_batches_and_layers_one_by_one_do_not_change_the_bytes(
    model: Path, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requant_module, "BATCH", {"cpu": 3})
    requant(model, "clip", layers=range(1, 2))
    manifest = read_manifest(model)
    assert (manifest.code, manifest.complete_codes(), manifest.stages["requant --codec clip"].done) == (None, [], False)
    with ModelDirectory(model) as opened:
        assert list(opened.planes) == ["fp4"]
    requant(model, "clip", layers=range(1, 2))  # nothing left of these
    requant(model, "clip", layers=range(1))
    assert contents(model) == contents(whole["clip"])


def test_a_second_code_stands_beside_the_first(whole: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(whole["clip"], tmp_path / "model"))
    requant(model, "quad")
    with ModelDirectory(model) as opened:
        assert (opened.code, opened.codes) == ("quad2", ["int2", "quad2"])
    use_code(model, "int2")
    assert read_manifest(model).code == "int2"
    with pytest.raises(ArtifactError, match=f"code split is not present.*run: prep requant --codec split {model}"):
        use_code(model, "split")
    requant(model, "quad")  # all there: only comes into use
    assert read_manifest(model).code == "quad2"


class Killed(BaseException):
    """Ends a run at once, as a signal would; no handler for errors may catch it."""


def _strike_at(patch: pytest.MonkeyPatch, call: str, number: int, error: BaseException) -> None:
    """Lets the call `number` (from 1) of os.`call` raise `error`."""
    real, calls = getattr(os, call), itertools.count(1)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return real(*args, **kwargs)

    patch.setattr(os, call, struck)


# (system call, which one): before and after slabs, names, tables, checksums, lines
INTERRUPTIONS = [
    *(("pwrite", number) for number in (1, 4, EXPERTS + 1, 2 * EXPERTS)),
    *(("fsync", number) for number in (1, 2, 4, 6, 8, 9, 11, 13, 15, 17, 18, 21, 23)),
    ("posix_fallocate", 2),
]


@pytest.mark.parametrize(("call", "number"), INTERRUPTIONS)
def test_an_interrupted_run_resumes_to_the_same_bytes(
    model: Path, whole: dict[str, Path], call: str, number: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _strike_at(patch, call, number, Killed())
        with pytest.raises(Killed):
            requant(model, "clip")
    assert_manifest_is_true(model)
    with ModelDirectory(model) as opened:
        assert opened.code is None or opened.codes == ["int2"]
    requant(model, "clip")
    assert contents(model) == contents(whole["clip"])


@pytest.mark.parametrize(("call", "number"), [("fsync", n) for n in range(3, 36, 4)] + [("open", 60)])
def test_nothing_is_lost_when_consumption_is_interrupted(
    model: Path, whole: dict[str, Path], call: str, number: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _strike_at(patch, call, number, Killed())
        try:
            requant(model, "split", consume=True)
        except (Killed, ArtifactError):
            assert_manifest_is_true(model)
            requant(model, "split", consume=True)
    assert contents(model) == contents(whole["consumed"])


def test_consuming_keeps_the_fp4_values_only_once(whole: dict[str, Path]) -> None:
    model = whole["consumed"]
    assert not list((model / "experts" / "fp4").glob("*"))
    assert list(read_manifest(model).planes) == ["base", "residual"]
    with ModelDirectory(model) as opened:
        assert set(opened.planes) == {"base", "residual"}


def _refused_unchanged(model: Path, codec: str, problem: str) -> None:
    before = contents(model)
    with pytest.raises(ArtifactError, match=problem) as caught:
        requant(model, codec)
    assert "\n" not in str(caught.value)
    assert contents(model) == before


@pytest.mark.parametrize("codec", ["clip", "quad"])
def test_without_the_tables_of_split_nothing_is_made_of_base_and_residual(
    whole: dict[str, Path], tmp_path: Path, codec: str
) -> None:
    model = Path(shutil.copytree(whole["consumed"], tmp_path / "model"))
    requant(model, "quad")
    tables = read_tables(model, "split")
    wrong = "split.levels is missing or of another shape, expected the tables of base and residual"
    write_tables(model, tables | {"split.levels": tables["split.levels"][:, :1]})
    _refused_unchanged(model, codec, wrong)
    write_tables(model, {name: tensor for name, tensor in tables.items() if name != "split.levels"})
    _refused_unchanged(model, codec, wrong)
    write_tables(model, tables | {"split.exponents": tables["split.exponents"] + 1})
    _refused_unchanged(model, codec, f"{TABLES}: layer 0 of split.exponents: CRC-32 .*, expected CRC-32 .*; remove")
    os.truncate(model / TABLES, 30)
    _refused_unchanged(model, codec, f"{TABLES}: file is damaged, expected the tables of base and residual.*; run prep")
    (model / TABLES).unlink()
    _refused_unchanged(model, codec, f"{TABLES}: file is missing, expected the tables of base and residual.*; run prep")
    (model / TABLES).mkdir()
    _refused_unchanged(model, codec, f"{TABLES}: a directory, expected a file of prep; remove it")
    (model / TABLES).rmdir()
    write_tables(model, tables)
    checksums = read_checksums(model)
    write_checksums(model, {name: row for name, row in checksums.items() if name != "split.partitions"})
    _refused_unchanged(
        model, codec, f"{CHECKSUMS}: checksum of layer 0 of split.partitions .* is -1, expected a CRC-32"
    )
    write_checksums(model, checksums)
    requant(model, codec)


def test_fp4_without_its_checksums_is_not_coded(source: Path, model: Path) -> None:
    checksums = read_checksums(model)
    for damaged in ({}, {"fp4": checksums["fp4"][:1]}):
        write_checksums(model, {"dense": checksums["dense"], **damaged})
        _refused_unchanged(model, "clip", f"{CHECKSUMS}: tensor fp4 is missing .*; run: prep layout CHECKPOINT {model}")
    layout(source, model)
    requant(model, "clip")


def test_fp4_stays_if_a_table_has_another_checksum(whole: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(whole["split"], tmp_path / "model"))
    checksums = read_checksums(model)
    manifest = read_manifest(model)
    checksums["split.levels"][1] ^= 1
    write_checksums(model, checksums)
    config = plan_requant(model, "int2").config
    with pytest.raises(ArtifactError, match=r"layer 1 of split.levels: CRC-32 .*; run: prep requant --codec split"):
        consume_fp4_layer(model, config, manifest, 1)
    assert (model / expert_file("fp4", 1)).exists()
    requant(model, "split", consume=True)
    assert not (model / expert_file("fp4", 1)).exists()


def test_consuming_can_come_later(whole: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(whole["split"], tmp_path / "model"))
    requant(model, "split", consume=True)
    assert contents(model) == contents(whole["consumed"])


def _flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("plane", ["base", "residual", "fp4"])
def test_fp4_stays_if_what_is_read_back_differs(whole: dict[str, Path], tmp_path: Path, plane: str) -> None:
    model = Path(shutil.copytree(whole["split"], tmp_path / "model"))
    _flip(model / expert_file(plane, 1), 100)
    with pytest.raises(
        ArtifactError, match=f"layer 1 expert 0 {plane}: CRC-32 [0-9a-f]+, expected CRC-32 [0-9a-f]+; remove"
    ):
        requant(model, "split", consume=True)
    assert [expert_file("fp4", idx) in read_manifest(model).files for idx in range(LAYERS)] == [False, True]
    assert (model / expert_file("fp4", 1)).exists()


def test_consumed_fp4_is_compared_and_not_only_checksummed(
    whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(whole["split"], tmp_path / "model"))
    monkeypatch.setattr("prep.slab_io.SlabCheck.__call__", lambda *key: lambda slab: None)
    _flip(model / expert_file("residual", 0), 100)
    with pytest.raises((ArtifactError, ValueError), match=r"read back with residual are not the FP4|beyond their cell"):
        requant(model, "split", consume=True)
    assert (model / expert_file("fp4", 0)).exists()


def test_damaged_fp4_is_not_coded(model: Path) -> None:
    _flip(model / expert_file("fp4", 1), 60_000)
    with pytest.raises(
        ArtifactError, match=f"layer 1 expert 1 fp4: CRC-32.*remove .* and run: prep layout CHECKPOINT {model}"
    ):
        requant(model, "clip")
    assert_manifest_is_true(model)
    assert expert_file("int2", 1) not in read_manifest(model).files


@pytest.mark.parametrize("codec", CODECS)
def test_exponent_255_is_refused_as_damage(source: Path, tmp_path: Path, codec: str) -> None:
    damaged = Path(shutil.copytree(source, tmp_path / "source"))
    edit_tensors(damaged, "layers.1.ffn.experts.3.w2.scale".__eq__, lambda scales: scales[7, 1].fill_(255))
    model = tmp_path / "model"
    layout(damaged, model)
    with pytest.raises(ArtifactError, match=r"cannot be coded .*255.*expected a released checkpoint's; fetch"):
        requant(model, codec)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(("call", "strike"), [("pwrite", 7), ("fsync", 9), ("posix_fallocate", 1)])
def test_a_write_error_is_named_and_the_manifest_stays_true(
    model: Path, whole: dict[str, Path], call: str, strike: int, number: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _strike_at(patch, call, strike, OSError(number, os.strerror(number)))
        with pytest.raises(
            ArtifactError, match=f"{model}/.*: writing failed .{os.strerror(number)}.*run the same command"
        ):
            requant(model, "clip")
    assert_manifest_is_true(model)
    assert not list(model.rglob("*.partial"))
    requant(model, "clip")
    assert contents(model) == contents(whole["clip"])


def test_a_file_system_without_o_direct_is_said_and_used(
    model: Path, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_open, real_write = os.open, os.pwrite

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and str(path).endswith("int2/layer_000.bin.partial"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **named)

    def refuse_write(descriptor: int, *rest: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(descriptor, *rest)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "pwrite", refuse_write)
    requant(model, "clip")
    assert contents(model) == contents(whole["clip"])
    warnings = [line for line in capsys.readouterr().err.splitlines() if "refuses O_DIRECT" in line]
    assert [sum(name in line for line in warnings) > 0 for name in ("layer_000", "layer_001")] == [True, True]


def test_another_codec_waits_for_the_one_begun(model: Path) -> None:
    requant(model, "clip", layers=range(1))
    with pytest.raises(
        ArtifactError, match=f"prep requant --codec clip did not finish.*run: prep requant --codec clip {model}"
    ):
        requant(model, "quad")


def test_other_settings_are_refused(model: Path) -> None:
    requant(model, "clip", layers=range(1))
    manifest = read_manifest(model)
    manifest.stages["requant --codec clip"].settings["sample_experts"] = 3
    write_manifest(model, manifest)
    with pytest.raises(ArtifactError, match=r"begun with .*'sample_experts': 3.*expected .*'sample_experts': 8"):
        requant(model, "clip")


def test_a_second_writer_is_kept_out(model: Path) -> None:
    with (model / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ArtifactError, match=f"{model / LOCK}: held by another process"):
            requant(model, "clip")
    assert list(read_manifest(model).planes) == ["fp4"]


def test_disk_is_checked_before_anything_is_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, usage = contents(model), shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1234))
    with pytest.raises(ArtifactError, match="1,234 bytes free on its disk, expected at least"):
        requant(model, "clip")
    assert contents(model) == before


def test_consuming_needs_room_for_one_layer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_requant(model, "split")
    usage, needed = shutil.disk_usage("/"), plan.write_bytes // LAYERS + (16 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(ArtifactError, match=f"expected at least {needed:,}"):
        requant(model, "split", consume=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    requant(model, "split", consume=True)


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    ("file gone", lambda m: (m / expert_file("int2", 1)).unlink()),
    ("file shorter", lambda m: os.truncate(m / expert_file("int2", 0), 4096)),
    ("tables gone", lambda m: (m / TABLES).unlink()),
    ("tables torn", lambda m: os.truncate(m / TABLES, 30)),
    ("a table's bit", lambda m: _flip(m / TABLES, (m / TABLES).stat().st_size - 1)),
]


@pytest.mark.parametrize("damage", [case[1] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_a_damaged_file_is_written_again(
    whole: dict[str, Path], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    model = Path(shutil.copytree(whole["clip"], tmp_path / "model"))
    damage(model)
    requant(model, "clip")
    assert contents(model) == contents(whole["clip"])


def test_what_lies_in_consumed_files_alone_is_not_touched(whole: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(whole["consumed"], tmp_path / "model"))
    (model / expert_file("residual", 1)).unlink()
    with pytest.raises(
        ArtifactError, match=f"{expert_file('fp4', 1)}: file is missing, expected .* into another directory"
    ):
        requant(model, "split")
    (model / TABLES).unlink()
    with pytest.raises(ArtifactError, match=r"tables of base and residual|file is missing"):
        requant(model, "split")


def test_an_unfinished_layout_is_refused(model: Path) -> None:
    manifest = read_manifest(model)
    stage = replace(manifest.stages["layout"], done=False)
    write_manifest(model, replace(manifest, stages={"layout": stage}))
    with pytest.raises(ArtifactError, match=f"prep layout did not finish.*run: prep layout CHECKPOINT {model}"):
        requant(model)


@pytest.mark.parametrize("layers", [range(2, 3), range(0, 5), range(1, 1)])
def test_layers_the_model_has_not(model: Path, layers: range) -> None:
    with pytest.raises(ArtifactError, match=r"expected some of 0 to 1; correct --layers"):
        requant(model, layers=layers)


@pytest.mark.parametrize("codec", CODECS)
def test_description_adds_up_and_writes_nothing(model: Path, codec: str) -> None:
    before = contents(model)
    text = describe_requant(model, codec)
    assert contents(model) == before
    assert f"{LAYERS * EXPERTS * 53_248:,} bytes" in text
    assert "free disk" in text
    assert "seconds" in text
    assert all(f"{plane} to write" in text for plane in CODES[CODECS[codec]].planes)


def test_a_few_batches_are_held_at_most(
    source: Path, model: Path, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs that were read and not yet written."""
    held, counts, lock = [0], [0], threading.Lock()
    real_solve, real_write = requant_module.LayerSolver.solve, os.pwrite

    def change(by: int) -> None:
        with lock:
            held[0] += by
            counts.append(held[0])

    def solve(self: Any, batch: Any, *rest: Any) -> None:
        change(+batch.number)
        real_solve(self, batch, *rest)

    def write(*args: Any) -> int:
        change(-1)
        return real_write(*args)

    monkeypatch.setattr(requant_module.LayerSolver, "solve", solve)
    monkeypatch.setattr(os, "pwrite", write)
    requant(model, "clip")
    assert max(counts) <= requant_module.BATCH["cpu"] * requant_module.WRITE_DEPTH
    assert counts[-1] == 0


def test_the_codes_checksums_stand_for_every_layer(whole: dict[str, Path]) -> None:
    checksums = read_checksums(whole["quad"])
    assert checksums["quad2"].shape == (LAYERS, EXPERTS)
    assert checksums["quad2.levels"].shape == checksums["quad2.normalisers"].shape == (LAYERS,)
    assert int(min(tensor.min() for tensor in checksums.values())) >= 0


# Starts runs by forking, so that torch is imported once, and kills each at a random moment after it has begun to write.
# Prints "killed" or "ended" for each; the first argument is how many to start, the second the seed, the rest the command.
KILLING = """
import os, random, signal, sys, time
import torch
from prep.cli import main
import prep.requant, prep.table_training
torch.set_num_threads(1)
count, moments, arguments = int(sys.argv[1]), random.Random(int(sys.argv[2])), sys.argv[3:]
manifest = os.path.join(arguments[1], "manifest.json")
for _ in range(count):
    before = os.stat(manifest).st_mtime_ns
    running = os.fork()
    if not running:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            main(arguments)
        finally:
            os._exit(0)
    status = None
    while status is None and os.stat(manifest).st_mtime_ns == before:
        status = os.waitpid(running, os.WNOHANG)[1] if os.waitid(os.P_PID, running, os.WEXITED | os.WNOHANG | os.WNOWAIT) else None
        time.sleep(0.001)
    if status is None:
        time.sleep(moments.random() * 0.3)
        os.kill(running, signal.SIGKILL)
        status = os.waitpid(running, 0)[1]
    print("killed" if os.WIFSIGNALED(status) else "ended", flush=True)
    if not os.WIFSIGNALED(status):
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "options"), [("clip", []), ("consumed", ["--consume", "--yes"])])
def test_killed_at_random_moments_the_bytes_are_the_same(
    plain: Path, whole: dict[str, Path], tmp_path: Path, codec: str, options: list[str]
) -> None:
    """Twenty kills, each of a run that resumes or, once all was done, begins anew."""
    kills, rounds = 0, 0
    name = "split" if codec == "consumed" else codec
    while kills < 20:
        model = Path(shutil.copytree(plain, tmp_path / f"model{rounds}"))
        command = ["requant", str(model), "--device", "cpu", "--codec", name, *options]
        series = [sys.executable, "-c", KILLING, str(20 - kills), str(rounds), *command]
        kills += subprocess.run(series, capture_output=True, text=True, check=True).stdout.count("killed")
        rounds += 1
        assert_manifest_is_true(model)
        requant(model, name, consume=bool(options))
        assert contents(model) == contents(whole[codec])


def test_a_killed_command_resumes(plain: Path, whole: dict[str, Path], model: Path) -> None:
    command = [sys.executable, "-m", "prep", "requant", str(model), "--device", "cpu", "--codec", "clip"]
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    before = (model / MANIFEST).stat().st_mtime_ns
    while running.poll() is None and (model / MANIFEST).stat().st_mtime_ns == before:
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert_manifest_is_true(model)
    requant(model, "clip")
    assert contents(model) == contents(whole["clip"])


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
def test_the_gpu_gives_the_same_bytes(
    model: Path, whole: dict[str, Path], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_training, "train", train)  # from samples on the card
    requant(model, codec, device="cuda")
    assert contents(model) == contents(whole[codec])


def _random_fp4(shape: tuple[int, ...], exponents: range, seed: int) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    *lead, columns = shape
    codes = torch.randint(256, (*lead, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(exponents.start, exponents.stop, (*lead, columns // 32), generator=generator)
    return Matrix(codes, scales.to(torch.uint8))


def _cases() -> Iterator[tuple[tuple[int, ...], range]]:
    yield (2, 64, 256), range(118, 125)
    yield (3, 33, 96), range(0, 255)
    yield (1, 1, 32), range(7, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "exponents"), list(_cases()))
@pytest.mark.parametrize("code", CODES)
def test_every_solver_gives_the_same_bytes_on_both_devices(code: str, shape: tuple[int, ...], exponents: range) -> None:
    from prep.codecs import solve

    matrix = _random_fp4(shape, exponents, seed=1)
    assert matrix.scales is not None
    there = Matrix(matrix.codes.cuda(), matrix.scales.cuda())
    table = train(code, matrix, exponents_present(matrix.scales))
    table_there = train(code, there, exponents_present(matrix.scales))
    assert all(torch.equal(table[name], table_there[name]) for name in table)
    rows = {name: part[None] for name, part in table.items()}
    here = solve(code, matrix, 0, rows)
    gpu = solve(code, there, 0, {name: part.cuda() for name, part in rows.items()})
    for plane, part in here.planes.items():
        assert torch.equal(part.codes, gpu.planes[plane].codes.cpu())
        assert part.scales is None or torch.equal(part.scales, gpu.planes[plane].scales.cpu())  # type: ignore[union-attr]
    assert here.normalisers is None or torch.equal(here.normalisers, gpu.normalisers.cpu())  # type: ignore[union-attr]


def test_unfinished_layers_are_those_without_a_line(model: Path) -> None:
    assert unfinished_layers(plan_requant(model, "int2")) == [0, 1]
    requant(model, "clip", layers=range(1))
    assert unfinished_layers(plan_requant(model, "int2")) == [1]
    assert plan_requant(model, "int2", range(1)).todo == []
    assert CHECKSUMS not in read_manifest(model).files
