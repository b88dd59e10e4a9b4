"""`prep layout` as a function: golden bytes, interruption at every kind of point, locks, disk, repair."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import TINY, write_random_checkpoint

from prep.consume import ShardConsumer
from prep.jobs import LOCK
from prep.layout import describe_layout, layout, plan_layout, source_fingerprint, source_shards
from runtime.artifact import ModelDirectory, read_checksums
from runtime.checkpoint import Checkpoint, model_tensors, write_checkpoint
from runtime.config import ModelConfig
from runtime.errors import ArtifactError, StrawError
from runtime.files import partial_path
from runtime.manifest import CHECKSUMS, DENSE, MANIFEST, expert_file, read_manifest, write_manifest
from runtime.safetensors_file import TORCH_DTYPES

LAYERS, EXPERTS = 2, 4
EXTRAS = {"tokenizer.json": b'{"a": 1}', "generation_config.json": b"{}", "encoding/deep/encoding.py": b"# how\n"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write_random_checkpoint(directory, num_hidden_layers=LAYERS, n_routed_experts=EXPERTS, shard_bytes=1_000_000)
    for name, content in EXTRAS.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def pristine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "deep" / "pristine"
    layout(source, directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_it_writes_the_named_files_and_no_others(pristine: Path) -> None:
    found = contents(pristine)
    layers = {expert_file("fp4", idx) for idx in range(LAYERS)}
    assert set(found) == {MANIFEST, DENSE, CHECKSUMS, "config.json", LOCK, *EXTRAS, *layers}
    assert {name: found[name] for name in EXTRAS} == EXTRAS
    manifest = read_manifest(pristine)
    assert set(manifest.files) == set(found) - {MANIFEST, CHECKSUMS, LOCK}
    assert all(manifest.files[name] == len(found[name]) for name in manifest.files)
    assert manifest.stages["layout"].done


# (part, size in bytes, first byte) of a [128 or 256] x [256 or 128] expert, in the order of byte order 1
SLAB = [
    ("w1.weight", 16_384, 0x10),
    ("w1.scale", 1_024, 0x20),
    ("w3.weight", 16_384, 0x30),
    ("w3.scale", 1_024, 0x40),
    ("w2.weight", 16_384, 0x50),
    ("w2.scale", 1_024, 0x60),
]


def _pattern(size_bytes: int, first: int) -> bytes:
    return bytes(first + idx % 13 for idx in range(size_bytes))


def test_golden_bytes_of_a_layer_file(tmp_path: Path) -> None:
    """The layout cannot change by accident: every byte tells which expert, which tensor and which place it came from."""
    raw = TINY | {"num_hidden_layers": 1, "num_hash_layers": 0, "n_routed_experts": 2, "compress_ratios": [0]}
    config = ModelConfig.from_json(raw, tmp_path)
    first = {f"layers.0.ffn.experts.{e}.{part}": mark + 0x80 * e for part, _, mark in SLAB for e in (0, 1)}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in model_tensors(config).items():
            content = _pattern(spec.size_bytes, first[name]) if name in first else bytes(spec.size_bytes)
            raw_bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            yield name, raw_bytes.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)

    write_checkpoint(tmp_path / "source", raw, tensors(), 10**9)
    layout(tmp_path / "source", tmp_path / "model")
    slabs = [b"".join(_pattern(size, mark + 0x80 * e) for _, size, mark in SLAB) for e in (0, 1)]
    content = (tmp_path / "model" / expert_file("fp4", 0)).read_bytes()
    assert content == slabs[0] + bytes(1_024) + slabs[1] + bytes(1_024)
    assert hashlib.sha256(content).hexdigest() == "68090fd59fe1c7b3c854950f92a12dedbf24509ccd06498bccbb40edbcd2bf18"
    assert read_checksums(tmp_path / "model")["fp4"].tolist() == [[zlib.crc32(slab) for slab in slabs]]


def test_a_finished_run_is_a_no_op(source: Path, pristine: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in pristine.rglob("*")}
    assert layout(source, pristine).todo == []
    assert {path: path.stat().st_mtime_ns for path in pristine.rglob("*")} == before


def test_shard_sizes_do_not_change_the_result(source: Path, pristine: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other", ignore=shutil.ignore_patterns("model*")))
    with closing(Checkpoint(source)) as checkpoint:
        tensors = ((name, checkpoint.read(name)) for name in model_tensors(checkpoint.config))
        write_checkpoint(other, checkpoint.raw_config, tensors, 10**9)
    (other / "config.json").write_bytes((source / "config.json").read_bytes())
    layout(other, tmp_path / "model")
    found, expected = contents(tmp_path / "model"), contents(pristine)
    assert found.pop(MANIFEST) != expected.pop(MANIFEST)  # another fingerprint
    assert found == expected


class Killed(BaseException):
    """Ends a run at once, as a signal would; no handler for errors may catch it."""


def _strike_at(patch: pytest.MonkeyPatch, call: str, number: int, error: BaseException) -> None:
    """Lets the call `number` (from 1) of os.`call` raise `error`."""
    real, calls = getattr(os, call), itertools.count(1)

    def struck(*args: Any) -> Any:
        if next(calls) == number:
            raise error
        return real(*args)

    patch.setattr(os, call, struck)


# (system call, which one): before and after each kind of file has its name, its checksums and its line
INTERRUPTIONS = [
    *(("pwrite", number) for number in (1, 3, EXPERTS, EXPERTS + 1, 2 * EXPERTS)),
    *(("fsync", number) for number in (1, 2, 3, 5, 8, 13, 16, 21, 24, 29, 31, 33)),
    ("ftruncate", 2),
]


@pytest.mark.parametrize(("call", "number"), INTERRUPTIONS)
def test_an_interrupted_run_resumes_to_the_same_bytes(
    source: Path, pristine: Path, tmp_path: Path, call: str, number: int
) -> None:
    model = tmp_path / "model"
    with pytest.MonkeyPatch.context() as patch:
        _strike_at(patch, call, number, Killed())
        with pytest.raises(Killed):
            layout(source, model)
    with pytest.raises(ArtifactError, match=f"run: prep layout CHECKPOINT {model}"):
        ModelDirectory(model)
    finished = _recorded_files(model)
    layout(source, model)
    assert contents(model) == contents(pristine)
    assert _recorded_files(model, finished) == finished  # not written a second time
    ModelDirectory(model).close()


def _recorded_files(model: Path, names: dict[str, int] | None = None) -> dict[str, int]:
    if names is None:
        names = read_manifest(model).files if (model / MANIFEST).exists() else {}
    return {name: (model / name).stat().st_mtime_ns for name in names}


DYING = """
import os, sys
from pathlib import Path
from prep.layout import layout
real, left = os.pwrite, int(sys.argv[3])
def dying(*args):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    return real(*args)
os.pwrite = dying
layout(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_process_that_dies_leaves_no_lock_and_a_usable_beginning(
    source: Path, pristine: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    arguments = [sys.executable, "-c", DYING, str(source), str(model), str(EXPERTS + 2)]
    assert subprocess.run(arguments, check=False).returncode == 9
    assert [expert_file("fp4", idx) in read_manifest(model).files for idx in range(LAYERS)] == [True, False]
    assert partial_path(model / expert_file("fp4", 1)).exists()
    with pytest.raises(ArtifactError, match="prep layout did not finish"):
        ModelDirectory(model)
    layout(source, model)
    assert contents(model) == contents(pristine)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(("call", "strike"), [("pwrite", 6), ("fsync", 9), ("ftruncate", 1)])
def test_a_write_error_is_named_and_the_manifest_stays_true(
    source: Path, pristine: Path, tmp_path: Path, call: str, strike: int, number: int
) -> None:
    model = tmp_path / "model"
    with pytest.MonkeyPatch.context() as patch:
        _strike_at(patch, call, strike, OSError(number, os.strerror(number)))
        with pytest.raises(
            ArtifactError, match=f"{model}/.*: writing failed .{os.strerror(number)}.*run the same command"
        ):
            layout(source, model)
    for name, size_bytes in read_manifest(model).files.items():
        assert (model / name).stat().st_size == size_bytes
    assert not list(model.rglob("*.partial"))
    layout(source, model)
    assert contents(model) == contents(pristine)


def test_another_source_is_refused(source: Path, pristine: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(raw | {"transformers_version": "5"}))
    with pytest.raises(ArtifactError, match=rf"{MANIFEST}: made from source [0-9a-f]+, expected [0-9a-f]+ \({other}\)"):
        layout(other, pristine)


def test_other_settings_are_refused(source: Path, pristine: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(pristine, tmp_path / "model"))
    manifest = read_manifest(model)
    manifest.stages["layout"].settings["byte_order"] = 2
    write_manifest(model, manifest)
    with pytest.raises(
        ArtifactError, match=r"prep layout was begun with .*'byte_order': 2.*expected .*'byte_order': 1"
    ):
        layout(source, model)


def test_fingerprint_depends_on_config_names_and_headers_not_on_payload(source: Path, tmp_path: Path) -> None:
    def fingerprint(directory: Path) -> str:
        with closing(Checkpoint(directory)) as checkpoint:
            return source_fingerprint(checkpoint, source_shards(checkpoint))

    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    first = fingerprint(source)
    assert len(first) == 64
    assert fingerprint(copy) == first
    shard = next(copy.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    assert fingerprint(copy) == first
    shard.rename(copy / "renamed.safetensors")
    index = copy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, "renamed.safetensors"))
    assert fingerprint(copy) != first


def test_a_second_writer_is_kept_out(source: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with (model / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ArtifactError, match=f"{model / LOCK}: held by another process"):
            layout(source, model)
    assert not (model / MANIFEST).exists()
    layout(source, model)


def test_a_directory_with_other_things_in_it_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"dear")
    with pytest.raises(ArtifactError, match=f"{tmp_path}: holds photo.jpg and no manifest.json, expected an empty"):
        layout(source, tmp_path)
    with pytest.raises(ArtifactError, match="a file, expected a directory"):
        layout(source, tmp_path / "photo.jpg")
    with pytest.raises(ArtifactError, match=r"holds config\.json and no manifest\.json"):
        layout(source, source)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def _shorten(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _scribble(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"???")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (expert_file("fp4", 1), Path.unlink),
        (expert_file("fp4", 0), _shorten),
        (DENSE, _shorten),
        (DENSE, _scribble),
        ("config.json", _scribble),
        ("config.json", Path.unlink),
        (CHECKSUMS, Path.unlink),
        (CHECKSUMS, _shorten),
    ],
)
def test_a_damaged_file_is_written_again(
    source: Path, pristine: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    model = Path(shutil.copytree(pristine, tmp_path / "model"))
    damage(model / name)
    with pytest.raises(ArtifactError, match=f"{name}: .*; run: prep layout CHECKPOINT {model}"):
        ModelDirectory(model)
    layout(source, model)
    assert contents(model) == contents(pristine)


def test_consumed_fp4_files_do_not_come_back(source: Path, pristine: Path, tmp_path: Path) -> None:
    """What requant removed from a finished directory, with its line in the manifest, is not missing."""
    model = Path(shutil.copytree(pristine, tmp_path / "model"))
    manifest = read_manifest(model)
    del manifest.files[expert_file("fp4", 0)]
    write_manifest(model, manifest)
    (model / expert_file("fp4", 0)).unlink()
    assert layout(source, model).todo == []


def _free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free_bytes))


def test_disk_is_checked_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    with closing(Checkpoint(source)) as checkpoint:
        needed = plan_layout(checkpoint, model).todo_bytes
    _free(monkeypatch, needed - 1)
    with pytest.raises(ArtifactError, match=f"{needed - 1:,} bytes free on its disk, expected at least {needed:,}"):
        layout(source, model)
    assert not model.exists()
    _free(monkeypatch, needed)
    layout(source, model)


def test_resuming_needs_room_for_the_rest_only(
    source: Path, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    with pytest.MonkeyPatch.context() as patch:
        _strike_at(patch, "ftruncate", 2, Killed())
        with pytest.raises(Killed):
            layout(source, model)
    _free(monkeypatch, EXPERTS * 53_248)
    layout(source, model)
    assert contents(model) == contents(pristine)


def test_description_adds_up_and_writes_nothing(source: Path, pristine: Path, tmp_path: Path) -> None:
    text = describe_layout(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    sizes = {line[:16].strip(): int(line[16:36].replace(",", "")) for line in text.splitlines()}
    assert sizes["FP4 slabs"] == LAYERS * EXPERTS * 53_248
    assert sizes["dense tensors"] == (pristine / DENSE).stat().st_size
    assert sizes["all files"] == sizes["still to write"] == sum(read_manifest(pristine).files.values())
    assert "still to write                     0 bytes" in describe_layout(source, pristine)


def test_at_most_a_few_experts_are_held(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, counts, real_read, real_write = [0], [0], Checkpoint.read_slab, os.pwrite
    lock = threading.Lock()

    def change(by: int) -> None:
        with lock:
            held[0] += by
            counts.append(held[0])

    def read(*args: Any) -> Any:
        change(+1)
        return real_read(*args)

    def write(*args: Any) -> int:
        change(-1)
        return real_write(*args)

    monkeypatch.setattr(Checkpoint, "read_slab", read)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr("prep.layout.THREADS", 2)
    layout(source, tmp_path / "model")
    assert len(counts) == 1 + 2 * LAYERS * EXPERTS
    assert max(counts) <= 2


def _shards(source: Path) -> list[str]:
    return sorted(path.name for path in source.glob("*.safetensors"))


@pytest.fixture
def own_source(source: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may consume."""
    return Path(shutil.copytree(source, tmp_path / "source"))


def test_consuming_removes_every_shard_and_changes_no_byte(own_source: Path, pristine: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    layout(own_source, model, consume=True)
    assert contents(model) == contents(pristine)
    assert _shards(own_source) == []
    assert (own_source / "config.json").exists()
    assert layout(own_source, model).todo == layout(own_source, model, consume=True).todo == []


def test_consuming_refuses_what_others_may_use(own_source: Path, tmp_path: Path) -> None:
    """A Hugging Face snapshot links to blobs that other snapshots share; a link within the directory is its own."""
    blobs, inner = tmp_path / "blobs", own_source / "inner"
    blobs.mkdir()
    inner.mkdir()
    first, second = (own_source / name for name in _shards(own_source)[:2])
    second.rename(inner / second.name)
    second.symlink_to(inner / second.name)
    blob = first.rename(blobs / "abc")
    first.symlink_to(Path("../blobs/abc"))
    with pytest.raises(StrawError, match=f"{first}: a link to {blob}, expected .*; copy the checkpoint .* --consume"):
        layout(own_source, tmp_path / "model", consume=True)
    assert blob.is_file()
    assert not (tmp_path / "model").exists()
    layout(own_source, tmp_path / "model")
    assert blob.is_file()
    first.unlink()
    blob.rename(first)
    layout(own_source, tmp_path / "model", consume=True)
    assert _shards(own_source) == list(inner.iterdir()) == []


def test_consuming_can_come_later(own_source: Path, pristine: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    layout(own_source, model)
    assert len(_shards(own_source)) > 2
    layout(own_source, model, consume=True)
    assert (_shards(own_source), contents(model)) == ([], contents(pristine))


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", n) for n in (4, 9, 12, 14, 16, 17, 18, 19, 20, 21, 23, 26)] + [("unlink", 2)]
)
def test_nothing_is_lost_when_consumption_is_interrupted(
    own_source: Path, pristine: Path, tmp_path: Path, call: str, number: int
) -> None:
    model = tmp_path / "model"
    with pytest.MonkeyPatch.context() as patch:
        _strike_at(patch, call, number, Killed())
        try:
            layout(own_source, model, consume=True)
        except Killed:
            layout(own_source, model, consume=True)
    assert (_shards(own_source), contents(model)) == ([], contents(pristine))


def test_a_run_without_consumption_completes_a_consumed_one(own_source: Path, pristine: Path, tmp_path: Path) -> None:
    """Killed before the last layer: the shards of the first are gone, known by the manifest, and not missed."""
    model = tmp_path / "model"
    with pytest.MonkeyPatch.context() as patch:
        _strike_at(patch, "ftruncate", 2, Killed())
        with pytest.raises(Killed):
            layout(own_source, model, consume=True)
    before = len(_shards(own_source))
    assert before < len(read_manifest(model).shards)
    layout(own_source, model)
    assert (len(_shards(own_source)), contents(model)) == (before, contents(pristine))


@pytest.mark.parametrize("name", [DENSE, expert_file("fp4", 0)])
def test_a_shard_stays_if_what_is_read_back_differs(
    own_source: Path, pristine: Path, tmp_path: Path, name: str
) -> None:
    model = Path(shutil.copytree(pristine, tmp_path / "model"))
    with (model / name).open("r+b") as file:
        file.seek(-2_000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-2_000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    shards = {shard: (own_source / shard).read_bytes() for shard in _shards(own_source)}
    with pytest.raises(StrawError, match=f"{model / name}: .* read back is not what .*; the shard stays, remove"):
        layout(own_source, model, consume=True)
    left = _shards(own_source)
    assert left
    (model / name).unlink()
    if len(left) == len(shards):  # all that the repair needs is there
        layout(own_source, model, consume=True)
        assert contents(model) == contents(pristine)


def test_a_consumed_shard_that_is_needed_again_is_named(own_source: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    layout(own_source, model, consume=True)
    (model / expert_file("fp4", 1)).unlink()
    with pytest.raises(
        StrawError, match=rf"model-.*: file is missing, expected it to write {expert_file('fp4', 1)}; fetch it"
    ):
        layout(own_source, model)
    with pytest.raises(StrawError, match=r"cannot be opened .*expected a safetensors file"):
        layout(own_source, tmp_path / "another")


def test_consuming_needs_less_room(
    own_source: Path, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files written and shards removed by turns: less than all files at once, more than the largest."""
    model = tmp_path / "model"
    with closing(Checkpoint(own_source)) as checkpoint:
        plan = plan_layout(checkpoint, model)
        peak = ShardConsumer(checkpoint, model).peak_bytes(plan.manifest, plan.todo, plan.sizes)
    assert plan.sizes[DENSE] < peak < plan.todo_bytes
    _free(monkeypatch, peak - 1)
    with pytest.raises(ArtifactError, match=f"expected at least {peak:,}"):
        layout(own_source, model, consume=True)
    _free(monkeypatch, peak)
    layout(own_source, model, consume=True)
    assert contents(model) == contents(pristine)
