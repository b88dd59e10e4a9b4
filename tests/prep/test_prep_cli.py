"""The command `prep`: one line and exit code 1 for whatever a user can meet, instant help, quiet ends."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from random_checkpoint import write_random_checkpoint
from safetensors.torch import load_file, save_file

import prep.layout
import prep.verify
from prep.cli import main
from runtime import console
from runtime.artifact import ModelDirectory
from runtime.checkpoint import INDEX
from runtime.console import run_cli
from runtime.devices import compute_device
from runtime.errors import StrawError
from runtime.manifest import expert_file, read_manifest

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    write_random_checkpoint(directory, num_hidden_layers=2, n_routed_experts=4, shard_bytes=1_000_000)
    return directory


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "source"))


def run(capsys: Capture, *arguments: object) -> tuple[Any, str, str]:
    """Exit code, stdout and stderr of `prep` in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def assert_one_line(code: object, out: str, err: str, *named: str) -> None:
    assert code == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert all(part in err for part in named), err
    assert any(word in err for word in ("expected", "says")), err
    assert ";" in err  # the remedy stands behind it


def test_layout_then_again(source: Path, tmp_path: Path, capsys: Capture) -> None:
    model = tmp_path / "model"
    code, out, err = run(capsys, "layout", source, model)
    assert (code, err) == (0, "")
    assert out.startswith(f"{model}: complete, wrote ")
    assert run(capsys, "layout", source, model) == (0, f"{model}: complete, wrote 0 bytes in 0 files\n", "")
    ModelDirectory(model).close()


def test_dry_run_prints_sizes_and_writes_nothing(source: Path, tmp_path: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "layout", source, tmp_path / "model", "--dry-run")
    assert (code, err) == (0, "")
    assert "FP4 slabs" in out
    assert "free disk" in out
    assert not (tmp_path / "model").exists()


def _edit_config(source: Path, edit: Callable[[dict], object]) -> None:
    raw = json.loads((source / "config.json").read_text())
    edit(raw)
    (source / "config.json").write_text(json.dumps(raw))


def _edit_tensor(source: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    shard = source / json.loads((source / INDEX).read_text())["weight_map"][name]
    tensors = load_file(shard)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, shard)


def _drop_from_index(source: Path, name: str) -> None:
    index = json.loads((source / INDEX).read_text())
    del index["weight_map"][name]
    (source / INDEX).write_text(json.dumps(index))


def _truncate(path: Path, size_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size_bytes)


SHARD = "model-00002-of-0000"


def _shard(source: Path) -> Path:
    return next(source.glob(f"{SHARD}*"))


EXPERT = "layers.1.ffn.experts.2.w3"
# (id, damage, what the line must hold: the file, what was found, what was expected)
DAMAGES: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("no checkpoint", shutil.rmtree, ["no such directory, expected a released checkpoint"]),
    ("no config", lambda s: (s / "config.json").unlink(), ["config.json", "No such file"]),
    ("config not json", lambda s: (s / "config.json").write_text("{"), ["config.json", "not JSON"]),
    ("no index", lambda s: (s / INDEX).unlink(), [INDEX, "No such file"]),
    ("index without map", lambda s: (s / INDEX).write_text("{}"), [INDEX, "no weight_map"]),
    ("missing shard", lambda s: _shard(s).unlink(), [SHARD, "No such file or directory), expected a safetensors file"]),
    ("truncated shard", lambda s: _truncate(_shard(s), 70_000), [SHARD, "70,000 bytes, its header says"]),
    (
        "shard cut in its header",
        lambda s: _truncate(_shard(s), 50),
        [SHARD, "50 bytes, expected a whole safetensors header"],
    ),
    ("empty shard", lambda s: _truncate(_shard(s), 0), [SHARD, "0 bytes, expected a whole safetensors header"]),
    (
        "tensor missing in the index",
        lambda s: _drop_from_index(s, f"{EXPERT}.weight"),
        [INDEX, f"tensor {EXPERT}.weight is missing, expected I8 [128, 128]"],
    ),
    (
        "tensor missing in its shard",
        lambda s: _edit_tensor(s, f"{EXPERT}.weight", lambda t: None),
        [".safetensors", f"tensor {EXPERT}.weight is missing", "I8 [128, 128]"],
    ),
    (
        "wrong shape",
        lambda s: _edit_tensor(s, f"{EXPERT}.weight", lambda t: t[:64].clone()),
        [".safetensors", f"tensor {EXPERT}.weight is I8 [64, 128], expected I8 [128, 128]"],
    ),
    (
        "wrong dtype",
        lambda s: _edit_tensor(s, "norm.weight", lambda t: t.float()),
        [".safetensors", "tensor norm.weight is F32 [256], expected BF16 [256]"],
    ),
    (
        "unknown model_type",
        lambda s: _edit_config(s, lambda raw: raw.update(model_type="llama")),
        ["config.json", "model_type is 'llama', expected 'deepseek_v4'"],
    ),
    (
        "no compress_ratios",
        lambda s: _edit_config(s, lambda raw: raw.pop("compress_ratios")),
        ["config.json", "key compress_ratios is missing, expected every key"],
    ),
    (
        "config of a larger model",
        lambda s: _edit_config(s, lambda raw: raw.update(n_routed_experts=8)),
        [".safetensors", "is BF16 [4, 256], expected BF16 [8, 256]"],
    ),
]


@pytest.mark.parametrize(("damage", "named"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_a_damaged_checkpoint_is_one_line(
    source: Path, tmp_path: Path, capsys: Capture, damage: Callable[[Path], object], named: list[str]
) -> None:
    damage(source)
    for options in ([], ["--dry-run"]):
        assert_one_line(*run(capsys, "layout", source, tmp_path / "model", *options), *named)
    assert not (tmp_path / "model").exists()


def test_not_enough_disk_is_one_line(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1234))
    assert_one_line(*run(capsys, "layout", source, tmp_path / "model"), "1,234 bytes free", str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_a_full_disk_while_writing_is_one_line(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert_one_line(
        *run(capsys, "layout", source, tmp_path / "model"), expert_file("fp4", 0), "No space left on device"
    )


def test_a_model_directory_of_another_schema_is_one_line(source: Path, tmp_path: Path, capsys: Capture) -> None:
    model = tmp_path / "model"
    run(capsys, "layout", source, model)
    manifest = json.loads((model / "manifest.json").read_text())
    (model / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 7}))
    named = (f"{model}/manifest.json", "schema version 7, expected 1", f"remove {model} and run: prep layout")
    assert_one_line(*run(capsys, "layout", source, model), *named)


def test_a_slab_file_of_the_wrong_size_is_one_line(source: Path, tmp_path: Path, capsys: Capture) -> None:
    """Through a command that opens the directory as the runtime's do; `prep layout` itself repairs it."""
    model = tmp_path / "model"
    run(capsys, "layout", source, model)
    _truncate(model / expert_file("fp4", 1), 1000)
    app = typer.Typer()
    app.command()(lambda: ModelDirectory(model))
    with pytest.raises(SystemExit) as ended:
        run_cli(app, [])
    captured = capsys.readouterr()
    named = (str(model / expert_file("fp4", 1)), "1,000 bytes, expected 212,992", f"prep layout CHECKPOINT {model}")
    assert_one_line(ended.value.code, captured.out, captured.err, *named)


def test_a_target_that_cannot_be_written_is_one_line(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_one_line(
        *run(capsys, "layout", source, source / "config.json" / "model"), "config.json/model", "File exists"
    )

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert_one_line(
        *run(capsys, "layout", source, tmp_path / "model"), str(tmp_path / "model"), "Read-only file system"
    )


@pytest.fixture
def model(original: Path, tmp_path: Path, capsys: Capture) -> Path:
    run(capsys, "layout", original, tmp_path / "model")
    return tmp_path / "model"


def test_requant_chooses_verifies_and_describes(model: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "requant", model, "--codec", "clip", "--dry-run", "--device", "cpu")
    assert (code, err) == (0, "")
    assert all(part in out for part in ("FP4 to read", "int2 to write", "free disk", "seconds"))
    done = run(capsys, "requant", model, "--codec", "clip", "--device", "cpu")
    assert done == (0, f"{model}: int2, solved 8 experts, wrote 229,376 bytes\n", "")
    run(capsys, "requant", model, "--codec", "split", "--device", "cpu", "--layers", "0")
    assert read_manifest(model).code == "int2"
    run(capsys, "requant", model, "--codec", "split", "--device", "cpu", "--layers", "0-1")
    assert read_manifest(model).code == "split"
    assert run(capsys, "requant", model, "--code", "int2") == (0, f"{model}: code int2 in use\n", "")
    assert read_manifest(model).code == "int2"
    assert_one_line(*run(capsys, "requant", model, "--code", "quad2"), "code quad2 is not present", "--codec quad")
    assert run(capsys, "verify", model, "--deep") == (0, f"{model}: whole\n", "")


def test_verify_of_damage_is_one_line(model: Path, original: Path, capsys: Capture) -> None:
    assert run(capsys, "verify", original) == (0, f"{original}: whole\n", "")
    with (model / expert_file("fp4", 1)).open("r+b") as file:
        file.write(b"\xff\xff\xff")
    named = (str(model / expert_file("fp4", 1)), "layer 1 expert 0 fp4: CRC-32", "prep layout CHECKPOINT")
    assert_one_line(*run(capsys, "verify", model), *named)
    with (model / expert_file("fp4", 0)).open("r+b") as file:
        file.write(b"\xff\xff\xff")
    code, out, err = run(capsys, "verify", model)
    assert (code, out.count("\n"), err.count("\n")) == (1, 1, 1)
    assert_one_line(*run(capsys, "verify", model / "experts"), "neither manifest.json nor")


CONSUMING = [["layout", "SOURCE", "MODEL"], ["requant", "MODEL", "--codec", "split", "--device", "cpu"]]


@pytest.mark.parametrize("command", CONSUMING, ids=["layout", "requant"])
def test_consuming_asks_first(
    source: Path, model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    places = {"SOURCE": source, "MODEL": model}
    arguments = [places.get(word, word) for word in command] + ["--consume"]
    watched = source if command[0] == "layout" else model / "experts" / "fp4"

    def files() -> set[str]:
        return {path.name for path in watched.rglob("*") if path.suffix in (".bin", ".safetensors")}

    before = files()
    assert_one_line(*run(capsys, *arguments), "--consume removes", "stdin is no terminal", "--yes")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", _answer(False))
    assert run(capsys, *arguments)[0] == 1
    assert files() == before
    monkeypatch.setattr(typer, "confirm", _answer(True))
    assert run(capsys, *arguments)[0] == 0
    assert files() == set()


def _answer(agrees: bool) -> Callable[..., bool]:
    def confirm(text: str, *, abort: bool) -> bool:
        assert text.startswith("Remove ")
        if not agrees and abort:
            raise typer.Abort
        return agrees

    return confirm


def test_yes_does_not_ask(source: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(capsys, "layout", source, tmp_path / "model", "--consume", "--yes")[0] == 0
    assert not list(source.glob("*.safetensors"))


def test_requant_of_a_full_disk_and_a_locked_directory_is_one_line(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("requant", model, "--codec", "clip", "--device", "cpu")
    real = os.open

    def refuse(path: object, flags: int, *rest: object, **named: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *rest, **named)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert_one_line(*run(capsys, *command), ".lock: cannot be written (Read-only file system)")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1234))
    assert_one_line(*run(capsys, *command), "1,234 bytes free")
    assert list(read_manifest(model).planes) == ["fp4"]


@pytest.mark.parametrize(
    "name", ["cuda:²", "cuda:٠", "cuda:" + "9" * 5_000, "cuda:", "cuda:-1", "cpu:1", "cpu:", "tpu", ""]
)
def test_what_is_no_device_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(StrawError, match=r"device is .*, expected cpu or one of 2 CUDA devices \(cuda:i\); correct"):
        compute_device(name)


def test_devices_have_one_name_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = {"cpu": "cpu", "cpu:0": "cpu", "cuda": "cuda", "cuda:1": "cuda:1", "cuda:01": "cuda:1", None: "cuda"}
    assert {name: compute_device(name) for name in names} == names


@pytest.mark.parametrize("command", ["layout", "verify"])
def test_ctrl_c_is_one_line(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prep.layout, "layout", interrupt)
    monkeypatch.setattr(prep.verify, "verify", interrupt)
    arguments = [source, tmp_path / "model"] if command == "layout" else [source]
    line = "interrupted; run the same command again, it continues where it stopped\n"
    assert run(capsys, command, *arguments) == (1, "", line)


def test_requant_needs_a_directory_and_a_device(model: Path, tmp_path: Path, capsys: Capture) -> None:
    assert_one_line(*run(capsys, "requant", tmp_path / "nowhere"), "manifest.json: cannot be read")
    assert_one_line(*run(capsys, "requant", model, "--device", "cuda:77"), "device is 'cuda:77'", "correct --device")
    assert_one_line(
        *run(capsys, "requant", model, "--layers", "1-7", "--device", "cpu"), "layers 1 to 7, expected some of 0 to 1"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["layout"],
        ["layout", "one"],
        ["layout", "a", "b", "--what"],
        ["unknown"],
        ["requant", "m", "--codec", "best"],
        ["requant", "m", "--code", "fp4"],
        ["requant", "m", "--code", "int2", "--codec", "clip"],
        ["requant", "m", "--consume"],
        ["requant", "m", "--codec", "clip", "--consume"],
        ["requant", "m", "--layers", "x"],
        ["requant", "m", "--layers", "9" * 5_000],
        ["requant", "m", "--layers", "0-" + "9" * 5_000],
        ["requant", "m", "--layers", "²"],
        ["requant", "m", "--layers", "٣"],
        ["verify", "m", "n"],
    ],
)
def test_usage_errors_end_with_2(capsys: Capture, arguments: list[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "Usage: " in err


def test_a_message_of_several_lines_becomes_one(capsys: Capture) -> None:
    def fail() -> None:
        raise StrawError("first\nsecond")

    app = typer.Typer()
    app.command()(fail)
    with pytest.raises(SystemExit) as ended:
        run_cli(app, [])
    assert (ended.value.code, capsys.readouterr().err) == (1, "error: first second\n")


def test_faults_of_the_program_keep_their_traceback() -> None:
    def fail() -> None:
        raise KeyError("ours")

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(fail)
    with pytest.raises(KeyError, match="ours"):
        run_cli(app, [])


def test_a_foreign_kernels_package_is_named(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise RuntimeError('must not be run')\n")
    monkeypatch.delitem(sys.modules, "kernels")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        StrawError, match=f"package kernels: found at {tmp_path / 'kernels'}, expected .*/kernels; another"
    ):
        console.require_own_kernels()
    code, _, err = run(capsys, "--help")
    assert (code, err.count("\n")) == (1, 1)


HELP = "import sys; sys.argv = ['prep', '--help']\nfrom prep.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"


def test_help_names_layout_and_does_not_load_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "layout" in done.stdout
    assert done.stdout.endswith("False\n")


def test_a_closed_pipe_ends_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    script = "from prep.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", script], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
