"""SafetensorsFile: damaged files are refused in one line; what the safetensors library writes is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import CheckpointError
from runtime.safetensors_file import SafetensorsFile


def opened(path: Path) -> SafetensorsFile:
    return SafetensorsFile(path, CheckpointError, "fetch it again")


def write(path: Path, header: bytes, payload_bytes: int = 0) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(payload_bytes))


def tensor(begin: Any, end: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    """A header's record of one tensor; a vector of bytes unless said otherwise."""
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "expected" in message
    assert message.endswith("; fetch it again")
    assert "\n" not in message
    return message


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "shard")
    assert "not a regular file" in refusal(tmp_path / "shard")


# what one tensor's record, in a file with 8 bytes of payload, may not be
RECORDS = {
    "no object": 5,
    "empty": {},
    "dtype a list": tensor(0, 8, dtype=["U8"]),
    "shape with a float": tensor(0, 8, shape=[8.0]),
    "shape with a bool": tensor(0, 8, shape=[True, 8]),
    "negative shape": tensor(0, 8, shape=[-2, -4]),
    "shape a text": tensor(0, 8, shape="8"),
    "shape of an unknown dtype": tensor(0, 8, dtype="F64", shape=[1.5]),
    "endless shape": tensor(0, 8, shape=[10**4000]),
    "another size than its shape": tensor(0, 8, shape=[7]),
    "negative begin": tensor(-8, 0, shape=[8]),
    "reversed": tensor(8, 0, shape=[8]),
    "reversed, unknown dtype": tensor(8, 0, dtype="F64", shape=[1]),
    "offsets with a float": tensor(0, 8.0, shape=[8]),
    "one offset": {"dtype": "U8", "shape": [8], "data_offsets": [8]},
    "endless offsets": tensor(0, 10**4000, dtype="F64", shape=[1]),
    "gap before": tensor(1, 8),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_damaged_record_is_refused(tmp_path: Path, record: Any) -> None:
    write(tmp_path / "shard", json.dumps({"a": record}).encode(), 8)
    assert "header is not safetensors" in refusal(tmp_path / "shard")


@pytest.mark.parametrize("second", [(0, 4), (2, 8), (5, 8)], ids=["same place", "overlap", "gap"])
def test_tensors_that_do_not_lie_back_to_back_are_refused(tmp_path: Path, second: tuple[int, int]) -> None:
    write(tmp_path / "shard", json.dumps({"b\n": tensor(*second), "a": tensor(0, 4)}).encode(), 8)
    assert "the tensor before it ends at" in refusal(tmp_path / "shard")


@pytest.mark.parametrize("header", [b"[]", b"5", b"null", b"{", b"\xff\xff", b"[" * 100_000, b"9" * 5000])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, header: bytes) -> None:
    write(tmp_path / "shard", header)
    assert "header is not safetensors" in refusal(tmp_path / "shard")


@pytest.mark.parametrize("dtype", ["F64", "F4", "C64\n", 5, None])
def test_an_unknown_dtype_is_an_error_only_when_read(tmp_path: Path, dtype: Any) -> None:
    header = {"new": tensor(4, 20, dtype, [2]), "none": tensor(4, 4), "old": tensor(0, 4), "__metadata__": None}
    write(tmp_path / "shard", json.dumps(header).encode(), 20)
    with closing(opened(tmp_path / "shard")) as file:
        assert file.entries["new"].size_bytes == 16
        assert file.read("old").tolist() == [0] * 4
        assert file.read("none").numel() == 0
        with pytest.raises(
            CheckpointError, match=r"^.*shard: new is .* \[2\], expected one of BF16.*; fetch it again$"
        ):
            file.read("new")


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6).view(2, 3), "a": torch.ones(3, dtype=torch.uint8), "c": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "shard", metadata={"format": "pt"})
    with closing(opened(tmp_path / "shard")) as file:
        assert set(file.entries) == set(tensors)
        assert all(torch.equal(file.read(name), tensor) for name, tensor in tensors.items())
