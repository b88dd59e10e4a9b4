"""`prep verify`: a flipped bit in any kind of file is found and named with the command that repairs it."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer

from prep import verify as verify_module
from prep.layout import layout
from prep.requant import requant
from prep.verify import TOKENIZER_CHECKS, verify, verify_tokenizer
from runtime.artifact import checksum, read_checksums, read_tables, write_checksums, write_tables
from runtime.checkpoint import INDEX, Checkpoint
from runtime.errors import StrawError
from runtime.manifest import CHECKSUMS, DENSE, MANIFEST, TABLES, expert_file

LAYERS, EXPERTS = 2, 3
STRIDE = {"fp4": 53_248, "int2": 28_672}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write_random_checkpoint(directory, num_hidden_layers=LAYERS, n_routed_experts=EXPERTS, shard_bytes=1_000_000)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ "clip" has fp4 and int2, "split" base and residual only."""
    root = tmp_path_factory.mktemp("whole")
    layout(source, root / "clip")
    shutil.copytree(root / "clip", root / "split")
    requant(root / "clip", "clip")
    requant(root / "split", "split", consume=True)
    return {name: root / name for name in ("clip", "split")}


@pytest.fixture
def model(whole: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole["clip"], tmp_path / "model"))


def flip(path: Path, place: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(place if place >= 0 else path.stat().st_size + place)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("codec", ["clip", "split"])
def test_what_prep_wrote_is_whole(whole: dict[str, Path], codec: str) -> None:
    assert verify(whole[codec], deep=True) == []


# (file, which byte, what the line must hold)
FLIPS = [
    (expert_file("fp4", 1), 2 * STRIDE["fp4"] + 17, "layer 1 expert 2 fp4: CRC-32 X, expected CRC-32 X"),
    (expert_file("int2", 0), STRIDE["int2"] + 99, "layer 0 expert 1 int2: CRC-32 X, expected CRC-32 X"),
    (expert_file("fp4", 0), STRIDE["fp4"] - 1, "layer 0 expert 0 fp4: padding that is not zero"),
    (DENSE, -1, "tensor [a-z0-9_.]+: CRC-32 X, expected CRC-32 X"),
    (TABLES, -1, "layer 1 of int2.normalisers: CRC-32 X, expected CRC-32 X"),
    ("tokenizer.json", 40, "tokenizer.json: the whole file: CRC-32 X, expected CRC-32 X"),
]


@pytest.mark.parametrize(("name", "place", "wanted"), FLIPS)
def test_a_flipped_bit_is_named_and_the_repair_repairs(
    source: Path, model: Path, name: str, place: int, wanted: str
) -> None:
    pristine = (model / name).read_bytes()
    flip(model / name, place)
    (finding,) = verify(model)
    assert re.search(wanted.replace("X", "[0-9a-f]{8}"), finding), finding
    by_requant = "int2" in name or name == TABLES
    command = "prep requant --codec clip" if by_requant else "prep layout CHECKPOINT"
    assert finding.startswith(f"{model / name}: ")
    removal = "" if name == TABLES else f"remove {model / name} and "
    assert finding.endswith(f"; {removal}run: {command} {model}")
    assert "\n" not in finding
    if removal:
        (model / name).unlink()
    requant(model, "clip") if by_requant else layout(source, model)
    assert (model / name).read_bytes() == pristine
    assert verify(model) == []


@pytest.mark.parametrize(
    ("entry", "place", "named"),
    [
        ("dense", 0, DENSE),
        ("fp4", (1, 2), expert_file("fp4", 1)),
        ("int2", (0, 1), expert_file("int2", 0)),
        ("int2.normalisers", 1, TABLES),
        ("file:tokenizer.json", 0, "tokenizer.json"),
    ],
)
@pytest.mark.parametrize("bit", [3, 60])
def test_a_flipped_bit_in_the_checksums_is_found_and_repaired(
    source: Path, model: Path, entry: str, place: int | tuple[int, int], named: str, bit: int
) -> None:
    """What is no CRC-32 at all is the checksums' fault; the repair is that of the file it stands for."""
    checksums = read_checksums(model)
    pristine = checksums[entry].clone()
    checksums[entry][place] ^= 1 << bit
    write_checksums(model, checksums)
    (finding,) = verify(model)
    blamed = named if bit == 3 else CHECKSUMS
    assert finding.startswith(f"{model / blamed}: "), finding
    if bit == 60:
        assert f"in {named} is {int(checksums[entry][place])}, expected a CRC-32; " in finding
    if named != TABLES:
        assert f"; remove {model / named} and run: prep " in finding
        (model / named).unlink()
    requant(model, "clip") if "--codec clip" in finding else layout(source, model)
    assert torch.equal(read_checksums(model)[entry], pristine)
    assert verify(model) == []


def test_missing_checksums_name_their_command(source: Path, model: Path) -> None:
    checksums = read_checksums(model)
    del checksums["int2.normalisers"]
    checksums["file:nothing"] = torch.zeros(1, dtype=torch.int64)
    write_checksums(model, checksums)
    stray, lost = verify(model)
    assert f"{model / CHECKSUMS}: has 1 checksums of nothing, expected" in stray
    assert f"{model / CHECKSUMS}: has 0 checksums of int2.normalisers, expected 2; run: prep requant --co" in lost
    requant(model, "clip")
    assert len(verify(model)) == 1


@pytest.mark.parametrize(("tensor", "mends"), [("quad2.levels", True), ("split.exponents", False)])
def test_the_remedy_never_removes_the_only_copy_of_fp4(
    whole: dict[str, Path], tmp_path: Path, tensor: str, mends: bool
) -> None:
    """Base and residual are FP4 only with their tables, which lie in one file with those of every other code."""
    model = Path(shutil.copytree(whole["split"], tmp_path / "model"))
    requant(model, "quad")
    pristine = (model / TABLES).read_bytes()
    tables = read_tables(model, "quad2")
    tables[tensor].view(torch.uint8).flatten()[0] ^= 1
    write_tables(model, tables)
    (finding,) = verify(model)
    assert f"layer 0 of {tensor}: CRC-32 " in finding
    if not mends:
        assert finding.endswith(f"; remove {model} and run: prep layout CHECKPOINT {model}")
        assert verify(model, deep=True) == [finding]
        return
    assert finding.endswith(f"; run: prep requant --codec quad {model}")
    requant(model, "quad")
    assert (model / TABLES).read_bytes() == pristine
    assert verify(model, deep=True) == []


@pytest.mark.parametrize("key", ["fingerprint", "code"])
def test_an_edited_manifest_is_found(model: Path, key: str) -> None:
    content = json.loads((model / MANIFEST).read_text())
    edited = content | {key: None if key == "code" else "0" + content[key][1:]}
    (model / MANIFEST).write_text(json.dumps(edited))
    (finding,) = verify(model)
    assert finding.startswith(f"{model / MANIFEST}: CRC-32 ")


def test_every_damage_is_reported(model: Path) -> None:
    for expert_id in range(EXPERTS):
        flip(model / expert_file("int2", 1), expert_id * STRIDE["int2"])
    flip(model / DENSE, -1)
    assert len(verify(model)) == EXPERTS + 1


def test_what_cannot_be_repaired_says_so(whole: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(whole["split"], tmp_path / "model"))
    flip(model / expert_file("residual", 0), 5)
    (finding,) = verify(model)
    assert "layer 0 expert 0 residual: CRC-32" in finding
    assert finding.endswith(f"; remove {model} and run: prep layout CHECKPOINT {model}")


def test_deep_finds_what_the_checksums_do_not(model: Path) -> None:
    """Bytes and their checksum both altered: only the FP4 tells."""
    tables, checksums = read_tables(model, "int2"), read_checksums(model)
    tables["int2.normalisers"][1, 0, 1] *= 2
    checksums["int2.normalisers"][1] = checksum(tables["int2.normalisers"][1])
    write_tables(model, tables)
    write_checksums(model, checksums)
    assert verify(model) == []
    (finding,) = verify(model, deep=True)
    assert "layer 1 expert 0 int2: not what its FP4 gives, expected the same bytes; remove" in finding


def test_deep_names_tables_that_give_no_fp4(whole: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(whole["split"], tmp_path / "model"))
    tables, checksums = read_tables(model, "split"), read_checksums(model)
    tables["split.exponents"].view(torch.uint8)[0] = 255
    checksums["split.exponents"][0] = checksum(tables["split.exponents"][0])
    write_tables(model, tables)
    write_checksums(model, checksums)
    assert verify(model) == []
    (finding,) = verify(model, deep=True)
    assert f"{expert_file('base', 0)}: layer 0 expert 0: cannot be coded (SPLIT table: exponent byte 255" in finding
    assert finding.endswith(f"; remove {model} and run: prep layout CHECKPOINT {model}")


def test_a_damaged_directory_that_does_not_open_raises(model: Path) -> None:
    os.truncate(model / expert_file("fp4", 0), 5)
    with pytest.raises(StrawError, match="5 bytes, expected"):
        verify(model)
    with pytest.raises(StrawError, match=r"neither manifest.json nor .* in it"):
        verify(model.parent)


def test_a_checkpoint_is_whole(source: Path) -> None:
    assert verify(source) == []


def test_a_checkpoint_with_another_total_or_a_stray_tensor(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    index = json.loads((copy / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (copy / INDEX).write_text(json.dumps(index))
    (finding,) = verify(copy)
    assert f"{copy / INDEX}: total_size is " in finding
    shard = next(copy.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(StrawError, match=shard.name):
        verify(copy)


@pytest.mark.parametrize(
    ("metadata", "found"),
    [(None, ""), ([], ""), ([5], "[5]"), ({"total_size": "12"}, "'12'"), ({"total_size": float("inf")}, "inf")],
)
def test_an_index_with_odd_metadata(source: Path, tmp_path: Path, metadata: object, found: str) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    index = json.loads((copy / INDEX).read_text())
    (copy / INDEX).write_text(json.dumps(index | {"metadata": metadata}))
    findings = verify(copy)
    assert len(findings) == bool(found)
    assert all(f"{copy / INDEX}: total_size is {found}, the shards hold " in line for line in findings)


def test_a_released_tokenizer_is_known_by_hash_and_by_ids(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiny tokenizer in the released one's place, every check finds something."""
    directory = tmp_path / "directory"
    directory.mkdir()
    checkpoint = Checkpoint(source)
    checkpoint.close()
    config = checkpoint.config
    assert list(verify_tokenizer(directory, config)) == []  # another vocabulary: nothing is known of it
    monkeypatch.setattr(verify_module, "RELEASED_VOCABULARY", config.vocab_size)
    (missing,) = verify_tokenizer(directory, config)
    assert f"{directory / 'tokenizer.json'}: file is missing" in missing
    shutil.copy(source / "tokenizer.json", directory)
    findings = list(verify_tokenizer(directory, config))
    assert len(findings) == 1 + len(TOKENIZER_CHECKS)
    assert "SHA-256 " in findings[0]
    assert "'hello' is [" in findings[1]
    assert "expected [33310]" in findings[1]
