"""Random weights in the released number formats at memory speed: codes and scales are drawn, nothing is quantised. Owns no file.

A weight matrix [N, K] has values of mean 0 and mean square 1/K, so that a product is of the size of what goes in; with norms
near 1 activations stay sane through any number of layers. The same seed and key give the same bytes, in whatever order asked.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kernels.formats import E2M1_VALUES, PLANES, split_slab
from runtime.artifact import byte_view
from runtime.config import FP8_BLOCK
from runtime.safetensors_file import TensorSpec

CHUNK_ELEMENTS = 2**18  # drawn at once: they stay in a core's cache, which is several times faster
E2M1_RMS = math.sqrt(sum(value**2 for value in E2M1_VALUES) / len(E2M1_VALUES))
FP8_RMS = 16.0  # the largest of 256 quantiles of the normal distribution is 2.9 times this; E4M3 ends at 448


def random_of(seed: int, *key: int | str) -> np.random.Generator:
    """The random numbers of one thing, named by `key`."""
    numbers = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, *numbers])))


def fill_slab(slab: Tensor, hidden: int, width: int, random: np.random.Generator) -> None:
    """Makes `slab` [at least slab_bytes] uint8 a random FP4 expert; what lies behind it is left alone.

    Codes are uniform: the 16 of them cut a normal distribution of the size that MXFP4 rounding leaves (2.9 units) into
    nearly equal parts.
    """
    for matrix in split_slab(slab, PLANES["fp4"], hidden, width):
        assert matrix.scales is not None
        columns = 2 * matrix.codes.shape[-1]
        _fill(matrix.codes, random, None)
        _fill(matrix.scales, random, exponent_table(E2M1_RMS, columns))


def dense_chunks(
    name: str, spec: TensorSpec, num_experts: int, random: np.random.Generator
) -> Iterator[memoryview | bytes]:
    """The bytes of the dense tensor `name`, a piece at a time."""
    if spec.dtype in ("F8_E4M3", "F8_E8M0"):
        table = _fp8_codes()[0]
        if spec.dtype == "F8_E8M0":
            table = exponent_table(_fp8_codes()[1], spec.shape[1] * FP8_BLOCK)
        for count in _counts(math.prod(spec.shape), CHUNK_ELEMENTS):
            yield _random_bytes(random, count).tobytes().translate(table)
        return
    row_elements = num_experts if name.endswith("tid2eid") else math.prod(spec.shape[1:])
    for rows in _counts(spec.shape[0], max(1, CHUNK_ELEMENTS // row_elements)):
        if name.endswith("tid2eid"):
            yield byte_view(_picks(rows, spec.shape[1], num_experts, random))
        else:
            yield byte_view(_plain(name, spec, rows, random))


def exponent_table(rms: float, columns: int) -> bytes:
    """[256] E8M0 bytes to draw from, two neighbours, so that values of mean square rms^2 become ones of 1/columns."""
    wanted = -math.log2(rms * math.sqrt(columns))
    low = math.floor(wanted)
    upper = round(256 * (4 ** (wanted - low) - 1) / 3)
    return bytes([127 + low] * (256 - upper) + [128 + low] * upper)


@cache
def _fp8_codes() -> tuple[bytes, float]:
    """[256] E4M3 codes of the quantiles of a normal distribution of FP8_RMS, and their own root mean square."""
    codes = (FP8_RMS * _quantiles(256)).to(torch.float8_e4m3fn)
    return bytes(byte_view(codes)), float(codes.double().square().mean().sqrt())


@cache
def _quantiles(count: int) -> Tensor:
    """[count] float32 that cut the normal distribution of mean square 1 into equal parts, in order."""
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count).float()


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Normal float32 numbers of 2^16 different values; several times faster than exact ones."""
    index = _random_bytes(random, 2 * math.prod(shape)).view(np.uint16).astype(np.int32)
    return _quantiles(2**16).index_select(0, torch.from_numpy(index)).view(shape)


def _random_bytes(random: np.random.Generator, count: int) -> np.ndarray:
    words = random.integers(2**64 - 1, size=-(-count // 8), dtype=np.uint64, endpoint=True)
    return words.view(np.uint8)[:count]


def _fill(target: Tensor, random: np.random.Generator, table: bytes | None) -> None:
    """Random bytes, or entries of `table`, for all of `target`, contiguous on the CPU."""
    view, start = target.flatten().numpy(), 0
    for count in _counts(len(view), 2 * CHUNK_ELEMENTS):
        drawn = _random_bytes(random, count)
        part = drawn if table is None else np.frombuffer(drawn.tobytes().translate(table), np.uint8)
        view[start : start + count] = part
        start += count


def _counts(total: int, most: int) -> Iterator[int]:
    for start in range(0, total, most):
        yield min(most, total - start)


def _picks(rows: int, num_picks: int, num_experts: int, random: np.random.Generator) -> Tensor:
    """[rows, num_picks] int64: different experts in each row."""
    order = random.random((rows, num_experts), dtype=np.float32).argpartition(num_picks - 1, axis=1)
    return torch.from_numpy(order[:, :num_picks].astype(np.int64))


def _plain(name: str, spec: TensorSpec, rows: int, random: np.random.Generator) -> Tensor:
    noise = _normal(random, (rows, *spec.shape[1:]))
    if name.endswith("norm.weight"):
        noise.mul_(0.1).add_(1)
    elif len(spec.shape) == 1:
        noise.mul_(0.3).add_(0.5 if name.endswith("_scale") else 0)
    elif name != "embed.weight" and not name.endswith(".ape"):
        noise.mul_(1 / math.sqrt(spec.shape[-1]))
    return noise.bfloat16() if spec.dtype == "BF16" else noise
