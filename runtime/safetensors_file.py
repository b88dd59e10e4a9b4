"""One safetensors file, read by byte range: opening costs the header only. Owns no names and no meaning of tensors."""

from __future__ import annotations

import json
import os
import stat
import struct
from math import prod
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.errors import StrawError

HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class TensorSpec(NamedTuple):
    """What a tensor must be: safetensors dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its payload."""
        return prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class TensorEntry(NamedTuple):
    """A tensor found in a file: what it is and where its bytes begin, counted from the start of the file.

    Its dtype may be one that this program does not know, so its size is the file's word and not the spec's.
    """

    spec: TensorSpec
    offset_bytes: int
    size_bytes: int


class SafetensorsFile:
    """An open safetensors file: `entries` by name, `read` of one tensor. Holds a file descriptor until `close`."""

    def __init__(self, path: Path, error: type[StrawError], remedy: str) -> None:
        """Reads and checks the header of `path`; `remedy` ends each message, e.g. "fetch the shard again".

        Raises:
            error: The file is missing, no regular file, shorter or longer than its header says, or has a damaged header.
        """
        self.path, self._error, self._remedy = path, error, remedy
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO is refused, not waited for
        except OSError as cause:
            raise error(f"{path}: cannot be opened ({cause.strerror}), expected a safetensors file; {remedy}") from None
        try:
            self.entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> Tensor:
        """The tensor `name`, newly allocated on the CPU, in its stored dtype and shape.

        Raises:
            StrawError: The file ended early or could not be read, or the dtype is unknown; the class is the one given at
                opening.
        """
        spec, offset, _ = self.entries[name]
        if spec.dtype not in TORCH_DTYPES:
            raise self._error(
                f"{self.path}: {name} is {spec}, expected one of {', '.join(TORCH_DTYPES)}; {self._remedy}"
            )
        raw = torch.empty(spec.size_bytes, dtype=torch.uint8)
        self.read_into(raw.numpy().data, offset, name)
        return raw.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)

    def read_into(self, target: memoryview, offset_bytes: int, what: str) -> None:
        """Fills `target` from the file's byte `offset_bytes` on; `what` names the content in an error."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], offset_bytes + done)
            except OSError as cause:
                raise self._error(f"{self.path}: reading {what} failed ({cause.strerror}); {self._remedy}") from cause
            if count == 0:
                raise self._error(
                    f"{self.path}: {what} ends after {done:,} bytes, expected {len(target):,}; {self._remedy}"
                )
            done += count

    def close(self) -> None:
        """Releases the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_header(self) -> dict[str, TensorEntry]:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._error(f"{self.path}: not a regular file, expected a safetensors file; {self._remedy}")
        size = status.st_size
        length = struct.unpack("<Q", self._read_bytes(8, 0))[0] if size >= 8 else size
        if size < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
            raise self._error(f"{self.path}: {size:,} bytes, expected a whole safetensors header; {self._remedy}")
        try:
            header = json.loads(self._read_bytes(length, 8))
            header.pop("__metadata__", None)
            entries = {name: _entry(raw, 8 + length) for name, raw in header.items()}
            end = _require_back_to_back(entries, 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
            raise self._error(
                f"{self.path}: header is not safetensors ({cause!r}), expected names with dtype, shape and place; {self._remedy}"
            ) from cause
        if size != end:
            raise self._error(f"{self.path}: {size:,} bytes, its header says {end:,}; {self._remedy}")
        return entries

    def _read_bytes(self, count: int, offset_bytes: int) -> bytearray:
        target = bytearray(count)
        self.read_into(memoryview(target), offset_bytes, "the header")
        return target


def _entry(raw: dict[str, Any], data_start: int) -> TensorEntry:
    dtype = raw["dtype"] if raw["dtype"] in TORCH_DTYPES else brief(raw["dtype"])  # an error only when it is read
    spec = TensorSpec(dtype, _naturals(raw["shape"]))
    begin, end = _naturals(raw["data_offsets"])
    if end < begin or (spec.dtype in TORCH_DTYPES and end - begin != spec.size_bytes):
        raise ValueError(f"{brief(raw)} in {end - begin} bytes")
    return TensorEntry(spec, data_start + begin, end - begin)


def _naturals(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in values):
        raise ValueError(f"{brief(values)} is no list of natural numbers")
    return tuple(values)


def _require_back_to_back(entries: dict[str, TensorEntry], data_start: int) -> int:
    """The end of the last tensor; ValueError where two overlap or leave a gap, as the format forbids."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1][1:]):
        if entry.offset_bytes != end:
            raise ValueError(f"{name} begins at byte {entry.offset_bytes}, the tensor before it ends at {end}")
        end += entry.size_bytes
    return end
